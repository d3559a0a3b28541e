// SPDX-License-Identifier: Apache-2.0
//! Everything about a local rank and its sources that does not depend on a request.
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, OnceLock};

use crate::bytes::rows::View;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::geometry::sharing::shared_memory;
use crate::geometry::types::Geometry;
use crate::pairing::assign::{Assignment, assign};
use crate::pairing::group_pair::{Geometries, GroupPair, LayerIndices, PartSlice};
use crate::pairing::settle::settle;
use crate::pairing::table::Table;
use crate::pairing::validate::{compare, refuse_errors};
use crate::pairing::view_table::ViewTable;

/// A source geometry.
pub(crate) struct Source {
    pub(crate) geometry: Arc<Geometry>,
    pub(crate) table: Table,
    views: OnceLock<Result<ViewTable>>,
}

/// Limits of the cost of a plan's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanOptions {
    /// A partial last block is moved whole if that costs fewer bytes than this for each saved descriptor.
    pub descriptor_bytes: u64,
    /// Limit of a request's descriptors, including its ranges to zero.
    pub max_descriptors: u64,
}

impl PlanOptions {
    /// No unrequested tokens, and as many descriptors as the layouts explain.
    pub const EXACT: Self = Self { descriptor_bytes: 0, max_descriptors: u64::MAX };
}

/// What a local rank reads from its sources, for all requests.
pub struct Plan {
    pub(crate) local: Arc<Geometry>,
    pub(crate) sources: Vec<Source>,
    /// All local layers paired with themselves, to find bytes to zero.
    pub(crate) self_table: Table,
    /// The same for layers without a source.
    pub(crate) unsourced: Table,
    pub(crate) options: PlanOptions,
    /// Which local groups share memory, if the layout guarantees it.
    pub(crate) shared_memory: Option<Vec<usize>>,
    findings: Vec<(usize, Finding)>,
}

impl Plan {
    /// Pairs a local rank with its sources.
    ///
    /// Fails with the first reason why a source cannot be paired, or why an item has no source.
    pub fn new(local: Arc<Geometry>, remotes: Vec<Arc<Geometry>>, options: PlanOptions) -> Result<Self> {
        if remotes.is_empty() {
            return Err(Error::count("remote geometries", 0, 1));
        }
        let mut all = vec![local];
        all.extend(remotes);
        let settled = settle(&all.iter().map(AsRef::as_ref).collect::<Vec<_>>());
        let mut all: Vec<_> = settled.into_iter().zip(all).map(|(new, old)| new.map_or(old, Arc::new)).collect();
        let remotes = all.split_off(1);
        let local = all.swap_remove(0);
        let findings = find(&local, &remotes)?;
        let geometries: Vec<&Geometry> = remotes.iter().map(AsRef::as_ref).collect();
        let assignments = assign(&local, &geometries)?;
        let has_source: Vec<bool> = assignments.iter().map(|of_layer| !of_layer.is_empty()).collect();
        let tables = tables(&local, &geometries, assignments);
        let num_tables = num_tables(&geometries);
        let sources = remotes
            .into_iter()
            .zip(tables)
            .map(|(geometry, table)| Source { geometry, table, views: OnceLock::new() })
            .collect();
        let all_layers = self_table(&local, num_tables, |_| true);
        let unsourced = self_table(&local, num_tables, |layer| !has_source[layer]);
        let shared_memory = shared_memory(&local);
        Ok(Self { local, sources, self_table: all_layers, unsourced, options, shared_memory, findings })
    }

    /// Warnings, each with the index of its source.
    pub fn findings(&self) -> &[(usize, Finding)] {
        &self.findings
    }

    /// The local geometry.
    pub fn local(&self) -> &Geometry {
        &self.local
    }

    /// The geometry of a source.
    pub fn remote(&self, source: usize) -> &Geometry {
        &self.sources[source].geometry
    }

    /// Number of sources, including those with nothing to read.
    pub fn num_sources(&self) -> usize {
        self.sources.len()
    }

    /// Indices of the sources with something to read.
    pub fn sources(&self) -> Vec<usize> {
        (0..self.sources.len()).filter(|&source| !self.sources[source].table.is_empty()).collect()
    }

    /// The local geometry and the geometry of a source.
    pub(crate) fn geometries(&self, source: usize) -> Geometries<'_> {
        Geometries { local: &self.local, remote: &self.sources[source].geometry }
    }

    /// Views of a source, made on first use.
    pub(crate) fn view_table(&self, source: usize) -> Result<&ViewTable> {
        let Some(Source { table, views, .. }) = self.sources.get(source) else {
            let expected = format!("there are {} sources", self.sources.len());
            return Err(Error::value("", "source", source as i128, expected));
        };
        let table = views.get_or_init(|| ViewTable::new(&self.geometries(source), table));
        table.as_ref().map_err(Clone::clone)
    }

    /// Views of the local and of the remote side, to prepare once for a source.
    pub fn views(&self, source: usize) -> Result<(&[View], &[View])> {
        let table = self.view_table(source)?;
        Ok((&table.local, &table.remote))
    }
}

/// Compares the local side with every source. A layer that any source has is not missing.
fn find(local: &Geometry, remotes: &[Arc<Geometry>]) -> Result<Vec<(usize, Finding)>> {
    let layers = remotes.iter().flat_map(|remote| &remote.layers);
    let anywhere: HashSet<&str> = layers.map(|layer| layer.name.as_str()).collect();
    let mut findings = Vec::new();
    let mut without_common_layer = 0;
    for (source, remote) in remotes.iter().enumerate() {
        let mut found = compare(local, remote);
        if let Some(index) = found.iter().position(|finding| finding.code == "no-common-layer") {
            without_common_layer += 1;
            // A pipeline stage may lack all layers of this rank, unless all sources do.
            if without_common_layer < remotes.len() {
                found.remove(index);
            }
        }
        refuse_errors(&found)?;
        found.retain(|finding| {
            let elsewhere = finding.place.layer.as_deref().is_some_and(|layer| anywhere.contains(layer));
            finding.code != "one-sided-layer" || finding.local == "absent" || !elsewhere
        });
        findings.extend(found.into_iter().map(|finding| (source, finding)));
    }
    Ok(findings)
}

/// The table of each source; `assignments` has one list for each local layer.
fn tables(local: &Geometry, sources: &[&Geometry], assignments: Vec<Vec<Assignment>>) -> Vec<Table> {
    let mut by_source: Vec<BTreeMap<(usize, usize), GroupPair>> = sources.iter().map(|_| BTreeMap::new()).collect();
    for (layer, of_layer) in assignments.into_iter().enumerate() {
        let mut slices: BTreeMap<(usize, usize), Vec<PartSlice>> = BTreeMap::new();
        for Assignment { source, remote_layer, slice } in of_layer {
            slices.entry((source, remote_layer)).or_default().push(slice);
        }
        for ((source, remote_layer), slices) in slices {
            let remote = sources[source];
            let groups = (local.layers[layer].group, remote.layers[remote_layer].group);
            let group_pair = by_source[source].entry(groups).or_insert_with(|| GroupPair::new(groups.0, groups.1));
            let layers = LayerIndices { local: layer, remote: remote_layer };
            group_pair.add(&Geometries { local, remote }, layers, slices);
        }
    }
    let table = |(pairs, &remote): (BTreeMap<_, GroupPair>, &&Geometry)| {
        Table::new(pairs.into_values().collect(), &Geometries { local, remote }, num_tables(sources))
    };
    by_source.into_iter().zip(sources).map(table).collect()
}

/// One table for each source, one for all local layers, and one for layers without a source.
fn num_tables(sources: &[&Geometry]) -> usize {
    sources.len() + 2
}

/// Some of the local layers, paired with themselves: one of several tables.
fn self_table(local: &Geometry, num_tables: usize, is_wanted: impl Fn(usize) -> bool) -> Table {
    let geometries = Geometries { local, remote: local };
    let mut pairs: BTreeMap<usize, GroupPair> = BTreeMap::new();
    for (index, layer) in local.layers.iter().enumerate().filter(|(index, _)| is_wanted(*index)) {
        let parts = local.page(layer).parts.iter().enumerate();
        let slices =
            parts.map(|(part, value)| PartSlice { local_part: part, remote_part: part, ranges: value.shard() });
        let pair = pairs.entry(layer.group).or_insert_with(|| GroupPair::new(layer.group, layer.group));
        pair.add(&geometries, LayerIndices { local: index, remote: index }, slices.collect());
    }
    Table::new(pairs.into_values().collect(), &geometries, num_tables)
}
