// SPDX-License-Identifier: Apache-2.0
//! Odd numbers for coordinates: for a layer's part, a token, an index of an axis, a word of a row.
//!
//! ```text
//! sum = part key * token key * key of each outer axis' index * sum over the row's words of word * word key
//! ```
//!
//! A product of odd numbers is odd, so the product with a changed word always changes.

/// The name of the axis that ranks may repeat an unknown number of times.
pub(crate) const HEADS: &str = "heads";

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Keys of one seed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys {
    seed: u64,
}

/// Keys of the indices of one axis.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexKeys {
    salt: u64,
}

impl Keys {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Key of a part of a layer.
    pub(crate) fn part(self, layer: &str, part: &str) -> u64 {
        self.salt(&["part", layer, part]) | 1
    }

    /// Keys of the indices of an axis, also of the token axis.
    pub(crate) fn axis(self, name: &str) -> IndexKeys {
        IndexKeys { salt: self.salt(&["axis", name]) }
    }

    /// Keys of the words of a row, 32 bits each.
    pub(crate) fn words(self) -> IndexKeys {
        IndexKeys { salt: self.salt(&["words"]) }
    }

    fn salt(self, names: &[&str]) -> u64 {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes());
        for name in names {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
        }
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        u64::from_le_bytes(first)
    }
}

impl IndexKeys {
    /// Key of an index, 64 bits and odd.
    pub(crate) fn key(self, index: u64) -> u64 {
        mix(self.salt.wrapping_add(index.wrapping_mul(STEP))) | 1
    }

    /// Key of a word, 32 bits and odd.
    pub(crate) fn word(self, index: u64) -> u32 {
        (self.key(index) >> 32) as u32 | 1
    }

    /// Keys of a range of indices.
    pub(crate) fn keys(self, start: u64, count: u64) -> Vec<u64> {
        (start..start + count).map(|index| self.key(index)).collect()
    }
}

/// Keys of the first indices of an axis, which are the factors of sums of repeated heads.
pub fn index_keys(seed: u64, axis: &str, count: u64) -> Vec<u64> {
    Keys::new(seed).axis(axis).keys(0, count)
}

/// Scrambles 64 bits, like the last step of splitmix64.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_odd_and_differ_by_seed_name_and_index() {
        let keys = Keys::new(7);
        let found = [
            keys.part("a", "kv"),
            keys.part("akv", ""),
            keys.part("", "akv"),
            Keys::new(8).part("a", "kv"),
            keys.axis("heads").key(0),
            keys.axis("heads").key(1),
            keys.axis("tokens").key(0),
            keys.words().key(0),
        ];
        assert!(found.iter().all(|key| key % 2 == 1));
        let mut sorted = found.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), found.len());
        assert_eq!(keys.words().word(3) % 2, 1);
        assert_eq!(index_keys(7, "heads", 2), [found[4], found[5]]);
    }
}
