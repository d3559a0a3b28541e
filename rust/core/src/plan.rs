// SPDX-License-Identifier: Apache-2.0
//! Everything about a local rank and its sources that does not depend on a request.
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crate::encode::ViewTable;
use crate::error::{Error, Result};
use crate::geometry::{Geometry, Group};
use crate::pieces::{Chunk, Lane, Tokens, Window, join, part_chunks, shard};
use crate::segment::classes;
use crate::source::{Share, assign};
use crate::validate::{Finding, refuse_errors, validate};

/// Cuts of whole kernel blocks kept with the plan; rarer ones are computed for each request.
const MAX_CLASSES: usize = 4096;

/// Where the blocks of some lanes are: regions and strides on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Family {
    pub(crate) local: Strides,
    pub(crate) remote: Strides,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Strides {
    pub(crate) region: u32,
    pub(crate) block: u64,
    pub(crate) kernel: u64,
    pub(crate) ratio: u64,
}

impl Strides {
    /// Whether kernel blocks are evenly spaced over all logical blocks.
    pub(crate) fn linear(self) -> bool {
        self.ratio == 1 || self.block == self.kernel * self.ratio
    }

    /// Bytes from kernel block 0 to kernel block `id`.
    pub(crate) fn offset(self, id: u64) -> u64 {
        id / self.ratio * self.block + id % self.ratio * self.kernel
    }

    /// Bytes between kernel blocks, when they are evenly spaced.
    pub(crate) fn step(self) -> u64 {
        if self.ratio == 1 { self.block } else { self.kernel }
    }
}

/// A piece of block 0, repeated in every block of its family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) family: usize,
    pub(crate) chunk: Chunk,
}

struct LanePart {
    local: usize,
    remote: usize,
    ranges: crate::axis::Box,
}

struct LayerLane {
    family: usize,
    lane: Lane,
    layers: (usize, usize),
    parts: Vec<LanePart>,
}

/// What one local group reads from one group of one source.
pub(crate) struct Link {
    pub(crate) source: usize,
    pub(crate) local_group: usize,
    pub(crate) remote_group: usize,
    pub(crate) families: Vec<Family>,
    lanes: Vec<LayerLane>,
    /// Pieces of each cut that whole kernel blocks make, sorted by cut.
    pub(crate) classes: Vec<(Tokens, Vec<Row>)>,
}

/// The only cut of state blocks.
pub(crate) const STATE: Tokens = Tokens { local: 0, remote: 0, count: 1 };

impl Link {
    fn new(
        local: &Geometry,
        remote: &Geometry,
        source: usize,
        groups: (usize, usize),
        lanes: Vec<LayerLane>,
        families: Vec<Family>,
    ) -> Self {
        let mut link = Self { source, local_group: groups.0, remote_group: groups.1, families, lanes, classes: vec![] };
        let (mine, theirs) = (&local.groups[groups.0], &remote.groups[groups.1]);
        let cuts =
            if mine.kind.is_attention() { classes(mine, theirs, MAX_CLASSES).unwrap_or_default() } else { vec![STATE] };
        let mut classes: Vec<_> = cuts.into_iter().map(|cut| (cut, link.rows(local, remote, cut))).collect();
        classes.sort_by_key(|class| class.0);
        link.classes = classes;
        link
    }

    /// Pieces of a block for one cut, joined over parts and layers.
    pub(crate) fn rows(&self, local: &Geometry, remote: &Geometry, cut: Tokens) -> Vec<Row> {
        let mut by_family: Vec<Vec<Chunk>> = vec![Vec::new(); self.families.len()];
        for lane in &self.lanes {
            let page = local.page(&local.layers[lane.layers.0]);
            let other = remote.page(&remote.layers[lane.layers.1]);
            for share in &lane.parts {
                let part = &page.parts[share.local];
                // Content that tokens do not cut belongs to the block's first token.
                if part.tokens().is_none() && cut.local > 0 {
                    continue;
                }
                let window = Window { ranges: share.ranges.clone(), tokens: Some(cut) };
                part_chunks(part, &other.parts[share.remote], &window, lane.lane, &mut by_family[lane.family]);
            }
        }
        let mut rows = Vec::new();
        for (family, mut chunks) in by_family.into_iter().enumerate() {
            join(&mut chunks);
            rows.extend(chunks.into_iter().map(|chunk| Row { family, chunk }));
        }
        rows
    }

    /// Kept pieces of a cut.
    pub(crate) fn class(&self, cut: Tokens) -> Option<usize> {
        self.classes.binary_search_by_key(&cut, |class| class.0).ok()
    }
}

/// What a local rank reads from its sources, whatever the request.
pub struct Plan {
    pub(crate) local: Arc<Geometry>,
    pub(crate) remotes: Vec<Arc<Geometry>>,
    pub(crate) links: Vec<Link>,
    /// For each local group: all its layers paired with themselves, to find bytes that are zeroed.
    pub(crate) own: Vec<Link>,
    /// The same for layers that no source has.
    pub(crate) orphans: Vec<Link>,
    pub(crate) local_blocks: Vec<u64>,
    pub(crate) remote_blocks: Vec<Vec<u64>>,
    pub(crate) descriptor_bytes: u64,
    pub(crate) views: Vec<OnceLock<Result<ViewTable>>>,
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
        let findings = find(&local, &remotes)?;
        let sources: Vec<&Geometry> = remotes.iter().map(AsRef::as_ref).collect();
        let shares = assign(&local, &sources)?;
        let links = link(&local, &sources, &shares);
        let whole = |only_orphans: bool| self_links(&local, &shares, only_orphans);
        Ok(Self {
            own: whole(false),
            orphans: whole(true),
            links,
            local_blocks: local.blocks_by_group(),
            remote_blocks: remotes.iter().map(|remote| remote.blocks_by_group()).collect(),
            views: remotes.iter().map(|_| OnceLock::new()).collect(),
            local,
            remotes,
            descriptor_bytes,
            findings,
        })
    }

    /// Warnings, each with the index of the source it is about.
    pub fn findings(&self) -> &[(usize, Finding)] {
        &self.findings
    }

    /// The local geometry.
    pub fn local(&self) -> &Geometry {
        &self.local
    }

    /// Geometries of the sources.
    pub fn remotes(&self) -> impl ExactSizeIterator<Item = &Geometry> {
        self.remotes.iter().map(AsRef::as_ref)
    }

    /// Indices of the sources that something is read from.
    pub fn sources(&self) -> Vec<usize> {
        let mut sources: Vec<usize> = self.links.iter().map(|link| link.source).collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }

    pub(crate) fn local_group(&self, link: &Link) -> &Group {
        &self.local.groups[link.local_group]
    }
}

/// Compares the local side with every source. A layer that some source has is not missing.
fn find(local: &Geometry, remotes: &[Arc<Geometry>]) -> Result<Vec<(usize, Finding)>> {
    let mut findings = Vec::new();
    let mut common = false;
    for (source, remote) in remotes.iter().enumerate() {
        let mut found = validate(local, remote);
        let before = found.len();
        found.retain(|finding| finding.code != "no-common-layer");
        common |= found.len() == before;
        refuse_errors(&found)?;
        found.retain(|finding| {
            finding.code != "one-sided-layer"
                || finding.local == "absent"
                || !remotes
                    .iter()
                    .any(|other| other.layers.iter().any(|layer| finding.place == format!("layer {:?}", layer.name)))
        });
        findings.extend(found.into_iter().map(|finding| (source, finding)));
    }
    if !common {
        refuse_errors(&validate(local, &remotes[0]))?;
    }
    Ok(findings)
}

fn strides(geometry: &Geometry, layer: usize) -> Strides {
    let layer = &geometry.layers[layer];
    Strides {
        // The check bounds the number of regions.
        region: layer.region as u32,
        block: layer.block_stride,
        kernel: layer.kernel_stride.unwrap_or(layer.block_stride),
        ratio: geometry.groups[layer.group].ratio,
    }
}

fn page_address(geometry: &Geometry, layer: usize) -> u64 {
    let layer = &geometry.layers[layer];
    geometry.regions[layer.region].base + layer.offset
}

/// Lanes of a link under construction, families numbered as they appear.
#[derive(Default)]
struct Lanes {
    families: Vec<Family>,
    lanes: Vec<LayerLane>,
}

impl Lanes {
    fn add(&mut self, local: &Geometry, remote: &Geometry, layers: (usize, usize), parts: Vec<LanePart>) {
        let family = Family { local: strides(local, layers.0), remote: strides(remote, layers.1) };
        let index = self.families.iter().position(|&known| known == family).unwrap_or_else(|| {
            self.families.push(family);
            self.families.len() - 1
        });
        let lane = Lane { local: page_address(local, layers.0), remote: page_address(remote, layers.1) };
        self.lanes.push(LayerLane { family: index, lane, layers, parts });
    }
}

fn link(local: &Geometry, sources: &[&Geometry], shares: &[Vec<Share>]) -> Vec<Link> {
    let mut building: BTreeMap<(usize, usize, usize), Lanes> = BTreeMap::new();
    for (layer, shares) in shares.iter().enumerate() {
        let mut by_source: BTreeMap<(usize, usize), Vec<LanePart>> = BTreeMap::new();
        for share in shares {
            let part = LanePart { local: share.parts.0, remote: share.parts.1, ranges: share.ranges.clone() };
            by_source.entry((share.source, share.layer)).or_default().push(part);
        }
        for ((source, other), parts) in by_source {
            let remote = sources[source];
            let key = (source, local.layers[layer].group, remote.layers[other].group);
            building.entry(key).or_default().add(local, remote, (layer, other), parts);
        }
    }
    building
        .into_iter()
        .map(|((source, mine, theirs), Lanes { families, lanes })| {
            Link::new(local, sources[source], source, (mine, theirs), lanes, families)
        })
        .collect()
}

/// Every local layer, or only those without a source, paired with itself.
fn self_links(local: &Geometry, shares: &[Vec<Share>], only_orphans: bool) -> Vec<Link> {
    let mut building: BTreeMap<usize, Lanes> = BTreeMap::new();
    for (index, layer) in local.layers.iter().enumerate() {
        if only_orphans && !shares[index].is_empty() {
            continue;
        }
        let parts = local.page(layer).parts.iter().enumerate();
        let parts = parts.map(|(part, value)| LanePart { local: part, remote: part, ranges: shard(value) }).collect();
        building.entry(layer.group).or_default().add(local, local, (index, index), parts);
    }
    building
        .into_iter()
        .map(|(group, Lanes { families, lanes })| Link::new(local, local, 0, (group, group), lanes, families))
        .collect()
}
