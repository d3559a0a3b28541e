// SPDX-License-Identifier: Apache-2.0
//! What tokens of one group cost a request whose blocks are not known yet.
use std::rc::Rc;

use crate::bytes::rows::NO_ADVICE;
use crate::error::{Error, Result};
use crate::geometry::ranges::Interval;
use crate::geometry::types::{BlockId, Geometry, Kind};
use crate::pairing::plan::Plan;
use crate::request::checked::CheckedRequest;
use crate::request::copies::Copies;
use crate::request::span::{CheckedSpan, MAX_TOKENS, RequestSpans};
use crate::request::token_ranges::{TailPolicy, TokenRange};

impl Plan {
    /// Bytes and copies that fill tokens `first_token..num_tokens` of a local group, in blocks with consecutive ids on
    /// both sides. A state group moves its state for any tokens.
    pub fn count(&self, group: usize, first_token: u64, num_tokens: u64) -> Result<(u64, u64)> {
        if group >= self.local.groups.len() {
            let expected = format!("there are {} groups", self.local.groups.len());
            return Err(Error::value("", "group", group as i128, expected));
        }
        if first_token >= num_tokens || num_tokens > MAX_TOKENS {
            let expected = format!("has to be {} to {MAX_TOKENS}", i128::from(first_token) + 1);
            return Err(Error::value("", "num_tokens", num_tokens, expected));
        }
        let tokens = Interval { start: first_token, end: num_tokens };
        let spans = |side, geometry: &Geometry, is_read: &dyn Fn(usize) -> bool| -> Result<Vec<CheckedSpan>> {
            let groups = 0..geometry.groups.len();
            let span = |index| if is_read(index) { consecutive((side, index), geometry, tokens) } else { Ok(EMPTY) };
            groups.map(span).collect()
        };
        let local = spans("local", &self.local, &|index| index == group)?;
        let remote = self.sources.iter().map(|source| {
            let pairs = &source.table.group_pairs;
            let is_read = |index| pairs.iter().any(|pair| (pair.local_group, pair.remote_group) == (group, index));
            spans("remote", &source.geometry, &is_read).map(Rc::from)
        });
        let spans = RequestSpans { num_tokens, local, remote: remote.collect::<Result<_>>()? };
        let mut token_ranges = vec![None; self.local.groups.len()];
        if self.local.groups[group].kind.is_attention() {
            let end = self.choose_tail(&self.spans_into(&spans, group), tokens, TailPolicy::Cheapest)?.end;
            token_ranges[group] = Some(TokenRange { first_kept_token: first_token, start: first_token, end });
        }
        let request = CheckedRequest { spans, token_ranges, excess_bytes: 0 };
        self.bound_block_pairs(&request)?;
        let reads = self.reads(&request, &[], NO_ADVICE)?;
        let sum = |count: fn(&Copies) -> u64| reads.iter().map(|read| count(&read.copies)).sum();
        Ok((sum(Copies::bytes), sum(|copies| copies.len() as u64)))
    }
}

const EMPTY: CheckedSpan = CheckedSpan { first: 0, ids: Vec::new() };

/// Blocks 1, 2, 3 … for some tokens, or block 1 for a state. Block 0 stays free: it may touch another layer.
fn consecutive((side, index): (&str, usize), geometry: &Geometry, tokens: Interval) -> Result<CheckedSpan> {
    let group = &geometry.groups[index];
    let per_entry = group.tokens_per_entry();
    let (first, count) = match group.kind {
        Kind::Ssm { .. } => (0, 1),
        _ => (tokens.start / per_entry, tokens.end.div_ceil(per_entry) - tokens.start / per_entry),
    };
    if count >= geometry.num_blocks[index] {
        let expected = format!("has to be less than the {} blocks there are", geometry.num_blocks[index]);
        return Err(Error::value(&format!("{side} group {index}"), "number of blocks", count, expected));
    }
    // Kernel blocks of a geometry are at most 2^31, so its logical blocks fit.
    Ok(CheckedSpan { first, ids: (1..=count as u32).map(BlockId).collect() })
}
