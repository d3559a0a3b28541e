// SPDX-License-Identifier: Apache-2.0
//! The bytes that two pages share, as the fewest contiguous pieces.
use crate::geometry::ranges::Interval;
use crate::geometry::types::Part;

/// Address of block 0's page on both sides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageBases {
    pub(crate) local: u64,
    pub(crate) remote: u64,
}

/// Bytes that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Piece {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: u64,
}

/// Tokens that a local and a remote kernel block share.
///
/// ```text
/// local kernel blocks of 4    |0 1 2 3|0 1 2 3|0 1 2 3|
/// remote kernel blocks of 6   |0 1 2 3 4 5|0 1 2 3 4 5|
///                                      ^^^ TokenCut { local: 0, remote: 4, count: 2 }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TokenCut {
    /// First token in the local kernel block.
    pub(crate) local: u64,
    /// First token in the remote kernel block.
    pub(crate) remote: u64,
    /// Number of tokens.
    pub(crate) count: u64,
}

impl TokenCut {
    /// The only cut of blocks without tokens.
    pub(crate) const STATE: Self = Self { local: 0, remote: 0, count: 1 };

    /// All tokens of a part; None if tokens cannot cut it.
    pub(crate) fn whole(part: &Part) -> Option<Self> {
        part.tokens().map(|axis| Self { local: 0, remote: 0, count: axis.extent })
    }
}

/// What is cut out of a pair of parts: global indices of the local part's axes except the token axis, and tokens. It
/// must be inside both shards.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cutout<'a> {
    pub(crate) ranges: &'a [Interval],
    pub(crate) tokens: Option<TokenCut>,
}

/// A dimension over which a piece repeats: the count, and the bytes from one repetition to the next.
struct Repeat {
    count: u64,
    local: u64,
    remote: u64,
}

/// Appends the pieces of one pair of parts.
pub(crate) fn part_pieces(local: &Part, remote: &Part, cutout: Cutout, bases: PageBases, pieces: &mut Vec<Piece>) {
    if let Some((first, repeats)) = outline(local, remote, cutout, bases) {
        repeat(&repeats, first, pieces);
    }
}

/// Number of these pieces.
pub(crate) fn count_pieces(local: &Part, remote: &Part, cutout: Cutout) -> u64 {
    let outline = outline(local, remote, cutout, PageBases::default());
    outline.map_or(0, |(_, repeats)| repeats.iter().fold(1, |pieces, repeat| repeat.count.saturating_mul(pieces)))
}

/// The first piece, and the dimensions over which it repeats, innermost first; None if the parts have other axes.
///
/// ```text
/// address of an item = page + part.offset + sum over the axes of (index - axis.start) * axis.stride
///
/// 2 heads, 3 tokens, 4 bytes of content  | local [heads, tokens, content] | remote [tokens, heads, content]
///   strides of heads, tokens, content    |      12, 4, 1                  |        4, 8, 1
///   content is contiguous on both sides, so the first piece is 4 bytes.
///   Tokens (3 times, 4 and 8 bytes apart) and heads (2 times, 12 and 4 bytes apart) repeat it.
/// ```
fn outline(local: &Part, remote: &Part, cutout: Cutout, bases: PageBases) -> Option<(Piece, Vec<Repeat>)> {
    let mut first =
        Piece { local: bases.local + local.offset, remote: bases.remote + remote.offset, len: local.item_bytes };
    let mut repeats: Vec<Repeat> = Vec::with_capacity(local.axes.len());
    let mut ranges = cutout.ranges.iter();
    for axis in &local.axes {
        let remote_axis = remote.axis(&axis.name)?;
        let (local_index, remote_index, count) = if axis.is_tokens() {
            let tokens = cutout.tokens?;
            (tokens.local, tokens.remote, tokens.count)
        } else {
            let range = ranges.next()?;
            (range.start - axis.start, range.start - remote_axis.start, range.len())
        };
        first.local += local_index * axis.stride;
        first.remote += remote_index * remote_axis.stride;
        if count > 1 {
            repeats.push(Repeat { count, local: axis.stride, remote: remote_axis.stride });
        }
    }
    repeats.sort_unstable_by_key(|repeat| repeat.local);
    let contiguous = repeats
        .iter()
        .take_while(|repeat| {
            let touches = repeat.local == first.len && repeat.remote == first.len;
            if touches {
                first.len *= repeat.count;
            }
            touches
        })
        .count();
    repeats.drain(..contiguous);
    Some((first, repeats))
}

fn repeat(repeats: &[Repeat], piece: Piece, pieces: &mut Vec<Piece>) {
    let Some((outer, inner)) = repeats.split_last() else {
        pieces.push(piece);
        return;
    };
    for index in 0..outer.count {
        let local = piece.local + index * outer.local;
        let remote = piece.remote + index * outer.remote;
        repeat(inner, Piece { local, remote, ..piece }, pieces);
    }
}

/// Sorts by local address and joins neighbours that are contiguous on both sides.
pub(crate) fn join_neighbours(pieces: &mut Vec<Piece>) {
    pieces.sort_by_key(|piece| piece.local);
    pieces.dedup_by(|next, last| {
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
    use crate::geometry::types::Axis;

    fn axis(name: &str, extent: u64, stride: u64) -> Axis {
        Axis { name: name.into(), extent, stride, start: 0, length: extent, may_repeat: false, spare: 0 }
    }

    fn part(axes: Vec<Axis>) -> Part {
        Part { name: "kv".into(), dtype: "bfloat16".into(), item_bytes: 2, offset: 0, axes }
    }

    fn whole<'a>(part: &Part, ranges: &'a [Interval]) -> Cutout<'a> {
        Cutout { ranges, tokens: TokenCut::whole(part) }
    }

    #[test]
    fn equal_pages_are_one_piece() {
        let page = part(vec![axis("heads", 4, 4096), axis("tokens", 16, 256), axis("content", 128, 2)]);
        let mut out = Vec::new();
        part_pieces(&page, &page, whole(&page, &page.shard()), PageBases::default(), &mut out);
        assert_eq!(out, [Piece { local: 0, remote: 0, len: 16_384 }]);
    }

    #[test]
    fn conv_rows_against_columns_are_items() {
        let channels_first = part(vec![axis("channels", 5, 6), axis("rows", 3, 2)]);
        let rows_first = part(vec![axis("channels", 5, 2), axis("rows", 3, 10)]);
        let mut out = Vec::new();
        let ranges = channels_first.shard();
        part_pieces(&channels_first, &rows_first, whole(&channels_first, &ranges), PageBases::default(), &mut out);
        assert_eq!(out.len(), 15);
        assert!(out.iter().all(|piece| piece.len == 2));
    }

    #[test]
    fn a_token_cut_of_a_heads_first_page_is_a_piece_per_head() {
        let page = part(vec![axis("heads", 4, 4096), axis("tokens", 16, 256), axis("content", 128, 2)]);
        let ranges = page.shard();
        let cutout = Cutout { ranges: &ranges, tokens: Some(TokenCut { local: 0, remote: 0, count: 5 }) };
        let mut out = Vec::new();
        part_pieces(&page, &page, cutout, PageBases::default(), &mut out);
        assert_eq!(out.len(), 4);
        assert_eq!(out[1], Piece { local: 4096, remote: 4096, len: 1280 });
        assert_eq!(count_pieces(&page, &page, cutout), 4);
    }
}
