// SPDX-License-Identifier: Apache-2.0
//! A cache of the pieces of recently used cuts.
use std::collections::HashMap;
use std::sync::Arc;

use crate::bytes::pieces::TokenCut;
use crate::pairing::page_pair::PagePieces;

/// Weight of a cut besides its pieces, in pieces of 24 bytes.
const WEIGHT_OF_CUT: u64 = 12;

/// A cut of a pair of groups in a pair of pages: indices of both, and the cut.
pub(crate) type CutKey = (usize, usize, TokenCut);

/// Holds the cuts used since half of the room was last filled; older cuts are evicted when it is filled again.
#[derive(Debug)]
pub(crate) struct KeptCuts {
    young: HashMap<CutKey, Arc<PagePieces>>,
    old: HashMap<CutKey, Arc<PagePieces>>,
    /// Size of the young entries.
    weight: u64,
    room: u64,
}

impl KeptCuts {
    /// Room for about that many pieces.
    pub(crate) fn new(room: u64) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), weight: 0, room }
    }

    pub(crate) fn get(&mut self, key: CutKey) -> Option<Arc<PagePieces>> {
        if let Some(pieces) = self.young.get(&key) {
            return Some(Arc::clone(pieces));
        }
        let pieces = self.old.remove(&key)?;
        self.keep(key, Arc::clone(&pieces));
        Some(pieces)
    }

    /// Stores the pieces of a cut, unless they alone fill half of the room.
    pub(crate) fn keep(&mut self, key: CutKey, pieces: Arc<PagePieces>) {
        let weight = WEIGHT_OF_CUT + pieces.count;
        if weight > self.room / 2 {
            return;
        }
        if self.weight + weight > self.room / 2 {
            self.old = std::mem::take(&mut self.young);
            self.weight = 0;
        }
        if self.young.insert(key, pieces).is_none() {
            self.weight += weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(cut: u64) -> CutKey {
        (0, 0, TokenCut { local: cut, remote: 0, count: 1 })
    }

    fn pieces(count: u64) -> Arc<PagePieces> {
        Arc::new(PagePieces { by_strides: vec![], count })
    }

    #[test]
    fn what_is_used_stays() {
        // Room for four cuts: two young ones and two old ones.
        let mut kept = KeptCuts::new(4 * (WEIGHT_OF_CUT + 3));
        kept.keep(key(0), pieces(3));
        for cut in 1..100 {
            kept.keep(key(cut), pieces(3));
            assert!(kept.get(key(0)).is_some(), "after {cut}");
            assert!(kept.young.len() + kept.old.len() <= 4);
        }
        assert!(kept.get(key(50)).is_none());
    }

    #[test]
    fn what_takes_too_much_is_not_kept() {
        let mut kept = KeptCuts::new(100);
        kept.keep(key(0), pieces(1));
        kept.keep(key(1), pieces(51));
        assert!(kept.get(key(1)).is_none());
        assert!(kept.get(key(0)).is_some());
    }
}
