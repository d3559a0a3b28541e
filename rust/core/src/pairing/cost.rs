// SPDX-License-Identifier: Apache-2.0
//! The minimum cost of a block of two geometries. This cost, and not the pieces that a plan caches, can refuse a pair.
use std::collections::HashMap;

use crate::bytes::pieces::{Cutout, TokenCut, count_pieces};
use crate::finding::{Finding, Place};
use crate::geometry::ranges::intersect_boxes;
use crate::geometry::types::{Axis, Geometry, Layer, Part};
use crate::pairing::most_pieces::{MAX_PIECES, MostPieces, SPARE_PIECES, split_unit};

/// Pieces of some pairs of parts.
#[derive(Clone, Copy, Default)]
struct Cost {
    pieces: u64,
    /// Pieces that the layouts of engines do not explain.
    unexplained: u64,
}

impl Cost {
    fn and(self, other: Self) -> Self {
        Self {
            pieces: self.pieces.saturating_add(other.pieces),
            unexplained: self.unexplained.saturating_add(other.unexplained),
        }
    }

    fn is_allowed(self) -> bool {
        self.unexplained <= SPARE_PIECES && self.pieces <= MAX_PIECES
    }
}

/// A part on both sides, and its cost.
struct PartCost<'a> {
    local: &'a Part,
    remote: &'a Part,
    cost: Cost,
}

/// The first part with which a block of all layers has too many pieces, if any; the same for both directions. Both
/// geometries have the same parts and axes in all layers that they share.
pub(crate) fn too_dear(local: &Geometry, remote: &Geometry) -> Option<Finding> {
    let mut known: HashMap<_, Vec<PartCost>> = HashMap::new();
    let mut total = Cost::default();
    for (layer, other) in common_layers(local, remote) {
        let key = (layer.page, layer.group, other.page, other.group);
        for part in known.entry(key).or_insert_with(|| costs((local, layer), (remote, other))) {
            total = total.and(part.cost);
            let refusal = if total.is_allowed() { None } else { refusal(total, layer, part) };
            if refusal.is_some() {
                return refusal;
            }
        }
    }
    None
}

/// The layers that both sides have, by name.
fn common_layers<'a>(local: &'a Geometry, remote: &'a Geometry) -> Vec<(&'a Layer, &'a Layer)> {
    let remote_layers: HashMap<&str, &Layer> = remote.layers.iter().map(|layer| (layer.name.as_str(), layer)).collect();
    let pair = |layer: &'a Layer| Some((layer, *remote_layers.get(layer.name.as_str())?));
    let mut pairs: Vec<_> = local.layers.iter().filter_map(pair).collect();
    pairs.sort_unstable_by_key(|(layer, _)| &layer.name);
    pairs
}

/// Why the total cost is too high, now that a part was added; None if another part is the reason.
fn refusal(total: Cost, layer: &Layer, part: &PartCost) -> Option<Finding> {
    let PartCost { local, remote, cost: _ } = part;
    let place = Place::layer(&layer.name).part(&local.name);
    let split = if total.unexplained > SPARE_PIECES { split_unit(&place, local, remote) } else { None };
    if let Some((place, strides)) = split {
        let reason = "every layout of an engine keeps these items together, for each token and head";
        return Some(Finding::error("split-items", place, "stride", strides, reason));
    }
    let reason = "one block of all layers is more than 2^21 pieces: the bytes of the two sides lie too differently";
    let values = || (strides(local), strides(remote));
    (total.pieces > MAX_PIECES).then(|| Finding::error("pieces", place, "strides", values(), reason))
}

/// The cost of each part of a layer, by name.
fn costs<'a>((local, layer): (&'a Geometry, &Layer), (remote, other): (&'a Geometry, &Layer)) -> Vec<PartCost<'a>> {
    let (group, other_group) = (local.group(layer), remote.group(other));
    let tokens = if group.kind.is_attention() { group.kernel_tokens().min(other_group.kernel_tokens()) } else { 1 };
    let mut parts: Vec<&Part> = local.page(layer).parts.iter().collect();
    parts.sort_unstable_by_key(|part| &part.name);
    let part_cost = |local: &'a Part| {
        let remote = remote.page(other).part(&local.name)?;
        Some(PartCost { local, remote, cost: cost(local, remote, tokens)? })
    };
    parts.into_iter().filter_map(part_cost).collect()
}

/// The maximum cost of a pair of parts for a cut of so many tokens; None if the ranks share no item.
fn cost(local: &Part, remote: &Part, tokens: u64) -> Option<Cost> {
    let common = |one: &Part, other: &Part| intersect_boxes(&one.shard(), &other.shard_in_order_of(one)?);
    let (ranges, other_ranges) = (common(local, remote)?, common(remote, local)?);
    // A whole block may be contiguous while a block without its last token is not.
    let cuts = [tokens, tokens.saturating_sub(1).max(1)].map(|count| TokenCut { local: 0, remote: 0, count });
    let explained = |cut| {
        let most = |part, ranges| MostPieces::of(part, ranges).pieces(cut, 1);
        most(local, &ranges).max(most(remote, &other_ranges))
    };
    let costs = cuts.map(|cut| {
        let pieces = count_pieces(local, remote, Cutout { ranges: &ranges, tokens: Some(cut) });
        Cost { pieces, unexplained: pieces.saturating_sub(explained(cut)) }
    });
    costs.into_iter().max_by_key(|cost| cost.pieces)
}

/// The strides of a part's axes, by name.
fn strides(part: &Part) -> String {
    let mut axes: Vec<&Axis> = part.axes.iter().collect();
    axes.sort_unstable_by_key(|axis| &axis.name);
    axes.iter().map(|axis| format!("{} {}", axis.name, axis.stride)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::most_pieces::tests::part as part_of_two_byte_items;

    fn part(axes: &[(&str, u64, u64)]) -> Part {
        Part { dtype: "u8".into(), item_bytes: 1, ..part_of_two_byte_items(axes) }
    }

    fn counted(local: &Part, remote: &Part, tokens: u64) -> (u64, u64) {
        let Cost { pieces, unexplained } = cost(local, remote, tokens).expect("equal ranks");
        (pieces, unexplained)
    }

    #[test]
    fn a_block_costs_its_pieces_whichever_side_reads() {
        let heads_first = part(&[("heads", 4, 512), ("tokens", 8, 64), ("content", 64, 1)]);
        let tokens_first = part(&[("heads", 4, 64), ("tokens", 8, 256), ("content", 64, 1)]);
        let transposed = part(&[("heads", 4, 512), ("tokens", 8, 1), ("content", 64, 8)]);
        for (one, other) in [(&heads_first, &tokens_first), (&tokens_first, &heads_first)] {
            assert_eq!(counted(one, other, 8), (4 * 8, 0));
        }
        // A row of tokens for each index of content is explained, the single items are not.
        for (one, other) in [(&heads_first, &transposed), (&transposed, &heads_first)] {
            assert_eq!(counted(one, other, 8), (4 * 8 * 64, 4 * 8 * 64 - 4 * 64));
        }
    }

    #[test]
    fn a_partial_block_may_cost_more_than_a_whole_one() {
        let heads_first = part(&[("heads", 4, 512), ("tokens", 8, 64), ("content", 64, 1)]);
        assert_eq!(counted(&heads_first, &heads_first, 8), (4, 0));
    }
}
