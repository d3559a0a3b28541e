// SPDX-License-Identifier: Apache-2.0
//! Rows that are read in the order of the source's blocks, and permuted after they arrive.
//!
//! This helps if heads are outside of tokens and the source's block is shorter: each source block then has a row per
//! head.
//!
//! ```text
//! local order    head 0: block a, block b | head 1: block a, block b | ...      blocks * heads rows
//! source         block a: head 0, head 1, ...      block b: head 0, head 1, ...
//! source order   block a: head 0, head 1, ... | block b: head 0, head 1, ...    blocks rows
//! ```
//!
//! This code knows no heads or blocks. It finds a grid of equal rows that fills a local range without a gap and is
//! transposed in the source. The bytes are the same, and only this grid writes the range.
use crate::bytes::rows::Descriptor;
use crate::error::{Error, Result};

/// Limit of source blocks that are searched for in a local block.
const MAX_BLOCKS: usize = 64;

/// A range to permute: `(address, device, blocks, heads, bytes)`. It arrives as blocks of heads with so many bytes, and
/// must become heads of blocks.
pub type Permute = [u64; 5];

/// Rows to read, and the ranges to permute after they arrive.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PermutedRows {
    /// Destinations, sorted by address.
    pub local: Vec<Descriptor>,
    /// Sources, with equal lengths.
    pub remote: Vec<Descriptor>,
    /// Ranges to permute; they are disjoint.
    pub permutes: Vec<Permute>,
}

/// Reads a grid in the source's order if that moves at most `permute_bytes` for each saved row.
///
/// `local` and `remote` are the rows of one source, sorted by local address. `bounds` are the sorted addresses, local
/// and remote, at which registered memory begins or ends; no row crosses them.
pub fn permuted_rows(
    local: &[Descriptor],
    remote: &[Descriptor],
    bounds: (&[u64], &[u64]),
    permute_bytes: u64,
) -> Result<PermutedRows> {
    if local.len() != remote.len() {
        return Err(Error::count("remote rows", remote.len(), local.len()));
    }
    let mut found = PermutedRows::default();
    let mut cursor = Cursor { local, remote, bounds, taken: 0 };
    while let Some(left) = cursor.bytes_left() {
        let Some(grid) = cursor.grid(left).filter(|grid| grid.bytes() <= permute_bytes.saturating_mul(grid.saved()))
        else {
            found.push(cursor.take_bytes(left), bounds);
            continue;
        };
        let before = left - grid.corner.length;
        if before > 0 {
            found.push(cursor.take_bytes(before), bounds);
        }
        for row in grid.block_rows() {
            found.push(row, bounds);
        }
        found.permutes.push(grid.permute());
        cursor.pass_grid(&grid);
    }
    Ok(found)
}

impl PermutedRows {
    /// Appends a row, or extends the last row if the new one continues it on both sides.
    fn push(&mut self, (local, remote): (Descriptor, Descriptor), bounds: (&[u64], &[u64])) {
        if let (Some(to), Some(from)) = (self.local.last_mut(), self.remote.last_mut()) {
            let goes_on = |row: &Descriptor, next: Descriptor, bounds: &[u64]| {
                row[0].checked_add(row[1]) == Some(next[0])
                    && row[2] == next[2]
                    && bounds.binary_search(&next[0]).is_err()
            };
            if goes_on(to, local, bounds.0) && goes_on(from, remote, bounds.1) {
                to[1] += local[1];
                from[1] += remote[1];
                return;
            }
        }
        self.local.push(local);
        self.remote.push(remote);
    }
}

/// The rows that were not read yet. Some bytes of the first row may have been.
struct Cursor<'a> {
    local: &'a [Descriptor],
    remote: &'a [Descriptor],
    bounds: (&'a [u64], &'a [u64]),
    /// Bytes of the first row that were read.
    taken: u64,
}

impl<'a> Cursor<'a> {
    /// Bytes of the first row that were not read; None after the last row.
    fn bytes_left(&self) -> Option<u64> {
        self.local.first().map(|row| row[1] - self.taken)
    }

    /// The largest grid that begins in the first row. Its cells are as long as what is left of it, or as the next row.
    fn grid(&self, left: u64) -> Option<Grid<'a>> {
        let next = self.local.get(1).map_or(0, |row| row[1]);
        let corner = |length: u64| Corner::new(self.local, self.remote, length);
        [left, next.min(left)].into_iter().find_map(|length| corner(length)?.grid(self.bounds))
    }

    /// Reads some bytes of the first row.
    fn take_bytes(&mut self, length: u64) -> (Descriptor, Descriptor) {
        let skip = self.taken;
        let cut = |rows: &[Descriptor]| [rows[0][0] + skip, length, rows[0][2]];
        let row = (cut(self.local), cut(self.remote));
        self.advance(length);
        row
    }

    /// Passes all cells of a grid.
    fn pass_grid(&mut self, grid: &Grid) {
        self.pass_rows(grid.cells() - 1);
        self.advance(grid.corner.length);
    }

    fn pass_rows(&mut self, count: usize) {
        (self.local, self.remote, self.taken) = (&self.local[count..], &self.remote[count..], 0);
    }

    fn advance(&mut self, length: u64) {
        self.taken += length;
        if self.taken == self.local[0][1] {
            self.pass_rows(1);
        }
    }
}

/// The first cell of a grid: the last `length` bytes of the first row.
struct Corner<'a> {
    /// The rows of the cells. Row `head * blocks + block` is the cell of a block and a head.
    local: &'a [Descriptor],
    remote: &'a [Descriptor],
    length: u64,
    /// Local address.
    address: u64,
}

impl<'a> Corner<'a> {
    /// None for an empty cell, and for a row beyond the last address.
    fn new(local: &'a [Descriptor], remote: &'a [Descriptor], length: u64) -> Option<Self> {
        let [address, bytes, _] = local[0];
        let end = address.checked_add(bytes)?;
        (length > 0).then(|| Self { local, remote, length, address: end - length })
    }

    /// The largest grid that begins here. None without a grid of at least two blocks and two heads.
    fn grid(self, bounds: (&[u64], &[u64])) -> Option<Grid<'a>> {
        let blocks = self.count_blocks()?;
        let heads = self.count_heads(blocks).min(self.heads_within(bounds, blocks));
        (heads > 1).then_some(Grid { corner: self, blocks, heads })
    }

    /// Address of a block in the source.
    fn source(&self, block: usize) -> u64 {
        let [address, bytes, _] = self.remote[block];
        if block == 0 { address + bytes - self.length } else { address }
    }

    /// Whether a row is as long as a cell.
    fn is_whole(&self, row: usize) -> bool {
        self.local.get(row).is_some_and(|local| local[1] == self.length)
    }

    /// Whether a row begins with the cell of a block and a head.
    fn begins_with(&self, row: usize, block: usize, head: usize) -> bool {
        let is_at = |row: Descriptor, address: u64, device: u64| (row[0], row[2]) == (address, device);
        let cells = |count: usize| self.length.wrapping_mul(count as u64);
        is_at(self.local[row], self.address.wrapping_add(cells(row)), self.local[0][2])
            && is_at(self.remote[row], self.source(block).wrapping_add(cells(head)), self.remote[block][2])
    }

    /// Number of blocks of a grid: the second head of the first block is in this row.
    fn count_blocks(&self) -> Option<usize> {
        let mut whole_rows = (1..=MAX_BLOCKS).take_while(|&row| self.is_whole(row));
        let blocks = whole_rows.find(|&row| self.begins_with(row, 0, 1))?;
        let is_grid = blocks > 1 && (1..blocks).all(|block| self.begins_with(block, block, 0));
        is_grid.then_some(blocks)
    }

    /// Number of heads of a grid. The last row of the last head may be longer than a cell.
    fn count_heads(&self, blocks: usize) -> usize {
        let is_head = |&head: &usize| {
            let (first, last) = (head * blocks, (head + 1) * blocks - 1);
            let is_long_enough = |row: usize| self.is_whole(row) || (row == last && self.local[row][1] > self.length);
            self.is_whole(first - 1)
                && (first..first + blocks).all(|row| is_long_enough(row) && self.begins_with(row, row - first, head))
        };
        1 + (1..self.local.len() / blocks).take_while(is_head).count()
    }

    /// Maximum number of heads whose rows stay within the registered memory of their first cells.
    fn heads_within(&self, (local_bounds, remote_bounds): (&[u64], &[u64]), blocks: usize) -> usize {
        let fitting = |address: u64, bounds: &[u64], head_bytes: u64| {
            let end = bounds.get(bounds.partition_point(|&bound| bound <= address)).copied().unwrap_or(u64::MAX);
            ((end - address) / head_bytes) as usize
        };
        let local = fitting(self.address, local_bounds, self.length.saturating_mul(blocks as u64));
        let remote = (0..blocks).map(|block| fitting(self.source(block), remote_bounds, self.length));
        remote.fold(local, usize::min)
    }
}

/// A grid of equal cells. All cells are whole rows except the first and the last. The first may be the end of a row and
/// the last the beginning of one, if the row was joined with a neighbour of the grid.
struct Grid<'a> {
    corner: Corner<'a>,
    blocks: usize,
    heads: usize,
}

impl Grid<'_> {
    fn cells(&self) -> usize {
        self.blocks * self.heads
    }

    fn bytes(&self) -> u64 {
        self.corner.length.saturating_mul(self.cells() as u64)
    }

    /// How many rows fewer it is in the source's order.
    fn saved(&self) -> u64 {
        (self.cells() - self.blocks) as u64
    }

    /// A row for each block of the source.
    fn block_rows(&self) -> impl Iterator<Item = (Descriptor, Descriptor)> {
        let Corner { local, remote, length, address } = self.corner;
        let bytes = length * self.heads as u64;
        (0..self.blocks).map(move |block| {
            let to = [address + block as u64 * bytes, bytes, local[0][2]];
            (to, [self.corner.source(block), bytes, remote[block][2]])
        })
    }

    fn permute(&self) -> Permute {
        let Corner { local, length, address, .. } = self.corner;
        [address, local[0][2], self.blocks as u64, self.heads as u64, length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of `heads` heads of source blocks at `sources`, read to `local`.
    fn grid(local: u64, sources: &[u64], heads: u64, length: u64) -> (Vec<Descriptor>, Vec<Descriptor>) {
        let cells = (0..heads).flat_map(|head| sources.iter().map(move |source| (head, *source)));
        cells
            .enumerate()
            .map(|(row, (head, source))| {
                ([local + row as u64 * length, length, 0], [source + head * length, length, 1])
            })
            .unzip()
    }

    fn permuted(rows: &(Vec<Descriptor>, Vec<Descriptor>), bounds: (&[u64], &[u64]), bytes: u64) -> PermutedRows {
        permuted_rows(&rows.0, &rows.1, bounds, bytes).expect("rows")
    }

    #[test]
    fn a_grid_is_a_row_for_each_block() {
        let rows = grid(0, &[1000, 5000, 3000], 8, 16);
        let found = permuted(&rows, (&[], &[]), 1 << 30);
        assert_eq!(found.local, [[0, 128, 0], [128, 128, 0], [256, 128, 0]]);
        assert_eq!(found.remote, [[1000, 128, 1], [5000, 128, 1], [3000, 128, 1]]);
        assert_eq!(found.permutes, [[0, 0, 3, 8, 16]]);
    }

    #[test]
    fn blocks_that_follow_each_other_are_one_row() {
        let found = permuted(&grid(0, &[1000, 1128], 8, 16), (&[], &[]), 1 << 30);
        assert_eq!((found.local, found.permutes), (vec![[0, 256, 0]], vec![[0, 0, 2, 8, 16]]));
        let found = permuted(&grid(0, &[1000, 1128], 8, 16), (&[], &[1128]), 1 << 30);
        assert_eq!(found.local, [[0, 128, 0], [128, 128, 0]]);
    }

    #[test]
    fn a_row_stays_within_what_is_registered() {
        // The fifth head of the second block is in other memory, the third of the first one.
        for (bounds, heads) in [((&[] as &[u64], &[5064u64] as &[u64]), 4), ((&[], &[1032]), 2), ((&[96], &[]), 3)] {
            let found = permuted(&grid(0, &[1000, 5000], 8, 16), bounds, 1 << 30);
            assert_eq!(found.permutes[0], [0, 0, 2, heads, 16], "{bounds:?}");
            let ends = |rows: &[Descriptor]| rows.iter().map(|row| (row[0], row[0] + row[1])).collect::<Vec<_>>();
            for (rows, bounds) in [(&found.local, bounds.0), (&found.remote, bounds.1)] {
                for (start, end) in ends(rows) {
                    assert!(!bounds.iter().any(|&bound| start < bound && bound < end));
                }
            }
        }
    }

    #[test]
    fn blocks_may_be_on_several_devices_but_a_permuted_range_is_on_one() {
        let mut rows = grid(0, &[1000, 5000], 4, 16);
        rows.1.iter_mut().skip(1).step_by(2).for_each(|row| row[2] = 2);
        let found = permuted(&rows, (&[], &[]), 1 << 30);
        assert_eq!(found.remote, [[1000, 64, 1], [5000, 64, 2]]);
        rows.0.iter_mut().skip(1).step_by(2).for_each(|row| row[2] = 3);
        assert_eq!(permuted(&rows, (&[], &[]), 1 << 30).local, rows.0);
    }

    #[test]
    fn what_costs_more_than_it_saves_stays() {
        let rows = grid(0, &[1000, 5000], 8, 16);
        let unchanged = permuted(&rows, (&[], &[]), 18);
        assert_eq!((unchanged.local.len(), unchanged.permutes.len()), (16, 0));
        assert_eq!(permuted(&rows, (&[], &[]), 19).permutes.len(), 1); // 256 bytes for 14 rows
    }

    #[test]
    fn neighbours_that_were_joined_with_a_grid_are_cut_off() {
        // Two local blocks with consecutive source blocks: the last cell of the first continues in the second. Whole
        // blocks that were joined before are before the first cell.
        let source = |block: u64| 1000 + 32 * block;
        let mut rows = (vec![[0, 64, 0]], vec![[1000 - 64, 64, 1]]);
        for blocks in [[0, 1], [2, 3]] {
            let next = grid(64 + 32 * blocks[0], &blocks.map(source), 2, 16);
            for (local, remote) in next.0.into_iter().zip(next.1) {
                let (to, from) = (rows.0.last_mut().expect("row"), rows.1.last_mut().expect("row"));
                if to[0] + to[1] == local[0] && from[0] + from[1] == remote[0] {
                    (to[1], from[1]) = (to[1] + 16, from[1] + 16);
                } else {
                    rows.0.push(local);
                    rows.1.push(remote);
                }
            }
        }
        assert_eq!(rows.0.iter().map(|row| row[1]).collect::<Vec<_>>(), [80, 16, 16, 32, 16, 16, 16]);
        let found = permuted(&rows, (&[], &[]), 1 << 30);
        assert_eq!(found.permutes, [[64, 0, 2, 2, 16], [128, 0, 2, 2, 16]]);
        assert_eq!((found.local, found.remote), (vec![[0, 192, 0]], vec![[936, 192, 1]]));
    }

    #[test]
    fn rows_that_are_no_grid_stay() {
        let mut rows = grid(64, &[1000, 5000], 4, 16);
        rows.1[5][0] += 1; // block 1, head 2
        let found = permuted(&rows, (&[], &[]), 1 << 30);
        assert_eq!(found.permutes, [[64, 0, 2, 2, 16]]);
        assert_eq!(found.local[2..], [[128, 16, 0], [144, 16, 0], [160, 16, 0], [176, 16, 0]]);
        let huge = (vec![[u64::MAX - 4, 8, 0], [3, 8, 0]], vec![[u64::MAX - 4, 8, 0], [3, 8, 0]]);
        assert_eq!(permuted(&huge, (&[], &[]), u64::MAX).local, huge.0);
        let empty = (vec![[8, 0, 0]; 4], vec![[8, 0, 0]; 4]);
        assert_eq!(permuted(&empty, (&[], &[]), u64::MAX).local, [[8, 0, 0]]);
        let one_block = grid(0, &[1000], 4, 16);
        assert_eq!(permuted(&one_block, (&[], &[]), 1 << 30).permutes, [] as [Permute; 0]);
        assert!(permuted_rows(&rows.0, &rows.1[1..], (&[], &[]), 0).is_err());
    }
}
