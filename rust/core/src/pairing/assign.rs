// SPDX-License-Identifier: Apache-2.0
//! Decides from which source a local rank reads each part: every item exactly once.
use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::finding::Place;
use crate::geometry::ranges::{Interval, gcd, intersect_boxes, intersect_lists, subtract_box, subtract_lists};
use crate::geometry::types::{Geometry, Group, Layer, Part};
use crate::pairing::group_pair::PartSlice;

/// A slice of a part that is read from one source.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) source: usize,
    /// Index of the layer at the source.
    pub(crate) remote_layer: usize,
    pub(crate) slice: PartSlice,
}

/// Limit of intervals in a cycle of positions, after which the pattern of context-parallel ranks repeats.
const MAX_CYCLE_INTERVALS: u64 = 65_536;

/// A source with the layer.
#[derive(Clone, Copy)]
struct Holder<'a> {
    source: usize,
    geometry: &'a Geometry,
    layer: usize,
}

impl<'a> Holder<'a> {
    fn layer(&self) -> &'a Layer {
        &self.geometry.layers[self.layer]
    }

    fn group(&self) -> &'a Group {
        self.geometry.group(self.layer())
    }
}

/// Assigns every item of every local layer to sources: one list for each layer, empty if no source has the layer.
pub(crate) fn assign(local: &Geometry, remotes: &[&Geometry]) -> Result<Vec<Vec<Assignment>>> {
    let order = preference(local, remotes);
    let by_name: Vec<HashMap<&str, usize>> = remotes
        .iter()
        .map(|remote| remote.layers.iter().enumerate().map(|(index, layer)| (layer.name.as_str(), index)).collect())
        .collect();
    let holder = |source: usize, name: &str| {
        let layer = *by_name[source].get(name)?;
        Some(Holder { source, geometry: remotes[source], layer })
    };
    local
        .layers
        .iter()
        .map(|layer| {
            let holders: Vec<Holder> = order.iter().filter_map(|&source| holder(source, &layer.name)).collect();
            if holders.is_empty() { Ok(Vec::new()) } else { assign_layer(local, layer, &holders) }
        })
        .collect()
}

/// Sources in a rank's order of preference. The source with the rank's own number comes first, so that ranks with the
/// same choice spread over the copies.
fn preference(local: &Geometry, remotes: &[&Geometry]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..remotes.len()).collect();
    order.sort_by_key(|&index| {
        let remote = remotes[index];
        let size = u64::from(remote.tp_size);
        let nearest = u64::from(local.tp_rank) * size / u64::from(local.tp_size);
        (u64::from(remote.tp_rank) + size - nearest) % size
    });
    order
}

fn assign_layer(local: &Geometry, layer: &Layer, holders: &[Holder]) -> Result<Vec<Assignment>> {
    let group = local.group(layer);
    let cycle = Cycle::of(group, holders.iter().map(Holder::group))?;
    let positions = cycle.positions(group);
    let mut assignments = Vec::new();
    for (index, part) in local.page(layer).parts.iter().enumerate() {
        let wanted = Wanted { layer, group, part, index, cycle, positions: &positions };
        wanted.cover(holders, &mut assignments)?;
    }
    Ok(assignments)
}

/// Number of tokens after which the positions of all involved ranks repeat.
#[derive(Debug, Clone, Copy)]
struct Cycle(u64);

impl Cycle {
    fn of<'a>(local: &'a Group, remotes: impl Iterator<Item = &'a Group>) -> Result<Self> {
        let (mut length, mut smallest) = (1u64, u64::MAX);
        for group in std::iter::once(local).chain(remotes).filter(|group| group.cp_size > 1) {
            let round = group.tokens_per_round();
            length = (length / gcd(length, round)).saturating_mul(round);
            smallest = smallest.min(group.cp_interleave);
        }
        if length / smallest > MAX_CYCLE_INTERVALS {
            return Err(Error::unplannable(
                "cp-cycle",
                Place::default(),
                "cp_interleave x cp_size",
                (format!("{} x {}", local.cp_interleave, local.cp_size), format!("a cycle of {length} tokens")),
                "the positions of the context-parallel ranks repeat too late",
            ));
        }
        Ok(Self(length))
    }

    /// Positions that a group holds within the cycle.
    fn positions(self, group: &Group) -> Vec<Interval> {
        if group.cp_size == 1 {
            return vec![Interval { start: 0, end: self.0 }];
        }
        let round = group.tokens_per_round();
        let starts = (0..self.0 / round).map(|index| index * round + group.cp_rank * group.cp_interleave);
        starts.map(|start| Interval { start, end: start + group.cp_interleave }).collect()
    }
}

/// A part of a local layer, at the positions that this rank holds.
struct Wanted<'a> {
    layer: &'a Layer,
    group: &'a Group,
    part: &'a Part,
    /// Axes of the part in its page.
    index: usize,
    cycle: Cycle,
    positions: &'a [Interval],
}

/// Items of a part at some positions: items without a source, or items that a source holds.
struct Items {
    ranges: Vec<Interval>,
    positions: Vec<Interval>,
}

impl Wanted<'_> {
    /// Assigns each item to the first holder that has it.
    fn cover(&self, holders: &[Holder], assignments: &mut Vec<Assignment>) -> Result<()> {
        let mut open = vec![Items { ranges: self.part.shard(), positions: self.positions.to_vec() }];
        for holder in holders {
            let Some((remote_part, held)) = self.held_by(holder) else { continue };
            let mut rest = Vec::new();
            for items in open {
                if let Some(ranges) = self.take(items, holder.source, &held, &mut rest)? {
                    let slice = PartSlice { local_part: self.index, remote_part, ranges };
                    assignments.push(Assignment { source: holder.source, remote_layer: holder.layer, slice });
                }
            }
            open = rest;
        }
        match open.first() {
            Some(items) => Err(self.no_source(items, holders.len())),
            None => Ok(()),
        }
    }

    /// The part of a holder's page with the same name, and its items.
    fn held_by(&self, holder: &Holder) -> Option<(usize, Items)> {
        let parts = &holder.geometry.page(holder.layer()).parts;
        let (index, part) = parts.iter().enumerate().find(|(_, other)| other.name == self.part.name)?;
        let positions = self.cycle.positions(holder.group());
        Some((index, Items { ranges: part.shard_in_order_of(self.part)?, positions }))
    }

    /// The box that a source provides of some items; the rest is appended to `rest`.
    fn take(&self, items: Items, source: usize, held: &Items, rest: &mut Vec<Items>) -> Result<Option<Vec<Interval>>> {
        let common = intersect_lists(&items.positions, &held.positions);
        let Some(inside) = intersect_boxes(&items.ranges, &held.ranges).filter(|_| !common.is_empty()) else {
            rest.push(items);
            return Ok(None);
        };
        // Pairing by position reads all positions that both sides hold, so a source cannot be asked for some of them.
        if common != intersect_lists(self.positions, &held.positions) {
            return Err(self.overlapping_positions(source));
        }
        let outside = subtract_box(&items.ranges, &inside).into_iter();
        rest.extend(outside.map(|ranges| Items { ranges, positions: items.positions.clone() }));
        let positions = subtract_lists(&items.positions, &common);
        if !positions.is_empty() {
            rest.push(Items { ranges: inside.clone(), positions });
        }
        Ok(Some(inside))
    }

    fn place(&self) -> Place {
        Place::layer(&self.layer.name).part(&self.part.name)
    }

    fn overlapping_positions(&self, source: usize) -> Error {
        Error::unplannable(
            "cp-overlap",
            self.place(),
            "cp_rank",
            (format!("{} of {}", self.group.cp_rank, self.group.cp_size), format!("source {source}")),
            "positions of two sources overlap in part",
        )
    }

    fn no_source(&self, items: &Items, holders: usize) -> Error {
        let axes = self.part.sharded_axes().zip(&items.ranges);
        let ranges: Vec<String> =
            axes.map(|(axis, range)| format!("{} {}..{}", axis.name, range.start, range.end)).collect();
        Error::unplannable(
            "no-source",
            self.place(),
            "shards",
            (ranges.join(", "), format!("{holders} sources")),
            "no source holds these items",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::{Axis, Kind};

    fn group(block_size: u64, cp_rank: u64, cp_size: u64) -> Group {
        Group { cp_rank, cp_size, ..Group::alone(Kind::Full, block_size, 1) }
    }

    fn interval(start: u64, end: u64) -> Interval {
        Interval { start, end }
    }

    fn heads(extent: u64, start: u64, length: u64) -> Part {
        let axis = Axis { name: "heads".into(), extent, stride: 1, start, length, may_repeat: false, spare: 0 };
        Part { name: "kv".into(), dtype: "u8".into(), item_bytes: 1, offset: 0, axes: vec![axis] }
    }

    fn geometry(group: Group, part: Part, (tp_rank, tp_size): (u32, u32)) -> Geometry {
        let layer = Layer {
            name: "a".into(),
            group: 0,
            page: 0,
            region: 0,
            offset: 0,
            num_blocks: 1,
            block_stride: 8,
            kernel_stride: 8,
        };
        let pages = vec![crate::geometry::types::Page { parts: vec![part] }];
        let (groups, layers, num_blocks) = (vec![group], vec![layer], vec![1]);
        Geometry { tp_rank, tp_size, null_block: None, regions: vec![], groups, pages, layers, num_blocks }
    }

    /// Sources, with first and end of the heads that are read from each.
    fn read(local: &Geometry, remotes: &[Geometry]) -> Result<Vec<(usize, u64, u64)>> {
        let assigned = assign(local, &remotes.iter().collect::<Vec<_>>())?;
        let heads = |one: &Assignment| (one.source, one.slice.ranges[0].start, one.slice.ranges[0].end);
        Ok(assigned[0].iter().map(heads).collect())
    }

    #[test]
    fn a_cycle_ends_where_all_turns_begin_anew() {
        // Two ranks with blocks of 4 take turns of 8 tokens, three with blocks of 4 turns of 12.
        let (one, other) = (group(4, 1, 2), group(4, 2, 3));
        let cycle = Cycle::of(&one, [&other].into_iter()).expect("short");
        assert_eq!(cycle.0, 24);
        assert_eq!(cycle.positions(&one), [interval(4, 8), interval(12, 16), interval(20, 24)]);
        assert_eq!(cycle.positions(&other), [interval(8, 12), interval(20, 24)]);
    }

    #[test]
    fn heads_come_from_the_ranks_that_hold_them() {
        let remote = |rank: u32| geometry(group(4, 0, 1), heads(8, 2 * u64::from(rank), 2), (rank, 4));
        let remotes: Vec<Geometry> = (0..4).map(remote).collect();
        // Rank 1 of 2 holds heads 4..8: those of ranks 2 and 3 of 4.
        let local = geometry(group(4, 0, 1), heads(8, 4, 4), (1, 2));
        assert_eq!(read(&local, &remotes), Ok(vec![(2, 4, 6), (3, 6, 8)]));
        let error = read(&local, &remotes[..3]).expect_err("no source holds heads 6 and 7").to_string();
        assert!(error.contains("heads 6..8"), "{error}");
    }

    #[test]
    fn equal_copies_are_read_from_by_rank() {
        let remotes: Vec<Geometry> = (0..4).map(|rank| geometry(group(4, 0, 1), heads(1, 0, 1), (rank, 4))).collect();
        for rank in 0..2 {
            let local = geometry(group(4, 0, 1), heads(1, 0, 1), (rank, 2));
            assert_eq!(read(&local, &remotes), Ok(vec![(2 * rank as usize, 0, 1)]));
        }
    }
}
