// SPDX-License-Identifier: Apache-2.0
//! A plan's views, and requests as ids into them.
use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::geometry::Geometry;
use crate::link::{Row, Strides};
use crate::plan::{Plan, Source};
use crate::runs::Descriptor;
use crate::span::Span;
use crate::table::{Pairs, stretches, unpack};
use crate::transfer::Tail;
use crate::views::View;

/// More views than this are slower to prepare than the descriptors of a request are to build.
const MAX_VIEWS: usize = 65_536;

/// What one request moves and zeroes, as ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdTransfer {
    /// One entry for each source that something is read from.
    pub reads: Vec<Ids>,
    /// Local ranges to zero before the reads are posted.
    pub zero: Vec<Descriptor>,
    /// Bytes of tokens behind the request's: views have whole kernel blocks only.
    pub excess_bytes: u64,
    /// As in [`Transfer`](crate::Transfer).
    pub first_tokens: Vec<u64>,
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

/// A row of the plan as entries of two views.
struct Pair {
    offsets: (u64, u64),
    length: u64,
    dense: bool,
    feeds: usize,
}

/// Views of one source.
pub(crate) struct ViewTable {
    local: Vec<View>,
    remote: Vec<View>,
    pairs: Vec<Pair>,
}

fn view(geometry: &Geometry, strides: Strides, blocks: u64, address: u64, length: u64) -> View {
    let device = geometry.regions[usize::from(strides.region)].device;
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
    fn new(plan: &Plan, source: &Source) -> Result<Self> {
        let table = &source.table;
        if table.links.iter().any(|link| link.cuts.is_empty()) {
            return Err(Error::NoViews { why: "the kernel blocks of the two sides cut each other too often".into() });
        }
        if table.rows.iter().any(|(row, _)| !row.family.local.linear() || !row.family.remote.linear()) {
            return Err(Error::NoViews { why: "kernel blocks are not evenly spaced over logical blocks".into() });
        }
        if table.rows.len() > MAX_VIEWS {
            return Err(Error::NoViews {
                why: format!("there are {}, at most {MAX_VIEWS} are kept", table.rows.len()),
            });
        }
        let views = |&(Row { chunk, family }, feeds): &(Row, usize)| {
            // Groups that alias may have different numbers of blocks: all blocks of the largest are in the row.
            let links = || table.feeds[feeds].iter().map(|&(link, _)| &table.links[link]);
            let mine = links().map(|link| plan.num_blocks[link.local_group]).max().unwrap_or(0);
            let theirs = links().map(|link| source.num_blocks[link.remote_group]).max().unwrap_or(0);
            (
                view(&plan.local, family.local, mine, chunk.local, chunk.len),
                view(&source.geometry, family.remote, theirs, chunk.remote, chunk.len),
            )
        };
        let (local, local_offsets) = number(table.rows.iter().map(|row| views(row).0))?;
        let (remote, remote_offsets) = number(table.rows.iter().map(|row| views(row).1))?;
        let pairs = table
            .rows
            .iter()
            .map(|row| {
                let (mine, theirs) = views(row);
                let offsets = (local_offsets[&mine], remote_offsets[&theirs]);
                let dense = mine[1] == mine[3] && theirs[1] == theirs[3];
                Pair { offsets, length: mine[1], dense, feeds: row.1 }
            })
            .collect();
        Ok(Self { local, remote, pairs })
    }
}

impl Plan {
    fn view_table(&self, source: usize) -> Result<&ViewTable> {
        let Some(slot) = self.sources.get(source) else {
            let expected = format!("there are {} sources", self.sources.len());
            return Err(Error::Value { place: String::new(), field: "source", value: source as i128, expected });
        };
        slot.views.get_or_init(|| ViewTable::new(self, slot)).as_ref().map_err(Clone::clone)
    }

    /// Views of the local and of the remote side, to be prepared once for a source.
    pub fn views(&self, source: usize) -> Result<(&[View], &[View])> {
        let table = self.view_table(source)?;
        Ok((&table.local, &table.remote))
    }

    /// The request as ids into the views of each source. Views have whole kernel blocks, so a last block is moved whole.
    pub fn ids(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<IdTransfer> {
        let request = self.check(num_tokens, local, remote, Tail::Whole)?;
        let zero = self.zero(&request)?;
        let mut reads: Vec<Ids> = Vec::new();
        let mut clear = true;
        for source in self.sources() {
            let views = self.view_table(source)?;
            let table = &self.sources[source].table;
            let by_link = self.segments(&request, source)?;
            for (link, cuts) in table.links.iter().zip(&by_link) {
                if cuts.iter().any(|(cut, _)| link.kept(*cut).is_none()) {
                    return Err(Error::NoViews {
                        why: "two links cut a group's first or last block differently".into(),
                    });
                }
            }
            let lists = table.gather(&by_link);
            clear &= reads.is_empty() && table.surely_apart(&lists, &zero);
            let ids = encode(source, views, &lists);
            if !ids.local.is_empty() {
                reads.push(ids);
            }
        }
        if !clear && !self.surely_distinct(&request.local) {
            // Several sources, interleaved rows, or an overlap: what is written where has to be looked at one by one.
            self.apart(&request, &zero, Vec::with_capacity)?;
        }
        Ok(IdTransfer { reads, zero, excess_bytes: request.excess_bytes, first_tokens: request.first_tokens() })
    }
}

fn encode(source: usize, table: &ViewTable, lists: &[Pairs]) -> Ids {
    // Block ids are below the count of their view, and the flat lists of a table fit int32.
    let columns: Vec<(Vec<i32>, Vec<i32>, u64)> = lists
        .iter()
        .map(|list| {
            let side = |of: fn(u64) -> u64| list.iter().map(|&pair| of(pair) as i32).collect();
            (side(|pair| unpack(pair).0), side(|pair| unpack(pair).1), stretches(list).len() as u64)
        })
        .collect();
    let total = table.pairs.iter().map(|pair| lists[pair.feeds].len()).sum();
    let mut ids = Ids { source, local: Vec::with_capacity(total), remote: Vec::with_capacity(total), ..Ids::default() };
    for pair in &table.pairs {
        let (mine, theirs, merged) = &columns[pair.feeds];
        let offsets = (pair.offsets.0 as i32, pair.offsets.1 as i32);
        ids.local.extend(mine.iter().map(|id| offsets.0.wrapping_add(*id)));
        ids.remote.extend(theirs.iter().map(|id| offsets.1.wrapping_add(*id)));
        ids.bytes = pair.length.saturating_mul(mine.len() as u64).saturating_add(ids.bytes);
        ids.merged += if pair.dense { *merged } else { mine.len() as u64 };
    }
    ids
}
