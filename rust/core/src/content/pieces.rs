// SPDX-License-Identifier: Apache-2.0
//! Which pieces of a request's blocks count, and in which range of tokens.
use crate::content::keys::{IndexKeys, Keys};
use crate::geometry::types::{BlockId, Group, Kind, Layer, Part, state_slot};
use crate::request::span::CheckedSpan;

/// Tokens of a sum, if that gives at most `MAX_RANGES` sums.
const RANGE_TOKENS: u64 = 1024;
const MAX_RANGES: u64 = 64;

/// Tokens of each range of a request; ranges begin at multiples of it.
pub(crate) fn range_tokens(num_tokens: u64) -> u64 {
    RANGE_TOKENS.max(num_tokens.div_ceil(MAX_RANGES).next_power_of_two())
}

/// Consecutive tokens of a kernel block that belong to one range; or a whole kernel block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) block: BlockId,
    /// Index of the kernel block in the block.
    pub(crate) kernel: u64,
    /// First token in the kernel block.
    pub(crate) first: u64,
    /// Index among the sums.
    pub(crate) range: usize,
    /// Keys of the tokens; for a whole kernel block the key of its first token.
    pub(crate) keys: Vec<u64>,
}

impl Piece {
    /// Where the piece of a part begins in the region of a layer.
    pub(crate) fn offset(&self, layer: &Layer, part: &Part) -> u64 {
        let page = u64::from(self.block.0) * layer.block_stride + self.kernel * layer.kernel_stride;
        layer.offset + page + part.offset + part.tokens().map_or(0, |axis| axis.stride * self.first)
    }
}

/// The pieces of one group, once for parts that tokens cut and once for the other parts.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) tokens: Vec<Piece>,
    pub(crate) whole: Vec<Piece>,
}

/// The tokens of a request that a group holds and counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    /// First needed token; the first range contains it.
    pub(crate) low: u64,
    /// First token that counts here.
    pub(crate) from: u64,
    pub(crate) num_tokens: u64,
    pub(crate) range_tokens: u64,
}

impl Counted {
    pub(crate) fn new(group: &Group, num_tokens: u64, from: u64) -> Self {
        let low = group.first_needed_token(num_tokens).min(num_tokens);
        Self { low, from: from.max(low), num_tokens, range_tokens: range_tokens(num_tokens) }
    }

    /// Number of sums.
    pub(crate) fn ranges(&self, kind: Kind) -> usize {
        if !kind.is_attention() {
            return 1;
        }
        if self.low == self.num_tokens { 0 } else { self.range_of(self.num_tokens - 1) + 1 }
    }

    fn range_of(&self, token: u64) -> usize {
        (token / self.range_tokens).saturating_sub(self.low / self.range_tokens) as usize
    }

    fn has(&self, token: u64) -> bool {
        (self.from..self.num_tokens).contains(&token)
    }

    /// Whether a kernel block begins before the last counted token, and ends after the first counted token.
    fn overlaps(&self, block: &KernelBlock) -> bool {
        let last = block.token(block.group.kernel_tokens() - 1);
        self.from < self.num_tokens && block.token(0) < self.num_tokens && self.from <= last
    }
}

/// The pieces of a group's blocks.
pub(crate) fn pieces_of(group: &Group, span: &CheckedSpan, counted: Counted, keys: Keys) -> Pieces {
    let keys = keys.axis("tokens");
    match group.kind {
        Kind::Ssm { num_speculative_blocks } => state_pieces(span, num_speculative_blocks, keys),
        _ => attention_pieces(group, span, counted, keys),
    }
}

/// The slot with the state. A state is one kernel block, and has no tokens.
fn state_pieces(span: &CheckedSpan, num_speculative_blocks: u64, keys: IndexKeys) -> Pieces {
    let slot = state_slot(span.ids.len(), num_speculative_blocks);
    let piece = |slot: usize| Piece { block: span.ids[slot], kernel: 0, first: 0, range: 0, keys: vec![keys.key(0)] };
    Pieces { tokens: Vec::new(), whole: slot.map(piece).into_iter().collect() }
}

fn attention_pieces(group: &Group, span: &CheckedSpan, counted: Counted, keys: IndexKeys) -> Pieces {
    let mut pieces = Pieces::default();
    for block in KernelBlock::all(group, span).filter(|block| counted.overlaps(block)) {
        pieces.whole.push(block.piece(&[(0, block.token(0))], counted, keys));
        let tokens = (0..group.kernel_tokens()).map(|index| (index, block.token(index)));
        let tokens: Vec<(u64, u64)> = tokens.filter(|(_, token)| counted.has(*token)).collect();
        let is_same_range = |one: &(u64, u64), next: &(u64, u64)| counted.range_of(one.1) == counted.range_of(next.1);
        let of_ranges = tokens.chunk_by(is_same_range);
        pieces.tokens.extend(of_ranges.map(|tokens| block.piece(tokens, counted, keys)));
    }
    pieces
}

/// A kernel block of an entry of the block table.
struct KernelBlock<'a> {
    group: &'a Group,
    entry: u64,
    block: BlockId,
    kernel: u64,
}

impl<'a> KernelBlock<'a> {
    /// The kernel blocks of a span, in the order of the sequence.
    fn all(group: &'a Group, span: &'a CheckedSpan) -> impl Iterator<Item = Self> {
        let kernels = 0..group.kernel_blocks_per_block;
        let of_entry = move |(entry, &block)| kernels.clone().map(move |kernel| Self { group, entry, block, kernel });
        (span.first..).zip(&span.ids).flat_map(of_entry)
    }

    /// The token of the sequence with number `index` in the kernel block.
    fn token(&self, index: u64) -> u64 {
        token_of(self.group, self.entry, self.kernel * self.group.kernel_tokens() + index)
    }

    /// The piece of consecutive tokens of one range: each token's number in the kernel block, and the token.
    fn piece(&self, tokens: &[(u64, u64)], counted: Counted, keys: IndexKeys) -> Piece {
        let (first, first_token) = tokens[0];
        let keys = tokens.iter().map(|(_, token)| keys.key(*token)).collect();
        Piece { block: self.block, kernel: self.kernel, first, range: counted.range_of(first_token), keys }
    }
}

/// The token of the sequence with number `index` in entry `entry` of the block table.
///
/// ```text
/// cp_size 2, cp_interleave 2, rank 0      index in the block   0 1 2 3
///                                         token                0 1 4 5
/// ```
fn token_of(group: &Group, entry: u64, index: u64) -> u64 {
    let (turn, within) = (index / group.cp_interleave, index % group.cp_interleave);
    group.entry_tokens(entry).start + turn * group.tokens_per_round() + within
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_with_the_prompt() {
        assert_eq!([1, 65_536, 65_537, 1 << 20].map(range_tokens), [1024, 1024, 2048, 16_384]);
        assert!((1..2_000_000u64).step_by(997).all(|tokens| tokens.div_ceil(range_tokens(tokens)) <= MAX_RANGES));
    }

    #[test]
    fn a_window_begins_in_the_range_of_its_first_token() {
        let group = Group::alone(Kind::Sliding { window: 1025 }, 16, 1);
        let counted = Counted::new(&group, 5000, 0);
        assert_eq!((counted.low, counted.from, counted.ranges(group.kind)), (3976, 3976, 2));
        assert_eq!(Counted::new(&group, 5000, 4500).from, 4500);
        let nothing = Group::alone(Kind::Sliding { window: 1 }, 16, 1);
        assert_eq!(Counted::new(&nothing, 5000, 0).ranges(nothing.kind), 0);
    }
}
