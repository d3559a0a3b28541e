// SPDX-License-Identifier: Apache-2.0
//! Rows of the arrays that the transfer library takes, and memory for them.
use std::ops::Range;

/// `(address, length, device)`.
pub type Descriptor = [u64; 3];

/// A regular cut of a region: `(address, length, device, stride, count)`.
pub type View = [u64; 5];

/// Is given the addresses of new memory for a result before it is written, to advise the system how to map it.
pub type Advise = fn(Range<usize>);

/// No advice.
pub(crate) const NO_ADVICE: Advise = |_| ();

/// Makes room for so many more entries; None without memory for them.
pub(crate) fn reserve<T>(entries: &mut Vec<T>, count: usize, advise: Advise) -> Option<()> {
    entries.try_reserve_exact(count).ok()?;
    let new = entries.spare_capacity_mut().as_ptr_range();
    advise(new.start as usize..new.end as usize);
    Some(())
}
