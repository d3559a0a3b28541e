// SPDX-License-Identifier: Apache-2.0
//! Local bytes of a request's blocks that no read fills: they are zeroed.
use std::collections::HashSet;

use crate::bytes::pieces::TokenCut;
use crate::bytes::rows::{Descriptor, NO_ADVICE};
use crate::error::Result;
use crate::geometry::ranges::Interval;
use crate::geometry::types::{KernelBlockId, Kind};
use crate::pairing::group_pair::{Geometries, GroupPair};
use crate::pairing::plan::Plan;
use crate::pairing::table::Table;
use crate::request::block_pairs::{BlockPair, visit_pairs};
use crate::request::checked::{CheckedRequest, state_block};
use crate::request::copies::refuse_overlap;
use crate::request::pairs_by_cut::PairsByCut;

impl Plan {
    /// Local ranges of the request's blocks that no read fills.
    ///
    /// ```text
    /// a group with a source      |zero|     read     |zero|     before the first and after the last moved token
    /// a layer without one        |zero|     zero     |zero|
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
        Ok(table.copies(&geometries, by_pair, self.budget(NO_ADVICE, 0))?.local)
    }

    /// Blocks of a group with the tokens before and after the moved tokens.
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

    /// Blocks of a group with the tokens or the state that its other layers move.
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

    /// Joins sorted local ranges that touch, except across the start of a region.
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

#[cfg(test)]
mod tests {
    use crate::bytes::rows::Descriptor;
    use crate::geometry::types::Geometry;
    use crate::pairing::plan::{Plan, PlanOptions};
    use crate::request::span::Span;
    use std::sync::Arc;

    /// Layers of one group with blocks of 4 tokens of 1 byte and heads outside of tokens, 2 x 4 bytes; 10 blocks each.
    fn geometry(base: u64, group: &str, layers: &[&str]) -> Arc<Geometry> {
        let bytes = 80;
        let region = |index: usize| format!(r#"{{"base":{},"bytes":{bytes}}}"#, base + 1000 * index as u64);
        let layer = |(index, name): (usize, &&str)| {
            format!(
                r#"{{"name":"{name}","group":0,"page":0,"region":{index},"offset":0,"num_blocks":10,"block_stride":8}}"#
            )
        };
        let json = format!(
            r#"{{"kvhma":1,"null_block":null,"regions":[{}],"groups":[{group}],"pages":[{{"parts":[{{"name":"kv",
            "dtype":"u8","item_bytes":1,"offset":0,"axes":[{{"name":"heads","extent":2,"stride":4}},
            {{"name":"tokens","extent":4,"stride":1}}]}}]}}],"layers":[{}]}}"#,
            (0..layers.len()).map(region).collect::<Vec<_>>().join(","),
            layers.iter().enumerate().map(layer).collect::<Vec<_>>().join(",")
        );
        Arc::new(Geometry::from_json(json.as_bytes()).expect("a valid geometry"))
    }

    const FULL: &str = r#"{"kind":"full","block_size":4}"#;

    /// Address from the local base and length of what is read and of what is zeroed, and the excess.
    #[derive(Debug, PartialEq)]
    struct Moved {
        read: Vec<(u64, u64)>,
        zero: Vec<(u64, u64)>,
        excess_bytes: u64,
    }

    fn moved(
        group: &str,
        (local, remote): (&[&str], &[&str]),
        descriptor_bytes: u64,
        (num_tokens, span): (u64, Span),
    ) -> Moved {
        let (local, remote) = (geometry(4096, group, local), geometry(1 << 20, group, remote));
        let plan =
            Plan::new(local, vec![remote], PlanOptions { descriptor_bytes, ..PlanOptions::EXACT }).expect("pairs");
        let spans = [vec![span]];
        let transfer = plan.transfer(num_tokens, &spans[0], &spans).expect("fits");
        let ranges = |rows: &[Descriptor]| rows.iter().map(|row| (row[0] - 4096, row[1])).collect();
        let (read, zero) = (ranges(&transfer.reads[0].copies.local), ranges(&transfer.zero));
        Moved { read, zero, excess_bytes: transfer.excess_bytes }
    }

    #[test]
    fn a_partial_block_is_cut_or_moved_whole_by_what_it_costs() {
        // 6 tokens in blocks 3 and 5: two tokens of two heads of block 5, at bytes 40..42 and 44..46.
        let span = Span { first: 0, ids: vec![3i64, 5].into() };
        let layers: (&[&str], &[&str]) = (&["a"], &["a"]);
        let cut = Moved { read: vec![(24, 8), (40, 2), (44, 2)], zero: vec![(42, 2), (46, 2)], excess_bytes: 0 };
        assert_eq!(moved(FULL, layers, 4, (6, span.clone())), cut);
        // Whole, it is one descriptor less and 2 x 2 bytes more: cheaper once a descriptor costs more than 4 bytes.
        let whole = Moved { read: vec![(24, 8), (40, 8)], zero: vec![], excess_bytes: 4 };
        assert_eq!(moved(FULL, layers, 5, (6, span)), whole);
    }

    #[test]
    fn tokens_before_the_window_are_moved_as_far_as_they_are_there() {
        // Of 11 tokens a window of 5 needs 7..11, in blocks 1 and 2 of the sequence. All of block 1 is there.
        let group = r#"{"kind":"sliding","window":5,"block_size":4}"#;
        let span = Span { first: 1, ids: vec![3i64, 5].into() };
        let Moved { read, zero, .. } = moved(group, (&["a"], &["a"]), 0, (11, span));
        assert_eq!(read, [(24, 8), (40, 3), (44, 3)]);
        assert_eq!(zero, [(43, 1), (47, 1)]);
    }

    #[test]
    fn a_layer_that_no_source_has_is_zeroed() {
        let span = Span { first: 0, ids: vec![3i64].into() };
        let Moved { read, zero, .. } = moved(FULL, (&["a", "b"], &["a"]), 0, (4, span));
        assert_eq!((read, zero), (vec![(24, 8)], vec![(1024, 8)]));
    }
}
