// SPDX-License-Identifier: Apache-2.0
//! Refuses requests that no real peer would send, before anything of that size is allocated.
use crate::bytes::rows::{Advise, reserve};
use crate::error::{Error, Result};
use crate::geometry::types::Group;
use crate::pairing::cuts::count_cuts;
use crate::pairing::group_pair::GroupPair;
use crate::pairing::page_pair::PagePair;
use crate::pairing::plan::{Plan, Source};
use crate::pairing::table::Table;
use crate::request::checked::CheckedRequest;
use crate::request::pairs_by_cut::PairsByCut;
use crate::request::token_ranges::TokenRange;

/// Descriptors that are allowed even if the layouts do not explain them: they take milliseconds and 48 MiB.
const FREE_DESCRIPTORS: u64 = 1 << 20;
/// Limit of pairs of kernel blocks of all sources.
const MAX_BLOCK_PAIRS: u64 = 1 << 24;
/// Limit of pairs of one source in all pairs of pages: each takes up to 48 bytes besides its descriptors.
const MAX_FILLING_PAIRS: u64 = 10_000_000;
/// Limit of ways in which a request cuts its blocks.
const MAX_CUTS: u64 = 1 << 17;
/// Limit of parts of pages that a request cuts, counted once for each way.
const MAX_CUT_PARTS: u64 = 1 << 20;

/// What receives the addresses of a request's descriptors, and the limit of their number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    pub(crate) advise: Advise,
    /// Descriptors that were already made.
    pub(crate) made: u64,
    max_descriptors: u64,
}

/// Limit of descriptors of some block pairs.
///
/// ```text
/// made by now + those of the pairs <= max_descriptors of the plan
///               those of the pairs <= what the layouts explain, or FREE_DESCRIPTORS
/// ```
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    explained: u64,
    made: u64,
    max_descriptors: u64,
}

impl Limit {
    /// The limit for pairs with so many descriptors that the layouts of engines explain.
    fn new(explained: u64, Budget { made, max_descriptors, .. }: Budget) -> Self {
        Self { explained: explained.max(FREE_DESCRIPTORS), made, max_descriptors }
    }

    /// Fails if a count is above the limit.
    pub(crate) fn check(self, count: u64) -> Result<()> {
        self.check_explained(count)?;
        let all = self.made.saturating_add(count);
        if all <= self.max_descriptors {
            return Ok(());
        }
        Err(refusal("descriptors", all, self.max_descriptors, "max_descriptors is the most that may be made"))
    }

    /// Fails if a count is above what the layouts explain.
    fn check_explained(self, count: u64) -> Result<()> {
        let reason = "no two layouts of engines cut these blocks into more pieces";
        if count <= self.explained { Ok(()) } else { Err(refusal("descriptors", count, self.explained, reason)) }
    }
}

fn refusal(what: &'static str, count: u64, limit: u64, reason: &'static str) -> Error {
    let text = format!("the request takes {count} {what}, at most {limit}: {reason}");
    let values = (i128::from(count).into(), format!("at most {limit}").into());
    Error::argument("too-many", what, values, reason, text)
}

impl Plan {
    /// The limit for a request that already has so many descriptors.
    pub(crate) fn budget(&self, advise: Advise, made: usize) -> Budget {
        Budget { advise, made: made as u64, max_descriptors: self.options.max_descriptors }
    }

    /// Fails if a request pairs more kernel blocks than any real request: counted from the tokens, not from the blocks.
    pub(crate) fn bound_block_pairs(&self, request: &CheckedRequest) -> Result<()> {
        let (mut pairs, mut cuts, mut parts) = (0u64, 0u64, 0u64);
        for Source { geometry, table, .. } in &self.sources {
            for (index, pair) in table.group_pairs.iter().enumerate() {
                let Some(range) = request.token_ranges[pair.local_group] else { continue };
                let groups = (&self.local.groups[pair.local_group], &geometry.groups[pair.remote_group]);
                let of_pair = most_block_pairs(range, (groups.0.kernel_tokens(), groups.1.kernel_tokens()));
                let of_cuts = of_pair.min(most_cuts(groups));
                let of_parts = table.page_pairs.iter().map(|pages| pages.num_slices(index)).sum::<u64>();
                pairs = pairs.saturating_add(of_pair);
                cuts = cuts.saturating_add(of_cuts);
                parts = parts.saturating_add(of_cuts.saturating_mul(of_parts));
            }
        }
        let reason = "kernel blocks of the two sides cut each other too often";
        for (what, count, limit) in [
            ("pairs of blocks", pairs, MAX_BLOCK_PAIRS),
            ("ways to cut blocks", cuts, MAX_CUTS),
            ("parts that are cut each in its way", parts, MAX_CUT_PARTS),
        ] {
            if count > limit {
                return Err(refusal(what, count, limit, reason));
            }
        }
        Ok(())
    }
}

/// Maximum number of pairs of kernel blocks of two sizes in some tokens.
fn most_block_pairs(range: TokenRange, (local, remote): (u64, u64)) -> u64 {
    let tokens = range.moved().len();
    tokens / local + if local == remote { 0 } else { tokens / remote } + 2
}

impl Table {
    /// Maximum number of descriptors that layouts of engines explain for some block pairs. Fails if these are in so
    /// many pairs of pages that there are more.
    ///
    /// ```text
    /// descriptors <= pieces before they are joined <= sum over group pairs and cuts of most pieces * block pairs
    /// ```
    pub(crate) fn bound_descriptors(&self, by_pair: &[PairsByCut], budget: Budget) -> Result<Limit> {
        let explained = |(group_pair, pairs): (&GroupPair, &PairsByCut)| {
            let of_cut = |(cut, pairs): (_, &[_])| group_pair.most_pieces.pieces(cut, pairs.len() as u64);
            pairs.iter().map(of_cut).fold(0, u64::saturating_add)
        };
        let explained = self.group_pairs.iter().zip(by_pair).map(explained).fold(0, u64::saturating_add);
        let limit = Limit::new(explained, budget);
        let of_pages = |pages: &PagePair| pages.group_pairs().map(|index| by_pair[index].len() as u64).sum::<u64>();
        let pairs = self.page_pairs.iter().map(of_pages).sum();
        limit.check_explained(pairs)?;
        if pairs > MAX_FILLING_PAIRS {
            let reason = "groups of the two sides share their memory in too many ways";
            return Err(refusal("pairs of blocks", pairs, MAX_FILLING_PAIRS, reason));
        }
        Ok(limit)
    }
}

/// Reserves room for so many entries. A peer may control the number, so a lack of memory is an error.
pub(crate) fn room<T>(count: usize, advise: Advise) -> Result<Vec<T>> {
    let mut entries = Vec::new();
    reserve(&mut entries, count, advise).ok_or_else(|| no_memory(count))?;
    Ok(entries)
}

pub(crate) fn no_memory(count: usize) -> Error {
    let reason = "there is no memory for them";
    let text = format!("the request takes {count} descriptors: {reason}");
    Error::argument("no-memory", "descriptors", ((count as i128).into(), "fewer".into()), reason, text)
}

/// Maximum number of ways in which a request's kernel blocks of two groups cut each other: the cuts of whole blocks,
/// and of the first and the last block.
fn most_cuts((local, remote): (&Group, &Group)) -> u64 {
    if local.turns_in_kernel_block() == remote.turns_in_kernel_block() {
        count_cuts(local.kernel_tokens(), remote.kernel_tokens()).saturating_add(2)
    } else {
        u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::rows::NO_ADVICE;

    #[test]
    fn a_limit_follows_from_the_layouts() {
        let budget = Budget { advise: NO_ADVICE, made: 0, max_descriptors: u64::MAX };
        assert_eq!(Limit::new(10, budget).explained, FREE_DESCRIPTORS);
        let limit = Limit::new(FREE_DESCRIPTORS + 1, budget);
        assert_eq!(limit.check(FREE_DESCRIPTORS + 1), Ok(()));
        let text = limit.check(1 << 30).expect_err("too many").to_string();
        assert!(
            text.starts_with("the request takes 1073741824 descriptors, at most 1048577: no two layouts"),
            "{text}"
        );
    }

    #[test]
    fn all_sources_share_the_descriptors_of_a_plan() {
        let limit = Limit::new(0, Budget { advise: NO_ADVICE, made: 30, max_descriptors: 100 });
        assert_eq!(limit.check(70), Ok(()));
        let text = limit.check(71).expect_err("too many").to_string();
        assert_eq!(
            text,
            "the request takes 101 descriptors, at most 100: max_descriptors is the most that may be made"
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
        assert!(room::<[u64; 3]>(usize::MAX / 48, NO_ADVICE).is_err());
        assert!(room::<[u64; 3]>(3, NO_ADVICE).is_ok());
    }
}
