// SPDX-License-Identifier: Apache-2.0
//! All pairs of groups of two geometries, and the pairs of pages of their layers.
use std::sync::{Arc, Mutex, PoisonError};

use crate::bytes::pieces::TokenCut;
use crate::error::{Error, Result};
use crate::pairing::group_pair::{Geometries, GroupPair};
use crate::pairing::kept::KeptCuts;
use crate::pairing::most_pieces::MAX_PIECES;
use crate::pairing::page_pair::{PagePair, PagePieces, Place, pair_pages};

/// Limit of cached pieces over all tables of a plan: 24 bytes each.
const KEPT_PIECES: u64 = 1 << 17;

/// Pairs of groups of two geometries. Groups whose layers share memory are in one pair of pages, so neighbouring blocks
/// of different groups are joined and sorted.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) group_pairs: Vec<GroupPair>,
    pub(crate) page_pairs: Vec<PagePair>,
    /// By local address.
    pub(crate) places: Vec<Place>,
    /// Cuts are made when a request needs them.
    kept: Mutex<KeptCuts>,
}

impl Table {
    /// One of several tables of a plan.
    pub(crate) fn new(group_pairs: Vec<GroupPair>, geometries: &Geometries, tables: usize) -> Self {
        let (page_pairs, places) = pair_pages(&group_pairs, geometries);
        let kept = Mutex::new(KeptCuts::new(KEPT_PIECES / tables as u64));
        Self { group_pairs, page_pairs, places, kept }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.group_pairs.is_empty()
    }

    /// Pieces of a block of a pair of pages for one cut of a pair of groups, both by index.
    pub(crate) fn pieces(
        &self,
        geometries: &Geometries,
        page_pair: usize,
        group_pair: usize,
        cut: TokenCut,
    ) -> Result<Arc<PagePieces>> {
        let key = (page_pair, group_pair, cut);
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pieces) = kept().get(key) {
            return Ok(pieces);
        }
        let pages = &self.page_pairs[page_pair];
        let count = pages.count_unjoined(group_pair, cut, geometries);
        if count > MAX_PIECES {
            let values = (i128::from(count).into(), format!("at most {MAX_PIECES}").into());
            let reason = "tokens of a block lie in too many pieces";
            let text = format!("the request takes {count} pieces of a block, at most {MAX_PIECES}: {reason}");
            return Err(Error::argument("too-many", "pieces of a block", values, reason, text));
        }
        let pieces = Arc::new(pages.pieces(group_pair, cut, geometries));
        kept().keep(key, Arc::clone(&pieces));
        Ok(pieces)
    }

    /// Number of pieces of a block of a pair of groups for one cut, over all its layers.
    pub(crate) fn count_pieces(&self, geometries: &Geometries, group_pair: usize, cut: TokenCut) -> Result<u64> {
        let mut count = 0u64;
        for (index, pages) in self.page_pairs.iter().enumerate() {
            if pages.group_pairs().any(|found| found == group_pair) {
                let of_page = self.pieces(geometries, index, group_pair, cut)?.count;
                count = of_page.saturating_mul(pages.num_places).saturating_add(count);
            }
        }
        Ok(count)
    }
}
