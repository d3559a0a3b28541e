// SPDX-License-Identifier: Apache-2.0
//! Where what is summed lies.

/// Where the bytes of regions are read.
pub trait ContentMemory: Sync {
    /// Bytes of a region; they lie within it.
    fn bytes(&self, region: usize, offset: u64, length: u64) -> &[u8];
}
