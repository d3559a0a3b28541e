// SPDX-License-Identifier: Apache-2.0
//! The templates of a table repeated for a request's block pairs.
use crate::bytes::rows::Descriptor;
use crate::error::Result;
use crate::geometry::types::KernelBlockId;
use crate::pairing::group_pair::{CopyTemplate, Geometries};
use crate::pairing::table::{PairCut, Table};
use crate::request::block_pairs::{BlockRun, PackedPair, Pairs, is_each_local_block_once, runs, sort};
use crate::request::by_group::{ByGroup, Owners};
use crate::request::copies::{Allocate, ByteRun, Copies, RegionPair};
use crate::request::pairs_by_cut::PairsByCut;

/// Block pairs that fill the same templates.
pub(crate) struct Filling<'a> {
    /// Sorted by local id.
    pub(crate) pairs: Pairs,
    runs: Vec<BlockRun>,
    owners: Owners<'a>,
    /// Number of runs by the group that they begin in.
    runs_by_group: Vec<(usize, u64)>,
}

impl<'a> Filling<'a> {
    fn new(pairs: Pairs, owners: Owners<'a>) -> Self {
        let runs = runs(&pairs);
        let runs_by_group = owners.count_runs(&runs);
        Self { pairs, runs, owners, runs_by_group }
    }

    /// Adds the bytes of a template whose pieces are `length` bytes.
    fn add_bytes(&self, length: u64, by_group: &mut ByGroup) {
        for (group, pairs) in self.owners.count_pairs() {
            // Blocks that overlap can add up to more than there is memory; they are refused later.
            by_group.bytes[group] = pairs.saturating_mul(length).saturating_add(by_group.bytes[group]);
        }
    }
}

/// A template and the block pairs that it is repeated for.
struct Filled<'a> {
    template: &'a CopyTemplate,
    filling: &'a Filling<'a>,
}

impl Table {
    /// Block pairs of each set of fillers, sorted by local id. `by_pair` has those of each group pair.
    pub(crate) fn gather(&self, by_pair: &[PairsByCut]) -> Vec<Pairs> {
        let gather = |fillers: &Vec<PairCut>| {
            let lists: Vec<&[PackedPair]> = fillers.iter().map(|&filler| self.pairs_of(filler, by_pair)).collect();
            let mut pairs = lists.concat();
            sort(&mut pairs);
            pairs
        };
        self.fillers.iter().map(gather).collect()
    }

    fn pairs_of<'a>(&self, filler: PairCut, by_pair: &'a [PairsByCut]) -> &'a [PackedPair] {
        by_pair[filler.group_pair].get(self.group_pairs[filler.group_pair].cuts[filler.cut].cut)
    }

    fn fillings<'a>(&self, by_pair: &'a [PairsByCut]) -> Vec<Filling<'a>> {
        let owner =
            |filler: &PairCut| (self.group_pairs[filler.group_pair].local_group, self.pairs_of(*filler, by_pair));
        let owners = self.fillers.iter().map(|fillers| Owners::new(fillers.iter().map(owner).collect()));
        self.gather(by_pair).into_iter().zip(owners).map(|(pairs, owners)| Filling::new(pairs, owners)).collect()
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

    /// The copies of a request's block pairs; what they move of each local group is added to `by_group`.
    pub(crate) fn copies(
        &self,
        geometries: &Geometries,
        by_pair: &[PairsByCut],
        allocate: Allocate,
        by_group: &mut ByGroup,
    ) -> Result<Copies> {
        let fillings = self.fillings(by_pair);
        let filled = || {
            let filled = self.entries.iter();
            filled.map(|entry| Filled { template: &entry.template, filling: &fillings[entry.filled_by] })
        };
        filled().for_each(|filled| filled.filling.add_bytes(filled.template.piece.len, by_group));
        let is_in_order = fillings.iter().all(|filling| is_each_local_block_once(&filling.pairs))
            && is_ascending(filled().map(|filled| (filled.template, filled.filling.pairs.as_slice())));
        if is_in_order && !self.has_rare_cuts(by_pair) {
            let mut copies = Copies::new(allocate, filled().map(|filled| filled.count()).sum());
            filled().for_each(|filled| filled.append(geometries, &mut copies, by_group));
            return Ok(copies);
        }
        let groups: Vec<Vec<u16>> = fillings.iter().map(|filling| filling.owners.sorted()).collect();
        let mut runs = Vec::new();
        for (filled, entry) in filled().zip(&self.entries) {
            filled.byte_runs(&groups[entry.filled_by], &mut runs);
        }
        self.add_rare_cuts(geometries, by_pair, &mut runs, by_group)?;
        Copies::from_runs(runs, geometries, allocate, by_group)
    }

    /// Whether blocks are cut in ways that the plan has no templates for.
    pub(crate) fn has_rare_cuts(&self, by_pair: &[PairsByCut]) -> bool {
        let mut pairs = self.group_pairs.iter().zip(by_pair);
        pairs.any(|(group_pair, cuts)| cuts.iter().any(|(cut, _)| !group_pair.keeps(cut)))
    }

    fn add_rare_cuts(
        &self,
        geometries: &Geometries,
        by_pair: &[PairsByCut],
        runs: &mut Vec<ByteRun>,
        by_group: &mut ByGroup,
    ) -> Result<()> {
        for (group_pair, cuts) in self.group_pairs.iter().zip(by_pair) {
            for (cut, pairs) in cuts.iter().filter(|(cut, _)| !group_pair.keeps(*cut)) {
                let mut sorted = pairs.to_vec();
                sort(&mut sorted);
                let filling = Filling::new(sorted, Owners::new(vec![(group_pair.local_group, pairs)]));
                let groups = filling.owners.sorted();
                for template in group_pair.templates(geometries, cut)? {
                    filling.add_bytes(template.piece.len, by_group);
                    Filled { template: &template, filling: &filling }.byte_runs(&groups, runs);
                }
            }
        }
        Ok(())
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
    fn append(&self, geometries: &Geometries, copies: &mut Copies, by_group: &mut ByGroup) {
        let Self { template: CopyTemplate { piece, strides }, filling } = self;
        let Some(&first) = filling.pairs.first() else { return };
        let regions = RegionPair::of(*strides);
        let devices = regions.devices(geometries);
        let (local_step, remote_step) = (strides.local.step(), strides.remote.step());
        let copy = move |pair: PackedPair, count: u64| {
            (piece.local + pair.local().0 * local_step, piece.remote + pair.remote().0 * remote_step, count * piece.len)
        };
        // Only the first can touch the template before: within one, runs and spaced entries do not touch.
        let (is_new, by_owner) = if self.template.is_dense() {
            let (local, remote, len) = copy(first, filling.runs[0].count);
            let is_new = copies.push(ByteRun { local, remote, len, regions, group: 0 }, devices);
            let rest = filling.runs[1..].iter().map(|run| copy(run.first, run.count));
            copies.extend(rest, filling.pairs.len() as u64 * piece.len - len, regions, devices);
            (is_new, &filling.runs_by_group)
        } else {
            let (local, remote, len) = copy(first, 1);
            let is_new = copies.push(ByteRun { local, remote, len, regions, group: 0 }, devices);
            let rest = filling.pairs[1..].iter().map(|&pair| copy(pair, 1));
            copies.extend(rest, (filling.pairs.len() as u64 - 1) * piece.len, regions, devices);
            (is_new, &filling.owners.count_pairs().collect())
        };
        for &(group, count) in by_owner {
            by_group.descriptors[group] += count;
        }
        if !is_new {
            by_group.descriptors[filling.owners.of(first)] -= 1;
        }
    }

    /// Appends copies in any order and spacing. `groups` has the local group of each pair.
    fn byte_runs(&self, groups: &[u16], runs: &mut Vec<ByteRun>) {
        let CopyTemplate { piece, strides } = self.template;
        let regions = RegionPair::of(*strides);
        let byte_run = |pair: PackedPair, count: u64, group: u16| ByteRun {
            local: piece.local + strides.local.offset(pair.local()),
            remote: piece.remote + strides.remote.offset(pair.remote()),
            len: count * piece.len,
            regions,
            group,
        };
        if self.template.is_dense() {
            let mut index = 0;
            runs.extend(self.filling.runs.iter().map(|run| {
                let group = groups[index];
                index += run.count as usize;
                byte_run(run.first, run.count, group)
            }));
        } else {
            runs.extend(self.filling.pairs.iter().zip(groups).map(|(&pair, &group)| byte_run(pair, 1, group)));
        }
    }
}
