// SPDX-License-Identifier: Apache-2.0
//! The pieces of all links between two geometries, and which block pairs go into each.
use std::collections::BTreeMap;

use crate::geometry::Geometry;
use crate::link::{Link, Row};
use crate::pieces::Tokens;
use crate::runs::Run;

/// Kernel blocks that meet, packed so that they sort by local id: `local << 32 | remote`. Kernel ids fit 31 bits.
pub(crate) type Pairs = Vec<u64>;

pub(crate) fn pack(local: u64, remote: u64) -> u64 {
    local << 32 | remote
}

pub(crate) fn unpack(pair: u64) -> (u64, u64) {
    (pair >> 32, pair & 0xffff_ffff)
}

/// Block pairs of one link, by how they cut each other.
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
    pub(crate) fn new(mut links: Vec<Link>, local: &Geometry, remote: &Geometry) -> Self {
        let mut fed: BTreeMap<Row, Vec<Feed>> = BTreeMap::new();
        for (index, link) in links.iter_mut().enumerate() {
            for (cut, rows) in link.cut_whole_blocks(local, remote).into_iter().enumerate() {
                rows.into_iter().for_each(|row| fed.entry(row).or_default().push((index, cut)));
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
        Self { links, rows, feeds }
    }

    /// Block pairs of each set of feeds, sorted by local id.
    pub(crate) fn gather(&self, by_link: &[ByCut]) -> Vec<Pairs> {
        self.feeds
            .iter()
            .map(|set| {
                let mut pairs = Pairs::new();
                for &(link, cut) in set {
                    let cut = self.links[link].cuts[cut].0;
                    let lists = by_link[link].iter().filter(|(found, _)| *found == cut);
                    lists.for_each(|(_, list)| pairs.extend_from_slice(list));
                }
                sort(&mut pairs);
                pairs
            })
            .collect()
    }

    /// Appends the copies of a request's block pairs.
    pub(crate) fn emit(&self, local: &Geometry, remote: &Geometry, by_link: &[ByCut], out: &mut Vec<Run>) {
        let gathered: Vec<_> = self.gather(by_link).into_iter().map(|pairs| (stretches(&pairs), pairs)).collect();
        for (row, feeds) in &self.rows {
            let (stretches, pairs) = &gathered[*feeds];
            push_row(row, pairs, stretches, out);
        }
        for (link, cuts) in self.links.iter().zip(by_link) {
            for (cut, pairs) in cuts.iter().filter(|(cut, _)| link.kept(*cut).is_none()) {
                let mut pairs = pairs.clone();
                sort(&mut pairs);
                let stretches = stretches(&pairs);
                link.rows(local, remote, *cut).iter().for_each(|row| push_row(row, &pairs, &stretches, out));
            }
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
        pairs.iter().for_each(|&pair| starts[digit(pair)] += 1);
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
    const NEXT: u64 = 1 << 32 | 1;
    let mut found: Vec<(u64, u64)> = Vec::new();
    let mut expected = None;
    for &pair in pairs {
        match found.last_mut() {
            Some(last) if expected == Some(pair) => last.1 += 1,
            _ => found.push((pair, 1)),
        }
        expected = Some(pair + NEXT);
    }
    found
}

fn push_row(row: &Row, pairs: &[u64], stretches: &[(u64, u64)], out: &mut Vec<Run>) {
    let Row { chunk, family } = *row;
    let run = |local_offset: u64, remote_offset: u64, len: u64| Run {
        local: chunk.local + local_offset,
        remote: chunk.remote + remote_offset,
        len,
        local_region: family.local.region,
        remote_region: family.remote.region,
    };
    if family.local.linear() && family.remote.linear() {
        let (step, other) = (family.local.step(), family.remote.step());
        if step == chunk.len && other == chunk.len {
            out.extend(stretches.iter().map(|&(first, count)| {
                let (local, remote) = unpack(first);
                run(local * step, remote * other, count * chunk.len)
            }));
        } else {
            out.extend(pairs.iter().map(|&pair| {
                let (local, remote) = unpack(pair);
                run(local * step, remote * other, chunk.len)
            }));
        }
    } else {
        out.extend(pairs.iter().map(|&pair| {
            let (local, remote) = unpack(pair);
            run(family.local.offset(local), family.remote.offset(remote), chunk.len)
        }));
    }
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
                .flat_map(|&(first, count)| (0..count).map(move |i| first + i * (1 << 32 | 1)))
                .collect();
            prop_assert_eq!(back, pairs);
        }
    }
}
