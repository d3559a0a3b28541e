// SPDX-License-Identifier: Apache-2.0
//! Contiguous copies: the fewest for a set of bytes, because neighbours on both sides are joined.
use crate::error::{Error, Result};

/// Bytes that are contiguous on both sides: one descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Local address.
    pub local: u64,
    /// Remote address.
    pub remote: u64,
    /// Bytes.
    pub len: u64,
    /// Index of the local region; a run never leaves it.
    pub local_region: u32,
    /// Index of the remote region; a run never leaves it.
    pub remote_region: u32,
}

/// Sorts by local address, joins neighbours, and fails if two runs write the same byte.
pub(crate) fn join(runs: &mut Vec<Run>) -> Result<()> {
    // Rows come out ascending one after the other: the stable sort finds those stretches and only merges them.
    runs.sort_by_key(|run| run.local);
    let mut overlap = None;
    runs.dedup_by(|next, last| {
        let end = last.local + last.len;
        if end > next.local && overlap.is_none() {
            overlap = Some(overlap_error((last.local, end), (next.local, next.local + next.len)));
        }
        let joined = end == next.local
            && last.remote + last.len == next.remote
            && (last.local_region, last.remote_region) == (next.local_region, next.remote_region);
        if joined {
            last.len += next.len;
        }
        joined
    });
    overlap.map_or(Ok(()), Err)
}

/// Fails if any two ranges `(start, length)` of sorted lists share a byte.
pub(crate) fn apart<'a>(lists: impl Iterator<Item = &'a [Run]>) -> Result<()> {
    let mut all: Vec<(u64, u64)> = lists.flatten().map(|run| (run.local, run.local + run.len)).collect();
    #[allow(clippy::stable_sort_primitive, reason = "it only merges lists that are sorted already")]
    all.sort();
    match all.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(overlap_error(pair[0], pair[1])),
        None => Ok(()),
    }
}

fn overlap_error(first: (u64, u64), second: (u64, u64)) -> Error {
    Error::Overlap { first: first.0, first_end: first.1, second: second.0, second_end: second.1 }
}
