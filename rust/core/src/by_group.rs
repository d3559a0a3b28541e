// SPDX-License-Identifier: Apache-2.0
//! What a transfer moves of each local group.
use crate::table::NEXT_PAIR;

/// Numbers of each local group, added up while copies are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ByGroup {
    pub(crate) bytes: Vec<u64>,
    /// A descriptor counts for the group of its first byte.
    pub(crate) descriptors: Vec<u64>,
}

impl ByGroup {
    pub(crate) fn new(groups: usize) -> Self {
        Self { bytes: vec![0; groups], descriptors: vec![0; groups] }
    }
}

/// Which local groups some block pairs are of; no pair is of two.
pub(crate) struct Owners<'a> {
    lists: Vec<(usize, &'a [u64])>,
}

impl<'a> Owners<'a> {
    /// Unsorted pairs of each group. A group may have several lists.
    pub(crate) fn new(mut lists: Vec<(usize, &'a [u64])>) -> Self {
        // The longest first: of its pairs one never has to ask.
        lists.sort_by_key(|(_, pairs)| std::cmp::Reverse(pairs.len()));
        Self { lists }
    }

    /// Number of pairs of each group.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (usize, u64)> {
        self.lists.iter().map(|&(group, pairs)| (group, pairs.len() as u64))
    }

    /// Number of stretches that begin with a pair of each group.
    pub(crate) fn stretches(&self, stretches: &[(u64, u64)]) -> Vec<(usize, u64)> {
        let begun = |pairs: &[u64]| {
            let mut next = None;
            let begins = |pair: &&u64| {
                let goes_on = next.replace(**pair + NEXT_PAIR) == Some(**pair);
                !goes_on && stretches.binary_search_by_key(*pair, |stretch| stretch.0).is_ok()
            };
            pairs.iter().filter(begins).count() as u64
        };
        let mut counts: Vec<_> = self.lists.iter().skip(1).map(|&(group, pairs)| (group, begun(pairs))).collect();
        let rest = stretches.len() as u64 - counts.iter().map(|(_, count)| count).sum::<u64>();
        counts.extend(self.lists.first().map(|&(group, _)| (group, rest)));
        counts
    }

    /// The group of one pair. It looks at all of them.
    pub(crate) fn of(&self, pair: u64) -> usize {
        let mut lists = self.lists.iter().rev();
        lists.find(|(_, pairs)| pairs.contains(&pair)).map_or(0, |&(group, _)| group)
    }

    /// The group of every pair, in the order of the sorted pairs.
    pub(crate) fn sorted(&self) -> Vec<u16> {
        let mut all: Vec<(u64, u16)> =
            self.lists.iter().flat_map(|&(group, pairs)| pairs.iter().map(move |&pair| (pair, group as u16))).collect();
        if self.lists.len() > 1 {
            all.sort_unstable();
        }
        all.into_iter().map(|(_, group)| group).collect()
    }
}
