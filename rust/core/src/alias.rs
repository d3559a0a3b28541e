// SPDX-License-Identifier: Apache-2.0
//! Which local groups share memory: where that is simple enough to say, ids tell whether two copies can overlap.
use crate::geometry::Geometry;
use crate::span::Blocks;

/// More distinct places than this are not compared with each other.
const MAX_PLACES: usize = 512;

/// Blocks of one or more layers: `count` of them, `stride` apart, none longer than `stride`.
#[derive(PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
struct Place {
    start: u64,
    stride: u64,
    length: u64,
    count: u64,
}

impl Place {
    /// Whether no block of the one can touch any block of the other.
    fn apart(self, other: Self) -> bool {
        // Two layers put together may reach behind the address space; such a place is only compared, never used.
        let end = |place: Self| {
            let last = (place.count - 1).saturating_mul(place.stride).saturating_add(place.start);
            last.saturating_add(place.length)
        };
        if end(self) <= other.start || end(other) <= self.start {
            return true;
        }
        // Interleaved with equal strides, as in block-major orders: each keeps to its own part of the stride.
        let gap = other.start.abs_diff(self.start) % self.stride;
        let (low, high) = if self.start <= other.start { (self, other) } else { (other, self) };
        self.stride == other.stride && low.length <= gap && gap.saturating_add(high.length) <= self.stride
    }
}

/// For every group the number of its class; groups of different classes share no byte, and two blocks of one class
/// share one only if they have the same id. None if the layout does not say that much.
pub(crate) fn classes(geometry: &Geometry) -> Option<Vec<usize>> {
    let mut classes: Vec<usize> = (0..geometry.groups.len()).collect();
    let mut places: Vec<(Place, usize)> = Vec::new();
    for layer in &geometry.layers {
        let ratio = geometry.groups[layer.group].ratio;
        let kernel = layer.kernel_stride.unwrap_or(layer.block_stride);
        let page = geometry.page(layer).end();
        let length = (ratio - 1) * kernel + page;
        if length > layer.block_stride || (ratio > 1 && page > kernel) {
            return None;
        }
        let start = geometry.regions[layer.region].base + layer.offset;
        let place = Place { start, stride: layer.block_stride, length, count: layer.num_blocks };
        // Groups whose blocks begin alike are of one class, whatever is in the blocks.
        let twin = |(other, _): &&(Place, usize)| other.start == start && other.stride == place.stride;
        if let Some(&(other, class)) = places.iter().find(twin) {
            let (from, to) = (classes[layer.group], classes[class]);
            classes.iter_mut().filter(|known| **known == from).for_each(|known| *known = to);
            let longest =
                Place { length: place.length.max(other.length), count: place.count.max(other.count), ..place };
            places.retain(|(known, _)| *known != other);
            places.push((longest, layer.group));
        } else {
            places.push((place, layer.group));
        }
        if places.len() > MAX_PLACES {
            return None;
        }
    }
    let all_apart = places.iter().enumerate().all(|(i, (one, _))| places[..i].iter().all(|(two, _)| one.apart(*two)));
    // Two layers of one group at one place would overlap in every block.
    let mut own: Vec<(usize, u64)> =
        geometry.layers.iter().map(|layer| (layer.group, geometry.regions[layer.region].base + layer.offset)).collect();
    own.sort_unstable();
    (all_apart && own.windows(2).all(|pair| pair[0] != pair[1])).then_some(classes)
}

/// Whether no two groups of a class have a block in common.
pub(crate) fn distinct(classes: &[usize], blocks: &[Blocks]) -> bool {
    let mut ids: Vec<(usize, u32)> =
        classes.iter().zip(blocks).flat_map(|(&class, list)| list.ids.iter().map(move |&id| (class, id))).collect();
    ids.sort_unstable();
    ids.windows(2).all(|pair| pair[0] != pair[1])
}
