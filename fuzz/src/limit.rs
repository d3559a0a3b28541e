// SPDX-License-Identifier: Apache-2.0
//! An allocator that ends the process when one allocation is larger than any input of a target can justify.
//! libFuzzer itself only sees memory that is touched, and only once a second.
use std::alloc::{GlobalAlloc, Layout, System};

const MAX_BYTES: usize = 512 << 20;

struct Limited;

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        assert!(layout.size() <= MAX_BYTES, "an allocation of {} bytes", layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        assert!(layout.size() <= MAX_BYTES, "an allocation of {} bytes", layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        assert!(size <= MAX_BYTES, "an allocation of {size} bytes");
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static LIMITED: Limited = Limited;
