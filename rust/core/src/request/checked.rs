// SPDX-License-Identifier: Apache-2.0
//! A checked, complete request, and the block pairs that it moves.
use crate::bytes::pieces::TokenCut;
use crate::error::{Error, Result};
use crate::geometry::ranges::Interval;
use crate::geometry::types::{KernelBlockId, Kind, state_slot};
use crate::pairing::plan::Plan;
use crate::request::block_pairs::{BlockPair, pair_whole_blocks, visit_pairs};
use crate::request::group_span::GroupSpan;
use crate::request::pairs_by_cut::PairsByCut;
use crate::request::span::{RequestSpans, Span};
use crate::request::token_ranges::{PairedSpans, TailPolicy, TokenRange};

/// A request whose blocks hold all that it needs on both sides.
pub(crate) struct CheckedRequest {
    pub(crate) spans: RequestSpans,
    /// By local group; None for groups whose blocks do not hold tokens by position.
    pub(crate) token_ranges: Vec<Option<TokenRange>>,
    /// Bytes after the request's last token that are moved with it.
    pub(crate) excess_bytes: u64,
}

impl CheckedRequest {
    /// By local group, the first token that is moved.
    pub(crate) fn first_tokens(&self) -> Vec<u64> {
        self.token_ranges.iter().map(|range| range.map_or(0, |range| range.start)).collect()
    }
}

impl Plan {
    pub(crate) fn check(
        &self,
        num_tokens: u64,
        local: &[Span],
        remote: &[Vec<Span>],
        policy: TailPolicy,
    ) -> Result<CheckedRequest> {
        let spans = RequestSpans::new(self, num_tokens, local, remote)?;
        let mut token_ranges = vec![None; spans.local.len()];
        let mut excess_bytes = 0u64;
        for (group, range) in token_ranges.iter_mut().enumerate() {
            if self.local.groups[group].kind.is_attention() {
                let (found, excess) = self.token_range(&spans, group, policy)?;
                *range = Some(found);
                excess_bytes = excess_bytes.saturating_add(excess);
            }
        }
        let request = CheckedRequest { spans, token_ranges, excess_bytes };
        self.bound_block_pairs(&request)?;
        Ok(request)
    }

    /// Block pairs of every group pair of a source.
    pub(crate) fn block_pairs(&self, request: &CheckedRequest, source: usize) -> Result<Vec<PairsByCut>> {
        let group_pairs = 0..self.sources[source].table.group_pairs.len();
        group_pairs.map(|index| self.block_pairs_of(request, source, index)).collect()
    }

    fn block_pairs_of(&self, request: &CheckedRequest, source: usize, group_pair: usize) -> Result<PairsByCut> {
        let paired = self.paired_spans(&request.spans, source, group_pair);
        match (request.token_ranges[paired.group_pair.local_group], paired.local.group.kind) {
            (Some(range), _) => Ok(token_pairs(&paired, range.moved())),
            (None, Kind::Ssm { .. }) => state_pair(&paired),
            (None, _) => entry_pairs(&paired),
        }
    }
}

/// Pairs of the kernel blocks that hold the same tokens.
fn token_pairs(paired: &PairedSpans, tokens: Interval) -> PairsByCut {
    let PairedSpans { local, remote, .. } = paired;
    let mut pairs = PairsByCut::default();
    if tokens.start < tokens.end {
        let whole = TokenCut { local: 0, remote: 0, count: local.group.kernel_tokens() };
        let paired_up_to = pair_whole_blocks(local, remote, tokens, pairs.list(whole));
        let rest = Interval { start: paired_up_to.unwrap_or(tokens.start), end: tokens.end };
        visit_pairs(local, remote, rest, |pair| pairs.push(pair));
    }
    pairs
}

/// The pair of slots with the state.
fn state_pair(paired: &PairedSpans) -> Result<PairsByCut> {
    let mut pairs = PairsByCut::default();
    if let Some(local) = state_block(&paired.local) {
        let remote = state_block(&paired.remote).ok_or_else(|| Error::count("remote state slots", 0, 1))?;
        pairs.push(BlockPair { local, remote, cut: TokenCut::STATE });
    }
    Ok(pairs)
}

/// Blocks with the same entry in both tables.
fn entry_pairs(paired: &PairedSpans) -> Result<PairsByCut> {
    let PairedSpans { local, remote, .. } = paired;
    let (first, end) = (local.span.first, local.span.end());
    let mut pairs = PairsByCut::default();
    for entry in first..end {
        if !remote.span.has(entry) {
            return Err(Error::missing_tokens((remote.side, remote.index), entry, first, end));
        }
        let local_blocks = local.group.kernel_blocks(local.span.block(entry));
        let remote_blocks = remote.group.kernel_blocks(remote.span.block(entry));
        for (local, remote) in local_blocks.zip(remote_blocks) {
            pairs.push(BlockPair { local, remote, cut: TokenCut::STATE });
        }
    }
    Ok(pairs)
}

/// The block with a request's last state.
pub(crate) fn state_block(blocks: &GroupSpan) -> Option<KernelBlockId> {
    let Kind::Ssm { num_speculative_blocks } = blocks.group.kind else { return None };
    let slot = state_slot(blocks.span.ids.len(), num_speculative_blocks)?;
    Some(blocks.group.kernel_block(blocks.span.ids[slot], 0))
}
