// SPDX-License-Identifier: Apache-2.0
//! What one local group reads from one group of another geometry, block by block.
use crate::bytes::pieces::{Cutout, PageBases, Piece, TokenCut, count_pieces, join_neighbours, part_pieces};
use crate::error::{Error, Result};
use crate::finding::Place;
use crate::geometry::ranges::Interval;
use crate::geometry::types::{Geometry, KernelBlockId, Layer, Part};
use crate::pairing::cuts::whole_block_cuts;
use crate::pairing::most_pieces::{MostPieces, SPARE_PIECES, split_unit};

/// Cuts of whole kernel blocks kept with a plan; rarer ones are computed for each request.
const MAX_CUTS: usize = 4096;

/// Pieces of the blocks of one plan. Conv states of a large model laid out the other way round have about a million.
pub(crate) const MAX_PIECES: u64 = 1 << 21;

/// Pieces that may still be made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PieceBudget {
    all: u64,
    /// Those that no engine's layout explains.
    spare: u64,
}

impl PieceBudget {
    pub(crate) const PLAN: Self = Self { all: MAX_PIECES, spare: SPARE_PIECES };
}

/// Where the blocks of some layers are.
///
/// ```text
/// page of kernel block id = page of block 0 + id / n * block + id % n * kernel        n kernel blocks per block
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockStrides {
    pub(crate) region: u16,
    block: u64,
    kernel: u64,
    pub(crate) kernel_blocks_per_block: u64,
}

impl BlockStrides {
    fn of(geometry: &Geometry, layer: &Layer) -> Self {
        Self {
            // The check allows fewer regions than that.
            region: layer.region as u16,
            block: layer.block_stride,
            kernel: layer.kernel_stride,
            kernel_blocks_per_block: geometry.group(layer).kernel_blocks_per_block,
        }
    }

    /// Whether kernel blocks are evenly spaced over all logical blocks.
    pub(crate) fn is_even(self) -> bool {
        let blocks = self.kernel_blocks_per_block;
        blocks == 1 || self.kernel.checked_mul(blocks) == Some(self.block)
    }

    /// Bytes from kernel block 0 to another one.
    pub(crate) fn offset(self, block: KernelBlockId) -> u64 {
        let (id, blocks) = (block.0, self.kernel_blocks_per_block);
        id / blocks * self.block + id % blocks * self.kernel
    }

    /// Bytes between kernel blocks, when they are evenly spaced.
    pub(crate) fn step(self) -> u64 {
        if self.kernel_blocks_per_block == 1 { self.block } else { self.kernel }
    }
}

/// Where the blocks of some layers are on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StridePair {
    pub(crate) local: BlockStrides,
    pub(crate) remote: BlockStrides,
}

/// A piece of block 0, repeated in every block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CopyTemplate {
    pub(crate) piece: Piece,
    pub(crate) strides: StridePair,
}

impl CopyTemplate {
    /// Whether kernel blocks are evenly spaced on both sides.
    pub(crate) fn is_even(&self) -> bool {
        self.strides.local.is_even() && self.strides.remote.is_even()
    }

    /// Whether the pieces of neighbouring blocks touch on both sides.
    pub(crate) fn is_dense(&self) -> bool {
        let len = self.piece.len;
        self.is_even() && self.strides.local.step() == len && self.strides.remote.step() == len
    }
}

/// One part of a layer, and what of it is read: indices into the parts of both pages, and a range of each axis of the
/// local part.
#[derive(Debug)]
pub(crate) struct PartSlice {
    pub(crate) local_part: usize,
    pub(crate) remote_part: usize,
    pub(crate) ranges: Vec<Interval>,
}

/// Indices of a layer on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LayerIndices {
    pub(crate) local: usize,
    pub(crate) remote: usize,
}

/// A layer of both sides, and what is read of it.
#[derive(Debug)]
pub(crate) struct LayerPair {
    pub(crate) layers: LayerIndices,
    pub(crate) slices: Vec<PartSlice>,
    bases: PageBases,
    /// Index into the strides of the groups.
    strides: usize,
}

/// A local geometry and one that is read from.
pub(crate) struct Geometries<'a> {
    pub(crate) local: &'a Geometry,
    pub(crate) remote: &'a Geometry,
}

impl<'a> Geometries<'a> {
    /// A part on both sides.
    pub(crate) fn parts(&self, layers: LayerIndices, slice: &PartSlice) -> (&'a Part, &'a Part) {
        let part =
            |geometry: &'a Geometry, layer: usize, part: usize| &geometry.page(&geometry.layers[layer]).parts[part];
        (part(self.local, layers.local, slice.local_part), part(self.remote, layers.remote, slice.remote_part))
    }
}

/// A cut of whole kernel blocks, and how many pieces a block has then.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeptCut {
    pub(crate) cut: TokenCut,
    pub(crate) pieces: u64,
}

/// What one local group reads from one group of another geometry.
#[derive(Debug)]
pub(crate) struct GroupPair {
    pub(crate) local_group: usize,
    pub(crate) remote_group: usize,
    pub(crate) layers: Vec<LayerPair>,
    strides: Vec<StridePair>,
    /// Cuts that whole kernel blocks make of each other, sorted.
    pub(crate) cuts: Vec<KeptCut>,
    /// Bytes of one token.
    pub(crate) token_bytes: u64,
    pub(crate) most_pieces: MostPieces,
    /// Parts of all layers.
    pub(crate) num_slices: u64,
}

impl GroupPair {
    pub(crate) fn new(local_group: usize, remote_group: usize) -> Self {
        Self {
            local_group,
            remote_group,
            layers: vec![],
            strides: vec![],
            cuts: vec![],
            token_bytes: 0,
            most_pieces: MostPieces::default(),
            num_slices: 0,
        }
    }

    /// Adds what is read of a layer.
    pub(crate) fn add(&mut self, geometries: &Geometries, layers: LayerIndices, slices: Vec<PartSlice>) {
        let Geometries { local, remote } = geometries;
        let (local_layer, remote_layer) = (&local.layers[layers.local], &remote.layers[layers.remote]);
        let strides =
            StridePair { local: BlockStrides::of(local, local_layer), remote: BlockStrides::of(remote, remote_layer) };
        let index = self.strides.iter().position(|&known| known == strides).unwrap_or_else(|| {
            self.strides.push(strides);
            self.strides.len() - 1
        });
        for slice in &slices {
            let (part, _) = geometries.parts(layers, slice);
            self.most_pieces = self.most_pieces.and(MostPieces::of(part, &slice.ranges));
            self.num_slices += 1;
            if part.tokens().is_some() {
                let items = slice.ranges.iter().map(|range| range.len());
                // Layers that alias can add up to more than there is memory; nothing can be moved into them then.
                let bytes = items.fold(part.item_bytes, u64::saturating_mul);
                self.token_bytes = self.token_bytes.saturating_add(bytes);
            }
        }
        let bases = PageBases { local: local.first_page(local_layer), remote: remote.first_page(remote_layer) };
        self.layers.push(LayerPair { layers, slices, bases, strides: index });
    }

    /// Finds the cuts of whole blocks and takes their pieces off the `left` that may still be made; `add` is called with
    /// the index of each cut and its templates.
    pub(crate) fn cut_whole_blocks(
        &mut self,
        geometries: &Geometries,
        left: &mut PieceBudget,
        mut add: impl FnMut(usize, &mut dyn Iterator<Item = CopyTemplate>),
    ) -> Result<()> {
        let (local, remote) =
            (&geometries.local.groups[self.local_group], &geometries.remote.groups[self.remote_group]);
        let cuts = if local.kind.is_attention() {
            whole_block_cuts(local, remote, MAX_CUTS)
        } else {
            Some(vec![TokenCut::STATE])
        };
        let Some(cuts) = cuts else {
            // Every cut of a request will be within this one.
            let count = local.kernel_tokens().min(remote.kernel_tokens());
            return self.count_unjoined(geometries, TokenCut { local: 0, remote: 0, count }, left).map(drop);
        };
        for (index, cut) in cuts.into_iter().enumerate() {
            self.count_unjoined(geometries, cut, left)?;
            let joined = self.joined_pieces(geometries, cut);
            let pieces = joined.iter().map(|(_, pieces)| pieces.len() as u64).sum();
            self.cuts.push(KeptCut { cut, pieces });
            add(index, &mut templates_of(joined));
        }
        Ok(())
    }

    /// Number of pieces of a block for one cut before they are joined, taken off those that are left; fails if these do
    /// not suffice.
    pub(crate) fn count_unjoined(&self, geometries: &Geometries, cut: TokenCut, left: &mut PieceBudget) -> Result<u64> {
        let mut pieces = 0u64;
        for LayerPair { layers, slices, .. } in &self.layers {
            for slice in slices {
                let (local, remote) = geometries.parts(*layers, slice);
                let cutout = Cutout { ranges: &slice.ranges, tokens: Some(cut) };
                let of_slice = count_pieces(local, remote, cutout);
                pieces = pieces.saturating_add(of_slice);
                let unexplained = of_slice.saturating_sub(MostPieces::of(local, &slice.ranges).pieces(cut, 1));
                let place = || Place::layer(&geometries.local.layers[layers.local].name).part(&local.name);
                if unexplained > left.spare
                    && let Some((place, strides)) = split_unit(&place(), local, remote)
                {
                    let reason = "every layout of an engine keeps these items together, for each token and head";
                    return Err(Error::unplannable("split-items", place, "stride", strides, reason));
                }
                if pieces > left.all {
                    let numbers = (format!("{pieces} pieces"), format!("at most {}", left.all));
                    let reason = "the bytes of the two sides lie too differently";
                    return Err(Error::unplannable("pieces", place(), "strides", numbers, reason));
                }
                left.spare = left.spare.saturating_sub(unexplained);
            }
        }
        left.all -= pieces;
        Ok(pieces)
    }

    /// Whether the plan keeps the templates of a cut.
    pub(crate) fn keeps(&self, cut: TokenCut) -> bool {
        self.kept(cut).is_some()
    }

    fn kept(&self, cut: TokenCut) -> Option<&KeptCut> {
        self.cuts.binary_search_by_key(&cut, |known| known.cut).ok().map(|index| &self.cuts[index])
    }

    /// Number of pieces of a block for one cut.
    pub(crate) fn pieces(&self, geometries: &Geometries, cut: TokenCut) -> Result<u64> {
        match self.kept(cut) {
            Some(kept) => Ok(kept.pieces),
            None => Ok(self.templates(geometries, cut)?.len() as u64),
        }
    }

    /// Pieces of a block for one cut, joined over parts and layers.
    pub(crate) fn templates(&self, geometries: &Geometries, cut: TokenCut) -> Result<Vec<CopyTemplate>> {
        let mut left = PieceBudget::PLAN;
        self.count_unjoined(geometries, cut, &mut left)?;
        Ok(templates_of(self.joined_pieces(geometries, cut)).collect())
    }

    fn joined_pieces(&self, geometries: &Geometries, cut: TokenCut) -> Vec<(StridePair, Vec<Piece>)> {
        let mut by_strides: Vec<(StridePair, Vec<Piece>)> =
            self.strides.iter().map(|&strides| (strides, Vec::new())).collect();
        for layer in &self.layers {
            for slice in &layer.slices {
                let (local, remote) = geometries.parts(layer.layers, slice);
                // Content that tokens do not cut belongs to the block's first token.
                if local.tokens().is_none() && cut.local > 0 {
                    continue;
                }
                let cutout = Cutout { ranges: &slice.ranges, tokens: Some(cut) };
                part_pieces(local, remote, cutout, layer.bases, &mut by_strides[layer.strides].1);
            }
        }
        for (_, pieces) in &mut by_strides {
            join_neighbours(pieces);
        }
        by_strides
    }
}

fn templates_of(joined: Vec<(StridePair, Vec<Piece>)>) -> impl Iterator<Item = CopyTemplate> {
    joined
        .into_iter()
        .flat_map(|(strides, pieces)| pieces.into_iter().map(move |piece| CopyTemplate { piece, strides }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strides(block: u64, kernel: u64, kernel_blocks_per_block: u64) -> BlockStrides {
        BlockStrides { region: 0, block, kernel, kernel_blocks_per_block }
    }

    #[test]
    fn kernel_blocks_step_inside_of_their_block() {
        // Blocks of 100 bytes with kernel blocks at 0, 30 and 60 of each: kernel block 7 is the second of block 2.
        let uneven = strides(100, 30, 3);
        assert_eq!(uneven.offset(KernelBlockId(7)), 230);
        assert!(!uneven.is_even());
        let even = strides(90, 30, 3);
        assert_eq!(even.offset(KernelBlockId(7)), 7 * even.step());
        assert!(even.is_even());
        assert_eq!(strides(90, 1, 1).step(), 90);
    }
}
