// SPDX-License-Identifier: Apache-2.0
//! Ids into a list of views, in the order of the views.
use std::borrow::Cow;

use super::block_ids::BlockIds;
use super::out::Out;
use crate::error::{Error, Result};

/// For every view in turn, the ids of each of its groups in turn, shifted by the view's start.
#[derive(Debug, Clone)]
pub struct IdOrder {
    groups: Vec<OrderedGroup>,
    /// Views in turn: a group whose blocks the view has, and the id of the view's first entry.
    segments: Vec<(usize, i32)>,
}

#[derive(Debug, Clone)]
struct OrderedGroup {
    /// Kernel blocks of a block. Views number kernel blocks.
    ratio: u64,
    /// Entries of its smallest view.
    entries: u64,
    /// How many views have its blocks.
    views: u64,
}

impl IdOrder {
    /// `ratios[g]` are the kernel blocks of a block of group `g`, `counts[v]` is the number of entries of view `v`,
    /// `groups_of[v]` are the groups whose blocks it has.
    pub fn new(ratios: &[u64], counts: &[u64], groups_of: &[impl AsRef<[usize]>]) -> Result<Self> {
        if counts.len() != groups_of.len() {
            return Err(Error::count("groups of views", groups_of.len(), counts.len()));
        }
        if ratios.contains(&0) {
            return Err(Error::value("", "ratio", 0, "has to be at least 1".into()));
        }
        let unseen = |&ratio| OrderedGroup { ratio, entries: u64::MAX, views: 0 };
        let mut groups: Vec<_> = ratios.iter().map(unseen).collect();
        let mut segments = Vec::new();
        let mut start = 0u64;
        for (&count, members) in counts.iter().zip(groups_of) {
            for &index in members.as_ref() {
                let Some(group) = groups.get_mut(index) else {
                    let expected = format!("there are {} groups", ratios.len());
                    return Err(Error::value("", "group of a view", index as i128, expected));
                };
                group.entries = group.entries.min(count);
                group.views += 1;
                segments.push((index, start as i32));
            }
            start = start.saturating_add(count);
        }
        if start > i32::MAX as u64 {
            return Err(Error::overflow("views", format!("{start} entries"), 31));
        }
        Ok(Self { groups, segments })
    }

    /// Appends the ids of each request; returns where they begin, and where the last ones end. `tables` are the block
    /// ids of each group of the first request, then of the next; a block may be a logical block.
    pub fn write(&self, tables: &[BlockIds<'_>], out: &mut Out<'_, i32>) -> Result<Vec<i64>> {
        let groups = self.groups.len().max(1);
        if tables.len() % groups != 0 {
            return Err(Error::count("tables", tables.len(), tables.len().next_multiple_of(groups)));
        }
        let requests = || tables.chunks(groups);
        let mut offsets = Vec::with_capacity(1 + tables.len() / groups);
        offsets.push(0);
        let mut total = 0u64;
        for request in requests() {
            total = total.saturating_add(self.count(request));
            offsets.push(total as i64);
        }
        if total > i32::MAX as u64 {
            return Err(Error::overflow("ids", format!("{total} ids"), 31));
        }
        out.reserve(total as usize)?;
        let mut kernel = Vec::with_capacity(groups);
        for request in requests() {
            kernel.clear();
            for (index, (group, &ids)) in self.groups.iter().zip(request).enumerate() {
                kernel.push(group.kernel_blocks(index, ids)?);
            }
            for &(group, start) in &self.segments {
                // Every id is below its view's entries, and the entries of all views fit int32.
                out.extend(kernel[group].iter().map(|&id| id.wrapping_add(start)));
            }
        }
        Ok(offsets)
    }

    /// How many ids a request has.
    fn count(&self, request: &[BlockIds<'_>]) -> u64 {
        let ids = |(group, ids): (&OrderedGroup, &BlockIds<'_>)| {
            (ids.len() as u64).saturating_mul(group.ratio).saturating_mul(group.views)
        };
        self.groups.iter().zip(request).map(ids).fold(0, u64::saturating_add)
    }
}

impl OrderedGroup {
    /// The kernel blocks of some blocks. Fails if one is outside of a view; without a view the result is empty.
    fn kernel_blocks<'a>(&self, index: usize, ids: BlockIds<'a>) -> Result<Cow<'a, [i32]>> {
        if self.views == 0 {
            return Ok(Cow::Borrowed(&[]));
        }
        let limit = self.entries / self.ratio;
        if let Some((at, id)) = ids.first_outside(limit) {
            return Err(Error::block_range(("view", index), at, id, limit));
        }
        Ok(match ids {
            BlockIds::Narrow(ids) if self.ratio == 1 => Cow::Borrowed(ids),
            _ => Cow::Owned(ids.expanded(self.ratio)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ratios: &[u64], groups: &[&[i64]], counts: &[u64], groups_of: &[Vec<usize>]) -> Result<Vec<i32>> {
        let order = IdOrder::new(ratios, counts, groups_of)?;
        let tables: Vec<_> = groups.iter().map(|ids| BlockIds::Wide(ids)).collect();
        let mut out = Out::default();
        let offsets = order.write(&tables, &mut out)?;
        let found = out.into_new().unwrap_or_default();
        assert_eq!(offsets.last().copied(), Some(found.len() as i64));
        Ok(found)
    }

    #[test]
    fn ids_of_a_view_begin_after_those_of_the_views_before() {
        let groups: [&[i64]; 2] = [&[1, 0], &[3]];
        assert_eq!(ids(&[1, 1], &groups, &[4, 2], &[vec![0, 1], vec![0]]), Ok(vec![1, 0, 3, 5, 4]));
        assert!(ids(&[1, 1], &groups, &[4, 3], &[vec![0], vec![1]]).is_err());
        assert!(ids(&[1, 1], &groups, &[4], &[vec![2]]).is_err());
        assert!(ids(&[1, 1, 1], &groups, &[4], &[vec![0]]).is_err());
        assert!(ids(&[1], &[&[4]], &[10, 4], &[vec![0], vec![0]]).is_err(), "the second view has no entry 4");
        assert!(ids(&[1], &[&[3]], &[4, 10], &[vec![0], vec![0]]).is_ok());
    }

    #[test]
    fn a_block_is_its_kernel_blocks_in_each_view() {
        assert_eq!(ids(&[2, 1], &[&[1], &[0]], &[4, 6, 1], &[vec![0], vec![0], vec![1]]), Ok(vec![2, 3, 6, 7, 10]));
        assert!(ids(&[2], &[&[2]], &[5], &[vec![0]]).is_err());
        assert!(ids(&[0], &[&[2]], &[5], &[vec![0]]).is_err());
    }

    #[test]
    fn requests_follow_each_other() {
        let tables: [&[i32]; 6] = [&[1], &[0], &[], &[], &[0, 1], &[0]];
        let tables = tables.map(BlockIds::Narrow);
        let order = IdOrder::new(&[2, 1], &[4, 1], &[vec![0], vec![1]]);
        let mut out = Out::default();
        assert_eq!(order.and_then(|order| order.write(&tables, &mut out)), Ok(vec![0, 3, 3, 8]));
        assert_eq!(out.into_new(), Some(vec![2, 3, 4, 0, 1, 2, 3, 4]));
    }

    #[test]
    fn a_group_without_a_view_gives_no_id() {
        assert_eq!(ids(&[1, 1], &[&[-7], &[0]], &[1], &[vec![1]]), Ok(vec![0]));
    }
}
