// SPDX-License-Identifier: Apache-2.0
//! What a transfer moves of each local group.
use crate::request::block_pairs::{BlockRun, PackedPair};

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
    lists: Vec<(usize, &'a [PackedPair])>,
}

impl<'a> Owners<'a> {
    /// Unsorted pairs of each group. A group may have several lists.
    pub(crate) fn new(mut lists: Vec<(usize, &'a [PackedPair])>) -> Self {
        // The longest first: its pairs never have to be looked up.
        lists.sort_by_key(|(_, pairs)| std::cmp::Reverse(pairs.len()));
        Self { lists }
    }

    /// Number of pairs of each group.
    pub(crate) fn count_pairs(&self) -> impl Iterator<Item = (usize, u64)> {
        self.lists.iter().map(|&(group, pairs)| (group, pairs.len() as u64))
    }

    /// Number of runs that begin with a pair of each group.
    pub(crate) fn count_runs(&self, runs: &[BlockRun]) -> Vec<(usize, u64)> {
        let begin_in = |pairs: &[PackedPair]| {
            let mut next = None;
            let begins_a_run = |pair: &&PackedPair| {
                let goes_on = next.replace(pair.plus(1)) == Some(**pair);
                !goes_on && runs.binary_search_by_key(*pair, |run| run.first).is_ok()
            };
            pairs.iter().filter(begins_a_run).count() as u64
        };
        let mut counts: Vec<_> = self.lists.iter().skip(1).map(|&(group, pairs)| (group, begin_in(pairs))).collect();
        let rest = runs.len() as u64 - counts.iter().map(|(_, count)| count).sum::<u64>();
        counts.extend(self.lists.first().map(|&(group, _)| (group, rest)));
        counts
    }

    /// The group of one pair. It looks at all of them.
    pub(crate) fn of(&self, pair: PackedPair) -> usize {
        let mut lists = self.lists.iter().rev();
        lists.find(|(_, pairs)| pairs.contains(&pair)).map_or(0, |&(group, _)| group)
    }

    /// The group of every pair, in the order of the sorted pairs.
    pub(crate) fn sorted(&self) -> Vec<u16> {
        let of_list = |&(group, pairs): &(usize, &'a [PackedPair])| pairs.iter().map(move |&pair| (pair, group as u16));
        let mut all: Vec<(PackedPair, u16)> = self.lists.iter().flat_map(of_list).collect();
        if self.lists.len() > 1 {
            all.sort_unstable();
        }
        all.into_iter().map(|(_, group)| group).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::KernelBlockId;
    use crate::request::block_pairs::runs;

    #[test]
    fn a_run_is_of_the_group_that_it_begins_in() {
        let pair = |block| PackedPair::new(KernelBlockId(block), KernelBlockId(block));
        // Group 4 has blocks 1, 2, 5, 6 and 9, group 7 has 3, 8 and 0: the runs are 0..=3 of group 7, 5..=6 of group 4
        // and 8..=9 of group 7.
        let (four, seven) = ([5, 6, 1, 2, 9].map(pair), [3, 8, 0].map(pair));
        let owners = Owners::new(vec![(7, &seven), (4, &four)]);
        let sorted = [0, 1, 2, 3, 5, 6, 8, 9].map(pair);
        let mut counts = owners.count_runs(&runs(&sorted));
        counts.sort_unstable();
        assert_eq!(counts, [(4, 1), (7, 2)]);
        assert_eq!(owners.sorted(), [7, 4, 4, 7, 4, 4, 7, 4]);
        assert_eq!((owners.of(pair(8)), owners.of(pair(9))), (7, 4));
    }
}
