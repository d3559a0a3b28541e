// SPDX-License-Identifier: Apache-2.0
//! Which source a local rank reads each part from: every item once, none left out.
use std::collections::HashMap;

use crate::axis::{Box, Range, gcd, intersect, meet_all, subtract, without};
use crate::error::{Error, Result};
use crate::finding::Place;
use crate::geometry::{Geometry, Group, Part};
use crate::pieces::{shard, shard_in_order_of, sharded_axes};

/// A box of one part that is read from one source.
#[derive(Debug, Clone)]
pub(crate) struct Share {
    pub(crate) source: usize,
    /// Index of the layer at the source.
    pub(crate) layer: usize,
    /// Index of the part in the local page, and in the page at the source.
    pub(crate) parts: (usize, usize),
    /// Global ranges of the local part's axes.
    pub(crate) ranges: Box,
}

/// Intervals of a cycle of positions, beyond which the pattern of context-parallel ranks repeats.
const MAX_CYCLE_INTERVALS: u64 = 65_536;

/// Sources in the order in which a rank prefers them: the one at its own place first, so that ranks which could all
/// read from one source spread over the copies.
fn preference(local: &Geometry, remotes: &[&Geometry]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..remotes.len()).collect();
    order.sort_by_key(|&index| {
        let remote = remotes[index];
        let size = u64::from(remote.tp_size);
        let own = u64::from(local.tp_rank) * size / u64::from(local.tp_size);
        (u64::from(remote.tp_rank) + size - own) % size
    });
    order
}

/// Assigns every box of every local layer to sources. Layers that no source has get no share.
pub(crate) fn assign(local: &Geometry, remotes: &[&Geometry]) -> Result<Vec<Vec<Share>>> {
    let order = preference(local, remotes);
    let by_name: Vec<HashMap<&str, usize>> = remotes
        .iter()
        .map(|remote| remote.layers.iter().enumerate().map(|(index, layer)| (layer.name.as_str(), index)).collect())
        .collect();
    local
        .layers
        .iter()
        .map(|layer| {
            let holders: Vec<(usize, usize)> = order
                .iter()
                .filter_map(|&source| by_name[source].get(layer.name.as_str()).map(|&index| (source, index)))
                .collect();
            let mut shares = Vec::new();
            if holders.is_empty() {
                return Ok(shares);
            }
            let group = &local.groups[layer.group];
            let cycle = Cycle::of(group, holders.iter().map(|&(source, index)| group_of(remotes[source], index)))?;
            for (part_index, part) in local.page(layer).parts.iter().enumerate() {
                let place = || Place::layer(&layer.name).part(&part.name);
                cover(part, part_index, group, cycle, &holders, remotes, &place, &mut shares)?;
            }
            Ok(shares)
        })
        .collect()
}

fn group_of(geometry: &Geometry, layer: usize) -> &Group {
    &geometry.groups[geometry.layers[layer].group]
}

/// Length in tokens after which the positions of all ranks involved repeat.
#[derive(Debug, Clone, Copy)]
struct Cycle(u64);

impl Cycle {
    fn of<'a>(local: &'a Group, remotes: impl Iterator<Item = &'a Group>) -> Result<Self> {
        let mut length = local.block_size * local.cp_size;
        let mut smallest = local.block_size;
        let mut parallel = local.cp_size > 1;
        for group in remotes {
            let own = group.block_size * group.cp_size;
            length = (length / gcd(length, own)).saturating_mul(own);
            smallest = smallest.min(group.block_size);
            parallel |= group.cp_size > 1;
        }
        if !parallel {
            return Ok(Self(1));
        }
        if length / smallest > MAX_CYCLE_INTERVALS {
            return Err(Error::unplannable(
                "cp-cycle",
                Place::default(),
                "block_size x cp_size",
                (format!("{} x {}", local.block_size, local.cp_size), format!("a cycle of {length} tokens")),
                "the positions of the context-parallel ranks repeat too late",
            ));
        }
        Ok(Self(length))
    }

    /// Positions a group holds within the cycle.
    fn positions(self, group: &Group) -> Vec<Range> {
        if group.cp_size == 1 {
            return vec![(0, self.0)];
        }
        let step = group.block_size * group.cp_size;
        (0..self.0 / step)
            .map(|turn| turn * step + group.cp_rank * group.block_size)
            .map(|start| (start, start + group.block_size))
            .collect()
    }
}

#[allow(clippy::too_many_arguments, reason = "one loop body, split off to be readable")]
fn cover(
    part: &Part,
    part_index: usize,
    group: &Group,
    cycle: Cycle,
    holders: &[(usize, usize)],
    remotes: &[&Geometry],
    place: &dyn Fn() -> Place,
    shares: &mut Vec<Share>,
) -> Result<()> {
    let positions = cycle.positions(group);
    let mut open = vec![(shard(part), positions.clone())];
    for &(source, layer) in holders {
        let remote = remotes[source];
        let parts = &remote.page(&remote.layers[layer]).parts;
        let Some((remote_part, theirs)) = parts.iter().enumerate().find(|(_, other)| other.name == part.name) else {
            continue;
        };
        let Some(held) = shard_in_order_of(part, theirs) else { continue };
        let held_positions = cycle.positions(group_of(remote, layer));
        let mut rest = Vec::new();
        for (ranges, needed) in open {
            let common = meet_all(&needed, &held_positions);
            let Some(inside) = intersect(&ranges, &held).filter(|_| !common.is_empty()) else {
                rest.push((ranges, needed));
                continue;
            };
            // Pairing by position reads whatever both sides hold, so a source cannot be asked for a part of that.
            if common != meet_all(&positions, &held_positions) {
                return Err(Error::unplannable(
                    "cp-overlap",
                    place(),
                    "cp_rank",
                    (format!("{} of {}", group.cp_rank, group.cp_size), format!("source {source}")),
                    "positions of two sources overlap in part",
                ));
            }
            let left = without(&needed, &common);
            rest.extend(subtract(&ranges, &inside).into_iter().map(|piece| (piece, needed.clone())));
            if !left.is_empty() {
                rest.push((inside.clone(), left));
            }
            shares.push(Share { source, layer, parts: (part_index, remote_part), ranges: inside });
        }
        open = rest;
    }
    let Some((ranges, _)) = open.first() else { return Ok(()) };
    let names: Vec<String> =
        sharded_axes(part).zip(ranges).map(|(axis, range)| format!("{} {}..{}", axis.name, range.0, range.1)).collect();
    Err(Error::unplannable(
        "no-source",
        place(),
        "shards",
        (names.join(", "), format!("{} sources", holders.len())),
        "no source holds these items",
    ))
}
