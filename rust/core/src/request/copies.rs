// SPDX-License-Identifier: Apache-2.0
//! Contiguous copies: the fewest for a set of bytes, because neighbours on both sides are joined.
use crate::bytes::rows::{Advise, Descriptor};
use crate::error::{Error, Result};
use crate::pairing::group_pair::Geometries;
use crate::pairing::page_pair::RegionPair;
use crate::request::bound::room;

/// Bytes that are contiguous on both sides, and their regions; a run never leaves them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteRun {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: u64,
    pub(crate) regions: RegionPair,
    /// Local group of the first byte.
    pub(crate) group: u16,
}

/// Copies sorted by local address, as descriptors of both sides: row `i` of `remote` is read into row `i` of `local`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Copies {
    /// Destinations.
    pub local: Vec<Descriptor>,
    /// Sources, with equal lengths.
    pub remote: Vec<Descriptor>,
    /// Bytes read into each local group.
    pub bytes_by_group: Vec<u64>,
    /// Copies of each local group. A copy that continues from group to group counts for the group of its first byte.
    pub descriptors_by_group: Vec<u64>,
    /// Regions of the last copy.
    last: RegionPair,
}

impl Copies {
    /// Empty copies, with the total number of bytes.
    pub(crate) fn new(advise: Advise, count: usize, bytes_by_group: Vec<u64>) -> Result<Self> {
        let room = || room(count, advise);
        let descriptors_by_group = vec![0; bytes_by_group.len()];
        Ok(Self { local: room()?, remote: room()?, bytes_by_group, descriptors_by_group, last: RegionPair::default() })
    }

    /// Bytes of all copies.
    pub fn bytes(&self) -> u64 {
        self.bytes_by_group.iter().sum()
    }

    /// Number of copies.
    pub fn len(&self) -> usize {
        self.local.len()
    }

    /// Whether there is no copy.
    pub fn is_empty(&self) -> bool {
        self.local.is_empty()
    }

    /// Appends a copy after all others, or extends the last copy if the new one continues it on both sides.
    pub(crate) fn push(&mut self, run: ByteRun, devices: (u64, u64)) {
        if let (Some(local), Some(remote)) = (self.local.last_mut(), self.remote.last_mut()) {
            let goes_on = local[0] + local[1] == run.local && remote[0] + remote[1] == run.remote;
            if goes_on && self.last == run.regions {
                local[1] += run.len;
                remote[1] += run.len;
                return;
            }
        }
        self.last = run.regions;
        self.local.push([run.local, run.len, devices.0]);
        self.remote.push([run.remote, run.len, devices.1]);
        self.descriptors_by_group[usize::from(run.group)] += 1;
    }

    /// Appends copies `(local, remote, length)` that neither touch each other nor the last copy, and are counted
    /// separately.
    pub(crate) fn extend(
        &mut self,
        runs: impl Iterator<Item = (u64, u64, u64)> + Clone,
        regions: RegionPair,
        devices: (u64, u64),
    ) {
        self.local.extend(runs.clone().map(|(local, _, len)| [local, len, devices.0]));
        self.remote.extend(runs.map(|(_, remote, len)| [remote, len, devices.1]));
        self.last = regions;
    }

    /// Sorts runs and joins neighbours. Fails if two runs write the same byte.
    pub(crate) fn from_runs(
        mut runs: Vec<ByteRun>,
        geometries: &Geometries,
        advise: Advise,
        bytes_by_group: Vec<u64>,
    ) -> Result<Self> {
        // Templates yield ascending runs one after the other: the stable sort finds and merges them.
        runs.sort_by_key(|run| run.local);
        if let Some(pair) = runs.windows(2).find(|pair| pair[0].local + pair[0].len > pair[1].local) {
            let end = |run: &ByteRun| run.local + run.len;
            return Err(Error::overlap((pair[0].local, end(&pair[0])), (pair[1].local, end(&pair[1]))));
        }
        let mut copies = Self::new(advise, runs.len(), bytes_by_group)?;
        for run in runs {
            copies.push(run, run.regions.devices(geometries));
        }
        Ok(copies)
    }
}

/// Fails if any two rows of sorted lists share a byte.
pub(crate) fn refuse_overlap<'a>(lists: impl Iterator<Item = &'a [Descriptor]>) -> Result<()> {
    let mut all: Vec<(u64, u64)> = lists.flatten().map(|row| (row[0], row[0] + row[1])).collect();
    #[allow(clippy::stable_sort_primitive, reason = "it only merges lists that are sorted already")]
    all.sort();
    match all.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(Error::overlap(pair[0], pair[1])),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::rows::NO_ADVICE;

    fn run(local: u64, remote: u64, len: u64, region: u16) -> ByteRun {
        ByteRun { local, remote, len, regions: RegionPair { local: region, remote: 0 }, group: 0 }
    }

    #[test]
    fn a_copy_goes_on_only_where_both_sides_and_the_region_do() {
        let mut copies = Copies::new(NO_ADVICE, 4, vec![0; 2]).expect("memory");
        let runs = [run(0, 100, 8, 0), run(8, 108, 8, 0), run(16, 200, 8, 0), run(24, 208, 8, 1)];
        let mut new = Vec::new();
        for (index, one) in runs.into_iter().enumerate() {
            copies.push(ByteRun { group: index as u16 / 3, ..one }, (3, 4));
            new.push(copies.len());
        }
        assert_eq!(new, [1, 1, 2, 3]);
        assert_eq!(copies.descriptors_by_group, [2, 1]);
        assert_eq!(copies.local, [[0, 16, 3], [16, 8, 3], [24, 8, 3]]);
        assert_eq!(copies.remote, [[100, 16, 4], [200, 8, 4], [208, 8, 4]]);
    }

    #[test]
    fn ranges_that_touch_do_not_overlap() {
        let lists = |second: Descriptor| refuse_overlap([[[0, 8, 0], [20, 4, 0]].as_slice(), &[second]].into_iter());
        assert_eq!(lists([8, 12, 0]), Ok(()));
        assert_eq!(lists([8, 13, 0]), Err(Error::overlap((8, 21), (20, 24))));
    }
}
