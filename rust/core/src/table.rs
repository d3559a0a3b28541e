// SPDX-License-Identifier: Apache-2.0
//! The pieces of all links between two geometries, and which block pairs go into each.
use std::collections::BTreeMap;

use crate::by_group::{ByGroup, Owners};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::link::{Link, Row};
use crate::pieces::Tokens;
use crate::runs::{Copies, Descriptor, Room, Run, devices};

/// Kernel blocks that meet, packed so that they sort by local id: `local << 32 | remote`. Kernel ids fit 31 bits.
pub(crate) type Pairs = Vec<u64>;

/// From a pair to that of the next blocks on both sides.
pub(crate) const NEXT_PAIR: u64 = 1 << 32 | 1;

pub(crate) fn pack(local: u64, remote: u64) -> u64 {
    local << 32 | remote
}

pub(crate) fn unpack(pair: u64) -> (u64, u64) {
    (pair >> 32, pair & 0xffff_ffff)
}

/// Block pairs of one link, by how they cut each other, sorted by that.
pub(crate) type ByCut = Vec<(Tokens, Pairs)>;

/// Which cut of which link fills a row.
pub(crate) type Feed = (usize, usize);

/// Links between two geometries and their rows. Layers that alias have one row, fed by the blocks of all their groups:
/// so neighbouring blocks of different groups are joined, and come out in order.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) links: Vec<Link>,
    /// Rows by local address, each with the index of its feeds.
    pub(crate) rows: Vec<(Row, usize)>,
    /// Distinct sets of feeds.
    pub(crate) feeds: Vec<Vec<Feed>>,
}

impl Table {
    /// `left` is how many pieces the plan may still have.
    pub(crate) fn new(mut links: Vec<Link>, local: &Geometry, remote: &Geometry, left: &mut u64) -> Result<Self> {
        let mut fed: BTreeMap<Row, Vec<Feed>> = BTreeMap::new();
        for (index, link) in links.iter_mut().enumerate() {
            for (cut, rows) in link.cut_whole_blocks(local, remote, left)?.into_iter().enumerate() {
                for row in rows {
                    fed.entry(row).or_default().push((index, cut));
                }
            }
        }
        let mut known: BTreeMap<Vec<Feed>, usize> = BTreeMap::new();
        let mut feeds = Vec::new();
        let rows = fed
            .into_iter()
            .map(|(row, set)| {
                let index = *known.entry(set).or_insert_with_key(|set| {
                    feeds.push(set.clone());
                    feeds.len() - 1
                });
                (row, index)
            })
            .collect();
        Ok(Self { links, rows, feeds })
    }

    /// Block pairs of each set of feeds, sorted by local id.
    pub(crate) fn gather(&self, by_link: &[ByCut]) -> Vec<Pairs> {
        self.feeds
            .iter()
            .map(|set| {
                let mut pairs = Pairs::new();
                for &(link, cut) in set {
                    let cut = self.links[link].cuts[cut].0;
                    if let Ok(found) = by_link[link].binary_search_by_key(&cut, |entry| entry.0) {
                        pairs.extend_from_slice(&by_link[link][found].1);
                    }
                }
                sort(&mut pairs);
                pairs
            })
            .collect()
    }

    /// Whether the pairs are surely written without overlap, and clear of sorted `others`: a look at every row, not at
    /// every copy.
    pub(crate) fn surely_apart(&self, gathered: &[Pairs], others: &[Descriptor]) -> bool {
        let rows = || self.rows.iter().map(|(row, feeds)| (row, gathered[*feeds].as_slice()));
        let doubled = |pairs: &Pairs| !pairs.is_sorted_by(|a, b| a >> 32 < b >> 32);
        !gathered.iter().any(doubled)
            && ascending(rows())
            && rows()
                .all(|(row, pairs)| others.iter().all(|other| !row.writes_into(pairs, (other[0], other[0] + other[1]))))
    }

    /// Block pairs of each set of feeds, with their groups.
    fn gather_owned<'a>(&self, by_link: &'a [ByCut]) -> Vec<Gathered<'a>> {
        let list = |&(link, cut): &Feed| {
            let link_cut = self.links[link].cuts[cut].0;
            let found = by_link[link].binary_search_by_key(&link_cut, |entry| entry.0).ok()?;
            Some((self.links[link].local_group, by_link[link][found].1.as_slice()))
        };
        let pairs = self.gather(by_link).into_iter();
        let owners = self.feeds.iter().map(|set| Owners::new(set.iter().filter_map(list).collect()));
        pairs.zip(owners).map(|(pairs, owners)| Gathered::new(pairs, owners)).collect()
    }

    /// The copies of a request's block pairs; what they move of each local group is added to `by_group`.
    pub(crate) fn copies(
        &self,
        local: &Geometry,
        remote: &Geometry,
        by_link: &[ByCut],
        room: Room,
        by_group: &mut ByGroup,
    ) -> Result<Copies> {
        let gathered = self.gather_owned(by_link);
        let rare = |link: &Link, cut: Tokens| link.kept(cut).is_none();
        let has_rare =
            || self.links.iter().zip(by_link).any(|(link, cuts)| cuts.iter().any(|(cut, _)| rare(link, *cut)));
        let rows = || self.rows.iter().map(|(row, feeds)| (row, &gathered[*feeds]));
        rows().for_each(|(row, of_row)| of_row.add_bytes(row.chunk.len, by_group));
        let in_order = gathered.iter().all(|set| set.pairs.is_sorted_by(|a, b| a >> 32 < b >> 32))
            && ascending(rows().map(|(row, set)| (row, set.pairs.as_slice())));
        if in_order && !has_rare() {
            let mut copies = Copies::new(room, rows().map(|(row, set)| row.copies(&set.pairs, &set.stretches)).sum());
            for (row, set) in rows() {
                let joined = row.append(&set.pairs, &set.stretches, local, remote, &mut copies);
                set.add_descriptors(row.dense(), joined, by_group);
            }
            return Ok(copies);
        }
        let mut runs = Vec::new();
        let sorted: Vec<_> = gathered.iter().map(|set| set.owners.sorted()).collect();
        for (row, set) in &self.rows {
            row.runs(&gathered[*set].pairs, &gathered[*set].stretches, &sorted[*set], &mut runs);
        }
        for (link, cuts) in self.links.iter().zip(by_link) {
            for (cut, pairs) in cuts.iter().filter(|(cut, _)| rare(link, *cut)) {
                let mut in_order = pairs.clone();
                sort(&mut in_order);
                let set = Gathered::new(in_order, Owners::new(vec![(link.local_group, pairs)]));
                let sorted = set.owners.sorted();
                for row in link.rows(local, remote, *cut)? {
                    set.add_bytes(row.chunk.len, by_group);
                    row.runs(&set.pairs, &set.stretches, &sorted, &mut runs);
                }
            }
        }
        Copies::from_runs(runs, local, remote, room, by_group)
    }
}

/// Block pairs that fill the same rows.
struct Gathered<'a> {
    /// Sorted by local id.
    pairs: Pairs,
    stretches: Vec<(u64, u64)>,
    owners: Owners<'a>,
    /// Stretches by the group they begin in.
    starts: Vec<(usize, u64)>,
}

impl<'a> Gathered<'a> {
    fn new(pairs: Pairs, owners: Owners<'a>) -> Self {
        let stretches = stretches(&pairs);
        let starts = owners.stretches(&stretches);
        Self { pairs, stretches, owners, starts }
    }

    /// Bytes of a row whose pieces are `length` bytes.
    fn add_bytes(&self, length: u64, by_group: &mut ByGroup) {
        for (group, pairs) in self.owners.pairs() {
            // Blocks that overlap can add up to more than there is memory; they are refused later.
            by_group.bytes[group] = pairs.saturating_mul(length).saturating_add(by_group.bytes[group]);
        }
    }

    /// Descriptors of a row: of its stretches where it is dense, else of its pairs. The first may have been joined to
    /// the row before.
    fn add_descriptors(&self, dense: bool, joined: bool, by_group: &mut ByGroup) {
        if dense {
            self.starts.iter().for_each(|&(group, count)| by_group.descriptors[group] += count);
        } else {
            self.owners.pairs().for_each(|(group, count)| by_group.descriptors[group] += count);
        }
        if joined {
            by_group.descriptors[self.owners.of(self.pairs[0])] -= 1;
        }
    }
}

/// Whether the copies of each row lie wholly behind those of the row before: then nothing has to be sorted.
fn ascending<'a>(rows: impl Iterator<Item = (&'a Row, &'a [u64])>) -> bool {
    let mut behind = 0;
    for (row, pairs) in rows {
        let (Some(first), Some(last)) = (pairs.first(), pairs.last()) else { continue };
        let strides = row.family.local;
        let apart = pairs.len() == 1 || strides.step() >= row.chunk.len;
        let start = row.chunk.local + strides.offset(unpack(*first).0);
        if start < behind || !apart || !row.linear() {
            return false;
        }
        behind = row.chunk.local + strides.offset(unpack(*last).0) + row.chunk.len;
    }
    true
}

impl Row {
    fn linear(&self) -> bool {
        self.family.local.linear() && self.family.remote.linear()
    }

    /// Whether entries of neighbouring blocks touch on both sides.
    fn dense(&self) -> bool {
        let len = self.chunk.len;
        self.linear() && self.family.local.step() == len && self.family.remote.step() == len
    }

    /// Whether any pair's copy of an evenly spaced row meets a local range.
    fn writes_into(&self, pairs: &[u64], range: (u64, u64)) -> bool {
        let (start, step) = (self.chunk.local, self.family.local.step());
        if range.1 <= start {
            return false;
        }
        // Entries from the first that ends behind the range's start to the last that starts before its end.
        let first = (range.0 + 1).saturating_sub(start + self.chunk.len).div_ceil(step);
        let last = (range.1 - 1 - start) / step;
        let from = pairs.partition_point(|&pair| unpack(pair).0 < first);
        pairs.get(from).is_some_and(|&pair| unpack(pair).0 <= last)
    }

    fn regions(&self) -> (u16, u16) {
        (self.family.local.region, self.family.remote.region)
    }

    /// How many copies come of it.
    fn copies(&self, pairs: &[u64], stretches: &[(u64, u64)]) -> usize {
        if self.dense() { stretches.len() } else { pairs.len() }
    }

    /// Appends evenly spaced copies that lie behind all others. Whether the first was joined to the last of those.
    fn append(
        &self,
        pairs: &[u64],
        stretches: &[(u64, u64)],
        local: &Geometry,
        remote: &Geometry,
        out: &mut Copies,
    ) -> bool {
        let (regions, chunk) = (self.regions(), self.chunk);
        let devices = devices(regions, local, remote);
        let (step, other) = (self.family.local.step(), self.family.remote.step());
        let place = move |pair: u64, count: u64| {
            let (l, r) = unpack(pair);
            (chunk.local + l * step, chunk.remote + r * other, count * chunk.len)
        };
        // Only the first can touch the row before: within a row, stretches and spaced entries do not touch.
        let mut push = |(local, remote, len)| out.push(Run { local, remote, len, regions, group: 0 }, devices);
        if self.dense() {
            let Some((&(pair, count), rest)) = stretches.split_first() else { return false };
            let new = push(place(pair, count));
            let bytes = (pairs.len() as u64 - count) * chunk.len;
            out.extend(rest.iter().map(|&(pair, count)| place(pair, count)), bytes, regions, devices);
            !new
        } else {
            let Some((&pair, rest)) = pairs.split_first() else { return false };
            let new = push(place(pair, 1));
            out.extend(rest.iter().map(|&pair| place(pair, 1)), rest.len() as u64 * chunk.len, regions, devices);
            !new
        }
    }

    /// Appends copies in any order and spacing. `groups` has the local group of each pair.
    fn runs(&self, pairs: &[u64], stretches: &[(u64, u64)], groups: &[u16], out: &mut Vec<Run>) {
        let run = |pair: u64, count: u64, group: u16| {
            let (local, remote) = unpack(pair);
            Run {
                local: self.chunk.local + self.family.local.offset(local),
                remote: self.chunk.remote + self.family.remote.offset(remote),
                len: count * self.chunk.len,
                regions: self.regions(),
                group,
            }
        };
        if self.dense() {
            let mut index = 0;
            out.extend(stretches.iter().map(|&(pair, count)| {
                let group = groups[index];
                index += count as usize;
                run(pair, count, group)
            }));
        } else {
            out.extend(pairs.iter().zip(groups).map(|(&pair, &group)| run(pair, 1, group)));
        }
    }
}

/// Sorts by local id. Block lists are short and their ids small, so two or three counting passes do.
pub(crate) fn sort(pairs: &mut Pairs) {
    const BITS: u32 = 11;
    if pairs.is_sorted() {
        return;
    }
    if pairs.len() < 128 {
        pairs.sort_unstable();
        return;
    }
    let largest = pairs.iter().max().map_or(0, |pair| pair >> 32);
    let mut other = vec![0; pairs.len()];
    let mut shift = 32;
    while largest >> (shift - 32) > 0 {
        let digit = |pair: u64| (pair >> shift) as usize & ((1 << BITS) - 1);
        let mut starts = [0u32; 1 << BITS];
        for &pair in pairs.iter() {
            starts[digit(pair)] += 1;
        }
        let mut sum = 0;
        for start in &mut starts {
            sum += std::mem::replace(start, sum);
        }
        for &pair in pairs.iter() {
            let slot = &mut starts[digit(pair)];
            other[*slot as usize] = pair;
            *slot += 1;
        }
        std::mem::swap(pairs, &mut other);
        shift += BITS;
    }
}

/// Block pairs that follow each other on both sides: the first pair and how many.
pub(crate) fn stretches(pairs: &[u64]) -> Vec<(u64, u64)> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    let mut expected = None;
    for &pair in pairs {
        match found.last_mut() {
            Some(last) if expected == Some(pair) => last.1 += 1,
            _ => found.push((pair, 1)),
        }
        expected = Some(pair + NEXT_PAIR);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counting_passes_sort(ids in proptest::collection::hash_set(0u64..1 << 31, 0..600), bits in 0u32..31) {
            let mut pairs: Pairs = ids.iter().map(|&id| pack(id >> bits, id & 0x7fff_ffff)).collect();
            let mut expected = pairs.clone();
            expected.sort_by_key(|pair| pair >> 32);
            sort(&mut pairs);
            let keys = |list: &Pairs| list.iter().map(|pair| pair >> 32).collect::<Vec<_>>();
            prop_assert_eq!(keys(&pairs), keys(&expected));
            pairs.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(pairs, expected);
        }

        #[test]
        fn stretches_say_the_same(starts in proptest::collection::vec((0u64..100, 0u64..100, 1u64..5), 0..20)) {
            let pairs: Pairs = starts.iter().flat_map(|&(l, r, n)| (0..n).map(move |i| pack(l + i, r + i))).collect();
            let back: Pairs = stretches(&pairs)
                .iter()
                .flat_map(|&(first, count)| (0..count).map(move |i| first + i * NEXT_PAIR))
                .collect();
            prop_assert_eq!(back, pairs);
        }
    }
}
