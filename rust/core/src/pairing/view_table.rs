// SPDX-License-Identifier: Apache-2.0
//! The templates of a source as views: many descriptors in one row, to be prepared once.
use std::collections::BTreeMap;

use crate::bytes::rows::View;
use crate::error::{Error, Result};
use crate::geometry::types::Geometry;
use crate::pairing::group_pair::{BlockStrides, Geometries};
use crate::pairing::table::{Entry, Table};

/// More views than this are slower to prepare than the descriptors of a request are to build.
const MAX_VIEWS: usize = 65_536;

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

/// Views of one source.
pub(crate) struct ViewTable {
    pub(crate) local: Vec<View>,
    pub(crate) remote: Vec<View>,
    pub(crate) pairs: Vec<ViewPair>,
}

impl ViewTable {
    pub(crate) fn new(geometries: &Geometries, table: &Table) -> Result<Self> {
        refuse_irregular(table)?;
        let views: Vec<(View, View)> = table.entries.iter().map(|entry| views(geometries, table, entry)).collect();
        let local_starts = number(views.iter().map(|views| views.0))?;
        let remote_starts = number(views.iter().map(|views| views.1))?;
        let pair = |(entry, (local, remote)): (&Entry, &(View, View))| ViewPair {
            local_start: local_starts[local],
            remote_start: remote_starts[remote],
            length: entry.template.piece.len,
            is_dense: entry.template.is_dense(),
            filled_by: entry.filled_by,
        };
        let pairs = table.entries.iter().zip(&views).map(pair).collect();
        Ok(Self { local: local_starts.into_keys().collect(), remote: remote_starts.into_keys().collect(), pairs })
    }
}

/// Fails if the plan has anything that views cannot say.
fn refuse_irregular(table: &Table) -> Result<()> {
    let no_views = |why: String| Err(Error::NoViews { why });
    if table.group_pairs.iter().any(|pair| pair.cuts.is_empty()) {
        return no_views("the kernel blocks of the two sides cut each other too often".into());
    }
    if table.entries.iter().any(|entry| !entry.template.is_even()) {
        return no_views("kernel blocks are not evenly spaced over logical blocks".into());
    }
    if table.entries.len() > MAX_VIEWS {
        return no_views(format!("there are {}, at most {MAX_VIEWS} are kept", table.entries.len()));
    }
    Ok(())
}

/// Views of a template on both sides.
fn views(geometries: &Geometries, table: &Table, entry: &Entry) -> (View, View) {
    let Geometries { local, remote } = geometries;
    // Groups that alias may have different numbers of blocks: all blocks of the largest are in the view.
    let pairs = || table.fillers[entry.filled_by].cuts.iter().map(|filler| &table.group_pairs[filler.group_pair]);
    let local_blocks = pairs().map(|pair| local.num_blocks[pair.local_group]).max().unwrap_or(0);
    let remote_blocks = pairs().map(|pair| remote.num_blocks[pair.remote_group]).max().unwrap_or(0);
    let (piece, strides) = (entry.template.piece, entry.template.strides);
    (
        view(local, strides.local, local_blocks, (piece.local, piece.len)),
        view(remote, strides.remote, remote_blocks, (piece.remote, piece.len)),
    )
}

fn view(geometry: &Geometry, strides: BlockStrides, blocks: u64, (address, length): (u64, u64)) -> View {
    let device = geometry.regions[usize::from(strides.region)].device;
    [address, length, device.into(), strides.step(), blocks * strides.kernel_blocks_per_block]
}

/// Numbers the entries of distinct views in ascending order: the id of each view's first entry.
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
}
