// SPDX-License-Identifier: Apache-2.0
//! One worker's checked cache: complete, and no address of it overflows or leaves its region.
use serde::{Deserialize, Serialize};

use crate::geometry::objects::{is_default, objects};
use crate::geometry::ranges::Interval;

/// Kind of memory, in the transfer library's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize, Serialize)]
#[serde(try_from = "String", into = "&str")]
pub enum Memory {
    /// Host memory.
    #[default]
    Dram,
    /// Device memory.
    Vram,
}

impl From<Memory> for &'static str {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::Dram => "DRAM",
            Memory::Vram => "VRAM",
        }
    }
}

impl TryFrom<String> for Memory {
    type Error = String;

    fn try_from(word: String) -> std::result::Result<Self, String> {
        match word.as_str() {
            "DRAM" => Ok(Self::Dram),
            "VRAM" => Ok(Self::Vram),
            _ => Err(format!("unknown memory {word:?}, expected \"DRAM\" or \"VRAM\"")),
        }
    }
}

/// One contiguous registered range.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// Address of the first byte.
    pub base: u64,
    /// Length.
    pub bytes: u64,
    /// Kind of memory.
    #[serde(default)]
    pub memory: Memory,
    /// Device id.
    #[serde(default)]
    pub device: u32,
}

/// The content of a group's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Attention to every earlier token.
    Full,
    /// Attention to the last tokens.
    Sliding {
        /// Tokens that a query sees, including itself.
        window: u64,
    },
    /// Attention inside chunks.
    Chunked {
        /// Tokens per chunk.
        chunk: u64,
    },
    /// Latent attention, to every earlier token.
    Mla,
    /// Recurrent state: the last slot counts.
    Ssm {
        /// State slots after the slot with the state.
        num_speculative_blocks: u64,
    },
    /// State that only its owner understands.
    Opaque,
}

impl Kind {
    /// Whether blocks hold tokens by position.
    pub fn is_attention(self) -> bool {
        !matches!(self, Self::Ssm { .. } | Self::Opaque)
    }

    /// Whether tokens before the window or the chunk of the current token are freed.
    pub(crate) fn frees_early_tokens(self) -> bool {
        matches!(self, Self::Sliding { .. } | Self::Chunked { .. })
    }

    /// The word of the JSON form.
    pub fn word(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Sliding { .. } => "sliding",
            Self::Chunked { .. } => "chunked",
            Self::Mla => "mla",
            Self::Ssm { .. } => "ssm",
            Self::Opaque => "opaque",
        }
    }
}

/// Id of a logical block, as the block manager allocates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockId(pub(crate) u32);

/// Id of a kernel block, as the attention kernel addresses it. Below 2^31.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KernelBlockId(pub(crate) u64);

/// Layers that share a block table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// What the blocks hold.
    pub kind: Kind,
    /// Tokens per logical block.
    pub block_size: u64,
    /// Kernel blocks per logical block.
    pub kernel_blocks_per_block: u64,
    /// Number among the context-parallel ranks.
    pub cp_rank: u64,
    /// Context-parallel ranks.
    pub cp_size: u64,
    /// Tokens that a rank holds before the next rank's turn; divides the block size.
    pub cp_interleave: u64,
}

impl Group {
    /// A group of a rank that holds every token.
    #[cfg(test)]
    pub(crate) fn alone(kind: Kind, block_size: u64, kernel_blocks_per_block: u64) -> Self {
        Self { kind, block_size, kernel_blocks_per_block, cp_rank: 0, cp_size: 1, cp_interleave: block_size }
    }

    /// Whether it has a recurrent state, of which only the last one counts.
    pub fn is_state(&self) -> bool {
        matches!(self.kind, Kind::Ssm { .. })
    }

    /// Tokens per kernel block.
    pub fn kernel_tokens(&self) -> u64 {
        self.block_size / self.kernel_blocks_per_block
    }

    /// First token that the token after `num_tokens` tokens still attends to.
    ///
    /// ```text
    /// window 4, 9 tokens   0 1 2 3 4 5[6 7 8]9      the next token, 9, sees itself and three more
    /// chunk 4, 9 tokens    0 1 2 3|4 5 6 7|[8]9     the next token, 9, sees its chunk, 8..12
    /// ```
    pub fn first_needed_token(&self, num_tokens: u64) -> u64 {
        match self.kind {
            Kind::Sliding { window } => num_tokens.saturating_add(1).saturating_sub(window),
            Kind::Chunked { chunk } => num_tokens / chunk * chunk,
            _ => 0,
        }
    }

    /// Tokens of all ranks together in one entry of the block table.
    pub(crate) fn tokens_per_entry(&self) -> u64 {
        self.block_size * self.cp_size
    }

    /// Tokens from one turn of this rank to its next turn.
    pub(crate) fn tokens_per_round(&self) -> u64 {
        self.cp_interleave * self.cp_size
    }

    /// Index of a token among the tokens of its rank, and whether that is this rank.
    ///
    /// ```text
    /// cp_size 2, cp_interleave 2      token             0 1 | 2 3 | 4 5 | 6 7 | 8 9
    ///                                 index at rank 0   0 1         2 3         4 5
    ///                                 index at rank 1         0 1         2 3
    /// ```
    pub(crate) fn index_at_rank(&self, token: u64) -> (u64, bool) {
        let (turn, within) = (token / self.cp_interleave, token % self.cp_interleave);
        (turn / self.cp_size * self.cp_interleave + within, turn % self.cp_size == self.cp_rank)
    }

    /// First token of this rank in entry `index` of the block table, and one past its last token.
    ///
    /// ```text
    /// block_size 4, cp_size 2       token   0 1 2 3 4 5 6 7 8 9 ...
    /// cp_interleave 4, rank 1               . . . . 0 0 0 0 . . . . 1 1 1 1
    /// cp_interleave 1, rank 1               . 0 . 0 . 0 . 0 . 1 . 1 . 1 . 1
    /// ```
    pub(crate) fn entry_tokens(&self, index: u64) -> Interval {
        let others_after = (self.cp_size - 1 - self.cp_rank) * self.cp_interleave;
        Interval {
            start: index * self.tokens_per_entry() + self.cp_rank * self.cp_interleave,
            end: (index + 1) * self.tokens_per_entry() - others_after,
        }
    }

    /// How ranks take turns within a kernel block; None if all of a kernel block's tokens are consecutive.
    pub(crate) fn turns_in_kernel_block(&self) -> Option<(u64, u64)> {
        let is_whole = self.cp_size == 1 || self.cp_interleave % self.kernel_tokens() == 0;
        (!is_whole).then_some((self.cp_size, self.cp_interleave))
    }

    /// A kernel block of a logical block.
    pub(crate) fn kernel_block(&self, block: BlockId, index: u64) -> KernelBlockId {
        KernelBlockId(u64::from(block.0) * self.kernel_blocks_per_block + index)
    }

    /// All kernel blocks of a logical block.
    pub(crate) fn kernel_blocks(&self, block: BlockId) -> impl Iterator<Item = KernelBlockId> {
        (0..self.kernel_blocks_per_block).map(move |index| self.kernel_block(block, index))
    }
}

/// Which of the last `count` slots of a request carries its state: the speculative slots follow it.
///
/// ```text
/// num_speculative_blocks 2    slots   0   1  [2]  3   4
/// ```
pub(crate) fn state_slot(count: usize, num_speculative_blocks: u64) -> Option<usize> {
    let last = count.checked_sub(1)?;
    Some(last - last.min(usize::try_from(num_speculative_blocks).unwrap_or(last)))
}

/// One dimension of a part. `Length` is a number, or an option in the written form.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(deny_unknown_fields, bound(serialize = "Length: Serialize + Default + PartialEq"))]
pub struct Axis<Length = u64> {
    /// Axes of the two sides are paired by name.
    pub name: String,
    /// Size over all ranks.
    pub extent: u64,
    /// Bytes from one index to the next.
    pub stride: u64,
    /// First global index on this rank.
    #[serde(default)]
    pub start: u64,
    /// Indices on this rank.
    #[serde(default, skip_serializing_if = "is_default")]
    pub length: Length,
    /// Whether neighbouring ranks may hold the same index, an unknown number of times. This rank then holds one index,
    /// `extent` counts ranks, and the true extent is a divisor of it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub may_repeat: bool,
    /// Last indices whose items are written before they are read, so that they need not be moved.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spare: u64,
}

impl Axis {
    /// Name of the axis that positions apply to.
    pub const TOKENS: &'static str = "tokens";
    /// Name of the axis of one token's items in one head.
    pub const CONTENT: &'static str = "content";

    /// Whether this is the token axis.
    pub fn is_tokens(&self) -> bool {
        self.name == Self::TOKENS
    }

    /// Global indices on this rank.
    pub(crate) fn shard(&self) -> Interval {
        Interval { start: self.start, end: self.start + self.length }
    }
}

/// A named piece of a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(deny_unknown_fields, bound = "Axis<Length>: Serialize + for<'a> Deserialize<'a>")]
pub struct Part<Length = u64> {
    /// Parts are paired by name.
    pub name: String,
    /// Encoding of an item.
    pub dtype: String,
    /// Bytes of an item.
    pub item_bytes: u64,
    /// Bytes from the start of the page.
    pub offset: u64,
    /// Dimensions in any order.
    #[serde(deserialize_with = "objects")]
    pub axes: Vec<Axis<Length>>,
}

impl Part {
    /// The token axis, if tokens can cut the part.
    pub fn tokens(&self) -> Option<&Axis> {
        self.axes.iter().find(|axis| axis.is_tokens())
    }

    /// The other axes; each rank holds a shard of them.
    pub(crate) fn sharded_axes(&self) -> impl Iterator<Item = &Axis> {
        self.axes.iter().filter(|axis| !axis.is_tokens())
    }

    /// This rank's share of every axis except the tokens.
    pub(crate) fn shard(&self) -> Vec<Interval> {
        self.sharded_axes().map(Axis::shard).collect()
    }

    /// The shares in the order of another part's axes; None if this part lacks an axis.
    pub(crate) fn shard_in_order_of(&self, other: &Self) -> Option<Vec<Interval>> {
        other.sharded_axes().map(|axis| self.axis(&axis.name).map(Axis::shard)).collect()
    }

    /// The axis of a name.
    pub(crate) fn axis(&self, name: &str) -> Option<&Axis> {
        self.axes.iter().find(|axis| axis.name == name)
    }
}

/// The bytes of one layer in one kernel block.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(deny_unknown_fields, bound = "Part<Length>: Serialize + for<'a> Deserialize<'a>")]
pub struct Page<Length = u64> {
    /// The content; other bytes are padding.
    #[serde(deserialize_with = "objects")]
    pub parts: Vec<Part<Length>>,
}

impl Page {
    /// The part of a name.
    pub(crate) fn part(&self, name: &str) -> Option<&Part> {
        self.parts.iter().find(|part| part.name == name)
    }

    /// One past the last byte of its parts.
    pub(crate) fn end(&self) -> u64 {
        let last_index = |axis: &Axis| (axis.length - 1) * axis.stride;
        let end = |part: &Part| part.offset + part.item_bytes + part.axes.iter().map(last_index).sum::<u64>();
        self.parts.iter().map(end).max().unwrap_or(0)
    }
}

/// Where the pages of one layer are.
///
/// ```text
/// region.base
/// |-- offset --|-------- block 0 ---------|-------- block 1 ---------|
///              | page | page |   padding  | page | page |   padding  |
///              |<-kernel_stride            two kernel blocks per block
///              |<----- block_stride ----->|
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Layers are paired by name.
    pub name: String,
    /// Index into the groups.
    pub group: usize,
    /// Index into the pages.
    pub page: usize,
    /// Index into the regions.
    pub region: usize,
    /// Bytes from the region's base to the page of block 0.
    pub offset: u64,
    /// Logical blocks.
    pub num_blocks: u64,
    /// Bytes between logical blocks.
    pub block_stride: u64,
    /// Bytes between the kernel blocks of a logical block.
    pub kernel_stride: u64,
}

/// One worker's checked cache: no address of it overflows or leaves its region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    pub(crate) tp_rank: u32,
    pub(crate) tp_size: u32,
    pub(crate) null_block: Option<u64>,
    pub(crate) regions: Vec<Region>,
    pub(crate) groups: Vec<Group>,
    pub(crate) pages: Vec<Page>,
    pub(crate) layers: Vec<Layer>,
    /// Smallest number of blocks over the layers of each group: ids below it are valid in every layer.
    pub(crate) num_blocks: Vec<u64>,
}

impl Geometry {
    /// Registered ranges.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The id that stands for "no block".
    pub fn null_block(&self) -> Option<u64> {
        self.null_block
    }

    /// Groups in the order of the block tables.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Every layer.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The content of a layer's pages.
    pub fn page(&self, layer: &Layer) -> &Page {
        &self.pages[layer.page]
    }

    /// Block table and kind of a layer.
    pub(crate) fn group(&self, layer: &Layer) -> &Group {
        &self.groups[layer.group]
    }

    /// Address of a layer's page of block 0.
    pub(crate) fn first_page(&self, layer: &Layer) -> u64 {
        self.regions[layer.region].base + layer.offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(kind: Kind) -> Group {
        Group { kind, block_size: 8, kernel_blocks_per_block: 2, cp_rank: 1, cp_size: 3, cp_interleave: 8 }
    }

    #[test]
    fn the_next_token_sees_its_window_or_its_chunk() {
        let first = |kind, num_tokens| group(kind).first_needed_token(num_tokens);
        assert_eq!(first(Kind::Full, 9), 0);
        assert_eq!(first(Kind::Sliding { window: 4 }, 9), 6);
        assert_eq!(first(Kind::Sliding { window: 4 }, 2), 0);
        assert_eq!(first(Kind::Chunked { chunk: 4 }, 9), 8);
        assert_eq!(first(Kind::Chunked { chunk: 4 }, 7), 4);
    }

    #[test]
    fn entries_are_the_blocks_of_this_ranks_turns() {
        // Rank 1 of 3 with blocks of 8 tokens holds blocks 1, 4, 7 of the sequence.
        assert_eq!([0, 1, 2].map(|index| group(Kind::Full).entry_tokens(index).start), [8, 32, 56]);
        assert_eq!([0, 1, 2].map(|index| group(Kind::Full).entry_tokens(index).end), [16, 40, 64]);
        assert_eq!(group(Kind::Full).kernel_block(BlockId(5), 1), KernelBlockId(11));
    }

    #[test]
    fn ranks_may_take_turns_within_a_block() {
        let group = Group { cp_interleave: 2, ..group(Kind::Full) };
        // Rank 1 of 3 holds tokens 2, 3, 8, 9, 14, 15, 20, 21 in its first block of 8, and 26, 27 ... in its second.
        let held: Vec<u64> = (0..28).filter(|&token| group.index_at_rank(token).1).collect();
        assert_eq!(held, [2, 3, 8, 9, 14, 15, 20, 21, 26, 27]);
        let indices: Vec<u64> = held.iter().map(|&token| group.index_at_rank(token).0).collect();
        assert_eq!(indices, (0..10).collect::<Vec<_>>());
        assert_eq!(group.entry_tokens(0), Interval { start: 2, end: 22 });
        assert_eq!(group.entry_tokens(1).start, 26);
        assert_eq!(group.turns_in_kernel_block(), Some((3, 2)));
        assert_eq!(Group { cp_interleave: 4, ..group }.turns_in_kernel_block(), None);
    }

    #[test]
    fn speculative_slots_follow_the_state() {
        assert_eq!(state_slot(5, 2), Some(2));
        assert_eq!(state_slot(2, 2), Some(0));
        assert_eq!(state_slot(1, u64::MAX), Some(0));
        assert_eq!(state_slot(0, 0), None);
    }
}
