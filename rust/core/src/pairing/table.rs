// SPDX-License-Identifier: Apache-2.0
//! The pieces of all groups that are paired between two geometries, and which block pairs are moved through each.
use std::collections::BTreeMap;

use crate::error::Result;
use crate::pairing::group_pair::{CopyTemplate, Geometries, GroupPair, PieceBudget};

/// Block pairs of one group pair that are cut in one way: indices of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PairCut {
    pub(crate) group_pair: usize,
    pub(crate) cut: usize,
}

/// What fills some templates, and how much those are.
#[derive(Debug)]
pub(crate) struct Fillers {
    pub(crate) cuts: Vec<PairCut>,
    /// Bytes that a block pair moves through all of the templates.
    pub(crate) bytes: u64,
    /// How many of the templates are dense.
    pub(crate) dense: u64,
    /// How many are not.
    pub(crate) spaced: u64,
}

/// A template, and which block pairs it is repeated for.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) template: CopyTemplate,
    /// Index of its fillers.
    pub(crate) filled_by: usize,
}

/// Group pairs between two geometries and their templates. Layers that alias have one template, filled by the blocks of
/// all their groups: so neighbouring blocks of different groups are joined, and come out in order.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) group_pairs: Vec<GroupPair>,
    /// By local address.
    pub(crate) entries: Vec<Entry>,
    /// Distinct sets of what fills a template.
    pub(crate) fillers: Vec<Fillers>,
}

impl Table {
    /// `left` is how many pieces the plan may still have.
    pub(crate) fn new(
        mut group_pairs: Vec<GroupPair>,
        geometries: &Geometries,
        left: &mut PieceBudget,
    ) -> Result<Self> {
        // Until all are there, an entry is filled by one cut: its index in `cuts`.
        let mut entries: Vec<Entry> = Vec::new();
        let mut cuts: Vec<PairCut> = Vec::new();
        for (index, group_pair) in group_pairs.iter_mut().enumerate() {
            group_pair.cut_whole_blocks(geometries, left, |cut, templates| {
                let filled_by = cuts.len();
                cuts.push(PairCut { group_pair: index, cut });
                entries.extend(templates.map(|template| Entry { template, filled_by }));
            })?;
        }
        entries.sort_unstable_by_key(|entry| (entry.template, entry.filled_by));
        let fillers = join_equal(&mut entries, &cuts);
        entries.shrink_to_fit();
        Ok(Self { group_pairs, entries, fillers })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.group_pairs.is_empty()
    }
}

/// Leaves one entry of each template, filled by the cuts of all of them: returns the distinct sets of cuts.
fn join_equal(entries: &mut Vec<Entry>, cuts: &[PairCut]) -> Vec<Fillers> {
    let mut known: BTreeMap<Vec<PairCut>, usize> = BTreeMap::new();
    let mut fillers: Vec<Fillers> = Vec::new();
    let (mut read, mut kept) = (0, 0);
    let mut set = Vec::new();
    while let Some(&Entry { template, .. }) = entries.get(read) {
        set.clear();
        while let Some(entry) = entries.get(read).filter(|entry| entry.template == template) {
            set.push(cuts[entry.filled_by]);
            read += 1;
        }
        let filled_by = known.get(&set).copied().unwrap_or_else(|| {
            known.insert(set.clone(), fillers.len());
            fillers.push(Fillers { cuts: set.clone(), bytes: 0, dense: 0, spaced: 0 });
            fillers.len() - 1
        });
        let Fillers { bytes, dense, spaced, .. } = &mut fillers[filled_by];
        // Layers that alias can add up to more than there is memory; nothing can be moved into them then.
        *bytes = bytes.saturating_add(template.piece.len);
        *(if template.is_dense() { dense } else { spaced }) += 1;
        entries[kept] = Entry { template, filled_by };
        kept += 1;
    }
    entries.truncate(kept);
    fillers
}

#[cfg(test)]
mod tests {
    use crate::geometry::types::Geometry;
    use crate::pairing::plan::{Plan, PlanOptions};
    use std::sync::Arc;

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
        let table = |local, remote| {
            let plan =
                Plan::new(geometry(4096, local), vec![geometry(1 << 20, remote)], PlanOptions::EXACT).expect("pairs");
            let table = &plan.sources[0].table;
            let fillers = |index: usize| table.fillers[table.entries[index].filled_by].cuts.len();
            (0..table.entries.len()).map(fillers).collect::<Vec<_>>()
        };
        assert_eq!(table(1, 1), [2]);
        // The same local bytes of two groups come from two regions, so they are never one copy.
        assert_eq!(table(1, 2), [1, 1]);
        assert_eq!(table(2, 2), [1, 1]);
    }
}
