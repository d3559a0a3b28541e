// SPDX-License-Identifier: Apache-2.0
//! Whole kernel blocks of a source as views: many descriptors in one row, to prepare once.
use std::collections::BTreeMap;

use crate::bytes::pieces::{Piece, TokenCut};
use crate::bytes::rows::View;
use crate::error::{Error, Result};
use crate::geometry::types::Geometry;
use crate::pairing::cuts::whole_block_cuts;
use crate::pairing::group_pair::{BlockStrides, CopyTemplate, Geometries};
use crate::pairing::most_pieces::MAX_PIECES;
use crate::pairing::page_pair::{Place, RegionPair};
use crate::pairing::table::Table;

/// Limit of cuts of whole kernel blocks for views.
const MAX_CUTS: usize = 4096;
/// Above this limit, preparing views is slower than building the descriptors of a request.
const MAX_VIEWS: usize = 65_536;

/// Block pairs of one group pair with one cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PairCut {
    /// Index of the group pair.
    pub(crate) group_pair: usize,
    pub(crate) cut: TokenCut,
}

/// A template, and the block pairs for which it is repeated.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) template: CopyTemplate,
    regions: RegionPair,
    /// Index of its fillers.
    pub(crate) filled_by: usize,
}

/// A template as entries of two views.
pub(crate) struct ViewPair {
    /// Ids of block 0's entries.
    pub(crate) local_start: u64,
    pub(crate) remote_start: u64,
    /// Bytes of an entry.
    pub(crate) length: u64,
    /// Whether the entries of neighbouring blocks touch on both sides.
    pub(crate) is_dense: bool,
    /// Index of the table's fillers.
    pub(crate) filled_by: usize,
}

/// Views of one source. Aliased layers have one template, filled by the blocks of all their groups.
pub(crate) struct ViewTable {
    pub(crate) local: Vec<View>,
    pub(crate) remote: Vec<View>,
    pub(crate) pairs: Vec<ViewPair>,
    /// By local address: one template for each of `pairs`.
    pub(crate) entries: Vec<Entry>,
    /// Distinct sets of fillers of a template.
    pub(crate) fillers: Vec<Vec<PairCut>>,
    /// Cuts of whole blocks, sorted.
    pub(crate) cuts: Vec<PairCut>,
}

impl ViewTable {
    pub(crate) fn new(geometries: &Geometries, table: &Table) -> Result<Self> {
        let cuts = all_cuts(geometries, table)?;
        let mut entries = entries(geometries, table, &cuts)?;
        let fillers = join_equal(&mut entries, &cuts);
        refuse_irregular(&entries)?;
        let views = |entry| views(geometries, table, entry, &fillers);
        let views: Vec<(View, View)> = entries.iter().map(views).collect();
        let local_starts = number(views.iter().map(|views| views.0))?;
        let remote_starts = number(views.iter().map(|views| views.1))?;
        let pair = |(entry, (local, remote)): (&Entry, &(View, View))| ViewPair {
            local_start: local_starts[local],
            remote_start: remote_starts[remote],
            length: entry.template.piece.len,
            is_dense: entry.template.is_dense(),
            filled_by: entry.filled_by,
        };
        let pairs = entries.iter().zip(&views).map(pair).collect();
        let (local, remote) = (local_starts.into_keys().collect(), remote_starts.into_keys().collect());
        Ok(Self { local, remote, pairs, entries, fillers, cuts })
    }
}

fn no_views<T>(why: String) -> Result<T> {
    Err(Error::NoViews { why })
}

/// The cuts that whole kernel blocks make of each other, in all pairs of groups.
fn all_cuts(geometries: &Geometries, table: &Table) -> Result<Vec<PairCut>> {
    let mut found = Vec::new();
    for (group_pair, pair) in table.group_pairs.iter().enumerate() {
        let (local, remote) =
            (&geometries.local.groups[pair.local_group], &geometries.remote.groups[pair.remote_group]);
        let cuts = if local.kind.is_attention() {
            whole_block_cuts(local, remote, MAX_CUTS)
        } else {
            Some(vec![TokenCut::STATE])
        };
        let Some(cuts) = cuts else {
            return no_views("the kernel blocks of the two sides cut each other too often".into());
        };
        found.extend(cuts.into_iter().map(|cut| PairCut { group_pair, cut }));
    }
    Ok(found)
}

/// The pieces of all cuts at all places. Until equal entries are joined, one cut, given by its index, fills an entry.
fn entries(geometries: &Geometries, table: &Table, cuts: &[PairCut]) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    for (page_pair, pages) in table.page_pairs.iter().enumerate() {
        let members: Vec<usize> = pages.group_pairs().collect();
        let places: Vec<&Place> = table.places.iter().filter(|place| place.page_pair == page_pair).collect();
        for (filled_by, of) in cuts.iter().enumerate().filter(|(_, of)| members.contains(&of.group_pair)) {
            let unjoined = pages.count_unjoined(of.group_pair, of.cut, geometries).saturating_mul(pages.num_places);
            if unjoined.saturating_add(entries.len() as u64) > MAX_PIECES {
                return no_views(format!("blocks are cut into too many pieces, at most {MAX_VIEWS} are kept"));
            }
            let pieces = pages.pieces(of.group_pair, of.cut, geometries);
            for place in &places {
                for (strides, pieces) in &pieces.by_strides {
                    entries.extend(pieces.iter().map(|piece| {
                        let (local, remote) = (place.bases.local + piece.local, place.bases.remote + piece.remote);
                        let template = CopyTemplate { piece: Piece { local, remote, ..*piece }, strides: *strides };
                        Entry { template, regions: place.regions, filled_by }
                    }));
                }
            }
        }
    }
    entries.sort_unstable_by_key(|entry| (entry.key(), entry.filled_by));
    Ok(entries)
}

impl Entry {
    /// The sort key of entries, and the common fields of equal entries.
    fn key(&self) -> (Piece, u16, BlockStrides, u16, BlockStrides) {
        let (CopyTemplate { piece, strides }, regions) = (self.template, self.regions);
        (piece, regions.local, strides.local, regions.remote, strides.remote)
    }
}

/// Joins equal entries of a template, filled by the cuts of all of them, and returns the distinct sets of cuts.
fn join_equal(entries: &mut Vec<Entry>, cuts: &[PairCut]) -> Vec<Vec<PairCut>> {
    let mut known: BTreeMap<Vec<PairCut>, usize> = BTreeMap::new();
    let mut sets: Vec<Vec<PairCut>> = Vec::new();
    let mut joined: Vec<Entry> = Vec::new();
    for equal in entries.chunk_by(|one, next| one.key() == next.key()) {
        let set: Vec<PairCut> = equal.iter().map(|entry| cuts[entry.filled_by]).collect();
        let filled_by = *known.entry(set).or_insert_with_key(|set| {
            sets.push(set.clone());
            sets.len() - 1
        });
        joined.push(Entry { filled_by, ..equal[0] });
    }
    *entries = joined;
    sets
}

/// Fails if views cannot express the plan.
fn refuse_irregular(entries: &[Entry]) -> Result<()> {
    if entries.iter().any(|entry| !entry.template.strides.is_even()) {
        return no_views("kernel blocks are not evenly spaced over logical blocks".into());
    }
    if entries.len() > MAX_VIEWS {
        return no_views(format!("there are {}, at most {MAX_VIEWS} are kept", entries.len()));
    }
    Ok(())
}

/// Views of a template on both sides.
fn views(geometries: &Geometries, table: &Table, entry: &Entry, fillers: &[Vec<PairCut>]) -> (View, View) {
    let Geometries { local, remote } = geometries;
    // Aliased groups may have different numbers of blocks; the view has all blocks of the largest group.
    let pairs = || fillers[entry.filled_by].iter().map(|filler| &table.group_pairs[filler.group_pair]);
    let local_blocks = pairs().map(|pair| local.num_blocks[pair.local_group]).max().unwrap_or(0);
    let remote_blocks = pairs().map(|pair| remote.num_blocks[pair.remote_group]).max().unwrap_or(0);
    let (CopyTemplate { piece, strides }, regions) = (entry.template, entry.regions);
    (
        view((local, regions.local), strides.local, local_blocks, (piece.local, piece.len)),
        view((remote, regions.remote), strides.remote, remote_blocks, (piece.remote, piece.len)),
    )
}

fn view(
    (geometry, region): (&Geometry, u16),
    strides: BlockStrides,
    blocks: u64,
    (address, length): (u64, u64),
) -> View {
    let device = geometry.regions[usize::from(region)].device;
    [address, length, device.into(), strides.step(), blocks * strides.kernel_blocks_per_block]
}

/// Numbers the entries of distinct views in ascending order, and returns the id of each view's first entry.
fn number(views: impl Iterator<Item = View>) -> Result<BTreeMap<View, u64>> {
    let mut starts: BTreeMap<View, u64> = views.map(|view| (view, 0)).collect();
    let mut next = 0;
    for ([.., count], start) in &mut starts {
        *start = next;
        next += count;
    }
    if next > i32::MAX as u64 {
        return Err(Error::overflow("views", format!("{next} entries"), 31));
    }
    Ok(starts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::plan::{Plan, PlanOptions};
    use std::sync::Arc;

    #[test]
    fn equal_views_are_one_and_ids_go_on_from_view_to_view() {
        let (low, high) = ([100, 8, 0, 16, 5], [200, 8, 0, 16, 7]);
        let starts = number([high, low, high].into_iter()).expect("few entries");
        assert_eq!(starts, BTreeMap::from([(low, 0), (high, 5)]));
    }

    #[test]
    fn ids_fit_31_bits() {
        let many = [0, 1, 0, 1, i32::MAX as u64];
        assert!(number([many].into_iter()).is_ok());
        assert!(number([many, [1, 1, 0, 1, 1]].into_iter()).is_err());
    }

    /// Two groups with a layer each: both in one region, or in two.
    fn geometry(base: u64, regions: usize) -> Arc<Geometry> {
        let region = |index: u64| format!(r#"{{"base":{},"bytes":80}}"#, base + 1000 * index);
        let json = format!(
            r#"{{"kvhma":1,"regions":[{},{}],"groups":[{{"kind":"full","block_size":4}},
            {{"kind":"sliding","window":9,"block_size":4}}],"pages":[{{"parts":[{{"name":"kv","dtype":"u8",
            "item_bytes":2,"offset":0,"axes":[{{"name":"tokens","extent":4,"stride":2}}]}}]}}],"layers":[
            {{"name":"a","group":0,"page":0,"region":0,"offset":0,"num_blocks":10,"block_stride":8}},
            {{"name":"b","group":1,"page":0,"region":{},"offset":0,"num_blocks":10,"block_stride":8}}]}}"#,
            region(0),
            region(1),
            regions - 1
        );
        Arc::new(Geometry::from_json(json.as_bytes()).expect("a valid geometry"))
    }

    #[test]
    fn layers_that_alias_share_a_template() {
        let fillers = |local, remote| {
            let plan =
                Plan::new(geometry(4096, local), vec![geometry(1 << 20, remote)], PlanOptions::EXACT).expect("pairs");
            let table = plan.view_table(0).expect("views");
            table.entries.iter().map(|entry| table.fillers[entry.filled_by].len()).collect::<Vec<_>>()
        };
        assert_eq!(fillers(1, 1), [2]);
        // The same local bytes of two groups come from two regions, so they are never one copy.
        assert_eq!(fillers(1, 2), [1, 1]);
        assert_eq!(fillers(2, 2), [1, 1]);
    }
}
