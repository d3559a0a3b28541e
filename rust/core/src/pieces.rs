// SPDX-License-Identifier: Apache-2.0
//! The bytes two pages have in common, as the fewest contiguous pieces.
use crate::axis::{Box, Range};
use crate::geometry::{Axis, Part};

/// Address of block 0's page on both sides.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lane {
    pub(crate) local: u64,
    pub(crate) remote: u64,
}

/// Bytes that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Chunk {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: u64,
}

/// Tokens of a kernel block on either side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Tokens {
    /// First token in the local kernel block.
    pub(crate) local: u64,
    /// First token in the remote kernel block.
    pub(crate) remote: u64,
    /// How many.
    pub(crate) count: u64,
}

/// What is cut out of a pair of parts: global ranges of the local part's axes, token axis left out, and tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window<'a> {
    pub(crate) ranges: &'a [Range],
    pub(crate) tokens: Option<Tokens>,
}

/// All tokens of a page.
pub(crate) fn all_tokens(part: &Part) -> Option<Tokens> {
    part.tokens().map(|axis| Tokens { local: 0, remote: 0, count: axis.extent })
}

/// The ranges a rank holds of every axis but the tokens.
pub(crate) fn shard(part: &Part) -> Box {
    sharded_axes(part).map(|axis| (axis.start, axis.start + axis.held())).collect()
}

pub(crate) fn sharded_axes(part: &Part) -> impl Iterator<Item = &Axis> {
    part.axes.iter().filter(|axis| !axis.is_tokens())
}

/// The same ranges in the order of `local`'s axes; None when `remote` lacks one.
pub(crate) fn shard_in_order_of(local: &Part, remote: &Part) -> Option<Box> {
    sharded_axes(local)
        .map(|axis| remote.axes.iter().find(|other| other.name == axis.name))
        .map(|other| other.map(|axis| (axis.start, axis.start + axis.held())))
        .collect()
}

struct Dim {
    count: u64,
    local: u64,
    remote: u64,
}

/// Appends the pieces of one pair of parts. The window has to lie inside both shards.
pub(crate) fn part_chunks(local: &Part, remote: &Part, window: Window, lane: Lane, out: &mut Vec<Chunk>) {
    if let Some((dims, first)) = outline(local, remote, window, lane) {
        walk(&dims, first, out);
    }
}

/// How many pieces that gives.
pub(crate) fn part_pieces(local: &Part, remote: &Part, window: Window) -> u64 {
    let outline = outline(local, remote, window, Lane::default());
    outline.map_or(0, |(dims, _)| dims.iter().fold(1, |pieces, dim| dim.count.saturating_mul(pieces)))
}

/// The first piece, and the dimensions over which it repeats, innermost first.
fn outline(local: &Part, remote: &Part, window: Window, lane: Lane) -> Option<(Vec<Dim>, Chunk)> {
    let mut first =
        Chunk { local: lane.local + local.offset, remote: lane.remote + remote.offset, len: local.item_bytes };
    let mut dims: Vec<Dim> = Vec::with_capacity(local.axes.len());
    let mut ranges = window.ranges.iter();
    for axis in &local.axes {
        let other = remote.axes.iter().find(|other| other.name == axis.name)?;
        let (local_index, remote_index, count) = if axis.is_tokens() {
            let tokens = window.tokens?;
            (tokens.local, tokens.remote, tokens.count)
        } else {
            let &(start, end) = ranges.next()?;
            (start - axis.start, start - other.start, end - start)
        };
        first.local += local_index * axis.stride;
        first.remote += remote_index * other.stride;
        if count > 1 {
            dims.push(Dim { count, local: axis.stride, remote: other.stride });
        }
    }
    dims.sort_unstable_by_key(|dim| dim.local);
    let dense = dims
        .iter()
        .take_while(|dim| {
            let inner = dim.local == first.len && dim.remote == first.len;
            if inner {
                first.len *= dim.count;
            }
            inner
        })
        .count();
    dims.drain(..dense);
    Some((dims, first))
}

fn walk(dims: &[Dim], chunk: Chunk, out: &mut Vec<Chunk>) {
    let Some((outer, rest)) = dims.split_last() else {
        out.push(chunk);
        return;
    };
    for index in 0..outer.count {
        let local = chunk.local + index * outer.local;
        let remote = chunk.remote + index * outer.remote;
        walk(rest, Chunk { local, remote, ..chunk }, out);
    }
}

/// Sorts by local address and joins neighbours that are contiguous on both sides.
pub(crate) fn join(chunks: &mut Vec<Chunk>) {
    chunks.sort_by_key(|chunk| chunk.local);
    chunks.dedup_by(|next, last| {
        let joined = last.local + last.len == next.local && last.remote + last.len == next.remote;
        if joined {
            last.len += next.len;
        }
        joined
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(name: &str, extent: u64, stride: u64) -> Axis {
        Axis { name: name.into(), extent, stride, start: 0, length: None, may_repeat: false, spare: 0 }
    }

    fn part(axes: Vec<Axis>) -> Part {
        Part { name: "kv".into(), dtype: "bfloat16".into(), item_bytes: 2, offset: 0, axes }
    }

    fn whole<'a>(part: &Part, ranges: &'a [Range]) -> Window<'a> {
        Window { ranges, tokens: all_tokens(part) }
    }

    #[test]
    fn equal_pages_are_one_piece() {
        let page = part(vec![axis("heads", 4, 4096), axis("tokens", 16, 256), axis("content", 128, 2)]);
        let mut out = Vec::new();
        part_chunks(&page, &page, whole(&page, &shard(&page)), Lane::default(), &mut out);
        assert_eq!(out, [Chunk { local: 0, remote: 0, len: 16_384 }]);
    }

    #[test]
    fn conv_rows_against_columns_are_items() {
        let channels_first = part(vec![axis("channels", 5, 6), axis("rows", 3, 2)]);
        let rows_first = part(vec![axis("channels", 5, 2), axis("rows", 3, 10)]);
        let mut out = Vec::new();
        let ranges = shard(&channels_first);
        part_chunks(&channels_first, &rows_first, whole(&channels_first, &ranges), Lane::default(), &mut out);
        assert_eq!(out.len(), 15);
        assert!(out.iter().all(|chunk| chunk.len == 2));
    }

    #[test]
    fn a_token_cut_of_a_heads_first_page_is_a_piece_per_head() {
        let page = part(vec![axis("heads", 4, 4096), axis("tokens", 16, 256), axis("content", 128, 2)]);
        let ranges = shard(&page);
        let window = Window { ranges: &ranges, tokens: Some(Tokens { local: 0, remote: 0, count: 5 }) };
        let mut out = Vec::new();
        part_chunks(&page, &page, window, Lane::default(), &mut out);
        assert_eq!(out.len(), 4);
        assert_eq!(out[1], Chunk { local: 4096, remote: 4096, len: 1280 });
    }
}
