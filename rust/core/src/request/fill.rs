// SPDX-License-Identifier: Apache-2.0
//! The pieces of pages, repeated for a request's block pairs, once for all places with equal layouts.
use crate::bytes::rows::NO_ADVICE;
use crate::error::Result;
use crate::pairing::group_pair::{CopyTemplate, Geometries};
use crate::pairing::page_pair::{PagePieces, Place};
use crate::pairing::table::Table;
use crate::request::block_pairs::{PackedPair, runs};
use crate::request::bound::{Budget, Limit, no_memory, room};
use crate::request::copies::{ByteRun, Copies};
use crate::request::pairs_by_cut::PairsByCut;

/// Bytes that are contiguous on both sides, as an offset from the place of their pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PageRun {
    local: u64,
    remote: u64,
    len: u64,
    /// Local group of the first byte.
    group: u16,
}

impl PageRun {
    fn end(&self) -> u64 {
        self.local + self.len
    }

    /// Extends the run if another run continues it on both sides.
    fn takes(&mut self, next: &Self) -> bool {
        let goes_on = self.end() == next.local && self.remote + self.len == next.remote;
        if goes_on {
            self.len += next.len;
        }
        goes_on
    }

    fn at(&self, place: &Place) -> ByteRun {
        let Self { local, remote, len, group } = *self;
        ByteRun {
            local: place.bases.local + local,
            remote: place.bases.remote + remote,
            len,
            regions: place.regions,
            group,
        }
    }
}

/// What a request moves through a pair of pages, at each of its places.
struct PageRuns {
    /// By local address, once all runs are added.
    runs: Vec<PageRun>,
    is_sorted: bool,
    bytes_by_group: Vec<u64>,
}

impl PageRuns {
    fn new(num_groups: usize) -> Self {
        Self { runs: Vec::new(), is_sorted: true, bytes_by_group: vec![0; num_groups] }
    }

    fn push(&mut self, run: PageRun) {
        if let Some(last) = self.runs.last_mut() {
            if last.takes(&run) {
                return;
            }
            self.is_sorted &= last.local <= run.local;
        }
        self.runs.push(run);
    }

    /// Repeats the pieces of a cut for its block pairs. Reserves room for that many runs at once; further runs grow one
    /// by one.
    fn fill(&mut self, pieces: &PagePieces, pairs: &[PackedPair], group: usize, spaced: usize) -> Result<()> {
        self.make_room(spaced)?;
        for (strides, pieces) in &pieces.by_strides {
            let bytes = pieces.iter().map(|piece| piece.len).fold(0, u64::saturating_add);
            // Overlapping blocks can add up to more bytes than there is memory; they are refused later.
            let of_group = &mut self.bytes_by_group[group];
            *of_group = bytes.saturating_mul(pairs.len() as u64).saturating_add(*of_group);
            if let &[piece] = pieces.as_slice() {
                let template = CopyTemplate { piece, strides: *strides };
                if template.is_dense() {
                    self.fill_dense(&template, pairs, group)?;
                    continue;
                }
            }
            for pair in pairs {
                let (local, remote) = (strides.local.offset(pair.local()), strides.remote.offset(pair.remote()));
                self.make_room(pieces.len())?;
                for piece in pieces {
                    let (local, remote) = (piece.local + local, piece.remote + remote);
                    self.push(PageRun { local, remote, len: piece.len, group: group as u16 });
                }
            }
        }
        Ok(())
    }

    /// A run of each run of blocks.
    fn fill_dense(&mut self, template: &CopyTemplate, pairs: &[PackedPair], group: usize) -> Result<()> {
        let CopyTemplate { piece, strides } = template;
        for run in runs(pairs) {
            let (local, remote) = (strides.local.offset(run[0].local()), strides.remote.offset(run[0].remote()));
            let (local, remote, len) = (piece.local + local, piece.remote + remote, piece.len * run.len() as u64);
            self.make_room(1)?;
            self.push(PageRun { local, remote, len, group: group as u16 });
        }
        Ok(())
    }

    fn make_room(&mut self, count: usize) -> Result<()> {
        self.runs.try_reserve(count).map_err(|_| no_memory(self.runs.len() + count))
    }

    /// Sorts runs and joins neighbours.
    fn finish(&mut self) {
        if !self.is_sorted {
            // The runs of a cut are mostly ascending: the stable sort finds and merges them.
            self.runs.sort_by_key(|run| run.local);
            self.runs.dedup_by(|next, last| last.takes(next));
        }
    }

    /// Whether no byte is in two runs.
    fn is_disjoint(&self) -> bool {
        self.runs.is_sorted_by(|one, next| one.end() <= next.local)
    }

    /// Where the first run begins at a place, and where the last run ends.
    fn extent(&self, place: &Place) -> Option<(u64, u64)> {
        let (first, last) = (self.runs.first()?, self.runs.last()?);
        Some((place.bases.local + first.local, place.bases.local + last.end()))
    }

    /// Appends runs that do not overlap and are after all others.
    fn append(&self, place: &Place, geometries: &Geometries, copies: &mut Copies) {
        let Some((first, rest)) = self.runs.split_first() else { return };
        let devices = place.regions.devices(geometries);
        // Only the first run can continue a run of an earlier place, because the runs of a place are already joined.
        copies.push(first.at(place), devices);
        let (local, remote) = (place.bases.local, place.bases.remote);
        let shifted = rest.iter().map(|run| (run.local + local, run.remote + remote, run.len));
        copies.extend(shifted, place.regions, devices);
    }
}

impl Table {
    /// The copies of a request's block pairs. `by_pair` has the pairs of each group pair.
    pub(crate) fn copies(
        &self,
        geometries: &Geometries,
        mut by_pair: Vec<PairsByCut>,
        budget: Budget,
    ) -> Result<Copies> {
        let limit = self.bound_descriptors(&by_pair, budget)?;
        by_pair.iter_mut().for_each(PairsByCut::sort_pairs);
        let mut pages: Vec<PageRuns> = Vec::with_capacity(self.page_pairs.len());
        let mut spaced = 0;
        for index in 0..self.page_pairs.len() {
            pages.push(self.page_runs(index, geometries, &by_pair, limit, &mut spaced)?);
        }
        let count = self.places.iter().map(|place| pages[place.page_pair].runs.len()).sum();
        limit.check(count as u64)?;
        let mut bytes = vec![0u64; geometries.local.groups.len()];
        for place in &self.places {
            for (sum, of_page) in bytes.iter_mut().zip(&pages[place.page_pair].bytes_by_group) {
                *sum = sum.saturating_add(*of_page);
            }
        }
        let mut filled: Vec<((u64, u64), &Place)> = Vec::with_capacity(self.places.len());
        filled.extend(self.places.iter().filter_map(|place| Some((pages[place.page_pair].extent(place)?, place))));
        filled.sort_by_key(|(extent, _)| *extent);
        let is_in_order =
            filled.is_sorted_by(|(one, _), (next, _)| one.1 <= next.0) && pages.iter().all(PageRuns::is_disjoint);
        if !is_in_order {
            let mut runs = room(count, NO_ADVICE)?;
            runs.extend(
                self.places.iter().flat_map(|place| pages[place.page_pair].runs.iter().map(|run| run.at(place))),
            );
            drop(pages);
            return Copies::from_runs(runs, geometries, budget.advise, bytes);
        }
        let mut copies = Copies::new(budget.advise, count, bytes)?;
        for (_, place) in filled {
            pages[place.page_pair].append(place, geometries, &mut copies);
        }
        self.count_extended(&pages, &mut copies.descriptors_by_group);
        Ok(copies)
    }

    /// The runs of a pair of pages. `spaced` is how many copies of all earlier pages cannot touch each other.
    fn page_runs(
        &self,
        index: usize,
        geometries: &Geometries,
        by_pair: &[PairsByCut],
        limit: Limit,
        spaced: &mut u64,
    ) -> Result<PageRuns> {
        let pages = &self.page_pairs[index];
        let mut found = PageRuns::new(geometries.local.groups.len());
        for group_pair in pages.group_pairs() {
            let group = self.group_pairs[group_pair].local_group;
            for (cut, pairs) in by_pair[group_pair].iter() {
                let pieces = self.pieces(geometries, index, group_pair, cut)?;
                let of_place = pieces.count_spaced().saturating_mul(pairs.len() as u64);
                *spaced = of_place.saturating_mul(pages.num_places).saturating_add(*spaced);
                // Check before they are made.
                limit.check(*spaced)?;
                found.fill(&pieces, pairs, group, of_place as usize)?;
            }
        }
        found.finish();
        Ok(found)
    }

    /// Counts the copies that extended the places: all except the first of each place.
    fn count_extended(&self, pages: &[PageRuns], descriptors_by_group: &mut [u64]) {
        for (page, pages) in pages.iter().zip(&self.page_pairs) {
            for run in page.runs.iter().skip(1) {
                descriptors_by_group[usize::from(run.group)] += pages.num_places;
            }
        }
    }
}

impl PagePieces {
    /// Pieces whose copies for neighbouring blocks do not touch.
    fn count_spaced(&self) -> u64 {
        let spaced = |(strides, pieces): &(_, Vec<_>)| {
            let is_spaced = |&piece: &_| !CopyTemplate { piece, strides: *strides }.is_dense();
            pieces.iter().filter(|piece| is_spaced(piece)).count() as u64
        };
        self.by_strides.iter().map(spaced).sum()
    }
}
