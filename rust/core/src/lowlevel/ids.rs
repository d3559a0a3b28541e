// SPDX-License-Identifier: Apache-2.0
//! Block ids: which of them move, and their ids as kernel blocks and in views.
use crate::error::{Error, Result};
use crate::geometry::types::{Geometry, Group, Kind, state_slot};

/// Selects the blocks of each group that move.
///
/// `keep[g]` trailing blocks of an attention group stay, or all for 0. A group with `speculative[g]` set is a state
/// group: only the block with the state stays, which has that many speculative slots after it. Blocks equal to `null`
/// at the front of any group are dropped first.
pub fn clip_blocks(
    groups: &[Vec<i64>],
    keep: &[u64],
    speculative: &[Option<u64>],
    null: Option<i64>,
) -> Result<Vec<Vec<i64>>> {
    for (what, got) in [("keep", keep.len()), ("speculative", speculative.len())] {
        if got != groups.len() {
            return Err(Error::count(what, got, groups.len()));
        }
    }
    Ok(groups
        .iter()
        .zip(keep.iter().zip(speculative))
        .map(|(ids, (&keep, speculative))| {
            let live = &ids[ids.iter().take_while(|&&id| Some(id) == null).count()..];
            match *speculative {
                Some(speculative) => state_slot(live.len(), speculative).map(|slot| live[slot]).into_iter().collect(),
                None if keep == 0 => live.to_vec(),
                None => {
                    live[live.len() - usize::try_from(keep).map_or(live.len(), |keep| keep.min(live.len()))..].to_vec()
                }
            }
        })
        .collect())
}

/// Kernel block ids of logical block ids: `id` becomes `id * ratio .. (id + 1) * ratio`.
pub fn expand_blocks(ids: &[i64], ratio: u64) -> Result<Vec<i32>> {
    if ratio == 0 {
        return Err(Error::value("", "ratio", 0, "has to be at least 1".into()));
    }
    // The last kernel id of a block is (id + 1) * ratio - 1.
    let limit = (1 << 31) / ratio;
    let total = (ids.len() as u64).checked_mul(ratio).filter(|&total| total <= i32::MAX as u64);
    let Some(total) = total else {
        let what = format!("{} blocks x ratio {ratio}", ids.len());
        return Err(Error::overflow("block ids", what, 31));
    };
    let mut out = Vec::with_capacity(total as usize);
    for (index, &id) in ids.iter().enumerate() {
        match u64::try_from(id) {
            Ok(block) if block < limit => out.extend((block * ratio..(block + 1) * ratio).map(|kernel| kernel as i32)),
            _ => return Err(Error::block_range(("logical", 0), index, id, limit)),
        }
    }
    Ok(out)
}

/// Ids into a list of views: for every view in turn, the ids of each of its groups in turn, shifted by the view's
/// start.
///
/// `counts[v]` is the number of entries of view `v`, `groups_of[v]` are the groups whose blocks it has.
pub fn descriptor_ids(groups: &[Vec<i64>], counts: &[u64], groups_of: &[Vec<usize>]) -> Result<Vec<i32>> {
    if counts.len() != groups_of.len() {
        return Err(Error::count("groups of views", groups_of.len(), counts.len()));
    }
    let total = check_ids(groups, counts, groups_of)?;
    let mut out = Vec::with_capacity(total);
    let mut start = 0i32;
    for (&count, members) in counts.iter().zip(groups_of) {
        for &group in members {
            // Every id is below its view's count and all counts together fit int32.
            out.extend(groups[group].iter().map(|&id| start.wrapping_add(id as i32)));
        }
        start = start.wrapping_add(count as i32);
    }
    Ok(out)
}

/// Fails if an id is outside of its view, or if there are too many entries. Counts the ids.
fn check_ids(groups: &[Vec<i64>], counts: &[u64], groups_of: &[Vec<usize>]) -> Result<usize> {
    let bounds: Vec<(i64, i64)> = groups
        .iter()
        .map(|ids| ids.iter().fold((i64::MAX, i64::MIN), |(low, high), &id| (low.min(id), high.max(id))))
        .collect();
    let mut total = 0usize;
    let mut entries = 0u64;
    for (&count, members) in counts.iter().zip(groups_of) {
        for &group in members {
            let Some(&(low, high)) = bounds.get(group) else {
                let expected = format!("there are {} groups", groups.len());
                return Err(Error::value("", "group of a view", group as i128, expected));
            };
            if !groups[group].is_empty() && (low < 0 || high as u64 >= count) {
                let bad = |&(_, &id): &(usize, &i64)| id < 0 || id as u64 >= count;
                let (index, &id) = groups[group].iter().enumerate().find(bad).unwrap_or((0, &low));
                return Err(Error::block_range(("view", group), index, id, count));
            }
            total = total.saturating_add(groups[group].len());
        }
        entries = entries.saturating_add(count);
    }
    if entries > i32::MAX as u64 {
        return Err(Error::overflow("views", format!("{entries} entries"), 31));
    }
    Ok(total)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_blocks_and_the_state_stay() {
        let groups = [vec![0, 0, 4, 5, 6], vec![0, 7, 8, 9], vec![3, 2]];
        let clipped = clip_blocks(&groups, &[2, 0, 9], &[None, Some(1), None], Some(0));
        assert_eq!(clipped, Ok(vec![vec![5, 6], vec![8], vec![3, 2]]));
        assert_eq!(clip_blocks(&[vec![0, 0]], &[0], &[Some(0)], Some(0)), Ok(vec![vec![]]));
        assert_eq!(clip_blocks(&[vec![1, 2]], &[u64::MAX], &[None], None), Ok(vec![vec![1, 2]]));
        assert_eq!(clip_blocks(&[vec![1, 2]], &[0], &[Some(u64::MAX)], None), Ok(vec![vec![1]]));
    }

    #[test]
    fn a_block_is_its_kernel_blocks() {
        assert_eq!(expand_blocks(&[3, 0], 2), Ok(vec![6, 7, 0, 1]));
        assert!(expand_blocks(&[1 << 30], 2).is_err());
        assert_eq!(expand_blocks(&[(1 << 30) - 1], 2), Ok(vec![i32::MAX - 1, i32::MAX]));
        assert_eq!(expand_blocks(&[i32::MAX.into()], 1), Ok(vec![i32::MAX]));
        assert!(expand_blocks(&[(1 << 31) / 3], 3).is_err());
        assert!(expand_blocks(&[-1], 2).is_err());
    }

    #[test]
    fn ids_of_a_view_begin_after_those_of_the_views_before() {
        let groups = [vec![1, 0], vec![3]];
        assert_eq!(descriptor_ids(&groups, &[4, 2], &[vec![0, 1], vec![0]]), Ok(vec![1, 0, 3, 5, 4]));
        assert!(descriptor_ids(&groups, &[4, 3], &[vec![0], vec![1]]).is_err());
        assert!(descriptor_ids(&groups, &[4], &[vec![2]]).is_err());
    }
}
