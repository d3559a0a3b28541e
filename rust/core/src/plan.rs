// SPDX-License-Identifier: Apache-2.0
//! Everything about a local rank and its sources that does not depend on a request.
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, OnceLock};

use crate::alias;
use crate::encode::ViewTable;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::geometry::Geometry;
use crate::link::{LanePart, Link, MAX_PIECES};
use crate::pieces::shard;
use crate::settle::settle;
use crate::source::{Share, assign};
use crate::span::Blocks;
use crate::table::Table;
use crate::validate::{compare, refuse_errors};

/// A geometry that is read from.
pub(crate) struct Source {
    pub(crate) geometry: Arc<Geometry>,
    pub(crate) table: Table,
    pub(crate) num_blocks: Vec<u64>,
    pub(crate) views: OnceLock<Result<ViewTable>>,
}

/// What a local rank reads from its sources, whatever the request.
pub struct Plan {
    pub(crate) local: Arc<Geometry>,
    pub(crate) num_blocks: Vec<u64>,
    pub(crate) sources: Vec<Source>,
    /// All local layers paired with themselves, to find bytes that are zeroed.
    pub(crate) own: Table,
    /// The same for layers that no source has.
    pub(crate) orphans: Table,
    pub(crate) descriptor_bytes: u64,
    /// Which local groups share memory, if the layout says.
    classes: Option<Vec<usize>>,
    findings: Vec<(usize, Finding)>,
}

impl Plan {
    /// Pairs a local rank with its sources.
    ///
    /// A partial last block is moved whole when that costs less than `descriptor_bytes` for each descriptor saved.
    /// Fails with the first reason why a source cannot be paired, or why an item has no source.
    pub fn new(local: Arc<Geometry>, remotes: Vec<Arc<Geometry>>, descriptor_bytes: u64) -> Result<Self> {
        if remotes.is_empty() {
            return Err(Error::Count { what: "remote geometries", got: 0, expected: 1 });
        }
        let mut all = vec![local];
        all.extend(remotes);
        let settled = settle(&all.iter().map(AsRef::as_ref).collect::<Vec<_>>());
        let mut all: Vec<_> = settled.into_iter().zip(all).map(|(new, old)| new.map_or(old, Arc::new)).collect();
        let remotes = all.split_off(1);
        let local = all.swap_remove(0);
        let findings = find(&local, &remotes)?;
        let geometries: Vec<&Geometry> = remotes.iter().map(AsRef::as_ref).collect();
        let shares = assign(&local, &geometries)?;
        let tables = tables(&local, &geometries, &shares)?;
        let sources = remotes
            .into_iter()
            .zip(tables)
            .map(|(geometry, table)| Source {
                num_blocks: geometry.blocks_by_group(),
                views: OnceLock::new(),
                geometry,
                table,
            })
            .collect();
        let own = own_table(&local, |_| true)?;
        let orphans = own_table(&local, |layer| shares[layer].is_empty())?;
        let (num_blocks, classes) = (local.blocks_by_group(), alias::classes(&local));
        Ok(Self { local, num_blocks, sources, own, orphans, descriptor_bytes, classes, findings })
    }

    /// Warnings, each with the index of the source it is about.
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

    /// Number of sources, read from or not.
    pub fn num_sources(&self) -> usize {
        self.sources.len()
    }

    /// Whether a request's blocks alone prove that it writes no byte twice: a layer's items, tokens and blocks are
    /// assigned once, so only two groups with a block in common could.
    pub(crate) fn surely_distinct(&self, blocks: &[Blocks]) -> bool {
        self.classes.as_ref().is_some_and(|classes| alias::distinct(classes, blocks))
    }

    /// Indices of the sources that something is read from.
    pub fn sources(&self) -> Vec<usize> {
        (0..self.sources.len()).filter(|&source| !self.sources[source].table.links.is_empty()).collect()
    }
}

/// Compares the local side with every source. A layer that some source has is not missing.
fn find(local: &Geometry, remotes: &[Arc<Geometry>]) -> Result<Vec<(usize, Finding)>> {
    let layers = remotes.iter().flat_map(|remote| &remote.layers);
    let anywhere: HashSet<&str> = layers.map(|layer| layer.name.as_str()).collect();
    let mut findings = Vec::new();
    let mut apart = 0;
    for (source, remote) in remotes.iter().enumerate() {
        let mut found = compare(local, remote);
        if let Some(index) = found.iter().position(|finding| finding.code == "no-common-layer") {
            apart += 1;
            // A pipeline stage without a layer of ours is nothing to complain of, unless all sources are.
            if apart < remotes.len() {
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

fn tables(local: &Geometry, sources: &[&Geometry], shares: &[Vec<Share>]) -> Result<Vec<Table>> {
    let mut building: Vec<BTreeMap<(usize, usize), Link>> = sources.iter().map(|_| BTreeMap::new()).collect();
    for (layer, shares) in shares.iter().enumerate() {
        let mut by_source: BTreeMap<(usize, usize), Vec<LanePart>> = BTreeMap::new();
        for share in shares {
            let part = LanePart { local: share.parts.0, remote: share.parts.1, ranges: share.ranges.clone() };
            by_source.entry((share.source, share.layer)).or_default().push(part);
        }
        for ((source, other), parts) in by_source {
            let groups = (local.layers[layer].group, sources[source].layers[other].group);
            let link = building[source].entry(groups).or_insert_with(|| Link::new(groups.0, groups.1));
            link.add(local, sources[source], (layer, other), parts);
        }
    }
    let mut left = MAX_PIECES;
    building
        .into_iter()
        .zip(sources)
        .map(|(links, source)| Table::new(links.into_values().collect(), local, source, &mut left))
        .collect()
}

/// Some of the local layers, paired with themselves.
fn own_table(local: &Geometry, wanted: impl Fn(usize) -> bool) -> Result<Table> {
    let mut links: BTreeMap<usize, Link> = BTreeMap::new();
    for (index, layer) in local.layers.iter().enumerate().filter(|(index, _)| wanted(*index)) {
        let parts = local.page(layer).parts.iter().enumerate();
        let parts = parts.map(|(part, value)| LanePart { local: part, remote: part, ranges: shard(value) }).collect();
        let link = links.entry(layer.group).or_insert_with(|| Link::new(layer.group, layer.group));
        link.add(local, local, (index, index), parts);
    }
    let mut left = MAX_PIECES;
    Table::new(links.into_values().collect(), local, local, &mut left)
}
