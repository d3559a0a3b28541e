// SPDX-License-Identifier: Apache-2.0
//! The sum over one part of a page.
use crate::content::keys::{HEADS, Keys};
use crate::content::memory::ContentMemory;
use crate::geometry::types::{Axis, Part};

/// One dimension of a part in memory: bytes from one index to the next, and the key of each index.
#[derive(Debug, Clone)]
struct Dim {
    stride: u64,
    weights: Vec<u64>,
}

impl Dim {
    fn walk(&self) -> WalkDim<'_> {
        WalkDim { stride: self.stride, weights: &self.weights }
    }
}

/// A dimension of a walk through memory, which also has the tokens of a piece.
#[derive(Debug, Clone, Copy)]
struct WalkDim<'a> {
    stride: u64,
    weights: &'a [u64],
}

impl WalkDim<'_> {
    /// Bytes from the first index to the end of the last index, if the dimension is dense.
    fn bytes(&self) -> u64 {
        self.stride * self.weights.len() as u64
    }
}

/// How the bytes of a part count. An item is cut into units of 1, 2 or 4 bytes.
#[derive(Debug)]
pub(crate) struct PartSum {
    /// Key of the part, multiplied by the weight of this rank's copy.
    pub(crate) key: u64,
    /// Axes except the tokens and the row; an axis that may repeat has key 1.
    outer: Vec<Dim>,
    /// Bytes from one token to the next; None if tokens do not cut the part.
    tokens: Option<u64>,
    row: Innermost,
}

/// The axis of a row: the axis with the largest extent, independent of its stride, so that both sides number words
/// alike.
#[derive(Debug)]
enum Innermost {
    /// Dense, and made of whole words.
    Words(Vec<u32>),
    /// A unit of each item, at an offset in the item, and the bytes of the unit.
    Units { unit: usize, of_item: Vec<(u64, Dim)> },
}

impl PartSum {
    /// Prepares a part whose copy counts for `weight`.
    pub(crate) fn new(keys: Keys, layer: &str, part: &Part, weight: u64) -> Self {
        let inner = row_axis(part);
        let is_outer = |axis: &&Axis| !axis.is_tokens() && inner.is_none_or(|inner| inner.name != axis.name);
        let outer = part.axes.iter().filter(is_outer).map(|axis| {
            let keys = keys.axis(&axis.name);
            let weights = if axis.may_repeat { vec![1] } else { keys.keys(axis.start, held(axis)) };
            Dim { stride: axis.stride, weights }
        });
        let of_row = inner.map_or((part.item_bytes, 0, 1), |axis| (axis.stride, axis.start, held(axis)));
        Self {
            key: keys.part(layer, &part.name).wrapping_mul(weight),
            outer: outer.collect(),
            tokens: part.tokens().map(|axis| axis.stride),
            row: Innermost::new(keys, part.item_bytes, of_row),
        }
    }

    /// Whether tokens cut the part.
    pub(crate) fn has_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    /// Its sum if every byte of one token is 1: equal only for equal shares of the same items.
    pub(crate) fn coverage(&self) -> u64 {
        let total = |weights: &[u64]| weights.iter().fold(0u64, |sum, weight| sum.wrapping_add(*weight));
        let row = match &self.row {
            Innermost::Words(keys) => {
                total(&keys.iter().copied().map(u64::from).collect::<Vec<_>>()).wrapping_mul(0x0101_0101)
            }
            Innermost::Units { unit, of_item } => {
                let ones = 0x0101_0101 >> (8 * (4 - unit));
                of_item.iter().fold(0u64, |sum, (_, dim)| sum.wrapping_add(total(&dim.weights).wrapping_mul(ones)))
            }
        };
        self.outer.iter().fold(self.key.wrapping_mul(row), |product, dim| product.wrapping_mul(total(&dim.weights)))
    }

    /// The sum over some consecutive tokens in a page, or over the whole part if it has no tokens.
    ///
    /// `at` is the offset in a region where the part begins, with its first token; `tokens` are the keys of the tokens.
    pub(crate) fn sum(&self, memory: &dyn ContentMemory, region: usize, at: u64, tokens: &[u64]) -> u64 {
        let mut dims: Vec<WalkDim> = self.outer.iter().map(Dim::walk).collect();
        let whole = match self.tokens {
            Some(stride) => {
                dims.push(WalkDim { stride, weights: tokens });
                1
            }
            None => tokens.first().copied().unwrap_or(0),
        };
        let sum = match &self.row {
            Innermost::Words(keys) => {
                sort_outermost_first(&mut dims);
                walk(&dims, at, &|at| words(memory.bytes(region, at, 4 * keys.len() as u64), keys))
            }
            Innermost::Units { unit, of_item } => of_item.iter().fold(0u64, |sum, (offset, dim)| {
                let mut dims = dims.clone();
                dims.push(dim.walk());
                sort_outermost_first(&mut dims);
                sum.wrapping_add(sum_units(memory, region, at + offset, *unit, &dims))
            }),
        };
        sum.wrapping_mul(self.key).wrapping_mul(whole)
    }
}

fn sort_outermost_first(dims: &mut [WalkDim]) {
    dims.sort_by_key(|dim| std::cmp::Reverse(dim.stride));
}

impl Innermost {
    /// The row of a part: bytes of an item, and the row axis' stride, first index and number of indices.
    fn new(keys: Keys, item_bytes: u64, (stride, start, count): (u64, u64, u64)) -> Self {
        let (first, length) = (start * item_bytes, count * item_bytes);
        let is_dense = stride == item_bytes || count == 1;
        let words = keys.words();
        if is_dense && first % 4 == 0 && length % 4 == 0 {
            return Self::Words((first / 4..(first + length) / 4).map(|index| words.word(index)).collect());
        }
        let unit = [4, 2].into_iter().find(|unit| item_bytes % unit == 0).unwrap_or(1);
        // byte of the row   0 1 2 3 | 4 5 6 7 | ...     a unit counts like its word
        let weight = |byte: u64| u64::from(words.word(byte / 4)) << (8 * (byte % 4));
        let units = |offset: u64| {
            let weights = (0..count).map(|index| weight(first + index * item_bytes + offset)).collect();
            (offset, Dim { stride, weights })
        };
        if is_dense {
            let weights = (0..length / unit).map(|index| weight(first + index * unit)).collect();
            return Self::Units { unit: unit as usize, of_item: vec![(0, Dim { stride: unit, weights })] };
        }
        Self::Units { unit: unit as usize, of_item: (0..item_bytes).step_by(unit as usize).map(units).collect() }
    }
}

/// Indices that count, without those that are written before they are read.
fn held(axis: &Axis) -> u64 {
    axis.length - axis.spare
}

/// The axis of the row; None if the part has only tokens and heads.
fn row_axis(part: &Part) -> Option<&Axis> {
    let axes = part.sharded_axes().filter(|axis| axis.name != HEADS);
    axes.max_by_key(|axis| (axis.extent - axis.spare, axis.name.as_str()))
}

/// The sum over all indices of some dimensions, outermost first.
fn walk(dims: &[WalkDim], at: u64, leaf: &dyn Fn(u64) -> u64) -> u64 {
    let [dim, inner @ ..] = dims else { return leaf(at) };
    let places = (0u64..).map(|index| at + index * dim.stride);
    let weighted = |(weight, at): (&u64, u64)| weight.wrapping_mul(walk(inner, at, leaf));
    dim.weights.iter().zip(places).map(weighted).fold(0, u64::wrapping_add)
}

/// The sum over units. A dense last dimension is read at once, together with a dense dimension before it.
fn sum_units(memory: &dyn ContentMemory, region: usize, at: u64, unit: usize, dims: &[WalkDim]) -> u64 {
    let is_dense = |last: &WalkDim| last.stride == unit as u64;
    match *dims {
        [ref outer @ .., rows, row] if is_dense(&row) && rows.stride == row.bytes() => {
            walk(outer, at, &|at| dot_rows(memory.bytes(region, at, rows.bytes()), unit, rows.weights, row.weights))
        }
        [ref outer @ .., row] if is_dense(&row) => {
            walk(outer, at, &|at| dot(memory.bytes(region, at, row.bytes()), unit, row.weights))
        }
        _ => walk(dims, at, &|at| value(memory.bytes(region, at, unit as u64))),
    }
}

/// The sum over dense rows of units.
fn dot_rows(bytes: &[u8], unit: usize, rows: &[u64], weights: &[u64]) -> u64 {
    let rows = bytes.chunks_exact(unit * weights.len()).zip(rows);
    rows.fold(0, |sum: u64, (units, weight)| sum.wrapping_add(weight.wrapping_mul(dot(units, unit, weights))))
}

fn words(bytes: &[u8], keys: &[u32]) -> u64 {
    let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    words.zip(keys).fold(0u64, |sum, (word, key)| sum.wrapping_add(u64::from(word).wrapping_mul(u64::from(*key))))
}

/// Weights in two halves, whose products with a unit fit 64 bits, so that a processor computes several at a time.
fn dot(bytes: &[u8], unit: usize, weights: &[u64]) -> u64 {
    let add = |(low, high): (u64, u64), value: u64, weight: u64| {
        let (low_half, high_half) = (weight & 0xffff_ffff, weight >> 32);
        (low.wrapping_add(value.wrapping_mul(low_half)), high.wrapping_add(value.wrapping_mul(high_half)))
    };
    // Called with constants: a division by `unit` for each row would take a tenth of the instructions.
    let pairs = |unit: usize| bytes.chunks_exact(unit).zip(weights);
    let (low, high) = match unit {
        1 => pairs(1).fold((0, 0), |sums, (item, weight)| add(sums, u64::from(item[0]), *weight)),
        2 => pairs(2)
            .fold((0, 0), |sums, (item, weight)| add(sums, u64::from(u16::from_le_bytes([item[0], item[1]])), *weight)),
        _ => pairs(4).fold((0, 0), |sums, (item, weight)| add(sums, value(item), *weight)),
    };
    low.wrapping_add(high << 32)
}

/// A unit as a number, little-endian.
fn value(unit: &[u8]) -> u64 {
    unit.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bytes(Vec<u8>);

    impl ContentMemory for Bytes {
        fn bytes(&self, _region: usize, offset: u64, length: u64) -> &[u8] {
            &self.0[offset as usize..(offset + length) as usize]
        }
    }

    /// An axis, and the indices of a shard.
    type Shard = (&'static str, u64, u64, u64);

    /// A part with its axes in a given memory order, outermost first, with padding after its rows.
    fn part(order: &[Shard], item_bytes: u64, pad: u64) -> Part {
        let mut stride = item_bytes;
        let mut axes = Vec::new();
        for (place, &(name, extent, start, length)) in order.iter().rev().enumerate() {
            axes.push(Axis { name: name.into(), extent, stride, start, length, may_repeat: false, spare: 0 });
            stride = stride * length + if place == 0 { pad } else { 0 };
        }
        Part { name: "kv".into(), dtype: "u8".into(), item_bytes, offset: 0, axes }
    }

    /// The definition, byte by byte.
    fn defined(part: &Part, memory: &Bytes, keys: Keys, tokens: &[u64]) -> u64 {
        let row = row_axis(part).map_or("", |axis| axis.name.as_str());
        let mut places = vec![(0u64, 1u64, 0u64)];
        for axis in &part.axes {
            let step = |&(at, key, index): &(u64, u64, u64)| {
                (0..axis.length)
                    .map(move |local| {
                        let global = axis.start + local;
                        let (at, index) = (at + local * axis.stride, if axis.name == row { global } else { index });
                        let of_axis = keys.axis(&axis.name).key(global);
                        let factor = if axis.name == row {
                            1
                        } else if axis.is_tokens() {
                            tokens[local as usize]
                        } else {
                            of_axis
                        };
                        (at, key.wrapping_mul(factor), index)
                    })
                    .collect::<Vec<_>>()
            };
            places = places.iter().flat_map(step).collect();
        }
        let mut sum = 0u64;
        for (at, key, index) in places {
            for byte in 0..part.item_bytes {
                let of_row = index * part.item_bytes + byte;
                let value = u64::from(memory.0[(at + byte) as usize]) << (8 * (of_row % 4));
                let word = u64::from(keys.words().word(of_row / 4));
                sum = sum.wrapping_add(value.wrapping_mul(word).wrapping_mul(key));
            }
        }
        sum.wrapping_mul(keys.part("layer", "kv"))
    }

    #[test]
    fn every_way_through_memory_is_the_definition() {
        let keys = Keys::new(11);
        let memory = Bytes((0..20_000u64).map(|at| (at * at % 251) as u8).collect());
        let tokens = keys.axis("tokens").keys(5, 3);
        let shards: [Shard; 3] = [("heads", 6, 2, 3), ("tokens", 3, 0, 3), ("content", 17, 4, 8)];
        for order in [[0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let order = order.map(|index: usize| shards[index]);
            for item_bytes in [1, 2, 3, 4, 6, 8] {
                for pad in [0, item_bytes] {
                    let part = part(&order, item_bytes, pad);
                    let found = PartSum::new(keys, "layer", &part, 1).sum(&memory, 0, 0, &tokens);
                    assert_eq!(found, defined(&part, &memory, keys, &tokens), "{order:?} {item_bytes} {pad}");
                }
            }
        }
    }

    #[test]
    fn shards_add_up_and_cover_what_the_whole_does() {
        let keys = Keys::new(3);
        let memory = Bytes((0..8000u64).map(|at| (at * 7 % 253) as u8).collect());
        let whole = part(&[("content", 9, 0, 9), ("heads", 4, 0, 4)], 2, 0);
        let sums: Vec<(u64, u64)> = (0..3)
            .map(|index| {
                let one = part(&[("content", 9, 3 * index, 3), ("heads", 4, 0, 4)], 2, 0);
                let sum = PartSum::new(keys, "layer", &one, 1);
                (sum.sum(&memory, 0, index * 24, &[5]), sum.coverage())
            })
            .collect();
        let of_whole = PartSum::new(keys, "layer", &whole, 1);
        let total =
            sums.iter().fold((0u64, 0u64), |(sum, cover), one| (sum.wrapping_add(one.0), cover.wrapping_add(one.1)));
        assert_eq!(total, (of_whole.sum(&memory, 0, 0, &[5]), of_whole.coverage()));
    }
}
