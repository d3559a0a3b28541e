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

/// A grid of equal cells. All cells are whole rows except the first and the last. The first may be the end of a row and
/// the last the beginning of one, if the row was joined with a neighbour of the grid.
struct Grid {
    blocks: usize,
    heads: usize,
    /// Bytes of a cell.
    length: u64,
}

impl Grid {
    fn bytes(&self) -> u64 {
        self.length.saturating_mul((self.blocks * self.heads) as u64)
    }

    fn saved(&self) -> u64 {
        (self.blocks * (self.heads - 1)) as u64
    }
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
    let rows = Rows { local, remote, bounds };
    let mut found = PermutedRows::default();
    // A row, and how many of its bytes belong to a grid.
    let (mut index, mut taken) = (0, 0);
    while index < local.len() {
        let left = local[index][1] - taken;
        let next = local.get(index + 1).map_or(0, |row| row[1]);
        let grid = [left, next.min(left)]
            .into_iter()
            .find_map(|length| rows.grid(index, length))
            .filter(|grid| grid.bytes() <= permute_bytes.saturating_mul(grid.saved()));
        let Some(grid) = grid else {
            found.push(rows.cut(index, taken, left), bounds);
            (index, taken) = (index + 1, 0);
            continue;
        };
        let skipped = left - grid.length;
        if skipped > 0 {
            found.push(rows.cut(index, taken, skipped), bounds);
        }
        let address = local[index][0] + taken + skipped;
        let whole = grid.length * grid.heads as u64;
        for block in 0..grid.blocks {
            let to = [address + block as u64 * whole, whole, local[index][2]];
            found.push((to, [rows.source(index, block, grid.length), whole, remote[index][2]]), bounds);
        }
        found.permutes.push([address, local[index][2], grid.blocks as u64, grid.heads as u64, grid.length]);
        index += grid.blocks * grid.heads - 1;
        taken = grid.length;
        if local[index][1] == taken {
            (index, taken) = (index + 1, 0);
        }
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

struct Rows<'a> {
    local: &'a [Descriptor],
    remote: &'a [Descriptor],
    bounds: (&'a [u64], &'a [u64]),
}

impl Rows<'_> {
    /// Some bytes of a row.
    fn cut(&self, index: usize, skip: u64, length: u64) -> (Descriptor, Descriptor) {
        let of = |row: Descriptor| [row[0] + skip, length, row[2]];
        (of(self.local[index]), of(self.remote[index]))
    }

    /// Where a block begins in the source, for a grid whose first cell is the end of a row.
    fn source(&self, start: usize, block: usize, length: u64) -> u64 {
        let [address, bytes, _] = self.remote[start + block];
        if block == 0 { address + bytes - length } else { address }
    }

    /// The largest grid that begins with the last `length` bytes of a row. None without a grid of at least two blocks
    /// and two heads.
    fn grid(&self, start: usize, length: u64) -> Option<Grid> {
        if length == 0 || self.local[start][0].checked_add(self.local[start][1]).is_none() {
            return None;
        }
        let first = self.local[start][0] + self.local[start][1] - length;
        let is_cell = |row: usize, of: usize, head: usize, is_last: bool| {
            let at = first.wrapping_add(length.wrapping_mul((row - start) as u64));
            let source = self.source(start, of, length).wrapping_add(length.wrapping_mul(head as u64));
            let begins = |rows: &[Descriptor], address: u64| {
                rows.get(row).is_some_and(|found| found[0] == address && found[2] == rows[start + of][2])
            };
            let bytes = self.local.get(row).map_or(0, |found| found[1]);
            (bytes == length || (is_last && bytes > length)) && begins(self.local, at) && begins(self.remote, source)
        };
        let blocks = (1..=MAX_BLOCKS)
            .take_while(|&blocks| self.local.get(start + blocks).is_some_and(|row| row[1] == length))
            .find(|&blocks| is_cell(start + blocks, 0, 1, false))
            .filter(|&blocks| blocks > 1)?;
        let is_head = |head: usize| {
            (0..blocks).all(|block| is_cell(start + head * blocks + block, block, head, block + 1 == blocks))
        };
        // The first cell of the first head is the end of a row, and the others are whole rows.
        if !(1..blocks).all(|block| is_cell(start + block, block, 0, false)) {
            return None;
        }
        let is_whole = |head: usize| self.local[start + (head + 1) * blocks - 1][1] == length;
        let mut heads = 1;
        while (heads == 1 || is_whole(heads - 1)) && is_head(heads) {
            heads += 1;
        }
        let room = |address: u64, bounds: &[u64], each: u64| {
            let end = bounds.get(bounds.partition_point(|&bound| bound <= address)).copied().unwrap_or(u64::MAX);
            ((end - address) / each) as usize
        };
        let heads = (0..blocks)
            .map(|block| room(self.source(start, block, length), self.bounds.1, length))
            .chain([heads, room(first, self.bounds.0, length.saturating_mul(blocks as u64))])
            .min()?;
        (heads > 1).then_some(Grid { blocks, heads, length })
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
