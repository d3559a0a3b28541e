// SPDX-License-Identifier: Apache-2.0
//! The templates of a table repeated for a request's block pairs.
use crate::bytes::pieces::TokenCut;
use crate::bytes::rows::Descriptor;
use crate::error::Result;
use crate::geometry::types::KernelBlockId;
use crate::pairing::group_pair::{CopyTemplate, Geometries, GroupPair};
use crate::pairing::table::{Fillers, PairCut, Table};
use crate::request::block_pairs::{BlockRun, OwnedPair, PackedPair, Pairs, is_each_local_block_once, runs, sort};
use crate::request::bound::{Budget, Limit, room};
use crate::request::copies::{ByteRun, Copies, RegionPair};
use crate::request::pairs_by_cut::PairsByCut;

/// Block pairs that fill the same templates.
struct Filling {
    /// Sorted by local id.
    pairs: Pairs,
    /// The same with the group of each.
    owned: Vec<OwnedPair>,
    runs: Vec<BlockRun>,
}

impl Filling {
    fn new(mut owned: Vec<OwnedPair>) -> Self {
        sort(&mut owned, |(pair, _)| pair);
        Self { pairs: owned.iter().map(|(pair, _)| *pair).collect(), runs: runs(owned.iter().copied()), owned }
    }
}

/// A template and the block pairs that it is repeated for.
struct Filled<'a> {
    template: &'a CopyTemplate,
    filling: &'a Filling,
}

impl Table {
    /// Block pairs of each set of fillers, sorted by local id. `by_pair` has those of each group pair.
    pub(crate) fn gather(&self, by_pair: &[PairsByCut]) -> Vec<Pairs> {
        let gather = |fillers: &Fillers| {
            let lists: Vec<&[PackedPair]> = fillers.cuts.iter().map(|&cut| self.pairs_of(cut, by_pair)).collect();
            let mut pairs = lists.concat();
            sort(&mut pairs, |pair| pair);
            pairs
        };
        self.fillers.iter().map(gather).collect()
    }

    pub(crate) fn pairs_of<'a>(&self, filler: PairCut, by_pair: &'a [PairsByCut]) -> &'a [PackedPair] {
        by_pair[filler.group_pair].get(self.group_pairs[filler.group_pair].cuts[filler.cut].cut)
    }

    fn local_group(&self, filler: PairCut) -> usize {
        self.group_pairs[filler.group_pair].local_group
    }

    fn fill(&self, fillers: &Fillers, by_pair: &[PairsByCut]) -> Filling {
        let lists = || fillers.cuts.iter().map(|&cut| (self.pairs_of(cut, by_pair), self.local_group(cut)));
        let mut owned = Vec::with_capacity(lists().map(|(pairs, _)| pairs.len()).sum());
        for (pairs, group) in lists() {
            owned.extend(pairs.iter().map(|&pair| (pair, group as u16)));
        }
        Filling::new(owned)
    }

    /// Whether the pairs are surely written without overlap, and clear of sorted `others`: a look at every template, not
    /// at every copy.
    pub(crate) fn is_surely_disjoint(&self, gathered: &[Pairs], others: &[Descriptor]) -> bool {
        let filled = || self.entries.iter().map(|entry| (&entry.template, gathered[entry.filled_by].as_slice()));
        let is_clear = |other: &Descriptor, (template, pairs): (&CopyTemplate, &[PackedPair])| {
            !template.writes_into(pairs, other[0], other[0] + other[1])
        };
        gathered.iter().all(|pairs| is_each_local_block_once(pairs))
            && is_ascending(filled())
            && filled().all(|filled| others.iter().all(|other| is_clear(other, filled)))
    }

    /// The copies of a request's block pairs.
    pub(crate) fn copies(&self, geometries: &Geometries, by_pair: &[PairsByCut], budget: Budget) -> Result<Copies> {
        let limit = self.bound_descriptors(by_pair, budget)?;
        let fillings: Vec<Filling> = self.fillers.iter().map(|fillers| self.fill(fillers, by_pair)).collect();
        let filled = || {
            let filled = self.entries.iter();
            filled.map(|entry| Filled { template: &entry.template, filling: &fillings[entry.filled_by] })
        };
        let is_in_order = fillings.iter().all(|filling| is_each_local_block_once(&filling.pairs))
            && is_ascending(filled().map(|filled| (filled.template, filled.filling.pairs.as_slice())));
        let mut bytes = self.bytes_by_group(geometries, by_pair);
        let count = filled().map(|filled| filled.count()).sum();
        limit.check(count as u64)?;
        if is_in_order && !self.has_rare_cuts(by_pair) {
            let mut copies = Copies::new(budget.allocate, count, bytes)?;
            filled().for_each(|filled| filled.append(geometries, &mut copies));
            self.count_extended(by_pair, &fillings, &mut copies.descriptors_by_group);
            return Ok(copies);
        }
        let mut runs = room(count)?;
        filled().for_each(|filled| filled.byte_runs(&mut runs));
        drop(fillings);
        let kept = runs.len();
        self.add_rare_cuts(geometries, by_pair, limit, &mut runs)?;
        for run in &runs[kept..] {
            let of_group = &mut bytes[usize::from(run.group)];
            *of_group = run.len.saturating_add(*of_group);
        }
        Copies::from_runs(runs, geometries, budget.allocate, bytes)
    }

    /// Bytes of all templates that are kept with the plan.
    fn bytes_by_group(&self, geometries: &Geometries, by_pair: &[PairsByCut]) -> Vec<u64> {
        let mut bytes = vec![0u64; geometries.local.groups.len()];
        for fillers in &self.fillers {
            for &cut in &fillers.cuts {
                let of_group = &mut bytes[self.local_group(cut)];
                // Blocks that overlap can add up to more than there is memory; they are refused later.
                let pairs = self.pairs_of(cut, by_pair).len() as u64;
                *of_group = pairs.saturating_mul(fillers.bytes).saturating_add(*of_group);
            }
        }
        bytes
    }

    /// Counts the copies that the templates were extended by: all but the first of each.
    fn count_extended(&self, by_pair: &[PairsByCut], fillings: &[Filling], descriptors_by_group: &mut [u64]) {
        for (fillers, Filling { runs, .. }) in self.fillers.iter().zip(fillings) {
            let Some(first) = runs.first() else { continue };
            runs[1..].iter().for_each(|run| descriptors_by_group[usize::from(run.group)] += fillers.dense);
            for &cut in &fillers.cuts {
                let pairs = self.pairs_of(cut, by_pair).len() as u64;
                descriptors_by_group[self.local_group(cut)] += pairs * fillers.spaced;
            }
            descriptors_by_group[usize::from(first.group)] -= fillers.spaced;
        }
    }

    /// Block pairs that are cut in ways that the plan has no templates for.
    fn rare_cuts<'a>(
        &'a self,
        by_pair: &'a [PairsByCut],
    ) -> impl Iterator<Item = (&'a GroupPair, TokenCut, &'a [PackedPair])> {
        let cuts = |(group_pair, cuts): (&'a GroupPair, &'a PairsByCut)| {
            cuts.iter().filter(|(cut, _)| !group_pair.keeps(*cut)).map(move |(cut, pairs)| (group_pair, cut, pairs))
        };
        self.group_pairs.iter().zip(by_pair).flat_map(cuts)
    }

    fn add_rare_cuts(
        &self,
        geometries: &Geometries,
        by_pair: &[PairsByCut],
        limit: Limit,
        runs: &mut Vec<ByteRun>,
    ) -> Result<()> {
        for (group_pair, cut, pairs) in self.rare_cuts(by_pair) {
            let group = group_pair.local_group as u16;
            let filling = Filling::new(pairs.iter().map(|&pair| (pair, group)).collect());
            let templates = group_pair.templates(geometries, cut)?;
            limit.check((runs.len() as u64).saturating_add(templates.len() as u64 * pairs.len() as u64))?;
            for template in templates {
                Filled { template: &template, filling: &filling }.byte_runs(runs);
            }
        }
        Ok(())
    }

    pub(crate) fn has_rare_cuts(&self, by_pair: &[PairsByCut]) -> bool {
        self.rare_cuts(by_pair).next().is_some()
    }
}

/// Whether the copies of each template lie wholly after those of the template before: then nothing has to be sorted.
fn is_ascending<'a>(filled: impl Iterator<Item = (&'a CopyTemplate, &'a [PackedPair])>) -> bool {
    let mut end = 0;
    for (template, pairs) in filled {
        let (Some(first), Some(last)) = (pairs.first(), pairs.last()) else { continue };
        let (piece, strides) = (template.piece, template.strides.local);
        let is_disjoint = pairs.len() == 1 || strides.step() >= piece.len;
        let start = piece.local + strides.offset(first.local());
        if start < end || !is_disjoint || !template.is_even() {
            return false;
        }
        end = piece.local + strides.offset(last.local()) + piece.len;
    }
    true
}

impl CopyTemplate {
    /// Whether the copy of any pair of an even template shares a byte with the local bytes `start..end`.
    ///
    /// ```text
    /// copies    |##---|##---|##---|##---|     step 5, length 2
    /// range             [------------)        blocks 1 and 2 begin before its end, and end after its start
    /// ```
    fn writes_into(&self, pairs: &[PackedPair], start: u64, end: u64) -> bool {
        let (first_byte, step) = (self.piece.local, self.strides.local.step());
        if end <= first_byte {
            return false;
        }
        let first = KernelBlockId((start + 1).saturating_sub(first_byte + self.piece.len).div_ceil(step));
        let last = KernelBlockId((end - 1 - first_byte) / step);
        let index = pairs.partition_point(|pair| pair.local() < first);
        pairs.get(index).is_some_and(|pair| pair.local() <= last)
    }
}

impl Filled<'_> {
    /// How many copies come of it: one for each run if those are contiguous, else one for each pair.
    fn count(&self) -> usize {
        if self.template.is_dense() { self.filling.runs.len() } else { self.filling.pairs.len() }
    }

    /// Appends evenly spaced copies that lie after all others.
    fn append(&self, geometries: &Geometries, copies: &mut Copies) {
        let Self { template: CopyTemplate { piece, strides }, filling: Filling { pairs, runs, .. } } = self;
        let Some(&first) = pairs.first() else { return };
        let regions = RegionPair::of(*strides);
        let devices = regions.devices(geometries);
        let (local_step, remote_step) = (strides.local.step(), strides.remote.step());
        let copy = move |pair: PackedPair, count: u64| {
            (piece.local + pair.local().0 * local_step, piece.remote + pair.remote().0 * remote_step, count * piece.len)
        };
        // Only the first can touch the template before: within one, runs and spaced entries do not touch.
        let (local, remote, len) = copy(first, if self.template.is_dense() { runs[0].count.into() } else { 1 });
        copies.push(ByteRun { local, remote, len, regions, group: runs[0].group }, devices);
        if self.template.is_dense() {
            copies.extend(runs[1..].iter().map(|run| copy(run.first, run.count.into())), regions, devices);
        } else {
            copies.extend(pairs[1..].iter().map(|&pair| copy(pair, 1)), regions, devices);
        }
    }

    /// Appends copies in any order and spacing.
    fn byte_runs(&self, runs: &mut Vec<ByteRun>) {
        let CopyTemplate { piece, strides } = self.template;
        let regions = RegionPair::of(*strides);
        let byte_run = |pair: PackedPair, count: u32, group: u16| ByteRun {
            local: piece.local + strides.local.offset(pair.local()),
            remote: piece.remote + strides.remote.offset(pair.remote()),
            len: u64::from(count) * piece.len,
            regions,
            group,
        };
        if self.template.is_dense() {
            runs.extend(self.filling.runs.iter().map(|run| byte_run(run.first, run.count, run.group)));
        } else {
            runs.extend(self.filling.owned.iter().map(|&(pair, group)| byte_run(pair, 1, group)));
        }
    }
}
