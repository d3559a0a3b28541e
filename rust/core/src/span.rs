// SPDX-License-Identifier: Apache-2.0
//! A request's blocks in one group, checked.
use crate::error::{Error, Result};
use crate::geometry::{Geometry, Group, Kind};

/// A request's live blocks in one group.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Span {
    /// Index of `ids[0]` in the request's block table.
    pub first: u64,
    /// Logical block ids in the order of the sequence.
    pub ids: Vec<i64>,
}

/// Positions stay below this, so that sums of them fit.
const MAX_POSITION: u64 = 1 << 62;

/// A span whose ids are known to be blocks of the group.
#[derive(Debug, Clone)]
pub(crate) struct Blocks {
    pub(crate) first: u64,
    pub(crate) ids: Vec<u32>,
}

impl Blocks {
    pub(crate) fn end(&self) -> u64 {
        self.first + self.ids.len() as u64
    }

    pub(crate) fn id(&self, index: u64) -> u64 {
        u64::from(self.ids[(index - self.first) as usize])
    }
}

/// Checks the spans of all groups of one side.
pub(crate) fn check_spans(
    side: &'static str,
    geometry: &Geometry,
    num_blocks: &[u64],
    spans: &[Span],
) -> Result<Vec<Blocks>> {
    if spans.len() != geometry.groups.len() {
        let what = if side == "local" { "local spans" } else { "remote spans" };
        return Err(Error::Count { what, got: spans.len(), expected: geometry.groups.len() });
    }
    spans
        .iter()
        .enumerate()
        .map(|(group, span)| {
            let turn = geometry.groups[group].block_size * geometry.groups[group].cp_size;
            let max_first = MAX_POSITION / turn - i32::MAX as u64;
            check_span(side, group, geometry.null_block, num_blocks[group], max_first, span)
        })
        .collect()
}

fn check_span(
    side: &'static str,
    group: usize,
    null: Option<u64>,
    num_blocks: u64,
    max_first: u64,
    span: &Span,
) -> Result<Blocks> {
    if span.first > max_first {
        return Err(Error::Value {
            place: format!("{side} group {group}"),
            field: "first",
            value: span.first.into(),
            expected: format!("has to be at most {max_first}"),
        });
    }
    if span.ids.len() as u64 > num_blocks {
        let (place, field) = (format!("{side} group {group}"), "number of block ids");
        let expected = format!("has to be at most the {num_blocks} blocks there are");
        return Err(Error::Value { place, field, value: span.ids.len() as i128, expected });
    }
    let mut ids = Vec::with_capacity(span.ids.len());
    for (index, &id) in span.ids.iter().enumerate() {
        match u64::try_from(id) {
            Ok(block) if block < num_blocks => {
                if null == Some(block) {
                    return Err(Error::NullBlock { side, group, index, id });
                }
                // Kernel blocks of a geometry are at most 2^31, so its logical blocks fit.
                ids.push(block as u32);
            }
            _ => return Err(Error::BlockRange { side, group, index, id, num_blocks }),
        }
    }
    if let Some(id) = duplicate(&ids, num_blocks) {
        return Err(Error::DuplicateBlock { side, group, id: id.into() });
    }
    Ok(Blocks { first: span.first, ids })
}

fn duplicate(ids: &[u32], num_blocks: u64) -> Option<u32> {
    if ids.is_sorted_by(|a, b| a < b) || ids.is_sorted_by(|a, b| a > b) {
        return None;
    }
    let words = num_blocks as usize / 64 + 1;
    if words > 16 * ids.len() {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        return sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    }
    let mut seen = vec![0u64; words];
    ids.iter().copied().find(|&id| {
        let (word, bit) = (&mut seen[id as usize / 64], 1 << (id % 64));
        let twice = *word & bit != 0;
        *word |= bit;
        twice
    })
}

/// How many trailing blocks of a sliding-window group vLLM 0.32 keeps: `ceil(window / block_size) + 1`.
pub fn window_blocks(window: u64, block_size: u64) -> Result<u64> {
    for (field, value) in [("window", window), ("block_size", block_size)] {
        if value == 0 {
            let expected = "has to be at least 1".into();
            return Err(Error::Value { place: String::new(), field, value: 0, expected });
        }
    }
    window.div_ceil(block_size).checked_add(1).ok_or_else(|| Error::Overflow {
        place: "window_blocks".into(),
        what: format!("{window} / {block_size} + 1"),
        bits: 64,
    })
}

/// For each group, the first block table entry that a request of `num_tokens` tokens still needs and that is not among
/// the `cached[group]` leading ones. Of a state group that is 0: which slot counts depends on the table's length.
pub fn first_entries(geometry: &Geometry, num_tokens: u64, cached: &[u64]) -> Result<Vec<u64>> {
    let groups = geometry.groups();
    if cached.len() != groups.len() {
        return Err(Error::Count { what: "cached", got: cached.len(), expected: groups.len() });
    }
    let first = |(group, &cached): (&Group, &u64)| match group.kind {
        Kind::Ssm => 0,
        _ => (group.need_start(num_tokens) / (group.block_size * group.cp_size)).max(cached),
    };
    Ok(groups.iter().zip(cached).map(first).collect())
}
