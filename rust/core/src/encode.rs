// SPDX-License-Identifier: Apache-2.0
//! The three encodings of a plan's copies: descriptors, views, and ids into views.
use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::plan::{Link, Plan, Strides};
use crate::runs::Run;
use crate::span::Span;
use crate::transfer::{ByCut, Pairs, Tail, stretches};

/// A regular cut of a region: `(address, length, device, stride, count)`.
pub type View = [u64; 5];

/// More views than this are slower to prepare than the descriptors of a request are to build.
const MAX_VIEWS: usize = 65_536;

/// `(address, length, device)` of the local and of the remote side of runs, row after row.
pub fn descriptors(runs: &[Run], local: &Geometry, remote: &Geometry) -> (Vec<u64>, Vec<u64>) {
    let side = |geometry: &Geometry, address: fn(&Run) -> u64, region: fn(&Run) -> u32| {
        let devices: Vec<u64> = geometry.regions.iter().map(|region| region.device.into()).collect();
        let mut rows = Vec::with_capacity(runs.len() * 3);
        for run in runs {
            rows.extend_from_slice(&[address(run), run.len, devices[region(run) as usize]]);
        }
        rows
    };
    (side(local, |run| run.local, |run| run.local_region), side(remote, |run| run.remote, |run| run.remote_region))
}

/// Expands views to `(address, length, device)` rows, view after view. Fails if an address overflows.
pub fn expand_views(views: &[View]) -> Result<Vec<u64>> {
    let total = crate::ids::check_views(views)?;
    let mut rows = Vec::with_capacity(total as usize * 3);
    for &[address, length, device, stride, count] in views {
        rows.extend((0..count).flat_map(|entry| [address + entry * stride, length, device]));
    }
    Ok(rows)
}

/// Ids into the prepared views of both sides, pair by pair.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ids {
    /// Index of the source.
    pub source: usize,
    /// Ids into the local views.
    pub local: Vec<i32>,
    /// Ids into the remote views.
    pub remote: Vec<i32>,
    /// Bytes the ids stand for.
    pub bytes: u64,
    /// Descriptors left after the transfer library joins ids that follow each other in dense views on both sides.
    pub merged: u64,
}

/// Which cut of which link fills a pair of views.
type Feed = (usize, usize);

struct Pair {
    offsets: (u64, u64),
    length: u64,
    dense: bool,
    feeds: usize,
}

/// Views of one source, and which blocks go into which pair of them.
pub(crate) struct ViewTable {
    local: Vec<View>,
    remote: Vec<View>,
    pairs: Vec<Pair>,
    /// Distinct sets of feeds: layers that alias share one.
    feeds: Vec<Vec<Feed>>,
}

fn view(geometry: &Geometry, strides: Strides, blocks: u64, address: u64, length: u64) -> View {
    let device = geometry.regions[strides.region as usize].device;
    [address, length, device.into(), strides.step(), blocks * strides.ratio]
}

/// Numbers views in ascending order and returns where each starts in the flat list.
fn number(views: impl Iterator<Item = View>) -> Result<(Vec<View>, BTreeMap<View, u64>)> {
    let mut offsets: BTreeMap<View, u64> = views.map(|view| (view, 0)).collect();
    if offsets.len() > MAX_VIEWS {
        return Err(Error::NoViews { why: format!("they are {}, at most {MAX_VIEWS} are kept", offsets.len()) });
    }
    let mut next = 0;
    for (view, offset) in &mut offsets {
        *offset = next;
        next += view[4];
    }
    if next > i32::MAX as u64 {
        return Err(Error::Overflow { place: "views".into(), what: format!("{next} entries"), bits: 31 });
    }
    Ok((offsets.keys().copied().collect(), offsets))
}

impl ViewTable {
    fn new(plan: &Plan, source: usize) -> Result<Self> {
        let remote = &plan.remotes[source];
        let mut rows: BTreeMap<(View, View), Vec<Feed>> = BTreeMap::new();
        for (index, link) in plan.links.iter().enumerate().filter(|(_, link)| link.source == source) {
            if link.classes.is_empty() {
                return Err(Error::NoViews {
                    why: "the kernel blocks of the two sides cut each other too often".into(),
                });
            }
            let blocks = (plan.local_blocks[link.local_group], plan.remote_blocks[source][link.remote_group]);
            for (class, (_, class_rows)) in link.classes.iter().enumerate() {
                for row in class_rows {
                    let family = link.families[row.family];
                    if !family.local.linear() || !family.remote.linear() {
                        return Err(Error::NoViews {
                            why: "kernel blocks are not evenly spaced over logical blocks".into(),
                        });
                    }
                    let chunk = row.chunk;
                    let pair = (
                        view(&plan.local, family.local, blocks.0, chunk.local, chunk.len),
                        view(remote, family.remote, blocks.1, chunk.remote, chunk.len),
                    );
                    rows.entry(pair).or_default().push((index, class));
                    if rows.len() > MAX_VIEWS {
                        return Err(Error::NoViews { why: format!("there are more than {MAX_VIEWS} pairs of them") });
                    }
                }
            }
        }
        let (local, local_offsets) = number(rows.keys().map(|pair| pair.0))?;
        let (remote, remote_offsets) = number(rows.keys().map(|pair| pair.1))?;
        let mut feeds: Vec<Vec<Feed>> = Vec::new();
        let pairs = rows
            .into_iter()
            .map(|((mine, theirs), set)| {
                let known = feeds.iter().position(|known| *known == set).unwrap_or_else(|| {
                    feeds.push(set);
                    feeds.len() - 1
                });
                let offsets = (local_offsets[&mine], remote_offsets[&theirs]);
                let dense = mine[1] == mine[3] && theirs[1] == theirs[3];
                Pair { offsets, length: mine[1], dense, feeds: known }
            })
            .collect();
        Ok(Self { local, remote, pairs, feeds })
    }
}

impl Plan {
    fn table(&self, source: usize) -> Result<&ViewTable> {
        let Some(slot) = self.views.get(source) else {
            let expected = format!("there are {} sources", self.views.len());
            return Err(Error::Value { what: "source".into(), value: source as i128, expected });
        };
        slot.get_or_init(|| ViewTable::new(self, source)).as_ref().map_err(Clone::clone)
    }

    /// Views of the local and of the remote side, to be prepared once for a source.
    pub fn views(&self, source: usize) -> Result<(&[View], &[View])> {
        let table = self.table(source)?;
        Ok((&table.local, &table.remote))
    }

    /// The request as ids into the views of each source. Views have whole kernel blocks, so a last block is moved whole.
    pub fn ids(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<(Vec<Ids>, Vec<Run>, u64)> {
        let request = self.check(num_tokens, local, remote, Tail::Whole)?;
        let mut out: Vec<Ids> = Vec::new();
        for source in self.sources() {
            let table = self.table(source)?;
            let mut by_link: BTreeMap<usize, ByCut> = BTreeMap::new();
            for (index, link) in self.links.iter().enumerate().filter(|(_, link)| link.source == source) {
                by_link.insert(index, self.segments(&request, link)?);
            }
            let lists = table.feeds.iter().map(|set| fed(set, &self.links, &by_link)).collect::<Result<Vec<_>>>()?;
            let ids = encode(source, table, &lists);
            if !ids.local.is_empty() {
                out.push(ids);
            }
        }
        let mut zero = Vec::new();
        self.zero(&request, &mut zero);
        crate::runs::join(&mut zero)?;
        Ok((out, zero, request.excess_bytes))
    }
}

/// Block pairs of a set of feeds, sorted by local id: ids that follow each other are joined only when ascending.
fn fed(set: &[Feed], links: &[Link], by_link: &BTreeMap<usize, ByCut>) -> Result<Pairs> {
    let mut pairs: Pairs = Vec::new();
    for &(link, class) in set {
        let cut = links[link].classes[class].0;
        pairs.extend(by_link.get(&link).and_then(|cuts| cuts.get(&cut)).into_iter().flatten());
    }
    if !pairs.is_sorted_by_key(|pair| pair.0) {
        pairs.sort_unstable();
    }
    if let Some(twice) = pairs.windows(2).find(|two| two[0].0 == two[1].0) {
        return Err(Error::DuplicateBlock { side: "local", group: links[set[0].0].local_group, id: twice[0].0 as i64 });
    }
    Ok(pairs)
}

fn encode(source: usize, table: &ViewTable, lists: &[Pairs]) -> Ids {
    let counts: Vec<u64> = lists.iter().map(|list| stretches(list).len() as u64).collect();
    let total = table.pairs.iter().map(|pair| lists[pair.feeds].len()).sum();
    let mut ids = Ids { source, local: Vec::with_capacity(total), remote: Vec::with_capacity(total), ..Ids::default() };
    for pair in &table.pairs {
        let list = &lists[pair.feeds];
        // The table's flat lists fit int32 and block ids are below the count of their view.
        let (mine, theirs) = (pair.offsets.0 as i32, pair.offsets.1 as i32);
        ids.local.extend(list.iter().map(|block| mine.wrapping_add(block.0 as i32)));
        ids.remote.extend(list.iter().map(|block| theirs.wrapping_add(block.1 as i32)));
        ids.bytes += pair.length * list.len() as u64;
        ids.merged += if pair.dense { counts[pair.feeds] } else { list.len() as u64 };
    }
    ids
}
