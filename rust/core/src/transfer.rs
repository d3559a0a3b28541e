// SPDX-License-Identifier: Apache-2.0
//! One request: what is read from each source, and what is zeroed before.
use std::collections::{BTreeMap, HashSet};

use crate::by_group::ByGroup;
use crate::error::{Error, Result};
use crate::geometry::{Geometry, Kind};
use crate::link::{Link, STATE};
use crate::pieces::Tokens;
use crate::plan::Plan;
use crate::runs::{Copies, Descriptor, Room, apart};
use crate::segment::{Reach, Segment, Side, pair, pair_whole, touched_start};
use crate::span::{Blocks, Span, check_spans};
use crate::table::{ByCut, Pairs, Table, pack};

/// Reads from one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Index of the source.
    pub source: usize,
    /// What is copied where.
    pub copies: Copies,
}

/// What one request moves and zeroes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// One entry for each source that something is read from.
    pub reads: Vec<Read>,
    /// Local ranges to zero before the reads are posted.
    pub zero: Vec<Descriptor>,
    /// Bytes of tokens behind the request's that came along because a whole block was cheaper.
    pub excess_bytes: u64,
    /// For each local group, the first token from which on its blocks are filled up to the request's last token.
    /// Blocks that begin before it hold zeros there. 0 for groups whose blocks do not hold tokens by position.
    pub first_tokens: Vec<u64>,
    /// Bytes read into each local group.
    pub bytes_by_group: Vec<u64>,
    /// Descriptors of each local group; one that goes on from group to group counts for the group of its first byte.
    pub descriptors_by_group: Vec<u64>,
}

/// Whether a partial last block may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tail {
    /// Cut it where that is cheaper.
    Cheapest,
    /// Move it whole: views have whole blocks only.
    Whole,
}

/// A request whose numbers are checked against both sides.
pub(crate) struct Checked {
    num_tokens: u64,
    pub(crate) local: Vec<Blocks>,
    /// Spans of each source.
    remote: Vec<Vec<Blocks>>,
    /// For each local attention group that has something to read or to zero.
    pub(crate) reach: Vec<Option<Reach>>,
    pub(crate) excess_bytes: u64,
}

impl Checked {
    pub(crate) fn first_tokens(&self) -> Vec<u64> {
        self.reach.iter().map(|reach| reach.map_or(0, |reach| reach.start)).collect()
    }
}

/// More tokens than any sequence has; positions stay far below 2^63.
const MAX_TOKENS: u64 = 1 << 40;

impl Plan {
    /// Computes what a request of `num_tokens` tokens moves.
    ///
    /// `local` has a span for each local group, of the blocks to fill. `remote` has, for each source, a span for
    /// each of its groups; a single entry holds for all sources.
    pub fn transfer(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<Transfer> {
        self.transfer_in(Vec::with_capacity, num_tokens, local, remote)
    }

    /// The same, with descriptors where `room` puts them.
    pub fn transfer_in(&self, room: Room, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<Transfer> {
        let request = self.check(num_tokens, local, remote, Tail::Cheapest)?;
        let zero = self.zero(&request)?;
        let (reads, by_group) = self.apart(&request, &zero, room)?;
        Ok(Transfer {
            reads,
            zero,
            excess_bytes: request.excess_bytes,
            first_tokens: request.first_tokens(),
            bytes_by_group: by_group.bytes,
            descriptors_by_group: by_group.descriptors,
        })
    }

    /// The copies of every source, and their numbers. Fails if a byte is written twice, also by `zero`.
    pub(crate) fn apart(&self, request: &Checked, zero: &[Descriptor], room: Room) -> Result<(Vec<Read>, ByGroup)> {
        let mut by_group = ByGroup::new(self.local.groups.len());
        let mut reads: Vec<Read> = Vec::new();
        for (index, source) in self.sources.iter().enumerate() {
            let by_link = self.segments(request, index)?;
            let copies = source.table.copies(&self.local, &source.geometry, &by_link, room, &mut by_group)?;
            if !copies.is_empty() {
                reads.push(Read { source: index, copies });
            }
        }
        if (reads.len() > 1 || !zero.is_empty()) && !self.surely_distinct(&request.local) {
            apart(reads.iter().map(|read| read.copies.local.as_slice()).chain([zero]))?;
        }
        Ok((reads, by_group))
    }

    pub(crate) fn check(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>], tail: Tail) -> Result<Checked> {
        if num_tokens == 0 || num_tokens > MAX_TOKENS {
            let expected = format!("has to be 1 to {MAX_TOKENS}");
            let (place, field) = (String::new(), "num_tokens");
            return Err(Error::Value { place, field, value: num_tokens.into(), expected });
        }
        let sources = self.sources.len();
        if remote.len() != 1 && remote.len() != sources {
            return Err(Error::Count { what: "remote spans by source", got: remote.len(), expected: sources });
        }
        let local = check_spans("local", &self.local, &self.num_blocks, local)?;
        let remote = self
            .sources
            .iter()
            .enumerate()
            .map(|(index, source)| {
                let spans = &remote[if remote.len() == 1 { 0 } else { index }];
                check_spans("remote", &source.geometry, &source.num_blocks, spans)
            })
            .collect::<Result<Vec<_>>>()?;
        let reach = vec![None; local.len()];
        let mut request = Checked { num_tokens, local, remote, reach, excess_bytes: 0 };
        for group in 0..self.local.groups.len() {
            if self.local.groups[group].kind.is_attention() {
                let (reach, excess_bytes) = self.reach(&request, group, tail)?;
                request.reach[group] = Some(reach);
                request.excess_bytes = request.excess_bytes.saturating_add(excess_bytes);
            }
        }
        Ok(request)
    }

    fn sides<'a>(&'a self, request: &'a Checked, source: usize, link: &Link) -> (Side<'a>, Side<'a>) {
        (
            local_side(&self.local, request, link.local_group),
            Side {
                name: "remote",
                index: link.remote_group,
                group: &self.sources[source].geometry.groups[link.remote_group],
                blocks: &request.remote[source][link.remote_group],
            },
        )
    }

    /// Links that read into a local group, each with its source.
    fn links_into(&self, group: usize) -> impl Iterator<Item = (usize, &Link)> {
        let links = self.sources.iter().enumerate();
        links
            .flat_map(|(index, source)| source.table.links.iter().map(move |link| (index, link)))
            .filter(move |(_, link)| link.local_group == group)
    }

    /// How far a local attention group is moved, and the bytes behind the request's tokens in that: all of its links
    /// have to agree, since what none of them moves is zeroed.
    fn reach(&self, request: &Checked, group: usize, tail: Tail) -> Result<(Reach, u64)> {
        let tokens = request.num_tokens;
        let local = local_side(&self.local, request, group);
        let touched = touched_start(&local, tokens);
        let needed = local.start().max(local.group.need_start(tokens));
        if needed >= tokens {
            let nothing = tokens.max(touched);
            return Ok((Reach { touched, start: nothing, end: nothing }, 0));
        }
        local.require(needed, tokens)?;
        let mut reach = Reach { touched, start: touched, end: tokens };
        // Where the kernel blocks of both sides that hold the last token end.
        let mut whole = u64::MAX;
        let last = tokens - 1;
        for (source, link) in self.links_into(group) {
            let (local, remote) = self.sides(request, source, link);
            pair_requirement(&local, &remote, needed, tokens)?;
            reach.start = reach.start.max(remote.start_before(needed));
            if local.holds(last) && remote.holds(last) {
                whole = whole.min(local.kernel_end(last)).min(remote.kernel_end(last));
            }
        }
        if whole == u64::MAX || whole == tokens {
            return Ok((reach, 0));
        }
        let (pieces, excess_bytes) = self.whole_tail(request, group, &reach, whole, tail)?;
        if tail == Tail::Cheapest && pieces.saturating_mul(self.descriptor_bytes) <= excess_bytes {
            return Ok((reach, 0));
        }
        Ok((Reach { end: whole, ..reach }, excess_bytes))
    }

    /// Pieces saved and bytes added when the last kernel block is moved up to token `end`.
    fn whole_tail(&self, request: &Checked, group: usize, reach: &Reach, end: u64, tail: Tail) -> Result<(u64, u64)> {
        let last = request.num_tokens - 1;
        let (mut exact, mut whole, mut bytes) = (0, 0, 0);
        for (source, link) in self.links_into(group) {
            let (local, remote) = self.sides(request, source, link);
            if !(local.holds(last) && remote.holds(last)) {
                continue;
            }
            bytes = link.token_bytes.saturating_mul(end - request.num_tokens).saturating_add(bytes);
            if tail == Tail::Whole {
                continue;
            }
            let block = |side: &Side| side.kernel_end(last) - side.group.kernel_tokens();
            let start = block(&local).max(block(&remote)).max(reach.start);
            let geometry = &self.sources[source].geometry;
            for (end, pieces) in [(request.num_tokens, &mut exact), (end, &mut whole)] {
                let mut cut = None;
                pair(&local, &remote, start, end, |segment| cut = Some(segment.tokens));
                // One kernel block of either side holds the last token, so there is one segment.
                *pieces += cut.map_or(Ok(0), |cut| link.pieces(&self.local, geometry, cut))?;
            }
        }
        Ok((exact.saturating_sub(whole), bytes))
    }

    /// Kernel block pairs of every link of a source, by how they cut each other.
    pub(crate) fn segments(&self, request: &Checked, source: usize) -> Result<Vec<ByCut>> {
        let links = self.sources[source].table.links.iter();
        links.map(|link| self.link_segments(request, source, link)).collect()
    }

    fn link_segments(&self, request: &Checked, source: usize, link: &Link) -> Result<ByCut> {
        let (local, remote) = self.sides(request, source, link);
        let mut cuts = Cuts::default();
        match local.group.kind {
            Kind::Ssm => {
                if let Some(mine) = state_slot(&local) {
                    let missing = Error::Count { what: "remote state slots", got: 0, expected: 1 };
                    let theirs = state_slot(&remote).ok_or(missing)?;
                    cuts.put(Segment { local: mine, remote: theirs, tokens: STATE });
                }
            }
            Kind::Opaque => {
                for entry in local.blocks.first..local.blocks.end() {
                    if entry < remote.blocks.first || entry >= remote.blocks.end() {
                        let (first, end) = (local.blocks.first, local.blocks.end());
                        return Err(Error::MissingTokens {
                            side: "remote",
                            group: remote.index,
                            token: entry,
                            first,
                            end,
                        });
                    }
                    for kernel in 0..local.group.ratio {
                        let local = local.blocks.id(entry) * local.group.ratio + kernel;
                        let remote = remote.blocks.id(entry) * remote.group.ratio + kernel;
                        cuts.put(Segment { local, remote, tokens: STATE });
                    }
                }
            }
            _ => {
                if let Some(Reach { mut start, end, .. }) = request.reach[link.local_group].filter(|r| r.start < r.end)
                {
                    let tokens = Tokens { local: 0, remote: 0, count: local.group.kernel_tokens() };
                    if let Some(whole) = pair_whole(&local, &remote, start, end, cuts.list(tokens)) {
                        start = whole;
                    }
                    pair(&local, &remote, start, end, |segment| cuts.put(segment));
                }
            }
        }
        Ok(cuts.sorted())
    }

    /// Local ranges of the request's blocks that nothing is read into.
    pub(crate) fn zero(&self, request: &Checked) -> Result<Vec<Descriptor>> {
        let own = self.own.links.iter().map(|link| {
            let side = local_side(&self.local, request, link.local_group);
            let mut cuts = Cuts::default();
            if let Some(reach) = request.reach[link.local_group] {
                let end = span_end(&side);
                pair(&side, &side, reach.touched, reach.start.min(end), |segment| cuts.put(segment));
                pair(&side, &side, reach.end, end, |segment| cuts.put(segment));
            }
            cuts.sorted()
        });
        let mut uncounted = ByGroup::new(self.local.groups.len());
        let mut zeroed = |table: &Table, by_link: Vec<ByCut>| {
            let copies = table.copies(&self.local, &self.local, &by_link, Vec::with_capacity, &mut uncounted);
            copies.map(|copies| copies.local)
        };
        let mut zero = zeroed(&self.own, own.collect())?;
        // Of layers without a source, what the group as a whole receives is left; the rest is zeroed above.
        let orphans = self.orphans.links.iter().map(|link| {
            let side = local_side(&self.local, request, link.local_group);
            let mut cuts = Cuts::default();
            match request.reach[link.local_group] {
                Some(reach) => pair(&side, &side, reach.start, reach.end, |segment| cuts.put(segment)),
                None if side.group.kind == Kind::Ssm => {
                    let slots = state_slot(&side).into_iter();
                    slots.for_each(|slot| cuts.put(Segment { local: slot, remote: slot, tokens: STATE }));
                }
                None => own_blocks(&side, |block| cuts.put(Segment { local: block, remote: block, tokens: STATE })),
            }
            cuts.sorted()
        });
        let orphans = zeroed(&self.orphans, orphans.collect())?;
        if !orphans.is_empty() {
            apart([zero.as_slice(), orphans.as_slice()].into_iter())?;
            zero.extend(orphans);
            zero.sort_unstable();
            self.join(&mut zero);
        }
        Ok(zero)
    }

    /// Joins sorted local ranges that touch, but none across the start of a region.
    fn join(&self, ranges: &mut Vec<Descriptor>) {
        let starts: HashSet<u64> = self.local.regions.iter().map(|region| region.base).collect();
        ranges.dedup_by(|next, last| {
            let goes_on = last[0] + last[1] == next[0] && last[2] == next[2] && !starts.contains(&next[0]);
            if goes_on {
                last[1] += next[1];
            }
            goes_on
        });
    }
}

/// Collects segments by cut.
#[derive(Default)]
struct Cuts {
    lists: BTreeMap<Tokens, Pairs>,
    /// The list in use: nearly all segments of a request are cut like the one before.
    last: Option<(Tokens, Pairs)>,
}

impl Cuts {
    fn list(&mut self, cut: Tokens) -> &mut Pairs {
        if self.last.as_ref().is_none_or(|last| last.0 != cut) {
            let next = (cut, self.lists.remove(&cut).unwrap_or_default());
            self.lists.extend(self.last.replace(next));
        }
        &mut self.last.get_or_insert((cut, Pairs::new())).1
    }

    fn put(&mut self, segment: Segment) {
        self.list(segment.tokens).push(pack(segment.local, segment.remote));
    }

    fn sorted(mut self) -> ByCut {
        self.lists.extend(self.last);
        self.lists.into_iter().filter(|(_, pairs)| !pairs.is_empty()).collect()
    }
}

pub(crate) fn local_side<'a>(local: &'a Geometry, request: &'a Checked, group: usize) -> Side<'a> {
    Side { name: "local", index: group, group: &local.groups[group], blocks: &request.local[group] }
}

/// One past the last token the span has room for on this rank.
fn span_end(side: &Side) -> u64 {
    match side.blocks.end() {
        end if end == side.blocks.first => 0,
        end => side.group.entry_start(end - 1) + side.group.block_size,
    }
}

/// Fails unless the remote span has every token of `first..end` that both ranks hold.
fn pair_requirement(local: &Side, remote: &Side, first: u64, end: u64) -> Result<()> {
    if local.group.cp_size == 1 {
        return remote.require(first, end);
    }
    // Walk the local blocks: with context parallelism on both sides each rank only owes what both hold.
    for entry in local.blocks.first..local.blocks.end() {
        let start = local.group.entry_start(entry);
        let (start, stop) = (start.max(first), (start + local.group.block_size).min(end));
        if start < stop {
            remote.require(start, stop)?;
        }
    }
    Ok(())
}

/// Kernel blocks of a span.
fn own_blocks(side: &Side, visit: impl FnMut(u64)) {
    let ratio = side.group.ratio;
    side.blocks.ids.iter().flat_map(|&id| u64::from(id) * ratio..(u64::from(id) + 1) * ratio).for_each(visit);
}

/// The slot that carries the last state: speculative slots lie behind it.
fn state_slot(side: &Side) -> Option<u64> {
    let slots = &side.blocks.ids;
    let index = slots.len().checked_sub(1)?;
    let speculative = usize::try_from(side.group.speculative).unwrap_or(usize::MAX);
    Some(slots[index.saturating_sub(speculative)].into())
}
