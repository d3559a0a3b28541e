// SPDX-License-Identifier: Apache-2.0
//! Which kernel block of one side shares tokens with which block of the other side.
use crate::bytes::pieces::TokenCut;
use crate::geometry::ranges::Interval;
use crate::geometry::types::KernelBlockId;
use crate::request::group_span::GroupSpan;

/// Kernel blocks with common tokens, packed to sort by local id: `local << 32 | remote`. Kernel ids fit 31 bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PackedPair(u64);

pub(crate) type Pairs = Vec<PackedPair>;

/// From so many pairs on, [`sort`] counts digits instead of comparing pairs.
const MIN_COUNTED: usize = 1024;
/// Maximum of bits of a local id that one pass of [`sort`] counts.
const MAX_DIGIT_BITS: u32 = 11;
const NUM_DIGITS: usize = 1 << MAX_DIGIT_BITS;
/// Pairs that are compared at once.
const CHUNK: usize = 64;

impl PackedPair {
    /// Difference from a pair to that of the next blocks on both sides.
    const NEXT: u64 = 1 << 32 | 1;

    pub(crate) fn new(local: KernelBlockId, remote: KernelBlockId) -> Self {
        Self(local.0 << 32 | remote.0)
    }

    pub(crate) fn local(self) -> KernelBlockId {
        KernelBlockId(self.0 >> 32)
    }

    pub(crate) fn remote(self) -> KernelBlockId {
        KernelBlockId(self.0 & 0xffff_ffff)
    }

    /// The pair that many blocks later on both sides.
    pub(crate) fn plus(self, blocks: u64) -> Self {
        Self(self.0 + blocks * Self::NEXT)
    }
}

/// A local and a remote kernel block, and their common tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockPair {
    pub(crate) local: KernelBlockId,
    pub(crate) remote: KernelBlockId,
    pub(crate) cut: TokenCut,
}

impl BlockPair {
    /// Whether the tokens of another pair directly follow this pair's in the same blocks.
    fn goes_on_with(&self, next: &Self) -> bool {
        let (cut, then) = (self.cut, next.cut);
        (self.local, self.remote) == (next.local, next.remote)
            && (cut.local + cut.count, cut.remote + cut.count) == (then.local, then.remote)
    }
}

/// Visits the kernel blocks that share tokens on both sides, in the order of the sequence.
///
/// ```text
/// local kernel blocks of 4    |   7   |   3   |   9   |      pairs (7, 5), (3, 5), (3, 2), (9, 2)
/// remote kernel blocks of 6   |     5     |     2     |      with 4, 2, 2 and 4 tokens
/// ```
///
/// Tokens of a pair are consecutive in both blocks, but need not be in the sequence. Ranks that take turns in the same
/// way hold the same tokens, and their blocks are paired whole.
pub(crate) fn visit_pairs(local: &GroupSpan, remote: &GroupSpan, tokens: Interval, mut visit: impl FnMut(BlockPair)) {
    let mut token = tokens.start;
    let mut last: Option<BlockPair> = None;
    while token < tokens.end {
        let (Some(local_entry), Some(remote_entry)) = (local.entry(token), remote.entry(token)) else {
            token = local.next_held(token).max(remote.next_held(token));
            continue;
        };
        let end = local.neighbours(token).end.min(remote.neighbours(token).end).min(tokens.end);
        let (local_block, local_token) = local.kernel_block(local_entry, token);
        let (remote_block, remote_token) = remote.kernel_block(remote_entry, token);
        let cut = TokenCut { local: local_token, remote: remote_token, count: end - token };
        let pair = BlockPair { local: local_block, remote: remote_block, cut };
        match &mut last {
            Some(last) if last.goes_on_with(&pair) => last.cut.count += pair.cut.count,
            _ => last.replace(pair).into_iter().for_each(&mut visit),
        }
        token = end;
    }
    last.into_iter().for_each(visit);
}

/// Like [`visit_pairs`], but without a step for each block. It handles whole kernel blocks of equal size on ranks that
/// hold every position. Appends pairs and returns where the last whole block ends, or None in other cases.
pub(crate) fn pair_whole_blocks(
    local: &GroupSpan,
    remote: &GroupSpan,
    tokens: Interval,
    pairs: &mut Pairs,
) -> Option<u64> {
    let size = local.group.kernel_tokens();
    let is_plain = |blocks: &GroupSpan| blocks.group.kernel_tokens() == size && blocks.group.cp_size == 1;
    if !is_plain(local) || !is_plain(remote) || tokens.start % size != 0 {
        return None;
    }
    let (first, last) = (tokens.start / size, tokens.end / size);
    let per_block = (local.group.kernel_blocks_per_block, remote.group.kernel_blocks_per_block);
    if per_block == (1, 1) {
        let entries =
            |blocks: &GroupSpan| (first - blocks.span.first) as usize..(last.max(first) - blocks.span.first) as usize;
        let (local_ids, remote_ids) = (&local.span.ids[entries(local)], &remote.span.ids[entries(remote)]);
        let kernel = |id: u32| KernelBlockId(id.into());
        pairs.extend(local_ids.iter().zip(remote_ids).map(|(l, r)| PackedPair::new(kernel(l.0), kernel(r.0))));
        return Some(last * size);
    }
    // Sorting the few runs here avoids sorting the many pairs later.
    let mut runs: Vec<(PackedPair, u64)> = Vec::new();
    let mut block = first;
    while block < last {
        let (local_index, remote_index) = (block % per_block.0, block % per_block.1);
        let count = (per_block.0 - local_index).min(per_block.1 - remote_index).min(last - block);
        let local_block = local.group.kernel_block(local.span.block(block / per_block.0), local_index);
        let remote_block = remote.group.kernel_block(remote.span.block(block / per_block.1), remote_index);
        runs.push((PackedPair::new(local_block, remote_block), count));
        block += count;
    }
    runs.sort_unstable();
    pairs.extend(runs.iter().flat_map(|(first, count)| (0..*count).map(|step| first.plus(step))));
    Some(last * size)
}

/// Whether the pairs are sorted by their local block, and none is in two of them.
pub(crate) fn is_ascending(pairs: &[PackedPair]) -> bool {
    let Some((_, rest)) = pairs.split_first() else { return true };
    // A difference has a sign if its pair does not ascend. Some pairs at once take less time than pair by pair.
    let sign = |(one, next): (&PackedPair, &PackedPair)| next.local().0.wrapping_sub(one.local().0 + 1);
    let signs = |(ones, nexts): (&[PackedPair], &[PackedPair])| ones.iter().zip(nexts).map(sign).fold(0, |a, b| a | b);
    pairs.chunks(CHUNK).zip(rest.chunks(CHUNK)).all(|chunks| signs(chunks) >> 63 == 0)
}

/// Sorts pairs by their local id. Long lists are counted, because their ids are small: two or three passes are enough.
///
/// ```text
/// ns a pair, random ids below 2^16       512   8,192   65,536 pairs
///   comparing: sort_unstable             5.0     7.6     10.7
///   counting digits of 11 bits           6.0     3.9      6.4
/// ```
pub(crate) fn sort(pairs: &mut Pairs) {
    if is_ascending(pairs) {
        return;
    }
    if pairs.is_sorted_by(|one, next| one.0 > next.0) {
        pairs.reverse();
        return;
    }
    if pairs.len() < MIN_COUNTED {
        pairs.sort_unstable_by_key(|pair| pair.0);
        return;
    }
    let largest = pairs.iter().map(|pair| pair.local().0).max().unwrap_or(0);
    let bits = u64::BITS - largest.leading_zeros();
    // Passes of equally many bits have the fewest digits, so the fewest places that are written to in turns.
    let passes = bits.div_ceil(MAX_DIGIT_BITS);
    let mut sorted = vec![PackedPair::default(); pairs.len()];
    for pass in 0..passes {
        let digit_bits = bits.div_ceil(passes);
        sort_by_digit(pairs, &mut sorted, pass * digit_bits, digit_bits);
        std::mem::swap(pairs, &mut sorted);
    }
}

/// One pass of a radix sort: writes the pairs in the order of a digit of their local ids; equal digits keep their order.
fn sort_by_digit(pairs: &[PackedPair], sorted: &mut [PackedPair], shift: u32, bits: u32) {
    let (shift, mask) = (32 + shift, (1 << bits) - 1);
    // The second mask changes nothing, and shows the compiler that the index is inside.
    let digit = |pair: PackedPair| pair.0.wrapping_shr(shift) as usize & mask & (NUM_DIGITS - 1);
    // First the number of pairs with each digit, then where the next pair with the digit is written.
    let mut starts = [0u32; NUM_DIGITS];
    for &pair in pairs {
        starts[digit(pair)] += 1;
    }
    let mut sum = 0;
    for start in &mut starts[..=mask] {
        sum += std::mem::replace(start, sum);
    }
    for &pair in pairs {
        let start = &mut starts[digit(pair)];
        sorted[*start as usize] = pair;
        *start += 1;
    }
}

/// Runs of pairs that are consecutive on both sides.
pub(crate) fn runs(mut pairs: &[PackedPair]) -> impl Iterator<Item = &[PackedPair]> {
    std::iter::from_fn(move || {
        let (run, rest) = pairs.split_at(first_run(pairs));
        pairs = rest;
        (!run.is_empty()).then_some(run)
    })
}

/// How many pairs the first run has. Most runs are short, or nearly as long as the request: from some pairs on, many
/// are compared at once.
fn first_run(pairs: &[PackedPair]) -> usize {
    let Some((_, rest)) = pairs.split_first() else { return 0 };
    let goes_on = |from: usize| {
        let more = pairs[from..].iter().zip(&rest[from..]);
        more.take(CHUNK).take_while(|&(&one, &next)| !is_break(one, next)).count()
    };
    let mut len = goes_on(0);
    if len == CHUNK {
        let chunks = pairs[len..].chunks(CHUNK).zip(rest[len..].chunks(CHUNK));
        len += chunks
            .take_while(|(ones, nexts)| count_breaks(ones, nexts) == 0)
            .map(|(_, nexts)| nexts.len())
            .sum::<usize>();
        len += goes_on(len);
    }
    1 + len
}

/// How many `runs` there are.
pub(crate) fn count_runs(pairs: &[PackedPair]) -> u64 {
    pairs.split_first().map_or(0, |(_, rest)| 1 + count_breaks(pairs, rest))
}

/// How many pairs do not continue the pair before, counted without a branch.
fn count_breaks(ones: &[PackedPair], nexts: &[PackedPair]) -> u64 {
    ones.iter().zip(nexts).map(|(one, next)| u64::from(is_break(*one, *next))).fold(0, u64::wrapping_add)
}

fn is_break(one: PackedPair, next: PackedPair) -> bool {
    one.0.wrapping_add(PackedPair::NEXT) != next.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::{BlockId, Group, Kind};
    use crate::request::span::CheckedSpan;
    use proptest::prelude::*;

    fn packed(local: u64, remote: u64) -> PackedPair {
        PackedPair::new(KernelBlockId(local), KernelBlockId(remote))
    }

    #[test]
    fn pairs_that_fall_are_turned_around() {
        let mut pairs: Pairs = (0..5000).rev().map(|id| packed(id, 7 * id)).collect();
        sort(&mut pairs);
        assert_eq!(pairs, (0..5000).map(|id| packed(id, 7 * id)).collect::<Pairs>());
    }

    #[test]
    fn a_run_goes_on_on_both_sides() {
        let pairs = [(1, 5), (2, 6), (3, 9), (5, 10), (6, 11)].map(|(local, remote)| packed(local, remote));
        assert_eq!(count_runs(&pairs), 3);
        assert_eq!(runs(&pairs).map(<[_]>::len).collect::<Vec<_>>(), [2, 1, 2]);
        assert_eq!(count_runs(&[]), 0);
        assert_eq!(runs(&[]).count(), 0);
    }

    #[test]
    fn runs_end_where_one_side_breaks_off_at_any_length() {
        for first in 1..=3 * CHUNK as u64 + 2 {
            for (second, gap) in [(1, (0, 1)), (2 * CHUNK as u64, (1, 0)), (5, (1, 1))] {
                let mut pairs: Pairs = (0..first).map(|id| packed(id, 7 + id)).collect();
                pairs.extend((first..first + second).map(|id| packed(id + gap.0, 7 + id + gap.1)));
                assert_eq!(runs(&pairs).map(|run| run.len() as u64).collect::<Vec<_>>(), [first, second]);
                assert_eq!(count_runs(&pairs), 2);
            }
        }
    }

    #[test]
    fn pairs_ascend_only_if_each_local_block_is_after_the_one_before() {
        assert!(is_ascending(&[]) && is_ascending(&[packed(5, 9)]));
        for count in [2, CHUNK as u64, CHUNK as u64 + 1, 3 * CHUNK as u64 + 2] {
            let pairs: Pairs = (0..count).map(|id| packed(id, count - id)).collect();
            assert!(is_ascending(&pairs));
            for index in 1..pairs.len() {
                for local in [index as u64 - 1, 0] {
                    let mut other = pairs.clone();
                    other[index] = packed(local, 0x7fff_ffff);
                    assert!(!is_ascending(&other), "{count} pairs, at {index}");
                }
            }
        }
    }

    #[test]
    fn blocks_of_4_and_6_tokens_meet() {
        let group = |block_size| Group::alone(Kind::Full, block_size, 1);
        let span = |ids: &[u32]| CheckedSpan { first: 0, ids: ids.iter().copied().map(BlockId).collect() };
        let (local_group, remote_group) = (group(4), group(6));
        let (local_span, remote_span) = (span(&[7, 3, 9]), span(&[5, 2]));
        let local = GroupSpan { side: "local", index: 0, group: &local_group, span: &local_span };
        let remote = GroupSpan { side: "remote", index: 0, group: &remote_group, span: &remote_span };
        let mut found = Vec::new();
        visit_pairs(&local, &remote, Interval { start: 1, end: 11 }, |pair| {
            found.push((pair.local.0, pair.remote.0, pair.cut.local, pair.cut.remote, pair.cut.count));
        });
        assert_eq!(found, [(7, 5, 1, 1, 3), (3, 5, 0, 4, 2), (3, 2, 2, 0, 2), (9, 2, 0, 2, 3)]);
    }

    #[test]
    fn blocks_of_ranks_that_take_turns_alike_meet_whole() {
        let group = |cp_rank, cp_size| Group { cp_rank, cp_size, cp_interleave: 1, ..Group::alone(Kind::Full, 4, 1) };
        let found = |local: &Group, remote: &Group| {
            let ids = |ids: &[u32]| CheckedSpan { first: 0, ids: ids.iter().copied().map(BlockId).collect() };
            let (local_span, remote_span) = (ids(&[7, 3]), ids(&[5, 2]));
            let local = GroupSpan { side: "local", index: 0, group: local, span: &local_span };
            let remote = GroupSpan { side: "remote", index: 0, group: remote, span: &remote_span };
            let mut found = Vec::new();
            visit_pairs(&local, &remote, Interval { start: 0, end: 13 }, |pair| {
                found.push((pair.local.0, pair.remote.0, pair.cut.local, pair.cut.remote, pair.cut.count));
            });
            found
        };
        // Rank 1 of 2 has tokens 1, 3, 5, 7 and 9, 11.
        assert_eq!(found(&group(1, 2), &group(1, 2)), [(7, 5, 0, 0, 4), (3, 2, 0, 0, 2)]);
        assert_eq!(found(&group(1, 2), &group(0, 2)), []);
        // Rank 1 of 4 has tokens 1, 5, 9: the first, third and fifth of rank 1 of 2.
        assert_eq!(found(&group(1, 4), &group(1, 2)), [(7, 5, 0, 0, 1), (7, 5, 1, 2, 1), (7, 2, 2, 0, 1)]);
    }

    proptest! {
        #[test]
        fn counting_passes_sort(ids in proptest::collection::hash_set(0u64..1 << 31, 0..2000), bits in 0u32..31) {
            let mut pairs: Pairs = ids.iter().map(|&id| packed(id >> bits, id & 0x7fff_ffff)).collect();
            let mut expected = pairs.clone();
            expected.sort_by_key(|pair| pair.local());
            sort(&mut pairs);
            let keys = |list: &Pairs| list.iter().map(|pair| pair.local()).collect::<Vec<_>>();
            prop_assert_eq!(keys(&pairs), keys(&expected));
            pairs.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(pairs, expected);
        }
    }
}
