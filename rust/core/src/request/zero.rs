// SPDX-License-Identifier: Apache-2.0
//! Local bytes of a request's blocks that nothing is read into: they are zeroed.
use std::collections::HashSet;

use crate::bytes::pieces::TokenCut;
use crate::bytes::rows::Descriptor;
use crate::error::Result;
use crate::geometry::ranges::Interval;
use crate::geometry::types::{KernelBlockId, Kind};
use crate::pairing::group_pair::{Geometries, GroupPair};
use crate::pairing::plan::Plan;
use crate::pairing::table::Table;
use crate::request::block_pairs::{BlockPair, visit_pairs};
use crate::request::by_group::ByGroup;
use crate::request::checked::{CheckedRequest, state_block};
use crate::request::copies::refuse_overlap;
use crate::request::pairs_by_cut::PairsByCut;

impl Plan {
    /// Local ranges of the request's blocks that nothing is read into.
    ///
    /// ```text
    /// a group with a source      |zero|     read     |zero|     before the first and after the last token that is moved
    /// a layer that none has      |zero|     zero     |zero|
    /// ```
    pub(crate) fn zero(&self, request: &CheckedRequest) -> Result<Vec<Descriptor>> {
        let mut zero = self.ranges(&self.self_table, |pair| self.around_moved_tokens(request, pair))?;
        let unsourced = self.ranges(&self.unsourced, |pair| self.moved_blocks(request, pair))?;
        if !unsourced.is_empty() {
            refuse_overlap([zero.as_slice(), unsourced.as_slice()].into_iter())?;
            zero.extend(unsourced);
            zero.sort_unstable();
            self.join_ranges(&mut zero);
        }
        Ok(zero)
    }

    /// Local ranges of some blocks of a table of the local geometry with itself.
    fn ranges(&self, table: &Table, blocks: impl Fn(&GroupPair) -> PairsByCut) -> Result<Vec<Descriptor>> {
        let by_pair: Vec<PairsByCut> = table.group_pairs.iter().map(blocks).collect();
        let geometries = Geometries { local: &self.local, remote: &self.local };
        let mut not_moved = ByGroup::new(self.local.groups.len());
        Ok(table.copies(&geometries, &by_pair, Vec::with_capacity, &mut not_moved)?.local)
    }

    /// Blocks of a group with the tokens before and after those that are moved.
    fn around_moved_tokens(&self, request: &CheckedRequest, pair: &GroupPair) -> PairsByCut {
        let local = self.local_span(&request.spans, pair.local_group);
        let mut pairs = PairsByCut::default();
        if let Some(range) = request.token_ranges[pair.local_group] {
            let end = local.end_token();
            let before = Interval { start: range.first_kept_token, end: range.start.min(end) };
            for tokens in [before, Interval { start: range.end, end }] {
                visit_pairs(&local, &local, tokens, |pair| pairs.push(pair));
            }
        }
        pairs
    }

    /// Blocks of a group with the tokens or the state that are moved of its other layers.
    fn moved_blocks(&self, request: &CheckedRequest, pair: &GroupPair) -> PairsByCut {
        let local = self.local_span(&request.spans, pair.local_group);
        let mut pairs = PairsByCut::default();
        let itself = |block: KernelBlockId| BlockPair { local: block, remote: block, cut: TokenCut::STATE };
        match (request.token_ranges[pair.local_group], local.group.kind) {
            (Some(range), _) => visit_pairs(&local, &local, range.moved(), |pair| pairs.push(pair)),
            (None, Kind::Ssm { .. }) => state_block(&local).into_iter().for_each(|block| pairs.push(itself(block))),
            (None, _) => local.kernel_blocks().for_each(|block| pairs.push(itself(block))),
        }
        pairs
    }

    /// Joins sorted local ranges that touch, but none across the start of a region.
    fn join_ranges(&self, ranges: &mut Vec<Descriptor>) {
        let starts: HashSet<u64> = self.local.regions.iter().map(|region| region.base).collect();
        ranges.dedup_by(|next, last| {
            let goes_on = last[0] + last[1] == next[0] && last[2] == next[2] && !starts.contains(&next[0]);
            if goes_on {
                last[1] += next[1];
            }
            goes_on
        });
    }
}
