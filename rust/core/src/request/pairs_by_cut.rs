// SPDX-License-Identifier: Apache-2.0
//! Block pairs of a request, by how they are cut.
use crate::bytes::pieces::TokenCut;
use crate::request::block_pairs::{BlockPair, PackedPair, Pairs};

/// Block pairs of one group pair, by how they cut each other.
#[derive(Default)]
pub(crate) struct PairsByCut {
    /// Sorted by the cut.
    lists: Vec<(TokenCut, Pairs)>,
    /// The list in use: nearly all pairs of a request are cut like the one before.
    last: usize,
}

impl PairsByCut {
    /// The pairs of a cut, to add to.
    pub(crate) fn list(&mut self, cut: TokenCut) -> &mut Pairs {
        if self.lists.get(self.last).is_none_or(|list| list.0 != cut) {
            self.last = self.lists.binary_search_by_key(&cut, |list| list.0).unwrap_or_else(|index| {
                self.lists.insert(index, (cut, Pairs::new()));
                index
            });
        }
        &mut self.lists[self.last].1
    }

    pub(crate) fn push(&mut self, pair: BlockPair) {
        self.list(pair.cut).push(PackedPair::new(pair.local, pair.remote));
    }

    /// The pairs of a cut.
    pub(crate) fn get(&self, cut: TokenCut) -> &[PackedPair] {
        self.lists.binary_search_by_key(&cut, |list| list.0).map_or(&[], |index| &self.lists[index].1)
    }

    /// Every cut that there are pairs of.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TokenCut, &[PackedPair])> {
        self.lists.iter().map(|(cut, pairs)| (*cut, pairs.as_slice())).filter(|(_, pairs)| !pairs.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::KernelBlockId;

    #[test]
    fn pairs_come_by_cut_in_the_order_they_were_pushed() {
        let cut = |local| TokenCut { local, remote: 0, count: 1 };
        let mut pairs = PairsByCut::default();
        for (block, local) in [(1, 5), (2, 5), (3, 0), (4, 5)] {
            pairs.push(BlockPair { local: KernelBlockId(block), remote: KernelBlockId(9), cut: cut(local) });
        }
        pairs.list(cut(7));
        let blocks = |pairs: &[PackedPair]| pairs.iter().map(|pair| pair.local().0).collect::<Vec<_>>();
        assert_eq!(blocks(pairs.get(cut(5))), [1, 2, 4]);
        assert_eq!(pairs.get(cut(1)), []);
        assert_eq!(
            pairs.iter().map(|(cut, pairs)| (cut.local, blocks(pairs))).collect::<Vec<_>>(),
            [(0, vec![3]), (5, vec![1, 2, 4])]
        );
    }
}
