// SPDX-License-Identifier: Apache-2.0
//! Positions of a request's blocks in one group: which block holds which token.
use crate::error::{Error, Result};
use crate::geometry::ranges::Interval;
use crate::geometry::types::{Group, KernelBlockId};
use crate::request::span::CheckedSpan;

/// A group of one side and a request's blocks in it.
#[derive(Clone, Copy)]
pub(crate) struct GroupSpan<'a> {
    /// `local` or `remote`.
    pub(crate) side: &'static str,
    pub(crate) index: usize,
    pub(crate) group: &'a Group,
    pub(crate) span: &'a CheckedSpan,
}

impl GroupSpan<'_> {
    /// First token of the first block's turn: the span has all of this rank's positions from there on.
    pub(crate) fn first_token(&self) -> u64 {
        self.span.first * self.group.tokens_per_entry()
    }

    /// One past the last token on this rank for which the span has room.
    pub(crate) fn end_token(&self) -> u64 {
        match self.span.end() {
            end if end == self.span.first => 0,
            end => self.group.entry_tokens(end - 1).end,
        }
    }

    /// First token of the first block that the request still needs.
    pub(crate) fn first_kept_token(&self, num_tokens: u64) -> u64 {
        let block_size = self.group.block_size;
        self.first_token().max(self.group.first_needed_token(num_tokens) / block_size * block_size)
    }

    /// First token from which the span has all that this rank holds before `needed`. It is the end of the last block
    /// outside the span that begins before `needed`.
    ///
    /// ```text
    /// entries of the table      0     1     2     3     4
    /// the span has              -     -     2     3     4        first 2, needed is in 3
    ///                                     ^ returned              ^ needed
    /// ```
    pub(crate) fn end_of_missing(&self, needed: u64) -> u64 {
        let first = self.group.entry_tokens(0).start;
        let begun = needed.saturating_sub(first).div_ceil(self.group.tokens_per_entry());
        let last_missing =
            if begun > self.span.end() { Some(begun - 1) } else { begun.min(self.span.first).checked_sub(1) };
        // The tokens of this rank from `needed` on are required anyway.
        last_missing.map_or(0, |entry| self.group.entry_tokens(entry).end.min(needed))
    }

    /// Block table entry with a token, if this rank holds it.
    pub(crate) fn entry(&self, token: u64) -> Option<u64> {
        let (index, is_own) = self.group.index_at_rank(token);
        is_own.then_some(index / self.group.block_size)
    }

    pub(crate) fn holds(&self, token: u64) -> bool {
        self.entry(token).is_some()
    }

    /// First token at or after `token` that this rank holds.
    pub(crate) fn next_held(&self, token: u64) -> u64 {
        if self.holds(token) {
            return token;
        }
        let Group { cp_size, cp_rank, cp_interleave, .. } = *self.group;
        let turn = token / cp_interleave;
        let round = turn / cp_size + u64::from(turn % cp_size > cp_rank);
        round * self.group.tokens_per_round() + cp_rank * cp_interleave
    }

    /// Consecutive tokens around a token in its kernel block and in this rank's turn.
    ///
    /// ```text
    /// kernel blocks of 4, cp_interleave 6     turn          |0 1 2 3 4 5|            |12 13 14 15 16 17|
    ///                                         kernel block  |0 1 2 3|4 5              12 13|14 15 16 17|
    /// around token 5: 4..6, around token 12: 12..14
    /// ```
    pub(crate) fn neighbours(&self, token: u64) -> Interval {
        let (index, _) = self.group.index_at_rank(token);
        let (in_turn, in_block) = (token % self.group.cp_interleave, index % self.group.kernel_tokens());
        let left = (self.group.cp_interleave - in_turn).min(self.group.kernel_tokens() - in_block);
        Interval { start: token - in_turn.min(in_block), end: token + left }
    }

    /// Kernel block of a token, and the token's index in it. `entry` is the token's entry, which is in the span.
    ///
    /// ```text
    /// block_size 8, two kernel blocks per block:      token 13 = block 1, token 5 of it
    ///   |0 1 2 3|4 5 6 7|8 ...|12 13 14 15|                    = kernel block 1 of that block, token 1 of it
    /// ```
    pub(crate) fn kernel_block(&self, entry: u64, token: u64) -> (KernelBlockId, u64) {
        let in_block = self.group.index_at_rank(token).0 % self.group.block_size;
        let tokens = self.group.kernel_tokens();
        (self.group.kernel_block(self.span.block(entry), in_block / tokens), in_block % tokens)
    }

    /// Kernel blocks of the whole span.
    pub(crate) fn kernel_blocks(&self) -> impl Iterator<Item = KernelBlockId> {
        self.span.ids.iter().flat_map(|&id| self.group.kernel_blocks(id))
    }

    /// Fails unless the span holds all of the tokens that belong to this rank.
    pub(crate) fn require(&self, needed: Interval) -> Result<()> {
        let Interval { start: first, end } = needed;
        let missing = |token| Error::missing_tokens((self.side, self.index), token, first, end);
        let start = self.next_held(first);
        if start >= end {
            return Ok(());
        }
        if self.entry(start).is_none_or(|entry| entry < self.span.first) {
            return Err(missing(start));
        }
        let after = self.next_held(self.group.entry_tokens(self.span.end()).start);
        if after < end { Err(missing(after.max(start))) } else { Ok(()) }
    }

    /// Fails unless a remote span has all of the tokens that both ranks hold.
    pub(crate) fn require_common(&self, remote: &Self, needed: Interval) -> Result<()> {
        let missing = remote.require(needed);
        if missing.is_ok() || self.group.cp_size == 1 {
            return missing;
        }
        // Walk the local turns: with context parallelism on both sides a rank must have only what both hold.
        let mut token = self.next_held(needed.start);
        while token < needed.end {
            let end = (token / self.group.cp_interleave + 1) * self.group.cp_interleave;
            remote.require(Interval { start: token, end: end.min(needed.end) })?;
            token = self.next_held(end);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Value;
    use crate::geometry::types::{BlockId, Kind};

    const fn group(cp_rank: u64, cp_size: u64) -> Group {
        Group { kind: Kind::Full, block_size: 8, kernel_blocks_per_block: 2, cp_rank, cp_size, cp_interleave: 8 }
    }

    fn span(first: u64, ids: &[u32]) -> CheckedSpan {
        CheckedSpan { first, ids: ids.iter().copied().map(BlockId).collect() }
    }

    fn of<'a>(group: &'a Group, span: &'a CheckedSpan) -> GroupSpan<'a> {
        GroupSpan { side: "local", index: 0, group, span }
    }

    #[test]
    fn what_is_missing_ends_with_a_block() {
        let (alone, second) = (group(0, 1), group(1, 2));
        // Blocks 2, 3 and 4: tokens 16..40.
        let three = span(2, &[5, 6, 7]);
        assert_eq!(of(&alone, &three).end_of_missing(30), 16);
        assert_eq!(of(&alone, &three).end_of_missing(12), 12);
        assert_eq!(of(&alone, &three).end_of_missing(45), 45);
        assert_eq!(of(&alone, &span(0, &[5, 6, 7])).end_of_missing(20), 0);
        // Rank 1 of 2: entries 2, 3 and 4 are blocks 5, 7 and 9 of the sequence, entry 1 ends with token 31.
        assert_eq!(of(&second, &three).end_of_missing(60), 32);
        assert_eq!(of(&second, &three).end_of_missing(7), 0);
    }

    #[test]
    fn tokens_are_found_in_kernel_blocks() {
        let (alone, second) = (group(0, 1), group(1, 2));
        let two = span(0, &[5, 9]);
        assert_eq!(of(&alone, &two).kernel_block(1, 13), (KernelBlockId(19), 1));
        assert_eq!((of(&second, &two).entry(13), of(&second, &two).entry(23)), (Some(0), None));
        assert_eq!((of(&second, &two).next_held(3), of(&second, &two).next_held(16)), (8, 24));
        assert_eq!(of(&second, &two).end_token(), 32);
        assert_eq!(of(&alone, &two).kernel_blocks().map(|block| block.0).collect::<Vec<_>>(), [10, 11, 18, 19]);
    }

    #[test]
    fn tokens_are_found_where_ranks_take_turns_within_a_block() {
        // Rank 1 of 2 has tokens 1, 3, 5 ... 15 in block 5, and 17, 19 ... in block 9.
        let by_token = Group { cp_interleave: 1, ..group(1, 2) };
        let two = span(0, &[5, 9]);
        let span = of(&by_token, &two);
        assert_eq!((span.entry(15), span.entry(16), span.entry(17)), (Some(0), None, Some(1)));
        assert_eq!((span.next_held(2), span.end_token()), (3, 32));
        assert_eq!(span.kernel_block(1, 27), (KernelBlockId(19), 1));
        assert_eq!(span.neighbours(27), Interval { start: 27, end: 28 });
        // Turns of six tokens in kernel blocks of four: 6..10 and 10..12 of the first turn of rank 1.
        let of_six = Group { cp_interleave: 6, block_size: 12, kernel_blocks_per_block: 3, ..group(1, 2) };
        let span = of(&of_six, &two);
        assert_eq!(span.neighbours(8), Interval { start: 6, end: 10 });
        assert_eq!(span.neighbours(11), Interval { start: 10, end: 12 });
        assert_eq!(span.neighbours(18), Interval { start: 18, end: 20 });
        assert_eq!(span.kernel_block(0, 19), (KernelBlockId(16), 3));
    }

    #[test]
    fn a_rank_owes_what_both_hold_only() {
        let (even, third) = (Group { cp_interleave: 1, ..group(0, 2) }, Group { cp_interleave: 1, ..group(2, 3) });
        // The remote rank has tokens 26, 29, 32 ... of its second block on, the local one 0, 2, 4 ...
        let (all, later) = (span(0, &[1, 2, 3]), span(1, &[4]));
        let (local, remote) = (of(&even, &all), of(&third, &later));
        assert!(local.require_common(&remote, Interval { start: 21, end: 26 }).is_ok(), "23 is not local");
        assert!(local.require_common(&remote, Interval { start: 20, end: 26 }).is_err(), "20 is missing");
        assert!(local.require_common(&remote, Interval { start: 24, end: 48 }).is_ok());
    }

    #[test]
    fn a_span_has_to_hold_what_is_needed() {
        let alone = group(0, 1);
        let two = span(1, &[5, 9]); // tokens 8..24
        let first_missing = |start, end| match of(&alone, &two).require(Interval { start, end }) {
            Err(Error::Input(wrong)) if wrong.code == "missing-tokens" => Some(wrong.value),
            _ => None,
        };
        assert_eq!(first_missing(8, 24), None);
        assert_eq!(first_missing(7, 24), Some(Value::Number(7)));
        assert_eq!(first_missing(8, 25), Some(Value::Number(24)));
    }
}
