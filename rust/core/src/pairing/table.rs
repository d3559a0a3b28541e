// SPDX-License-Identifier: Apache-2.0
//! The pieces of all groups that are paired between two geometries, and which block pairs are moved through each.
use std::collections::BTreeMap;

use crate::error::Result;
use crate::pairing::group_pair::{CopyTemplate, Geometries, GroupPair};

/// Block pairs of one group pair that are cut in one way: indices of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PairCut {
    pub(crate) group_pair: usize,
    pub(crate) cut: usize,
}

/// A template, and which block pairs it is repeated for.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) template: CopyTemplate,
    /// Index of its fillers.
    pub(crate) filled_by: usize,
}

/// Group pairs between two geometries and their templates. Layers that alias have one template, filled by the blocks of
/// all their groups: so neighbouring blocks of different groups are joined, and come out in order.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) group_pairs: Vec<GroupPair>,
    /// By local address.
    pub(crate) entries: Vec<Entry>,
    /// Distinct sets of what fills a template.
    pub(crate) fillers: Vec<Vec<PairCut>>,
}

impl Table {
    /// `left` is how many pieces the plan may still have.
    pub(crate) fn new(mut group_pairs: Vec<GroupPair>, geometries: &Geometries, left: &mut u64) -> Result<Self> {
        let mut filled: BTreeMap<CopyTemplate, Vec<PairCut>> = BTreeMap::new();
        for (index, group_pair) in group_pairs.iter_mut().enumerate() {
            for (cut, templates) in group_pair.cut_whole_blocks(geometries, left)?.into_iter().enumerate() {
                for template in templates {
                    filled.entry(template).or_default().push(PairCut { group_pair: index, cut });
                }
            }
        }
        let mut known: BTreeMap<Vec<PairCut>, usize> = BTreeMap::new();
        let mut fillers = Vec::new();
        let entries = filled
            .into_iter()
            .map(|(template, set)| {
                let filled_by = *known.entry(set).or_insert_with_key(|set| {
                    fillers.push(set.clone());
                    fillers.len() - 1
                });
                Entry { template, filled_by }
            })
            .collect();
        Ok(Self { group_pairs, entries, fillers })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.group_pairs.is_empty()
    }
}
