// SPDX-License-Identifier: Apache-2.0
//! Block pairs of a request, by their cut.
use std::collections::HashMap;

use crate::bytes::pieces::TokenCut;
use crate::request::block_pairs::{BlockPair, PackedPair, Pairs, sort};

/// Block pairs of one group pair, by their cut.
#[derive(Default)]
pub(crate) struct PairsByCut {
    /// In the order in which they occur in the request.
    lists: Vec<(TokenCut, Pairs)>,
    index: HashMap<TokenCut, usize>,
    /// The current list: nearly all pairs of a request have the cut of the previous pair.
    last: usize,
}

impl PairsByCut {
    /// The list of pairs of a cut, to append to.
    pub(crate) fn list(&mut self, cut: TokenCut) -> &mut Pairs {
        if self.lists.get(self.last).is_none_or(|list| list.0 != cut) {
            self.last = *self.index.entry(cut).or_insert_with(|| {
                self.lists.push((cut, Pairs::new()));
                self.lists.len() - 1
            });
        }
        &mut self.lists[self.last].1
    }

    pub(crate) fn push(&mut self, pair: BlockPair) {
        self.list(pair.cut).push(PackedPair::new(pair.local, pair.remote));
    }

    /// Sorts the pairs of each cut by local block.
    pub(crate) fn sort_pairs(&mut self) {
        self.lists.iter_mut().for_each(|(_, pairs)| sort(pairs));
    }

    /// The pairs of a cut.
    pub(crate) fn get(&self, cut: TokenCut) -> &[PackedPair] {
        self.index.get(&cut).map_or(&[], |&index| &self.lists[index].1)
    }

    /// Every cut with pairs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TokenCut, &[PackedPair])> {
        self.lists.iter().map(|(cut, pairs)| (*cut, pairs.as_slice())).filter(|(_, pairs)| !pairs.is_empty())
    }

    /// Number of pairs.
    pub(crate) fn len(&self) -> usize {
        self.lists.iter().map(|(_, pairs)| pairs.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::KernelBlockId;

    #[test]
    fn pairs_come_by_cut_in_the_order_of_the_request_or_of_their_blocks() {
        let cut = |local| TokenCut { local, remote: 0, count: 1 };
        let mut pairs = PairsByCut::default();
        for (block, local) in [(4, 5), (2, 5), (3, 0), (1, 5)] {
            pairs.push(BlockPair { local: KernelBlockId(block), remote: KernelBlockId(9), cut: cut(local) });
        }
        pairs.list(cut(7));
        let blocks = |pairs: &[PackedPair]| pairs.iter().map(|pair| pair.local().0).collect::<Vec<_>>();
        assert_eq!(blocks(pairs.get(cut(5))), [4, 2, 1]);
        pairs.sort_pairs();
        assert_eq!(blocks(pairs.get(cut(5))), [1, 2, 4]);
        assert_eq!(pairs.get(cut(1)), []);
        assert_eq!(pairs.len(), 4);
        assert_eq!(
            pairs.iter().map(|(cut, pairs)| (cut.local, blocks(pairs))).collect::<Vec<_>>(),
            [(5, vec![1, 2, 4]), (0, vec![3])]
        );
    }
}
