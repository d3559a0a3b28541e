// SPDX-License-Identifier: Apache-2.0
//! Contiguous copies: the fewest for a set of bytes, because neighbours on both sides are joined.
use crate::by_group::ByGroup;
use crate::error::{Error, Result};
use crate::geometry::Geometry;

/// A row the transfer library takes: `(address, length, device)`.
pub type Descriptor = [u64; 3];

/// Bytes that are contiguous on both sides, and the regions they are in; a run never leaves them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: u64,
    pub(crate) regions: (u16, u16),
    /// Local group of the first byte.
    pub(crate) group: u16,
}

/// Allocates room for so many descriptors; a caller who hands them on may know better where.
pub type Room = fn(usize) -> Vec<Descriptor>;

/// Copies sorted by local address, as descriptors of both sides: row `i` of `remote` is read into row `i` of `local`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Copies {
    /// Where to.
    pub local: Vec<Descriptor>,
    /// Where from, with equal lengths.
    pub remote: Vec<Descriptor>,
    /// Bytes of all copies.
    pub bytes: u64,
    /// Regions of the last copy.
    last: (u16, u16),
}

impl Copies {
    pub(crate) fn new(room: Room, count: usize) -> Self {
        Self { local: room(count), remote: room(count), bytes: 0, last: (0, 0) }
    }

    /// Number of copies.
    pub fn len(&self) -> usize {
        self.local.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.local.is_empty()
    }

    /// Appends a copy behind all others and returns true, or lengthens the last one if it goes on on both sides.
    pub(crate) fn push(&mut self, run: Run, devices: (u64, u64)) -> bool {
        self.bytes += run.len;
        if let (Some(local), Some(remote)) = (self.local.last_mut(), self.remote.last_mut()) {
            let goes_on = local[0] + local[1] == run.local && remote[0] + remote[1] == run.remote;
            if goes_on && self.last == run.regions {
                local[1] += run.len;
                remote[1] += run.len;
                return false;
            }
        }
        self.last = run.regions;
        self.local.push([run.local, run.len, devices.0]);
        self.remote.push([run.remote, run.len, devices.1]);
        true
    }

    /// Appends copies `(local, remote, length)` that neither touch each other nor the last one, `bytes` in all.
    pub(crate) fn extend(
        &mut self,
        runs: impl Iterator<Item = (u64, u64, u64)> + Clone,
        bytes: u64,
        regions: (u16, u16),
        devices: (u64, u64),
    ) {
        self.local.extend(runs.clone().map(|(local, _, len)| [local, len, devices.0]));
        self.remote.extend(runs.map(|(_, remote, len)| [remote, len, devices.1]));
        self.bytes += bytes;
        self.last = regions;
    }

    /// Sorts runs and joins neighbours. Fails if two runs write the same byte.
    pub(crate) fn from_runs(
        mut runs: Vec<Run>,
        local: &Geometry,
        remote: &Geometry,
        room: Room,
        by_group: &mut ByGroup,
    ) -> Result<Self> {
        // Rows come out ascending one after the other: the stable sort finds those stretches and only merges them.
        runs.sort_by_key(|run| run.local);
        if let Some(pair) = runs.windows(2).find(|pair| pair[0].local + pair[0].len > pair[1].local) {
            let end = |run: &Run| run.local + run.len;
            return Err(overlap((pair[0].local, end(&pair[0])), (pair[1].local, end(&pair[1]))));
        }
        let mut copies = Self::new(room, runs.len());
        for run in runs {
            let new = copies.push(run, devices(run.regions, local, remote));
            by_group.descriptors[usize::from(run.group)] += u64::from(new);
        }
        Ok(copies)
    }
}

/// Device ids of a pair of regions.
pub(crate) fn devices(regions: (u16, u16), local: &Geometry, remote: &Geometry) -> (u64, u64) {
    let device = |geometry: &Geometry, region: u16| u64::from(geometry.regions[usize::from(region)].device);
    (device(local, regions.0), device(remote, regions.1))
}

/// Fails if any two rows of sorted lists share a byte.
pub(crate) fn apart<'a>(lists: impl Iterator<Item = &'a [Descriptor]>) -> Result<()> {
    let mut all: Vec<(u64, u64)> = lists.flatten().map(|row| (row[0], row[0] + row[1])).collect();
    #[allow(clippy::stable_sort_primitive, reason = "it only merges lists that are sorted already")]
    all.sort();
    match all.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(overlap(pair[0], pair[1])),
        None => Ok(()),
    }
}

fn overlap(first: (u64, u64), second: (u64, u64)) -> Error {
    Error::Overlap { first: first.0, first_end: first.1, second: second.0, second_end: second.1 }
}
