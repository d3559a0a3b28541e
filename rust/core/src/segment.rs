// SPDX-License-Identifier: Apache-2.0
//! Positions: which kernel block of one side meets which of the other, and how far a transfer reaches.
use crate::error::{Error, Result};
use crate::geometry::Group;
use crate::pieces::Tokens;
use crate::span::Blocks;
use crate::table::{NEXT_PAIR, Pairs, pack};

/// Tokens of one local kernel block that are in one remote kernel block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Kernel block ids.
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) tokens: Tokens,
}

/// A group and a request's blocks in it.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub(crate) name: &'static str,
    pub(crate) index: usize,
    pub(crate) group: &'a Group,
    pub(crate) blocks: &'a Blocks,
}

impl Side<'_> {
    /// First token of the first block: everything of this side's positions from there on is in the span.
    pub(crate) fn start(&self) -> u64 {
        self.blocks.first * self.group.block_size * self.group.cp_size
    }

    /// First token from which on the span has all that this side holds before `needed`. At most `needed`: what it holds
    /// from there on is required.
    pub(crate) fn start_before(&self, needed: u64) -> u64 {
        let Group { block_size, cp_size, cp_rank, .. } = *self.group;
        let started = (needed.div_ceil(block_size) + cp_size - 1 - cp_rank) / cp_size;
        // What is missing behind the span is missing up to the last block that starts before `needed`.
        let missing = if self.blocks.end() < started { started } else { self.blocks.first.min(started) };
        match missing {
            0 => 0,
            missing => (self.group.entry_start(missing - 1) + block_size).min(needed),
        }
    }

    /// Block table entry that holds token `t`, if this rank does.
    fn entry(&self, t: u64) -> Option<u64> {
        let block = t / self.group.block_size;
        (block % self.group.cp_size == self.group.cp_rank).then_some(block / self.group.cp_size)
    }

    /// First token at or after `t` that this rank holds.
    pub(crate) fn next_held(&self, t: u64) -> u64 {
        if self.holds(t) {
            return t;
        }
        let block = t / self.group.block_size;
        let turn = block / self.group.cp_size + u64::from(block % self.group.cp_size > self.group.cp_rank);
        self.group.entry_start(turn)
    }

    /// End of the kernel block that token `t` is in.
    pub(crate) fn kernel_end(&self, t: u64) -> u64 {
        let tokens = self.group.kernel_tokens();
        (t / tokens + 1) * tokens
    }

    pub(crate) fn holds(&self, t: u64) -> bool {
        self.entry(t).is_some()
    }

    /// Kernel block id of token `t`, and the token's place in it. The entry has to be in the span.
    fn kernel_block(&self, entry: u64, t: u64) -> (u64, u64) {
        let in_block = t % self.group.block_size;
        let tokens = self.group.kernel_tokens();
        (self.blocks.id(entry) * self.group.ratio + in_block / tokens, in_block % tokens)
    }

    /// Fails unless the span holds every token of `first..end` that is this rank's.
    pub(crate) fn require(&self, first: u64, end: u64) -> Result<()> {
        let missing = |token| Error::MissingTokens { side: self.name, group: self.index, token, first, end };
        let start = self.next_held(first);
        if start >= end {
            return Ok(());
        }
        if self.entry(start).is_none_or(|entry| entry < self.blocks.first) {
            return Err(missing(start));
        }
        let behind = self.next_held(self.group.entry_start(self.blocks.end()));
        if behind < end { Err(missing(behind.max(start))) } else { Ok(()) }
    }
}

/// Tokens of a group that a request moves and zeroes on the local side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reach {
    /// First token of the first local block that is touched.
    pub(crate) touched: u64,
    /// First token that is moved.
    pub(crate) start: u64,
    /// One past the last token that is moved.
    pub(crate) end: u64,
}

/// First token of the first local block that the request still needs.
pub(crate) fn touched_start(local: &Side, num_tokens: u64) -> u64 {
    let block_size = local.group.block_size;
    local.start().max(local.group.need_start(num_tokens) / block_size * block_size)
}

/// The same as [`pair`] for whole kernel blocks of equal size on sides that hold every position, without a step for each
/// block: appends pairs and returns where the last whole block ends, or None if this is another case.
pub(crate) fn pair_whole(local: &Side, remote: &Side, start: u64, end: u64, out: &mut Pairs) -> Option<u64> {
    let tokens = local.group.kernel_tokens();
    let plain = |side: &Side| side.group.kernel_tokens() == tokens && side.group.cp_size == 1;
    if !plain(local) || !plain(remote) || start % tokens != 0 {
        return None;
    }
    let (first, last) = (start / tokens, end / tokens);
    let (ratio, other) = (local.group.ratio, remote.group.ratio);
    if ratio == 1 && other == 1 {
        let ids = |side: &Side| (first - side.blocks.first) as usize..(last.max(first) - side.blocks.first) as usize;
        let pairs = local.blocks.ids[ids(local)].iter().zip(&remote.blocks.ids[ids(remote)]);
        out.extend(pairs.map(|(&mine, &theirs)| pack(mine.into(), theirs.into())));
        return Some(last * tokens);
    }
    // Sorting the few stretches here spares sorting the many pairs later.
    let mut stretches: Vec<(u64, u64)> = Vec::new();
    let mut block = first;
    while block < last {
        let (mine, theirs) = (block % ratio, block % other);
        let count = (ratio - mine).min(other - theirs).min(last - block);
        let pair =
            pack(local.blocks.id(block / ratio) * ratio + mine, remote.blocks.id(block / other) * other + theirs);
        stretches.push((pair, count));
        block += count;
    }
    stretches.sort_unstable();
    out.extend(stretches.iter().flat_map(|&(pair, count)| (0..count).map(move |step| pair + step * NEXT_PAIR)));
    Some(last * tokens)
}

/// Walks the tokens `start..end` that both sides hold, in the order of the sequence.
pub(crate) fn pair(local: &Side, remote: &Side, start: u64, end: u64, mut visit: impl FnMut(Segment)) {
    let mut t = start;
    while t < end {
        let (Some(entry), Some(other)) = (local.entry(t), remote.entry(t)) else {
            t = local.next_held(t).max(remote.next_held(t));
            continue;
        };
        let stop = local.kernel_end(t).min(remote.kernel_end(t)).min(end);
        let (local_block, local_token) = local.kernel_block(entry, t);
        let (remote_block, remote_token) = remote.kernel_block(other, t);
        let tokens = Tokens { local: local_token, remote: remote_token, count: stop - t };
        visit(Segment { local: local_block, remote: remote_block, tokens });
        t = stop;
    }
}

/// The cuts that whole kernel blocks of two groups make of each other, each once.
pub(crate) fn classes(local: &Group, remote: &Group, limit: usize) -> Option<Vec<Tokens>> {
    let (a, b) = (local.kernel_tokens(), remote.kernel_tokens());
    let cycle = (a / crate::axis::gcd(a, b)).checked_mul(b)?;
    if cycle / a + cycle / b > limit as u64 {
        return None;
    }
    let mut found = Vec::new();
    let mut t = 0;
    while t < cycle {
        let stop = ((t / a + 1) * a).min((t / b + 1) * b);
        found.push(Tokens { local: t % a, remote: t % b, count: stop - t });
        t = stop;
    }
    Some(found)
}
