// SPDX-License-Identifier: Apache-2.0
//! What one local group reads from one group of another geometry, and where the blocks of both are.
use crate::bytes::pieces::Piece;
use crate::geometry::ranges::Interval;
use crate::geometry::types::{Geometry, KernelBlockId, Layer, Part};
use crate::pairing::most_pieces::MostPieces;

/// Strides from block to block of some layers.
///
/// ```text
/// page of kernel block id = page of block 0 + id / n * block + id % n * kernel        n kernel blocks per block
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockStrides {
    pub(crate) block: u64,
    kernel: u64,
    pub(crate) kernel_blocks_per_block: u64,
}

impl BlockStrides {
    fn of(geometry: &Geometry, layer: &Layer) -> Self {
        Self {
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

    /// Bytes from kernel block 0 to another kernel block.
    pub(crate) fn offset(self, block: KernelBlockId) -> u64 {
        match (block.0, self.kernel_blocks_per_block) {
            (id, 1) => id * self.block,
            (id, blocks) => id / blocks * self.block + id % blocks * self.kernel,
        }
    }

    /// Bytes between kernel blocks, if they are evenly spaced.
    pub(crate) fn step(self) -> u64 {
        if self.kernel_blocks_per_block == 1 { self.block } else { self.kernel }
    }
}

/// Strides from block to block of some layers on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StridePair {
    pub(crate) local: BlockStrides,
    pub(crate) remote: BlockStrides,
}

impl StridePair {
    pub(crate) fn of(geometries: &Geometries, layers: LayerIndices) -> Self {
        let Geometries { local, remote } = geometries;
        Self {
            local: BlockStrides::of(local, &local.layers[layers.local]),
            remote: BlockStrides::of(remote, &remote.layers[layers.remote]),
        }
    }

    /// Whether kernel blocks are evenly spaced on both sides.
    pub(crate) fn is_even(self) -> bool {
        self.local.is_even() && self.remote.is_even()
    }
}

/// A piece of block 0, repeated in every block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CopyTemplate {
    pub(crate) piece: Piece,
    pub(crate) strides: StridePair,
}

impl CopyTemplate {
    /// Whether the pieces of neighbouring blocks touch on both sides.
    pub(crate) fn is_dense(&self) -> bool {
        let (len, StridePair { local, remote }) = (self.piece.len, self.strides);
        self.strides.is_even() && local.step() == len && remote.step() == len
    }
}

/// One part of a layer, and the slice that is read: indices into the parts of both pages, and a range of each axis of
/// the local part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
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

/// A layer on both sides, and the slices that are read.
#[derive(Debug)]
pub(crate) struct LayerPair {
    pub(crate) layers: LayerIndices,
    pub(crate) slices: Vec<PartSlice>,
}

/// A local geometry and a geometry that it reads from.
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

/// What one local group reads from one group of another geometry.
#[derive(Debug)]
pub(crate) struct GroupPair {
    pub(crate) local_group: usize,
    pub(crate) remote_group: usize,
    pub(crate) layers: Vec<LayerPair>,
    /// Bytes of one token.
    pub(crate) token_bytes: u64,
    pub(crate) most_pieces: MostPieces,
}

impl GroupPair {
    pub(crate) fn new(local_group: usize, remote_group: usize) -> Self {
        let most_pieces = MostPieces::default();
        Self { local_group, remote_group, layers: vec![], token_bytes: 0, most_pieces }
    }

    /// Adds the slices of a layer.
    pub(crate) fn add(&mut self, geometries: &Geometries, layers: LayerIndices, slices: Vec<PartSlice>) {
        for slice in &slices {
            let (part, _) = geometries.parts(layers, slice);
            self.most_pieces = self.most_pieces.and(MostPieces::of(part, &slice.ranges));
            if part.tokens().is_some() {
                let items = slice.ranges.iter().map(|range| range.len());
                // Aliased layers can add up to more bytes than there is memory; then nothing can be moved into them.
                let bytes = items.fold(part.item_bytes, u64::saturating_mul);
                self.token_bytes = self.token_bytes.saturating_add(bytes);
            }
        }
        self.layers.push(LayerPair { layers, slices });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strides(block: u64, kernel: u64, kernel_blocks_per_block: u64) -> BlockStrides {
        BlockStrides { block, kernel, kernel_blocks_per_block }
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
