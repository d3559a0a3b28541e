// SPDX-License-Identifier: Apache-2.0
//! Requests as ids into a plan's views.
use crate::bytes::rows::Descriptor;
use crate::error::{Error, Result};
use crate::pairing::plan::Plan;
use crate::pairing::view_table::ViewTable;
use crate::request::block_pairs::{PackedPair, Pairs, runs};
use crate::request::bound::{ALLOCATE, room};
use crate::request::span::Span;
use crate::request::token_ranges::TailPolicy;
use crate::request::transfer::Transfer;

/// Ids into the prepared views of both sides, pair by pair.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ids {
    /// Index of the source.
    pub source: usize,
    /// Ids into the local views.
    pub local: Vec<i32>,
    /// Ids into the remote views.
    pub remote: Vec<i32>,
    /// Bytes the ids stand for.
    pub bytes: u64,
    /// Descriptors left after the transfer library joins ids that follow each other in dense views on both sides.
    pub merged: u64,
}

impl Plan {
    /// The request as ids into the views of each source. Views have whole kernel blocks, so a last block is moved whole.
    pub fn ids(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<Transfer<Ids>> {
        let request = self.check(num_tokens, local, remote, TailPolicy::Whole)?;
        let zero = self.zero(&request)?;
        let mut reads: Vec<Ids> = Vec::new();
        let mut is_disjoint = true;
        let mut budget = self.budget(ALLOCATE, zero.len());
        for source in self.sources() {
            let views = self.view_table(source)?;
            let table = &self.sources[source].table;
            let by_pair = self.block_pairs(&request, source)?;
            if table.has_rare_cuts(&by_pair) {
                let why = "two pairs of groups cut a group's first or last block differently".into();
                return Err(Error::NoViews { why });
            }
            let limit = table.bound_descriptors(&by_pair, budget)?;
            let gathered = table.gather(&by_pair);
            let total = views.pairs.iter().map(|pair| gathered[pair.filled_by].len()).sum();
            limit.check(total as u64)?;
            budget.made += total as u64;
            is_disjoint &= reads.is_empty() && table.is_surely_disjoint(&gathered, &zero);
            let empty = Ids { source, local: room(total)?, remote: room(total)?, ..Ids::default() };
            let ids = encode(empty, views, &gathered);
            if !ids.local.is_empty() {
                reads.push(ids);
            }
        }
        if !is_disjoint && !self.is_each_block_once(&request) {
            // Several sources, interleaved views, or an overlap: what is written where has to be looked at one by one.
            self.reads(&request, &zero, ALLOCATE)?;
        }
        Ok(Transfer::new(reads, zero, &request))
    }

    /// Descriptors of the local side that ids of a source stand for.
    pub fn id_descriptors(&self, source: usize, ids: &[i32]) -> Result<Vec<Descriptor>> {
        let (views, _) = self.views(source)?;
        let add = |sum: &mut u64, count: u64| {
            *sum += count;
            Some(*sum)
        };
        let ends: Vec<u64> = views.iter().map(|view| view[4]).scan(0, add).collect();
        let total = ends.last().copied().unwrap_or(0);
        let descriptor = |(index, &id): (usize, &i32)| {
            let outside = || Error::block_range(("view", source), index, id.into(), total);
            let id = u64::try_from(id).ok().filter(|&id| id < total).ok_or_else(outside)?;
            let view = ends.partition_point(|&end| end <= id);
            let [address, length, device, stride, count] = views[view];
            Ok([address + (id - (ends[view] - count)) * stride, length, device])
        };
        ids.iter().enumerate().map(descriptor).collect()
    }
}

/// Ids of gathered pairs: for each pair of views in turn, the ids of its blocks, from the id of block 0 on.
fn encode(mut ids: Ids, table: &ViewTable, gathered: &[Pairs]) -> Ids {
    // Block ids are below the count of their view, and all ids of a table fit int32.
    let columns: Vec<(Vec<i32>, Vec<i32>, u64)> = gathered
        .iter()
        .map(|pairs| {
            let ids = |of: fn(PackedPair) -> i32| pairs.iter().map(|&pair| of(pair)).collect();
            (
                ids(|pair| pair.local().0 as i32),
                ids(|pair| pair.remote().0 as i32),
                runs(pairs.iter().map(|&pair| (pair, 0))).len() as u64,
            )
        })
        .collect();
    for pair in &table.pairs {
        let (local, remote, runs) = &columns[pair.filled_by];
        let (local_start, remote_start) = (pair.local_start as i32, pair.remote_start as i32);
        ids.local.extend(local.iter().map(|id| local_start.wrapping_add(*id)));
        ids.remote.extend(remote.iter().map(|id| remote_start.wrapping_add(*id)));
        ids.bytes = pair.length.saturating_mul(local.len() as u64).saturating_add(ids.bytes);
        ids.merged += if pair.is_dense { *runs } else { local.len() as u64 };
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::KernelBlockId;
    use crate::pairing::view_table::ViewPair;

    #[test]
    fn each_pair_of_views_has_the_ids_of_its_blocks() {
        let pair = |local_start, remote_start, is_dense| ViewPair {
            local_start,
            remote_start,
            length: 16,
            is_dense,
            filled_by: 0,
        };
        let table = ViewTable { local: vec![], remote: vec![], pairs: vec![pair(0, 100, true), pair(10, 200, false)] };
        let packed = |(local, remote)| PackedPair::new(KernelBlockId(local), KernelBlockId(remote));
        let ids = encode(Ids { source: 3, ..Ids::default() }, &table, &[[(2, 5), (3, 6), (7, 1)].map(packed).to_vec()]);
        assert_eq!(ids.local, [2, 3, 7, 12, 13, 17]);
        assert_eq!(ids.remote, [105, 106, 101, 205, 206, 201]);
        // Blocks 2 and 3 are one run of the dense pair; the other pair has three descriptors.
        assert_eq!((ids.source, ids.bytes, ids.merged), (3, 6 * 16, 2 + 3));
    }
}
