// SPDX-License-Identifier: Apache-2.0
//! A request's blocks, checked against their caches.
use std::rc::Rc;

use crate::error::{Error, Result};
use crate::geometry::types::{BlockId, Geometry, Group};
use crate::lowlevel::block_ids::BlockIds;
use crate::pairing::plan::Plan;

/// A request's live blocks in one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Index of `ids[0]` in the request's block table.
    pub first: u64,
    /// Logical block ids in the order of the sequence.
    pub ids: SpanIds,
}

/// Block ids of 32 or 64 bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpanIds {
    /// What vLLM's workers have.
    Narrow(Vec<i32>),
    /// What Python's integers are read as.
    Wide(Vec<i64>),
}

impl SpanIds {
    fn as_ids(&self) -> BlockIds<'_> {
        match self {
            Self::Narrow(ids) => BlockIds::Narrow(ids),
            Self::Wide(ids) => BlockIds::Wide(ids),
        }
    }
}

impl From<Vec<i32>> for SpanIds {
    fn from(ids: Vec<i32>) -> Self {
        Self::Narrow(ids)
    }
}

impl From<Vec<i64>> for SpanIds {
    fn from(ids: Vec<i64>) -> Self {
        Self::Wide(ids)
    }
}

/// Limit of positions, so that their sums fit.
const MAX_POSITION: u64 = 1 << 62;
/// More tokens than any sequence has; positions stay far below 2^63.
pub(crate) const MAX_TOKENS: u64 = 1 << 40;

/// A span whose ids are known to be blocks of the group.
#[derive(Debug, Clone)]
pub(crate) struct CheckedSpan {
    pub(crate) first: u64,
    pub(crate) ids: Vec<BlockId>,
}

impl CheckedSpan {
    /// One past the last entry of the block table.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.ids.len() as u64
    }

    /// The block of an entry of the table, which must be in the span.
    pub(crate) fn block(&self, entry: u64) -> BlockId {
        self.ids[(entry - self.first) as usize]
    }

    pub(crate) fn has(&self, entry: u64) -> bool {
        (self.first..self.end()).contains(&entry)
    }
}

/// A request's numbers, each checked separately.
pub(crate) struct RequestSpans {
    pub(crate) num_tokens: u64,
    /// By local group.
    pub(crate) local: Vec<CheckedSpan>,
    /// By source and its groups. Sources of the same size share what was checked once.
    pub(crate) remote: Vec<Rc<[CheckedSpan]>>,
}

impl RequestSpans {
    pub(crate) fn new(plan: &Plan, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<Self> {
        if num_tokens == 0 || num_tokens > MAX_TOKENS {
            return Err(Error::value("", "num_tokens", num_tokens, format!("has to be 1 to {MAX_TOKENS}")));
        }
        let sources = plan.sources.len();
        if remote.len() != 1 && remote.len() != sources {
            return Err(Error::count("remote spans by source", remote.len(), sources));
        }
        let local = check_spans("local", &plan.local, local)?;
        let mut checked: Vec<Rc<[CheckedSpan]>> = Vec::with_capacity(sources);
        for (index, source) in plan.sources.iter().enumerate() {
            let of_source = &remote[if remote.len() == 1 { 0 } else { index }];
            let before = checked.last().filter(|_| remote.len() == 1);
            checked.push(match before {
                Some(spans) if are_checked_alike(&plan.sources[index - 1].geometry, &source.geometry) => spans.clone(),
                _ => check_spans("remote", &source.geometry, of_source)?.into(),
            });
        }
        Ok(Self { num_tokens, local, remote: checked })
    }
}

/// Whether spans that are right for one geometry are right for another.
fn are_checked_alike(one: &Geometry, other: &Geometry) -> bool {
    let entries = |geometry: &Geometry| geometry.groups.iter().map(Group::tokens_per_entry).collect::<Vec<_>>();
    one.null_block == other.null_block && one.num_blocks == other.num_blocks && entries(one) == entries(other)
}

/// Checks the spans of all groups of one side.
pub(crate) fn check_spans(side: &'static str, geometry: &Geometry, spans: &[Span]) -> Result<Vec<CheckedSpan>> {
    if spans.len() != geometry.groups.len() {
        let what = if side == "local" { "local spans" } else { "remote spans" };
        return Err(Error::count(what, spans.len(), geometry.groups.len()));
    }
    spans.iter().enumerate().map(|(group, span)| check_span(side, geometry, group, span)).collect()
}

fn check_span(side: &'static str, geometry: &Geometry, group: usize, span: &Span) -> Result<CheckedSpan> {
    let place = || format!("{side} group {group}");
    let max_first = MAX_POSITION / geometry.groups[group].tokens_per_entry() - i32::MAX as u64;
    if span.first > max_first {
        return Err(Error::value(&place(), "first", span.first, format!("has to be at most {max_first}")));
    }
    let num_blocks = geometry.num_blocks[group];
    let given = span.ids.as_ids();
    if given.len() as u64 > num_blocks {
        let expected = format!("has to be at most the {num_blocks} blocks there are");
        return Err(Error::value(&place(), "number of block ids", given.len() as i128, expected));
    }
    // Nearly always all are right. Kernel blocks of a geometry are at most 2^31, so its blocks fit.
    let null = geometry.null_block.map(|block| block as i64);
    let ends = given.ends_if_ordered();
    let may_be_wrong = match ends {
        Some((least, most)) => {
            least < 0 || most as u64 >= num_blocks || null.is_some_and(|null| (least..=most).contains(&null))
        }
        None => given.first_outside(num_blocks).is_some() || null.is_some_and(|null| given.has(null)),
    };
    let is_wrong = |id: i64| id as u64 >= num_blocks || null == Some(id);
    if let Some((index, id)) = may_be_wrong.then(|| given.find(is_wrong)).flatten() {
        let place = (side, group);
        return Err(if id as u64 >= num_blocks {
            Error::block_range(place, index, id, num_blocks)
        } else {
            Error::null_block(place, index, id)
        });
    }
    let ids = given.to_blocks();
    if let Some(id) = ends.is_none().then(|| duplicate(&ids, num_blocks)).flatten() {
        return Err(Error::duplicate_block((side, group), id.0));
    }
    Ok(CheckedSpan { first: span.first, ids })
}

/// An id that is listed twice.
fn duplicate(ids: &[BlockId], num_blocks: u64) -> Option<BlockId> {
    let words = num_blocks as usize / 64 + 1;
    if words > 16 * ids.len() {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        return sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    }
    let mut seen = vec![0u64; words];
    ids.iter().copied().find(|&id| {
        let (word, bit) = (&mut seen[id.0 as usize / 64], 1 << (id.0 % 64));
        let twice = *word & bit != 0;
        *word |= bit;
        twice
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[u32]) -> Vec<BlockId> {
        ids.iter().copied().map(BlockId).collect()
    }

    #[test]
    fn few_ids_of_many_blocks_are_compared_as_all_others() {
        for num_blocks in [64, 1 << 30] {
            assert_eq!(duplicate(&ids(&[5, 63, 0, 7]), num_blocks), None);
            assert_eq!(duplicate(&ids(&[5, 63, 0, 63]), num_blocks), Some(BlockId(63)));
        }
    }

    #[test]
    fn entries_are_counted_from_the_spans_first() {
        let span = CheckedSpan { first: 3, ids: ids(&[8, 6]) };
        assert_eq!((span.has(2), span.has(3), span.has(4), span.has(5)), (false, true, true, false));
        assert_eq!((span.block(4), span.end()), (BlockId(6), 5));
    }
}
