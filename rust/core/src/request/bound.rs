// SPDX-License-Identifier: Apache-2.0
//! Refuses what no request to a real peer costs, before anything of that size is made.
use crate::bytes::rows::Descriptor;
use crate::error::{Error, Result};
use crate::pairing::group_pair::GroupPair;
use crate::pairing::plan::Plan;
use crate::pairing::table::Table;
use crate::request::checked::CheckedRequest;
use crate::request::pairs_by_cut::PairsByCut;
use crate::request::token_ranges::TokenRange;

/// Descriptors that any request may have, whatever the layouts: they take milliseconds and 48 MiB.
const FREE_DESCRIPTORS: u64 = 1 << 20;
/// Descriptors that no request may have: 6 GiB.
const MAX_DESCRIPTORS: u64 = 1 << 27;
/// Pairs of kernel blocks of all sources, and pairs of one source in all sets that fill templates.
const MAX_BLOCK_PAIRS: u64 = 1 << 24;
/// Parts of layers over all block pairs, where nearly every pair is cut in a way of its own.
const MAX_RARE_SLICES: u64 = 1 << 17;

/// A limit, and why it is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit {
    count: u64,
    reason: &'static str,
}

impl Limit {
    /// Of descriptors, when the layouts of engines explain so many.
    fn of_descriptors(explained: u64) -> Self {
        let count = explained.clamp(FREE_DESCRIPTORS, MAX_DESCRIPTORS);
        let reason = if count == MAX_DESCRIPTORS {
            "more are never made"
        } else {
            "no two layouts of engines cut these blocks into more pieces"
        };
        Self { count, reason }
    }

    /// Fails if a count is beyond the limit.
    pub(crate) fn check(self, count: u64) -> Result<()> {
        if count <= self.count { Ok(()) } else { Err(self.refusal("descriptors", count)) }
    }

    fn refusal(self, what: &'static str, count: u64) -> Error {
        let Self { count: limit, reason } = self;
        let text = format!("the request takes {count} {what}, at most {limit}: {reason}");
        let values = (i128::from(count).into(), format!("at most {limit}").into());
        Error::argument("too-many", what, values, reason, text)
    }
}

impl Plan {
    /// Fails if a request pairs more kernel blocks than any real one: counted from the tokens, not from the blocks.
    pub(crate) fn bound_block_pairs(&self, request: &CheckedRequest) -> Result<()> {
        let (mut pairs, mut rare_slices) = (0u64, 0u64);
        for source in &self.sources {
            for pair in &source.table.group_pairs {
                let Some(range) = request.token_ranges[pair.local_group] else { continue };
                let remote = &source.geometry.groups[pair.remote_group];
                let of_pair = most_block_pairs(
                    range,
                    (self.local.groups[pair.local_group].kernel_tokens(), remote.kernel_tokens()),
                );
                pairs = pairs.saturating_add(of_pair);
                if pair.cuts.is_empty() {
                    rare_slices = rare_slices.saturating_add(of_pair.saturating_mul(pair.num_slices));
                }
            }
        }
        let reason = "kernel blocks of the two sides cut each other too often";
        if pairs > MAX_BLOCK_PAIRS {
            return Err(Limit { count: MAX_BLOCK_PAIRS, reason }.refusal("pairs of blocks", pairs));
        }
        if rare_slices > MAX_RARE_SLICES {
            return Err(
                Limit { count: MAX_RARE_SLICES, reason }.refusal("parts that are cut each in its way", rare_slices)
            );
        }
        Ok(())
    }
}

/// The most pairs that kernel blocks of two sizes have in some tokens.
fn most_block_pairs(range: TokenRange, (local, remote): (u64, u64)) -> u64 {
    let tokens = range.moved().len();
    tokens / local + if local == remote { 0 } else { tokens / remote } + 2
}

impl Table {
    /// The most descriptors that layouts of engines explain for some block pairs. Fails if these fill so many templates
    /// that there are more.
    ///
    /// ```text
    /// descriptors <= pieces before they are joined <= sum over group pairs and cuts of most pieces * block pairs
    /// ```
    pub(crate) fn bound_descriptors(&self, by_pair: &[PairsByCut]) -> Result<Limit> {
        let explained = |(group_pair, pairs): (&GroupPair, &PairsByCut)| {
            let of_cut = |(cut, pairs): (_, &[_])| group_pair.most_pieces.pieces(cut, pairs.len() as u64);
            pairs.iter().map(of_cut).fold(0, u64::saturating_add)
        };
        let explained = self.group_pairs.iter().zip(by_pair).map(explained).fold(0, u64::saturating_add);
        let limit = Limit::of_descriptors(explained);
        let cuts = self.fillers.iter().flat_map(|fillers| &fillers.cuts);
        limit.check(cuts.map(|&cut| self.pairs_of(cut, by_pair).len() as u64).sum())?;
        Ok(limit)
    }
}

/// Room for so many; the number may be a peer's doing, so a lack of memory is an error.
pub(crate) fn room<T>(count: usize) -> Result<Vec<T>> {
    let mut rows = Vec::new();
    rows.try_reserve_exact(count).map_err(|_| no_memory(count))?;
    Ok(rows)
}

/// Allocates for so many descriptors; None if there is no memory for them. A caller who hands them on may know better
/// where.
pub type Allocate = fn(usize) -> Option<Vec<Descriptor>>;

/// Descriptors as they are allocated by default.
pub(crate) const ALLOCATE: Allocate = |count| room(count).ok();

pub(crate) fn no_memory(count: usize) -> Error {
    let reason = "there is no memory for them";
    let text = format!("the request takes {count} descriptors: {reason}");
    Error::argument("no-memory", "descriptors", ((count as i128).into(), "fewer".into()), reason, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_follows_from_the_layouts() {
        assert_eq!(Limit::of_descriptors(10).count, FREE_DESCRIPTORS);
        assert_eq!(Limit::of_descriptors(FREE_DESCRIPTORS + 1).count, FREE_DESCRIPTORS + 1);
        assert_eq!(Limit::of_descriptors(u64::MAX).count, MAX_DESCRIPTORS);
        let limit = Limit::of_descriptors(FREE_DESCRIPTORS + 1);
        assert_eq!(limit.check(FREE_DESCRIPTORS + 1), Ok(()));
        let text = limit.check(1 << 30).expect_err("too many").to_string();
        assert!(
            text.starts_with("the request takes 1073741824 descriptors, at most 1048577: no two layouts"),
            "{text}"
        );
    }

    #[test]
    fn block_pairs_are_counted_from_tokens() {
        let range = TokenRange { first_kept_token: 0, start: 8, end: 108 };
        assert_eq!(most_block_pairs(range, (10, 10)), 12);
        assert_eq!(most_block_pairs(range, (10, 4)), 10 + 25 + 2);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        assert!(room::<Descriptor>(usize::MAX / 48).is_err());
        assert!(ALLOCATE(3).is_some());
    }
}
