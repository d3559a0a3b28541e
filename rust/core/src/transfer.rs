// SPDX-License-Identifier: Apache-2.0
//! One request: what is read from each source, and what is zeroed before.
use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::geometry::{Geometry, Kind};
use crate::pieces::Tokens;
use crate::plan::{Link, Plan, Row, STATE};
use crate::runs::{Run, apart, join};
use crate::segment::{Reach, Segment, Side, pair, touched_start};
use crate::span::{Blocks, Span, check_spans};

/// Reads from one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Index of the source.
    pub source: usize,
    /// Copies, sorted by local address.
    pub runs: Vec<Run>,
}

impl Read {
    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.len).sum()
    }
}

/// Kernel block ids of both sides that meet.
pub(crate) type Pairs = Vec<(u64, u64)>;

/// Block pairs by how they cut each other.
pub(crate) type ByCut = BTreeMap<Tokens, Pairs>;

/// What one request moves and zeroes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// One entry for each source that something is read from.
    pub reads: Vec<Read>,
    /// Local ranges to zero before the reads are posted; `remote` equals `local`.
    pub zero: Vec<Run>,
    /// Bytes of tokens behind the request's that came along because a whole block was cheaper.
    pub excess_bytes: u64,
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
    local: Vec<Blocks>,
    /// Spans of each source.
    remote: Vec<Vec<Blocks>>,
    /// For each local attention group that has something to read or to zero.
    reach: Vec<Option<Reach>>,
    pub(crate) excess_bytes: u64,
}

/// More tokens than any sequence has; positions stay far below 2^63.
const MAX_TOKENS: u64 = 1 << 40;

impl Plan {
    /// Computes what a request of `num_tokens` tokens moves.
    ///
    /// `local` has a span for each local group, of the blocks to fill. `remote` has, for each source, a span for
    /// each of its groups; a single entry holds for all sources.
    pub fn transfer(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>]) -> Result<Transfer> {
        let request = self.check(num_tokens, local, remote, Tail::Cheapest)?;
        let mut reads: Vec<Read> = Vec::new();
        for link in &self.links {
            let geometry = &self.remotes[link.source];
            let by_cut = self.segments(&request, link)?;
            if by_cut.is_empty() {
                continue;
            }
            if reads.last().is_none_or(|read| read.source != link.source) {
                reads.push(Read { source: link.source, runs: Vec::new() });
            }
            if let Some(read) = reads.last_mut() {
                emit(link, &self.local, geometry, by_cut, &mut read.runs);
            }
        }
        for read in &mut reads {
            join(&mut read.runs)?;
        }
        let mut zero = Vec::new();
        self.zero(&request, &mut zero);
        join(&mut zero)?;
        if reads.len() > 1 || !zero.is_empty() {
            apart(reads.iter().map(|read| read.runs.as_slice()).chain([zero.as_slice()]))?;
        }
        Ok(Transfer { reads, zero, excess_bytes: request.excess_bytes })
    }

    pub(crate) fn check(&self, num_tokens: u64, local: &[Span], remote: &[Vec<Span>], tail: Tail) -> Result<Checked> {
        if num_tokens == 0 || num_tokens > MAX_TOKENS {
            let expected = format!("has to be 1 to {MAX_TOKENS}");
            return Err(Error::Value { what: "num_tokens".into(), value: num_tokens.into(), expected });
        }
        let sources = self.remotes.len();
        if remote.len() != 1 && remote.len() != sources {
            return Err(Error::Count { what: "remote spans by source", got: remote.len(), expected: sources });
        }
        let local = check_spans("local", &self.local, &self.local_blocks, local)?;
        let remote = (0..sources)
            .map(|source| {
                let spans = &remote[if remote.len() == 1 { 0 } else { source }];
                check_spans("remote", &self.remotes[source], &self.remote_blocks[source], spans)
            })
            .collect::<Result<Vec<_>>>()?;
        let reach = vec![None; local.len()];
        let mut request = Checked { num_tokens, local, remote, reach, excess_bytes: 0 };
        for group in 0..self.local.groups.len() {
            if self.local.groups[group].kind.is_attention() {
                let (reach, excess_bytes) = self.reach(&request, group, tail)?;
                request.reach[group] = Some(reach);
                request.excess_bytes += excess_bytes;
            }
        }
        Ok(request)
    }

    fn sides<'a>(&'a self, request: &'a Checked, link: &Link) -> (Side<'a>, Side<'a>) {
        let theirs = &self.remotes[link.source];
        (
            local_side(&self.local, request, link.local_group),
            Side {
                name: "remote",
                index: link.remote_group,
                group: &theirs.groups[link.remote_group],
                blocks: &request.remote[link.source][link.remote_group],
            },
        )
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
        let links: Vec<&Link> = self.links.iter().filter(|link| link.local_group == group).collect();
        // Where the kernel blocks of both sides that hold the last token end.
        let mut whole = u64::MAX;
        for link in &links {
            let (local, remote) = self.sides(request, link);
            pair_requirement(&local, &remote, needed, tokens)?;
            reach.start = reach.start.max(remote.start());
            if local.holds(tokens - 1) && remote.holds(tokens - 1) {
                whole = whole.min(local.kernel_end(tokens - 1)).min(remote.kernel_end(tokens - 1));
            }
        }
        if whole == u64::MAX || whole == tokens {
            return Ok((reach, 0));
        }
        let (pieces, bytes) = self.tail_cost(request, &links, &reach, tokens);
        let (whole_pieces, whole_bytes) = self.tail_cost(request, &links, &reach, whole);
        let more = pieces.saturating_sub(whole_pieces).saturating_mul(self.descriptor_bytes);
        if tail == Tail::Cheapest && more <= whole_bytes - bytes {
            return Ok((reach, 0));
        }
        Ok((Reach { end: whole, ..reach }, whole_bytes - bytes))
    }

    /// Pieces and bytes of the last kernel block when tokens before `end` of it are moved.
    fn tail_cost(&self, request: &Checked, links: &[&Link], reach: &Reach, end: u64) -> (u64, u64) {
        let mut cost = (0, 0);
        for link in links {
            let (local, remote) = self.sides(request, link);
            let last = request.num_tokens - 1;
            let block = |side: &Side| side.kernel_end(last) - side.group.kernel_tokens();
            let start = block(&local).max(block(&remote)).max(reach.start);
            pair(&local, &remote, start, end, |segment| {
                self.with_rows(link, segment.tokens, |rows| {
                    cost.0 += rows.len() as u64;
                    cost.1 += rows.iter().map(|row| row.chunk.len).sum::<u64>();
                });
            });
        }
        cost
    }

    fn with_rows(&self, link: &Link, cut: Tokens, use_rows: impl FnOnce(&[Row])) {
        match link.class(cut) {
            Some(class) => use_rows(&link.classes[class].1),
            None => use_rows(&link.rows(&self.local, &self.remotes[link.source], cut)),
        }
    }

    /// Kernel block pairs of a link, by how they cut each other.
    pub(crate) fn segments(&self, request: &Checked, link: &Link) -> Result<ByCut> {
        let mut by_cut = ByCut::new();
        let (local, remote) = self.sides(request, link);
        let mut last: Option<(Tokens, Pairs)> = None;
        let mut put = |segment: Segment| match &mut last {
            // Nearly all segments of a request are cut alike: look the list up only when the cut changes.
            Some((cut, list)) if *cut == segment.tokens => list.push((segment.local, segment.remote)),
            _ => {
                let mut list = by_cut.remove(&segment.tokens).unwrap_or_default();
                list.push((segment.local, segment.remote));
                if let Some((cut, list)) = last.replace((segment.tokens, list)) {
                    by_cut.insert(cut, list);
                }
            }
        };
        match self.local_group(link).kind {
            Kind::Ssm => {
                if let Some(mine) = state_slot(&local) {
                    let expected = 1;
                    let missing = Error::Count { what: "remote state slots", got: 0, expected };
                    let theirs = state_slot(&remote).ok_or(missing)?;
                    put(Segment { local: mine, remote: theirs, tokens: STATE });
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
                        put(Segment { local, remote, tokens: STATE });
                    }
                }
            }
            _ => {
                if let Some(reach) = request.reach[link.local_group] {
                    pair(&local, &remote, reach.start, reach.end, put);
                }
            }
        }
        by_cut.extend(last);
        Ok(by_cut)
    }

    /// Local ranges of the request's blocks that nothing is read into.
    pub(crate) fn zero(&self, request: &Checked, out: &mut Vec<Run>) {
        for (links, orphans) in [(&self.own, false), (&self.orphans, true)] {
            for link in links {
                let side = local_side(&self.local, request, link.local_group);
                let mut by_cut = ByCut::new();
                let mut put = |s: Segment| by_cut.entry(s.tokens).or_default().push((s.local, s.remote));
                match (request.reach[link.local_group], orphans) {
                    (Some(reach), false) => {
                        let end = span_end(&side);
                        pair(&side, &side, reach.touched, reach.start.min(end), &mut put);
                        pair(&side, &side, reach.end, end, &mut put);
                    }
                    // The rest of these layers is zeroed with the whole group.
                    (Some(reach), true) => pair(&side, &side, reach.start, reach.end, &mut put),
                    (None, true) => {
                        let slots = state_slot(&side).into_iter();
                        slots.for_each(|slot| put(Segment { local: slot, remote: slot, tokens: STATE }));
                    }
                    (None, false) => {}
                }
                emit(link, &self.local, &self.local, by_cut, out);
            }
        }
    }
}

fn local_side<'a>(local: &'a Geometry, request: &'a Checked, group: usize) -> Side<'a> {
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

/// The slot that carries the last state: speculative slots lie behind it.
fn state_slot(side: &Side) -> Option<u64> {
    let slots = &side.blocks.ids;
    let index = slots.len().checked_sub(1)?;
    let speculative = usize::try_from(side.group.speculative).unwrap_or(usize::MAX);
    Some(slots[index.saturating_sub(speculative)].into())
}

/// Appends the copies of one link's block pairs.
fn emit(link: &Link, local: &Geometry, remote: &Geometry, by_cut: ByCut, out: &mut Vec<Run>) {
    for (cut, mut pairs) in by_cut {
        if !pairs.is_sorted_by_key(|pair| pair.0) {
            pairs.sort_unstable();
        }
        let stretches = stretches(&pairs);
        let computed;
        let rows = if let Some(class) = link.class(cut) {
            &link.classes[class].1
        } else {
            computed = link.rows(local, remote, cut);
            &computed
        };
        for row in rows {
            push_row(link, row, &pairs, &stretches, out);
        }
    }
}

/// Block pairs that follow each other on both sides: `(local, remote, count)`.
pub(crate) fn stretches(pairs: &[(u64, u64)]) -> Vec<(u64, u64, u64)> {
    let mut found: Vec<(u64, u64, u64)> = Vec::new();
    for &(local, remote) in pairs {
        match found.last_mut() {
            Some(last) if last.0 + last.2 == local && last.1 + last.2 == remote => last.2 += 1,
            _ => found.push((local, remote, 1)),
        }
    }
    found
}

fn push_row(link: &Link, row: &Row, pairs: &[(u64, u64)], stretches: &[(u64, u64, u64)], out: &mut Vec<Run>) {
    let (family, chunk) = (link.families[row.family], row.chunk);
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
            out.extend(stretches.iter().map(|&(l, r, count)| run(l * step, r * other, count * chunk.len)));
        } else {
            out.extend(pairs.iter().map(|&(l, r)| run(l * step, r * other, chunk.len)));
        }
    } else {
        out.extend(pairs.iter().map(|&(l, r)| run(family.local.offset(l), family.remote.offset(r), chunk.len)));
    }
}
