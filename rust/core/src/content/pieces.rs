// SPDX-License-Identifier: Apache-2.0
//! Which pieces of a request's blocks count, and in which range of tokens.
use crate::content::keys::Keys;
use crate::geometry::types::{BlockId, Geometry, Group, Kind, state_slot};
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
}

/// The pieces of a group's blocks.
pub(crate) fn pieces_of(geometry: &Geometry, group: usize, span: &CheckedSpan, counted: Counted, keys: Keys) -> Pieces {
    let group = &geometry.groups[group];
    let tokens = keys.axis("tokens");
    let whole = |block: BlockId, kernel: u64, range: usize, token: u64| Piece {
        block,
        kernel,
        first: 0,
        range,
        keys: vec![tokens.key(token)],
    };
    if let Kind::Ssm { num_speculative_blocks } = group.kind {
        let slot = state_slot(span.ids.len(), num_speculative_blocks).map(|slot| span.ids[slot]);
        let kernels = |block| (0..group.kernel_blocks_per_block).map(move |kernel| (block, kernel));
        let whole = slot.into_iter().flat_map(kernels).map(|(block, kernel)| whole(block, kernel, 0, kernel)).collect();
        return Pieces { tokens: Vec::new(), whole };
    }
    let mut found = Pieces::default();
    for (index, &block) in span.ids.iter().enumerate() {
        let entry = span.first + index as u64;
        for kernel in 0..group.kernel_blocks_per_block {
            let token = |index: u64| token_of(group, entry, kernel * group.kernel_tokens() + index);
            let (first, last) = (token(0), token(group.kernel_tokens() - 1));
            let is_needed = counted.from < counted.num_tokens && first < counted.num_tokens && last >= counted.from;
            if !is_needed {
                continue;
            }
            found.whole.push(whole(block, kernel, counted.range_of(first), first));
            for index in 0..group.kernel_tokens() {
                let token = token(index);
                if !(counted.from..counted.num_tokens).contains(&token) {
                    continue;
                }
                let (range, key) = (counted.range_of(token), tokens.key(token));
                match found.tokens.last_mut() {
                    Some(piece)
                        if (piece.block, piece.kernel, piece.range) == (block, kernel, range)
                            && piece.first + piece.keys.len() as u64 == index =>
                    {
                        piece.keys.push(key);
                    }
                    _ => found.tokens.push(Piece { block, kernel, first: index, range, keys: vec![key] }),
                }
            }
        }
    }
    found
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
