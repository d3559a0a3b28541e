// SPDX-License-Identifier: Apache-2.0
//! Functions on block ids that need no geometry, each usable alone.
use crate::error::{Error, Result};
pub use crate::span::{first_entries, window_blocks};

/// Keeps the blocks of each group that are moved.
///
/// `keep[g]` trailing blocks of an attention group stay, all for 0. A group with `speculative[g]` set is a state group:
/// of its blocks the state-bearing one stays, which has that many speculative slots behind it. Blocks equal to `null`
/// at the front of any group are dropped first.
pub fn clip_blocks(
    groups: &[Vec<i64>],
    keep: &[u64],
    speculative: &[Option<u64>],
    null: Option<i64>,
) -> Result<Vec<Vec<i64>>> {
    for (what, got) in [("keep", keep.len()), ("speculative", speculative.len())] {
        if got != groups.len() {
            return Err(Error::Count { what, got, expected: groups.len() });
        }
    }
    Ok(groups
        .iter()
        .zip(keep.iter().zip(speculative))
        .map(|(ids, (&keep, speculative))| {
            let live = &ids[ids.iter().take_while(|&&id| Some(id) == null).count()..];
            if let Some(slots) = *speculative {
                let slots = usize::try_from(slots).unwrap_or(usize::MAX);
                let state = live.len().saturating_sub(slots.saturating_add(1));
                return live.get(state).map(|&id| vec![id]).unwrap_or_default();
            }
            let keep = usize::try_from(keep).unwrap_or(usize::MAX);
            let from = if keep == 0 { 0 } else { live.len().saturating_sub(keep) };
            live[from..].to_vec()
        })
        .collect())
}

/// Kernel block ids of logical block ids: `id` becomes `id * ratio .. (id + 1) * ratio`.
pub fn expand_blocks(ids: &[i64], ratio: u64) -> Result<Vec<i32>> {
    if ratio == 0 {
        let expected = "has to be at least 1".into();
        return Err(Error::Value { place: String::new(), field: "ratio", value: 0, expected });
    }
    let limit = i32::MAX as u64 / ratio;
    let total = (ids.len() as u64).checked_mul(ratio).filter(|&total| total <= i32::MAX as u64);
    let Some(total) = total else {
        let what = format!("{} blocks x ratio {ratio}", ids.len());
        return Err(Error::Overflow { place: "block ids".into(), what, bits: 31 });
    };
    let mut out = Vec::with_capacity(total as usize);
    for (index, &id) in ids.iter().enumerate() {
        match u64::try_from(id) {
            Ok(block) if block < limit => out.extend((block * ratio..(block + 1) * ratio).map(|kernel| kernel as i32)),
            _ => return Err(Error::BlockRange { side: "logical", group: 0, index, id, num_blocks: limit }),
        }
    }
    Ok(out)
}

/// Ids into a list of views: for every view in turn, the ids of each of its groups in turn, shifted by its start.
///
/// `counts[v]` is the number of entries of view `v`, `groups_of[v]` the groups whose blocks it holds.
pub fn descriptor_ids(groups: &[Vec<i64>], counts: &[u64], groups_of: &[Vec<usize>]) -> Result<Vec<i32>> {
    if counts.len() != groups_of.len() {
        return Err(Error::Count { what: "groups of views", got: groups_of.len(), expected: counts.len() });
    }
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
                let (place, field) = (String::new(), "group of a view");
                return Err(Error::Value { place, field, value: group as i128, expected });
            };
            if !groups[group].is_empty() && (low < 0 || high as u64 >= count) {
                let bad = |&(_, &id): &(usize, &i64)| id < 0 || id as u64 >= count;
                let (index, &id) = groups[group].iter().enumerate().find(bad).unwrap_or((0, &low));
                return Err(Error::BlockRange { side: "view", group, index, id, num_blocks: count });
            }
            total = total.saturating_add(groups[group].len());
        }
        entries = entries.saturating_add(count);
    }
    if entries > i32::MAX as u64 {
        return Err(Error::Overflow { place: "views".into(), what: format!("{entries} entries"), bits: 31 });
    }
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
