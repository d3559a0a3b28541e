// SPDX-License-Identifier: Apache-2.0
//! Which entries of a block table move.
use std::ops::Range;

use super::block_ids::BlockIds;
use crate::error::{Error, Result};
use crate::geometry::types::{Geometry, Group, Kind, state_slot};

/// Which entries of a group's block table move, by vLLM's static rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clip {
    /// How many trailing entries of an attention group; 0 for all.
    pub keep: u64,
    /// For a state group, which has one block with the state: the slots after that block.
    pub speculative: Option<u64>,
}

impl Clip {
    /// The entries of a table of some length whose first `nulls` are null blocks.
    pub fn entries(self, length: usize, nulls: usize) -> Range<usize> {
        let nulls = nulls.min(length);
        match self.speculative {
            Some(speculative) => {
                state_slot(length - nulls, speculative).map_or(length..length, |slot| nulls + slot..nulls + slot + 1)
            }
            None if self.keep == 0 => nulls..length,
            None => length.saturating_sub(usize::try_from(self.keep).unwrap_or(usize::MAX)).max(nulls)..length,
        }
    }

    /// The entries of a table that move; null blocks at its front do not. They are counted only if they can matter: if
    /// one is the first of the entries that would move.
    pub fn select(self, ids: BlockIds<'_>, null: Option<i64>) -> Range<usize> {
        let all = self.entries(ids.len(), 0);
        let is_null = ids.slice(all.start..ids.len()).leading(null) > 0;
        if is_null { self.entries(ids.len(), ids.leading(null)) } else { all }
    }
}

/// What `clip_blocks` does with each of some groups.
pub fn clips(groups: usize, keep: &[u64], speculative: &[Option<u64>]) -> Result<Vec<Clip>> {
    for (what, got) in [("keep", keep.len()), ("speculative", speculative.len())] {
        if got != groups {
            return Err(Error::count(what, got, groups));
        }
    }
    Ok(keep.iter().zip(speculative).map(|(&keep, &speculative)| Clip { keep, speculative }).collect())
}

/// How many trailing blocks of a sliding-window group vLLM 0.32 holds: `ceil(window / block_size) + 1`.
pub fn window_blocks(window: u64, block_size: u64) -> Result<u64> {
    for (field, value) in [("window", window), ("block_size", block_size)] {
        if value == 0 {
            return Err(Error::value("", field, 0, "has to be at least 1".into()));
        }
    }
    let overflow = || Error::overflow("window_blocks", format!("{window} / {block_size} + 1"), 64);
    window.div_ceil(block_size).checked_add(1).ok_or_else(overflow)
}

/// For each group, the first block table entry that a request of `num_tokens` tokens needs after its
/// `cached_blocks[group]` leading entries. 0 for a state group, because the table's length decides which slot counts.
/// Without `num_tokens`, the request needs all entries after the leading ones.
pub fn first_entries(geometry: &Geometry, num_tokens: Option<u64>, cached_blocks: &[u64]) -> Result<Vec<u64>> {
    let groups = geometry.groups();
    if cached_blocks.len() != groups.len() {
        return Err(Error::count("cached", cached_blocks.len(), groups.len()));
    }
    let Some(num_tokens) = num_tokens else { return Ok(cached_blocks.to_vec()) };
    let first = |(group, &cached): (&Group, &u64)| match group.kind {
        Kind::Ssm { .. } => 0,
        _ => (group.first_needed_token(num_tokens) / group.tokens_per_entry()).max(cached),
    };
    Ok(groups.iter().zip(cached_blocks).map(first).collect())
}

/// For each group, the live entries of its block table of some length, after its leading `cached` entries. Null blocks
/// count. Of a state group, only the slot with the state is live.
pub fn live_entries(
    geometry: &Geometry,
    num_tokens: Option<u64>,
    lengths: &[usize],
    cached: &[u64],
) -> Result<Vec<Range<usize>>> {
    let groups = geometry.groups();
    if lengths.len() != groups.len() {
        return Err(Error::count("block_tables", lengths.len(), groups.len()));
    }
    let firsts = first_entries(geometry, num_tokens, cached)?;
    let live = |((group, &length), first): ((&Group, &usize), u64)| {
        let first = usize::try_from(first).map_or(length, |first| first.min(length));
        match group.kind {
            Kind::Ssm { num_speculative_blocks } => {
                let slot = first.max(state_slot(length, num_speculative_blocks).unwrap_or(0));
                slot..length.min(slot + 1)
            }
            _ => first..length,
        }
    };
    Ok(groups.iter().zip(lengths).zip(firsts).map(live).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_blocks_and_the_state_stay() {
        let clip = |keep, speculative| Clip { keep, speculative };
        assert_eq!(clip(2, None).entries(5, 2), 3..5);
        assert_eq!(clip(4, None).entries(5, 2), 2..5);
        assert_eq!(clip(0, None).entries(5, 2), 2..5);
        assert_eq!(clip(u64::MAX, None).entries(2, 0), 0..2);
        assert_eq!(clip(0, Some(1)).entries(4, 1), 2..3);
        assert_eq!(clip(0, Some(u64::MAX)).entries(2, 0), 0..1);
        assert_eq!(clip(0, Some(0)).entries(2, 2), 2..2);
        assert!(clips(2, &[1], &[None, None]).is_err());
    }

    #[test]
    fn null_blocks_that_matter_are_counted() {
        for table in [[0, 0, 0, 0], [0, 0, 0, 5], [0, 0, 5, 6], [0, 5, 0, 6], [5, 0, 0, 6], [5, 6, 7, 0]] {
            let ids = BlockIds::Wide(&table);
            let clips = (0..6).flat_map(|keep| [None, Some(keep)].map(|speculative| Clip { keep, speculative }));
            for clip in clips {
                let entries = clip.entries(4, ids.leading(Some(0)));
                assert_eq!(clip.select(ids, Some(0)), entries, "{clip:?} of {table:?}");
                assert_eq!(clip.select(ids, None), clip.entries(4, 0));
            }
        }
    }
}
