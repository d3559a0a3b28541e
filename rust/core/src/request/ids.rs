// SPDX-License-Identifier: Apache-2.0
//! Requests as ids into a plan's views.
use std::borrow::Cow;

use crate::bytes::rows::{Advise, Descriptor, NO_ADVICE};
use crate::error::{Error, Result};
use crate::geometry::types::KernelBlockId;
use crate::pairing::group_pair::CopyTemplate;
use crate::pairing::plan::Plan;
use crate::pairing::view_table::{Entry, PairCut, ViewPair, ViewTable};
use crate::request::block_pairs::{PackedPair, count_runs, is_ascending, sort};
use crate::request::bound::{Budget, room};
use crate::request::pairs_by_cut::PairsByCut;
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
    /// Descriptors left after the transfer library joins consecutive ids in dense views on both sides.
    pub merged: u64,
}

impl Plan {
    /// The request as ids into the views of each source. Views have whole kernel blocks, so the last block is moved
    /// whole.
    pub fn ids(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<Transfer<Ids>> {
        self.ids_in(NO_ADVICE, num_tokens, local, remote)
    }

    /// The same; `advise` is given the addresses of the ids before they are written.
    pub fn ids_in(
        &self,
        advise: Advise,
        num_tokens: u64,
        local: &[Span],
        remote: &[Vec<Span>],
    ) -> Result<Transfer<Ids>> {
        let request = self.check(num_tokens, local, remote, TailPolicy::Whole)?;
        let zero = self.zero(&request)?;
        let mut reads: Vec<Ids> = Vec::new();
        let mut is_disjoint = true;
        let mut budget = self.budget(advise, zero.len());
        for source in self.sources() {
            let by_pair = self.block_pairs(&request, source)?;
            let filled = self.fill_views(source, &by_pair, budget)?;
            budget.made += filled.num_ids as u64;
            is_disjoint &= reads.is_empty() && filled.is_surely_disjoint(&zero);
            if filled.num_ids > 0 {
                reads.push(filled.ids(source, advise)?);
            }
        }
        if !is_disjoint && !self.is_each_block_once(&request) {
            // Several sources, interleaved views, or an overlap: every written range must be checked separately.
            self.reads(&request, &zero, NO_ADVICE)?;
        }
        Ok(Transfer::new(reads, zero, &request))
    }

    /// The views of a source with the blocks of each group pair. Fails if views cannot express the request, or if it
    /// has too many ids.
    fn fill_views<'a>(&'a self, source: usize, by_pair: &'a [PairsByCut], budget: Budget) -> Result<FilledViews<'a>> {
        let views = self.view_table(source)?;
        if views.lacks_cut_of(by_pair) {
            let why = "two pairs of groups cut a group's first or last block differently".into();
            return Err(Error::NoViews { why });
        }
        let limit = self.sources[source].table.bound_descriptors(by_pair, budget)?;
        let filled = FilledViews::new(views, views.gather(by_pair));
        limit.check(filled.num_ids as u64)?;
        Ok(filled)
    }

    /// Local descriptors of ids of a source.
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

impl ViewTable {
    /// Whether no view has the cut of some pairs.
    fn lacks_cut_of(&self, by_pair: &[PairsByCut]) -> bool {
        let has = |group_pair, cut| self.cuts.binary_search(&PairCut { group_pair, cut }).is_ok();
        by_pair.iter().enumerate().any(|(index, pairs)| pairs.iter().any(|(cut, _)| !has(index, cut)))
    }

    /// Block pairs of each set of fillers, sorted by local id. `by_pair` has the pairs of each group pair.
    fn gather<'a>(&self, by_pair: &'a [PairsByCut]) -> Vec<Cow<'a, [PackedPair]>> {
        let gather = |fillers: &Vec<PairCut>| {
            let lists: Vec<&[PackedPair]> = fillers.iter().map(|of| by_pair[of.group_pair].get(of.cut)).collect();
            match lists[..] {
                [pairs] if is_ascending(pairs) => Cow::Borrowed(pairs),
                _ => {
                    let mut pairs = lists.concat();
                    sort(&mut pairs);
                    Cow::Owned(pairs)
                }
            }
        };
        self.fillers.iter().map(gather).collect()
    }
}

/// Views, and the blocks of a request that fill them.
struct FilledViews<'a> {
    views: &'a ViewTable,
    /// Block pairs of each set of fillers, sorted by local id.
    gathered: Vec<Cow<'a, [PackedPair]>>,
    /// Ids of each side.
    num_ids: usize,
}

impl<'a> FilledViews<'a> {
    fn new(views: &'a ViewTable, gathered: Vec<Cow<'a, [PackedPair]>>) -> Self {
        let num_ids = views.pairs.iter().map(|pair| gathered[pair.filled_by].len()).sum();
        Self { views, gathered, num_ids }
    }

    /// Whether the pairs are certainly written without overlap, and apart from sorted `others`. It checks every
    /// template, not every copy.
    fn is_surely_disjoint(&self, others: &[Descriptor]) -> bool {
        let pairs_of = |entry: &Entry| &*self.gathered[entry.filled_by];
        let filled = || self.views.entries.iter().map(|entry| (&entry.template, pairs_of(entry)));
        let is_clear = |other: &Descriptor, (template, pairs): (&CopyTemplate, &[PackedPair])| {
            !template.writes_into(pairs, other[0], other[0] + other[1])
        };
        self.gathered.iter().all(|pairs| is_ascending(pairs))
            && are_apart(filled())
            && filled().all(|filled| others.iter().all(|other| is_clear(other, filled)))
    }

    /// For each pair of views in turn, the ids of its blocks, from the id of block 0 on.
    fn ids(&self, source: usize, advise: Advise) -> Result<Ids> {
        let room = || room(self.num_ids, advise);
        let mut ids = Ids { source, local: room()?, remote: room()?, ..Ids::default() };
        let columns: Vec<IdColumns> = self.gathered.iter().map(|pairs| IdColumns::of(pairs)).collect();
        for pair in &self.views.pairs {
            ids.append_blocks(pair, &columns[pair.filled_by]);
        }
        Ok(ids)
    }
}

/// Whether the copies of each template are all after those of the previous template: then nothing has to be sorted.
fn are_apart<'a>(filled: impl Iterator<Item = (&'a CopyTemplate, &'a [PackedPair])>) -> bool {
    let mut end = 0;
    for (template, pairs) in filled {
        let (Some(first), Some(last)) = (pairs.first(), pairs.last()) else { continue };
        let (piece, strides) = (template.piece, template.strides.local);
        let is_disjoint = pairs.len() == 1 || strides.step() >= piece.len;
        let start = piece.local + strides.offset(first.local());
        if start < end || !is_disjoint {
            return false;
        }
        end = piece.local + strides.offset(last.local()) + piece.len;
    }
    true
}

impl CopyTemplate {
    /// Whether the copy of any pair of an even template shares a byte with the local bytes `start..end`.
    ///
    /// ```text
    /// copies    |##---|##---|##---|##---|     step 5, length 2
    /// range             [------------)        blocks 1 and 2 begin before its end, and end after its start
    /// ```
    fn writes_into(&self, pairs: &[PackedPair], start: u64, end: u64) -> bool {
        let (first_byte, step) = (self.piece.local, self.strides.local.step());
        if end <= first_byte {
            return false;
        }
        let first = KernelBlockId((start + 1).saturating_sub(first_byte + self.piece.len).div_ceil(step));
        let last = KernelBlockId((end - 1 - first_byte) / step);
        let index = pairs.partition_point(|pair| pair.local() < first);
        pairs.get(index).is_some_and(|pair| pair.local() <= last)
    }
}

/// Block ids of some pairs.
struct IdColumns {
    local: Vec<i32>,
    remote: Vec<i32>,
    runs: u64,
}

impl IdColumns {
    fn of(pairs: &[PackedPair]) -> Self {
        // Block ids are below the count of their view, and all ids of a table fit int32.
        let ids = |of: fn(PackedPair) -> i32| pairs.iter().map(|&pair| of(pair)).collect();
        let (local, remote) = (ids(|pair| pair.local().0 as i32), ids(|pair| pair.remote().0 as i32));
        Self { local, remote, runs: count_runs(pairs) }
    }
}

impl Ids {
    /// Appends the ids of blocks in a pair of views.
    fn append_blocks(&mut self, pair: &ViewPair, blocks: &IdColumns) {
        let num_blocks = blocks.local.len() as u64;
        let (local_start, remote_start) = (pair.local_start as i32, pair.remote_start as i32);
        self.local.extend(blocks.local.iter().map(|id| local_start.wrapping_add(*id)));
        self.remote.extend(blocks.remote.iter().map(|id| remote_start.wrapping_add(*id)));
        self.bytes = pair.length.saturating_mul(num_blocks).saturating_add(self.bytes);
        self.merged += if pair.is_dense { blocks.runs } else { num_blocks };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_views_has_the_ids_of_its_blocks() {
        let pair = |local_start, remote_start, is_dense| ViewPair {
            local_start,
            remote_start,
            length: 16,
            is_dense,
            filled_by: 0,
        };
        let table = ViewTable {
            local: vec![],
            remote: vec![],
            pairs: vec![pair(0, 100, true), pair(10, 200, false)],
            entries: vec![],
            fillers: vec![],
            cuts: vec![],
        };
        let packed = |(local, remote)| PackedPair::new(KernelBlockId(local), KernelBlockId(remote));
        let filled = FilledViews::new(&table, vec![[(2, 5), (3, 6), (7, 1)].map(packed).to_vec().into()]);
        let ids = filled.ids(3, NO_ADVICE).expect("there is memory");
        assert_eq!(ids.local, [2, 3, 7, 12, 13, 17]);
        assert_eq!(ids.remote, [105, 106, 101, 205, 206, 201]);
        // Blocks 2 and 3 are one run of the dense pair; the other pair has three descriptors.
        assert_eq!((ids.source, ids.bytes, ids.merged), (3, 6 * 16, 2 + 3));
    }
}
