// SPDX-License-Identifier: Apache-2.0
//! Which tokens of each group a request moves: their first token, and whether a partial last block is cut.
use crate::error::Result;
use crate::geometry::ranges::Interval;
use crate::pairing::group_pair::GroupPair;
use crate::pairing::plan::Plan;
use crate::request::block_pairs::visit_pairs;
use crate::request::group_span::GroupSpan;
use crate::request::span::RequestSpans;

/// Tokens of a group that a request moves and zeroes on the local side.
///
/// ```text
/// local blocks   |          |          |          |          |
///                ^ first_kept_token                            zeroed: first_kept_token..start
///                     ^ start                   ^ end          moved:  start..end
///                                               num_tokens <= end: the rest of the last block is zeroed
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenRange {
    /// First token of the first local block that the request still needs.
    pub(crate) first_kept_token: u64,
    /// First token that is moved.
    pub(crate) start: u64,
    /// One past the last token that is moved.
    pub(crate) end: u64,
}

impl TokenRange {
    pub(crate) fn moved(self) -> Interval {
        Interval { start: self.start, end: self.end }
    }
}

/// Whether a partial last block may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TailPolicy {
    /// Cut it if that is cheaper.
    Cheapest,
    /// Move it whole: views have whole blocks only.
    Whole,
}

/// Where the moved tokens end, and the bytes of those after the request.
pub(crate) struct Tail {
    pub(crate) end: u64,
    excess_bytes: u64,
}

/// A group pair and a request's blocks on both sides.
pub(crate) struct PairedSpans<'a> {
    pub(crate) source: usize,
    /// Index of the group pair.
    pub(crate) index: usize,
    pub(crate) group_pair: &'a GroupPair,
    pub(crate) local: GroupSpan<'a>,
    pub(crate) remote: GroupSpan<'a>,
}

impl PairedSpans<'_> {
    /// Whether both ranks hold a token.
    fn both_hold(&self, token: u64) -> bool {
        self.local.holds(token) && self.remote.holds(token)
    }

    /// Tokens around a token that are consecutive on both sides.
    fn neighbours(&self, token: u64) -> Interval {
        let (local, remote) = (self.local.neighbours(token), self.remote.neighbours(token));
        Interval { start: local.start.max(remote.start), end: local.end.min(remote.end) }
    }
}

impl Plan {
    /// A local group and a request's blocks in it.
    pub(crate) fn local_span<'a>(&'a self, spans: &'a RequestSpans, group: usize) -> GroupSpan<'a> {
        GroupSpan { side: "local", index: group, group: &self.local.groups[group], span: &spans.local[group] }
    }

    pub(crate) fn paired_spans<'a>(&'a self, spans: &'a RequestSpans, source: usize, index: usize) -> PairedSpans<'a> {
        let group_pair = &self.sources[source].table.group_pairs[index];
        let remote_group = group_pair.remote_group;
        let remote = GroupSpan {
            side: "remote",
            index: remote_group,
            group: &self.sources[source].geometry.groups[remote_group],
            span: &spans.remote[source][remote_group],
        };
        PairedSpans { source, index, group_pair, local: self.local_span(spans, group_pair.local_group), remote }
    }

    /// Every group of a source from which a local group reads.
    pub(crate) fn spans_into<'a>(&'a self, spans: &'a RequestSpans, group: usize) -> Vec<PairedSpans<'a>> {
        let of_sources = self.sources.iter().enumerate();
        of_sources
            .flat_map(|(source, of)| of.table.group_pairs.iter().enumerate().map(move |pair| (source, pair)))
            .filter(|(_, (_, pair))| pair.local_group == group)
            .map(|(source, (index, _))| self.paired_spans(spans, source, index))
            .collect()
    }

    /// Which tokens of a local attention group are moved, and the bytes of those after the request. All of its sources
    /// must agree, because tokens that no source moves are zeroed.
    pub(crate) fn token_range(
        &self,
        spans: &RequestSpans,
        group: usize,
        policy: TailPolicy,
    ) -> Result<(TokenRange, u64)> {
        let local = self.local_span(spans, group);
        let first_kept_token = local.first_kept_token(spans.num_tokens);
        let Some(needed) = needed_range(&local, spans.num_tokens) else {
            let nothing = spans.num_tokens.max(first_kept_token);
            return Ok((TokenRange { first_kept_token, start: nothing, end: nothing }, 0));
        };
        local.require(needed)?;
        let paired = self.spans_into(spans, group);
        for pair in &paired {
            local.require_common(&pair.remote, needed)?;
        }
        let start = start_over_sources(&paired, needed, first_kept_token);
        let Tail { end, excess_bytes } = self.choose_tail(&paired, Interval { start, end: needed.end }, policy)?;
        Ok((TokenRange { first_kept_token, start, end }, excess_bytes))
    }

    /// Moves the last kernel block whole if that is the policy, or costs less than the saved descriptors.
    pub(crate) fn choose_tail(&self, paired: &[PairedSpans], exact: Interval, policy: TailPolicy) -> Result<Tail> {
        let num_tokens = exact.end;
        let cut = Tail { end: num_tokens, excess_bytes: 0 };
        let last: Vec<&PairedSpans> = paired.iter().filter(|pair| pair.both_hold(num_tokens - 1)).collect();
        let Some(end) =
            last.iter().map(|pair| pair.neighbours(num_tokens - 1).end).min().filter(|&end| end > num_tokens)
        else {
            return Ok(cut);
        };
        let bytes = last.iter().map(|pair| pair.group_pair.token_bytes.saturating_mul(end - num_tokens));
        let whole = Tail { end, excess_bytes: bytes.fold(0, u64::saturating_add) };
        if policy == TailPolicy::Whole {
            return Ok(whole);
        }
        let (mut cut_pieces, mut whole_pieces) = (0, 0);
        for pair in last {
            cut_pieces += self.pieces_of_last_block(pair, exact)?;
            whole_pieces += self.pieces_of_last_block(pair, Interval { end, ..exact })?;
        }
        let saved: u64 = u64::saturating_sub(cut_pieces, whole_pieces);
        let is_cheaper = saved.saturating_mul(self.options.descriptor_bytes) > whole.excess_bytes;
        Ok(if is_cheaper { whole } else { cut })
    }

    /// Pieces of the kernel block that holds the last of some tokens.
    fn pieces_of_last_block(&self, pair: &PairedSpans, tokens: Interval) -> Result<u64> {
        let start = pair.neighbours(tokens.end - 1).start.max(tokens.start);
        let mut cut = None;
        // One kernel block of each rank holds the last token, so there is one pair.
        visit_pairs(&pair.local, &pair.remote, Interval { start, ..tokens }, |block_pair| cut = Some(block_pair.cut));
        let table = &self.sources[pair.source].table;
        cut.map_or(Ok(0), |cut| table.count_pieces(&self.geometries(pair.source), pair.index, cut))
    }
}

/// Tokens that the next token attends to and that belong into the span's blocks; None if there is no such token.
fn needed_range(local: &GroupSpan, num_tokens: u64) -> Option<Interval> {
    let start = local.first_token().max(local.group.first_needed_token(num_tokens));
    (start < num_tokens).then_some(Interval { start, end: num_tokens })
}

/// First token from which all sources have everything, in blocks that the request still needs.
fn start_over_sources(paired: &[PairedSpans], needed: Interval, first_kept_token: u64) -> u64 {
    let starts = paired.iter().map(|pair| pair.remote.end_of_missing(needed.start));
    starts.fold(first_kept_token, u64::max)
}
