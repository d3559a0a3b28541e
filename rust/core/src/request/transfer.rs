// SPDX-License-Identifier: Apache-2.0
//! One request: the reads from each source, and the ranges to zero before.
use crate::bytes::rows::{Advise, Descriptor, NO_ADVICE};
use crate::error::Result;
use crate::geometry::sharing::no_block_twice;
use crate::pairing::plan::Plan;
use crate::request::checked::CheckedRequest;
use crate::request::copies::{Copies, refuse_overlap};
use crate::request::span::Span;
use crate::request::token_ranges::TailPolicy;

/// Reads from one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Index of the source.
    pub source: usize,
    /// The copies.
    pub copies: Copies,
}

/// All reads of a request and its ranges to zero: as descriptors, or as [`Ids`](crate::Ids).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer<Reads = Read> {
    /// One entry for each source with something to read.
    pub reads: Vec<Reads>,
    /// Local ranges to zero before the reads are posted.
    pub zero: Vec<Descriptor>,
    /// Bytes of tokens after the request's last token, moved because a whole block was cheaper or views have only whole
    /// blocks.
    pub excess_bytes: u64,
    /// For each local group, the first token from which its blocks are filled up to the request's last token. A block
    /// that begins before it has zeros there. 0 for groups whose blocks do not hold tokens by position.
    pub first_tokens: Vec<u64>,
}

impl<Reads> Transfer<Reads> {
    pub(crate) fn new(reads: Vec<Reads>, zero: Vec<Descriptor>, request: &CheckedRequest) -> Self {
        Self { reads, zero, excess_bytes: request.excess_bytes, first_tokens: request.first_tokens() }
    }
}

impl Plan {
    /// Computes the copies of a request of `num_tokens` tokens.
    ///
    /// `local` has a span for each local group, with the blocks to fill. `remote` has, for each source, a span for each
    /// of its groups; a single entry is used for all sources.
    pub fn transfer(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<Transfer> {
        self.transfer_in(NO_ADVICE, num_tokens, local, remote)
    }

    /// The same; `advise` is given the addresses of the descriptors before they are written.
    pub fn transfer_in(
        &self,
        advise: Advise,
        num_tokens: u64,
        local: &[Span],
        remote: &[Vec<Span>],
    ) -> Result<Transfer> {
        let request = self.check(num_tokens, local, remote, TailPolicy::Cheapest)?;
        let zero = self.zero(&request)?;
        let reads = self.reads(&request, &zero, advise)?;
        Ok(Transfer::new(reads, zero, &request))
    }

    /// The copies of every source. Fails if a byte is written twice, also by `zero`.
    pub(crate) fn reads(&self, request: &CheckedRequest, zero: &[Descriptor], advise: Advise) -> Result<Vec<Read>> {
        let mut reads: Vec<Read> = Vec::new();
        let mut budget = self.budget(advise, zero.len());
        for (index, source) in self.sources.iter().enumerate() {
            let by_pair = self.block_pairs(request, index)?;
            let copies = source.table.copies(&self.geometries(index), by_pair, budget)?;
            budget.made += copies.len() as u64;
            if !copies.is_empty() {
                reads.push(Read { source: index, copies });
            }
        }
        if (reads.len() > 1 || !zero.is_empty()) && !self.is_each_block_once(request) {
            refuse_overlap(reads.iter().map(|read| read.copies.local.as_slice()).chain([zero]))?;
        }
        Ok(reads)
    }

    /// Whether a request's blocks alone prove that it writes no byte twice. A layer's items, tokens and blocks are
    /// assigned once, so only two groups with a common block could write a byte twice.
    pub(crate) fn is_each_block_once(&self, request: &CheckedRequest) -> bool {
        let blocks = request.spans.local.iter().map(|span| span.ids.as_slice());
        self.shared_memory.as_ref().is_some_and(|memory| no_block_twice(memory, blocks))
    }
}
