// SPDX-License-Identifier: Apache-2.0
//! Which groups share memory. In simple layouts, block ids then tell whether two copies can overlap.
use crate::geometry::types::{BlockId, Geometry, Layer};

/// Limit of distinct places that are compared with each other.
const MAX_PLACES: usize = 512;

/// Where the blocks of one or more layers are: `count` blocks, `stride` bytes from start to start, none longer than
/// `stride`.
#[derive(PartialEq, Eq, Clone, Copy)]
struct LayerBlocks {
    start: u64,
    stride: u64,
    length: u64,
    count: u64,
}

impl LayerBlocks {
    /// Where a layer's blocks are; None if two blocks could share a byte.
    fn of(geometry: &Geometry, layer: &Layer) -> Option<Self> {
        let ratio = geometry.group(layer).kernel_blocks_per_block;
        let page = geometry.page(layer).end();
        let length = (ratio - 1) * layer.kernel_stride + page;
        if length > layer.block_stride || (ratio > 1 && page > layer.kernel_stride) {
            return None;
        }
        let start = geometry.first_page(layer);
        Some(Self { start, stride: layer.block_stride, length, count: layer.num_blocks })
    }

    fn end(self) -> u64 {
        // Two joined layers may extend beyond the address space; such a place is only compared, never used.
        let last = (self.count - 1).saturating_mul(self.stride).saturating_add(self.start);
        last.saturating_add(self.length)
    }

    /// Whether the blocks begin where those of another place begin.
    fn begins_like(self, other: Self) -> bool {
        self.start == other.start && self.stride == other.stride
    }

    /// A place that covers two places with the same start and stride.
    fn joined(self, other: Self) -> Self {
        Self { length: self.length.max(other.length), count: self.count.max(other.count), ..self }
    }

    /// Whether no block of `self` can share a byte with a block of `other`. Either one place ends before the other
    /// begins. Or they are interleaved with equal strides, as in block-major orders, and each uses a separate part of
    /// the stride.
    ///
    /// ```text
    /// low    |##--------|##--------|##--------|      length 2, stride 10
    /// high   |----###---|----###---|----###---|      gap 4, length 3
    /// ```
    fn is_disjoint(self, other: Self) -> bool {
        if self.end() <= other.start || other.end() <= self.start {
            return true;
        }
        let gap = other.start.abs_diff(self.start) % self.stride;
        let (low, high) = if self.start <= other.start { (self, other) } else { (other, self) };
        self.stride == other.stride && low.length <= gap && gap.saturating_add(high.length) <= self.stride
    }
}

/// For every group the number of its memory. Groups with different memory share no byte. Two blocks of one memory share
/// a byte only if they have the same id. None if the layout does not guarantee this.
pub(crate) fn shared_memory(geometry: &Geometry) -> Option<Vec<usize>> {
    let mut memory: Vec<usize> = (0..geometry.groups.len()).collect();
    let mut places: Vec<(LayerBlocks, usize)> = Vec::new();
    for layer in &geometry.layers {
        let place = LayerBlocks::of(geometry, layer)?;
        // Groups whose blocks begin alike share memory, even if their content differs.
        if let Some((known, group)) = places.iter_mut().find(|(known, _)| known.begins_like(place)) {
            let (from, to) = (memory[layer.group], memory[*group]);
            memory.iter_mut().filter(|number| **number == from).for_each(|number| *number = to);
            *known = known.joined(place);
        } else {
            places.push((place, layer.group));
        }
        if places.len() > MAX_PLACES {
            return None;
        }
    }
    let pairs = || places.iter().enumerate().flat_map(|(index, one)| places[..index].iter().map(move |two| (one, two)));
    (pairs().all(|(one, two)| one.0.is_disjoint(two.0)) && !any_group_twice(geometry)).then_some(memory)
}

/// Whether two layers of one group begin at one address: they would overlap in every block.
fn any_group_twice(geometry: &Geometry) -> bool {
    let mut starts: Vec<(usize, u64)> =
        geometry.layers.iter().map(|layer| (layer.group, geometry.first_page(layer))).collect();
    starts.sort_unstable();
    starts.windows(2).any(|pair| pair[0] == pair[1])
}

/// Whether no two groups of one memory have a block in common.
pub(crate) fn no_block_twice<'a>(memory: &[usize], blocks: impl Iterator<Item = &'a [BlockId]>) -> bool {
    let mut ids: Vec<(usize, BlockId)> =
        memory.iter().zip(blocks).flat_map(|(&memory, ids)| ids.iter().map(move |&id| (memory, id))).collect();
    ids.sort_unstable();
    ids.windows(2).all(|pair| pair[0] != pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(start: u64, stride: u64, length: u64, count: u64) -> LayerBlocks {
        LayerBlocks { start, stride, length, count }
    }

    #[test]
    fn blocks_share_a_byte_or_not() {
        let low = place(100, 10, 2, 3); // 100..102, 110..112, 120..122
        assert!(low.is_disjoint(place(122, 7, 7, 9)));
        assert!(!low.is_disjoint(place(121, 7, 7, 9)));
        assert!(low.is_disjoint(place(104, 10, 3, 3)));
        assert!(!low.is_disjoint(place(101, 10, 3, 3)));
        // The last byte of a block of the first place is the first byte of the next block of the second.
        assert!(!low.is_disjoint(place(104, 10, 7, 3)));
        assert!(!low.is_disjoint(place(104, 12, 3, 3)));
    }
}
