// SPDX-License-Identifier: Apache-2.0
//! What one local group reads from one group of another geometry, block by block.
use crate::axis::Box;
use crate::error::{Error, Result};
use crate::finding::Place;
use crate::geometry::Geometry;
use crate::pieces::{Chunk, Lane, Tokens, Window, join, part_chunks, part_pieces};
use crate::segment::classes;

/// Cuts of whole kernel blocks kept with a plan; rarer ones are computed for each request.
const MAX_CUTS: usize = 4096;

/// Pieces of the blocks of one plan. Conv states of a large model laid out the other way round have about a million.
pub(crate) const MAX_PIECES: u64 = 1 << 21;

/// The only cut of blocks that hold no tokens.
pub(crate) const STATE: Tokens = Tokens { local: 0, remote: 0, count: 1 };

/// Where the blocks of some layers are: regions and strides on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Family {
    pub(crate) local: Strides,
    pub(crate) remote: Strides,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Strides {
    pub(crate) region: u16,
    pub(crate) block: u64,
    pub(crate) kernel: u64,
    pub(crate) ratio: u64,
}

impl Strides {
    fn of(geometry: &Geometry, layer: usize) -> Self {
        let layer = &geometry.layers[layer];
        Self {
            // The check allows fewer regions than that.
            region: layer.region as u16,
            block: layer.block_stride,
            kernel: layer.kernel_stride.unwrap_or(layer.block_stride),
            ratio: geometry.groups[layer.group].ratio,
        }
    }

    /// Whether kernel blocks are evenly spaced over all logical blocks.
    pub(crate) fn linear(self) -> bool {
        self.ratio == 1 || self.kernel.checked_mul(self.ratio) == Some(self.block)
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    pub(crate) chunk: Chunk,
    pub(crate) family: Family,
}

/// One part of a layer, and what of it is read.
#[derive(Debug)]
pub(crate) struct LanePart {
    pub(crate) local: usize,
    pub(crate) remote: usize,
    pub(crate) ranges: Box,
}

#[derive(Debug)]
struct LayerLane {
    family: usize,
    lane: Lane,
    layers: (usize, usize),
    parts: Vec<LanePart>,
}

/// What one local group reads from one group of another geometry.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) local_group: usize,
    pub(crate) remote_group: usize,
    families: Vec<Family>,
    lanes: Vec<LayerLane>,
    /// Cuts that whole kernel blocks make of each other, sorted, with their number of pieces.
    pub(crate) cuts: Vec<(Tokens, u64)>,
    /// Bytes of one token.
    pub(crate) token_bytes: u64,
}

impl Link {
    pub(crate) fn new(local_group: usize, remote_group: usize) -> Self {
        Self { local_group, remote_group, families: vec![], lanes: vec![], cuts: vec![], token_bytes: 0 }
    }

    pub(crate) fn add(&mut self, local: &Geometry, remote: &Geometry, layers: (usize, usize), parts: Vec<LanePart>) {
        let family = Family { local: Strides::of(local, layers.0), remote: Strides::of(remote, layers.1) };
        let index = self.families.iter().position(|&known| known == family).unwrap_or_else(|| {
            self.families.push(family);
            self.families.len() - 1
        });
        let page = local.page(&local.layers[layers.0]);
        for share in &parts {
            let part = &page.parts[share.local];
            if part.tokens().is_some() {
                let items = share.ranges.iter().map(|range| range.1 - range.0);
                // Layers that alias can add up to more than there is memory; nothing can be moved into them then.
                let bytes = items.fold(part.item_bytes, u64::saturating_mul);
                self.token_bytes = self.token_bytes.saturating_add(bytes);
            }
        }
        let address = |geometry: &Geometry, layer: usize| {
            let layer = &geometry.layers[layer];
            geometry.regions[layer.region].base + layer.offset
        };
        let lane = Lane { local: address(local, layers.0), remote: address(remote, layers.1) };
        self.lanes.push(LayerLane { family: index, lane, layers, parts });
    }

    /// Finds the cuts of whole blocks and returns the pieces of each; takes them off the `left` that may still be made.
    pub(crate) fn cut_whole_blocks(
        &mut self,
        local: &Geometry,
        remote: &Geometry,
        left: &mut u64,
    ) -> Result<Vec<Vec<Row>>> {
        let (mine, theirs) = (&local.groups[self.local_group], &remote.groups[self.remote_group]);
        let attention = mine.kind.is_attention();
        let mut cuts = if attention { classes(mine, theirs, MAX_CUTS).unwrap_or_default() } else { vec![STATE] };
        cuts.sort_unstable();
        let mut rows = Vec::with_capacity(cuts.len());
        for &cut in &cuts {
            *left = left.saturating_sub(self.finest(local, remote, cut, *left)?);
            rows.push(self.rows(local, remote, cut)?);
        }
        self.cuts = cuts.into_iter().zip(rows.iter().map(|rows| rows.len() as u64)).collect();
        Ok(rows)
    }

    /// Number of pieces of a block for one cut before they are joined; fails if that is more than `limit`.
    fn finest(&self, local: &Geometry, remote: &Geometry, cut: Tokens, limit: u64) -> Result<u64> {
        let mut pieces = 0u64;
        for lane in &self.lanes {
            let layer = &local.layers[lane.layers.0];
            let (page, other) = (local.page(layer), remote.page(&remote.layers[lane.layers.1]));
            for share in &lane.parts {
                let window = Window { ranges: &share.ranges, tokens: Some(cut) };
                let part = part_pieces(&page.parts[share.local], &other.parts[share.remote], window);
                pieces = pieces.saturating_add(part);
                if pieces > limit {
                    return Err(Error::unplannable(
                        "pieces",
                        Place::layer(&layer.name).part(&page.parts[share.local].name),
                        "strides",
                        (format!("{pieces} pieces"), format!("at most {limit}")),
                        "the bytes of the two sides lie too differently",
                    ));
                }
            }
        }
        Ok(pieces)
    }

    /// Layers of both sides.
    pub(crate) fn layers(&self) -> Vec<(usize, usize)> {
        self.lanes.iter().map(|lane| lane.layers).collect()
    }

    /// Parts that are read of each pair of layers.
    pub(crate) fn parts(&self) -> impl Iterator<Item = ((usize, usize), &[LanePart])> {
        self.lanes.iter().map(|lane| (lane.layers, lane.parts.as_slice()))
    }

    /// Index of a cut that the plan keeps.
    pub(crate) fn kept(&self, cut: Tokens) -> Option<usize> {
        self.cuts.binary_search_by_key(&cut, |known| known.0).ok()
    }

    /// Number of pieces of a block for one cut.
    pub(crate) fn pieces(&self, local: &Geometry, remote: &Geometry, cut: Tokens) -> Result<u64> {
        match self.kept(cut) {
            Some(index) => Ok(self.cuts[index].1),
            None => Ok(self.rows(local, remote, cut)?.len() as u64),
        }
    }

    /// Pieces of a block for one cut, joined over parts and layers.
    pub(crate) fn rows(&self, local: &Geometry, remote: &Geometry, cut: Tokens) -> Result<Vec<Row>> {
        self.finest(local, remote, cut, MAX_PIECES)?;
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
                let window = Window { ranges: &share.ranges, tokens: Some(cut) };
                part_chunks(part, &other.parts[share.remote], window, lane.lane, &mut by_family[lane.family]);
            }
        }
        let mut rows = Vec::new();
        for (family, mut chunks) in by_family.into_iter().enumerate() {
            join(&mut chunks);
            rows.extend(chunks.into_iter().map(|chunk| Row { chunk, family: self.families[family] }));
        }
        Ok(rows)
    }
}
