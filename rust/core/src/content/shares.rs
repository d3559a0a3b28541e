// SPDX-License-Identifier: Apache-2.0
//! The weight of a rank's copy of a part: the copies of all ranks together count once.
use crate::error::{Error, Result};
use crate::geometry::types::{Group, Layer, Part};

/// The tensor-parallel ranks that hold the same tokens, and the index of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ranks {
    pub(crate) index: u64,
    pub(crate) count: u64,
}

impl Ranks {
    /// The ranks of a group: for a context-parallel group, `cp_tp_size` neighbouring ranks share its tokens.
    pub(crate) fn of_group(group: &Group, (rank, size): (u32, u32), cp_tp_size: u64) -> Self {
        let shared = if group.cp_size > 1 { cp_tp_size.max(1) } else { 1 };
        Self { index: u64::from(rank) / shared, count: u64::from(size) / shared }
    }

    /// The weight of this rank's copy of a part.
    ///
    /// ```text
    /// extent 2, 4 ranks |  shard of the rank   0   0   1   1
    ///                   |  copy of the shard   0   1   0   1
    ///                   |  its weight         -2   3  -2   3     | the copies of a shard count 1 together
    /// ```
    ///
    /// No copy has weight 0, so every wrong copy changes the sum.
    pub(crate) fn weight(self, layer: &Layer, part: &Part) -> Result<u64> {
        let (mut shards, mut shard) = (1u64, 0u64);
        let mut is_regular = true;
        for axis in part.sharded_axes().filter(|axis| !axis.may_repeat) {
            is_regular &= axis.extent % axis.length == 0 && axis.start % axis.length == 0;
            let of_axis = axis.extent / axis.length;
            shard = shard.saturating_mul(of_axis).saturating_add(axis.start / axis.length);
            shards = shards.saturating_mul(of_axis);
        }
        let copies = self.count / shards;
        if !is_regular || copies == 0 || self.count % shards != 0 || self.index / copies != shard {
            return Err(irregular(layer, part, self));
        }
        Ok(if self.index % copies == 0 { 4u64.wrapping_sub(copies.wrapping_mul(3)) } else { 3 })
    }
}

fn irregular(layer: &Layer, part: &Part, ranks: Ranks) -> Error {
    let place = format!("layer {:?} part {:?}", layer.name, part.name);
    let shards: Vec<String> = part
        .sharded_axes()
        .map(|axis| format!("{} {}..{} of {}", axis.name, axis.start, axis.start + axis.length, axis.extent))
        .collect();
    let expected = format!("expected the equal share of rank {} of {}", ranks.index, ranks.count);
    Error::geometry(&place, "shard", shards.join(", "), expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::Axis;

    fn weight(extent: u64, start: u64, length: u64, index: u64, count: u64) -> Result<u64> {
        let axis = Axis { name: "heads".into(), extent, stride: 1, start, length, may_repeat: false, spare: 0 };
        let part = Part { name: "kv".into(), dtype: "u8".into(), item_bytes: 1, offset: 0, axes: vec![axis] };
        let layer = Layer {
            name: "a".into(),
            group: 0,
            page: 0,
            region: 0,
            offset: 0,
            num_blocks: 1,
            block_stride: 1,
            kernel_stride: 1,
        };
        Ranks { index, count }.weight(&layer, &part)
    }

    #[test]
    fn all_copies_together_count_as_one_and_none_for_nothing() {
        for copies in 1..200 {
            let found: Vec<u64> = (0..copies).filter_map(|index| weight(3, 0, 3, index, copies).ok()).collect();
            assert_eq!(found.len(), copies as usize);
            assert_eq!(found.iter().fold(0u64, |sum, one| sum.wrapping_add(*one)), 1);
            assert!(found.iter().all(|one| *one != 0 && one.trailing_zeros() < 16));
        }
        assert_eq!(weight(2, 1, 1, 3, 4), Ok(3));
        assert_eq!(weight(4, 2, 2, 1, 2), Ok(1));
    }

    #[test]
    fn shares_that_are_not_equal_are_refused() {
        for (extent, start, length, index, count) in
            [(7, 0, 2, 0, 3), (2, 0, 1, 3, 4), (4, 1, 2, 0, 2), (4, 0, 1, 0, 2)]
        {
            let text = weight(extent, start, length, index, count).map_err(|error| error.to_string());
            assert!(text.is_err_and(|text| text.contains("equal share of rank")), "{extent} {start} {length}");
        }
    }
}
