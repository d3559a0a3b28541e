// SPDX-License-Identifier: Apache-2.0
//! How many pieces the layouts of engines can cut a slice into. Only an untrusted peer asks for more.
use crate::bytes::pieces::TokenCut;
use crate::finding::Place;
use crate::geometry::ranges::Interval;
use crate::geometry::types::{Axis, Part};

/// Limit of pieces of the blocks of all layers for one cut. Convolution states of a large model in the other order have
/// about a million.
pub(crate) const MAX_PIECES: u64 = 1 << 21;

/// Pieces allowed beyond what the layouts explain, for all layouts: they cost next to nothing.
pub(crate) const SPARE_PIECES: u64 = 1 << 16;

/// The maximum number of pieces of some slices: a number for each token of a pair of blocks, and a number for the pair.
///
/// ```text
/// an engine may order heads and tokens freely, but never splits what one token has in one head
///   tokens, heads, content    |t0 h0|t0 h1|t1 h0|t1 h1|      a piece for each token and head
///   heads, tokens, content    |t0 h0|t1 h0|t0 h1|t1 h1|
/// if the reader has content outside of tokens (K of the CPU kernel), a row of tokens is never split
///   heads, content, tokens    |c0: t0 t1|c1: t0 t1|          a piece for each head and index of content
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct MostPieces {
    per_token: u64,
    per_block: u64,
}

impl MostPieces {
    /// The maximum for a slice of a part in the reader's layout.
    pub(crate) fn of(part: &Part, ranges: &[Interval]) -> Self {
        let unit = unit(part);
        let is_split = |axis: &Axis| unit.is_none_or(|unit| unit.name != axis.name);
        let axes = part.sharded_axes().zip(ranges);
        let pieces = axes.filter(|(axis, _)| is_split(axis)).map(|(_, range)| range.len());
        let pieces = pieces.fold(1, u64::saturating_mul);
        if part.tokens().is_some_and(is_split) {
            Self { per_token: pieces, per_block: 0 }
        } else {
            Self { per_token: 0, per_block: pieces }
        }
    }

    /// The maximum for these slices and others.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            per_token: self.per_token.saturating_add(other.per_token),
            per_block: self.per_block.saturating_add(other.per_block),
        }
    }

    /// The maximum for so many block pairs with one cut.
    pub(crate) fn pieces(self, cut: TokenCut, block_pairs: u64) -> u64 {
        self.per_token.saturating_mul(cut.count).saturating_add(self.per_block).saturating_mul(block_pairs)
    }
}

/// The axis that no layout of a peer splits: content, or tokens if they are inside of content.
fn unit(part: &Part) -> Option<&Axis> {
    let content = part.axis(Axis::CONTENT)?;
    let inner = part.tokens().filter(|tokens| tokens.stride < content.stride).unwrap_or(content);
    (inner.stride == part.item_bytes).then_some(inner)
}

/// The axis of a pair of parts that splits the unit: its place, and its bytes from index to index on both sides. It is
/// the same axis for both directions.
pub(crate) fn split_unit(place: &Place, local: &Part, remote: &Part) -> Option<(Place, (String, String))> {
    let bytes = |axis: &Axis| format!("{} bytes from index to index", axis.stride);
    let units = [unit(local), unit(remote)].into_iter().flatten();
    let split = units.filter_map(|unit| Some((local.axis(&unit.name)?, remote.axis(&unit.name)?)));
    let (one, other) =
        split.filter(|(one, other)| one.stride != other.stride).min_by_key(|(one, _)| one.is_tokens())?;
    Some((place.axis(&one.name), (bytes(one), bytes(other))))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Axes of a part with items of 2 bytes: name, length and stride.
    pub(crate) fn part(axes: &[(&str, u64, u64)]) -> Part {
        let axis = |&(name, length, stride): &(&str, u64, u64)| Axis {
            name: name.into(),
            extent: length,
            stride,
            start: 0,
            length,
            may_repeat: false,
            spare: 0,
        };
        let axes = axes.iter().map(axis).collect();
        Part { name: "kv".into(), dtype: "bfloat16".into(), item_bytes: 2, offset: 0, axes }
    }

    fn most(axes: &[(&str, u64, u64)]) -> (u64, u64) {
        let part = part(axes);
        let MostPieces { per_token, per_block } = MostPieces::of(&part, &part.shard());
        (per_token, per_block)
    }

    #[test]
    fn content_is_never_split() {
        assert_eq!(most(&[("heads", 4, 4096), ("tokens", 16, 256), ("content", 128, 2)]), (4, 0));
        assert_eq!(most(&[("tokens", 16, 1024), ("heads", 4, 256), ("content", 128, 2)]), (4, 0));
        assert_eq!(most(&[("tokens", 16, 256), ("content", 128, 2)]), (1, 0));
        // A state has no tokens.
        assert_eq!(most(&[("heads", 4, 256), ("content", 128, 2)]), (0, 4));
    }

    #[test]
    fn where_tokens_are_inside_of_content_they_are_not_split() {
        assert_eq!(most(&[("heads", 4, 4096), ("content", 128, 32), ("tokens", 16, 2)]), (0, 4 * 128));
    }

    #[test]
    fn without_content_items_may_lie_in_any_order() {
        assert_eq!(most(&[("channels", 5, 6), ("rows", 3, 2)]), (0, 15));
        assert_eq!(most(&[("heads", 4, 32), ("tokens", 16, 2)]), (4, 0));
    }

    #[test]
    fn pieces_are_those_of_all_tokens_and_blocks() {
        let both = MostPieces { per_token: 4, per_block: 0 }.and(MostPieces { per_token: 1, per_block: 7 });
        assert_eq!(both.pieces(TokenCut { local: 0, remote: 0, count: 10 }, 3), (5 * 10 + 7) * 3);
        assert_eq!(both.pieces(TokenCut { local: 0, remote: 0, count: u64::MAX }, 3), u64::MAX);
    }

    #[test]
    fn what_splits_it_is_named() {
        let local = part(&[("heads", 4, 4096), ("tokens", 16, 256), ("content", 128, 2)]);
        let transposed = part(&[("heads", 4, 4096), ("tokens", 16, 2), ("content", 128, 32)]);
        let (place, (one, other)) = split_unit(&Place::layer("a"), &local, &transposed).expect("content is split");
        assert_eq!(place.axis.as_deref(), Some("content"));
        assert_eq!((one.as_str(), other.as_str()), ("2 bytes from index to index", "32 bytes from index to index"));
        assert_eq!(split_unit(&Place::layer("a"), &local, &local), None);
        let (place, (one, other)) = split_unit(&Place::layer("a"), &transposed, &local).expect("content is split");
        assert_eq!(place.axis.as_deref(), Some("content"));
        assert_eq!((one.as_str(), other.as_str()), ("32 bytes from index to index", "2 bytes from index to index"));
    }
}
