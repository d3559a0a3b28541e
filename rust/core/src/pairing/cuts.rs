// SPDX-License-Identifier: Apache-2.0
//! How kernel blocks of two sizes cut each other.
use crate::bytes::pieces::TokenCut;
use crate::geometry::ranges::gcd;
use crate::geometry::types::Group;

/// The cuts that whole kernel blocks of two groups make of each other, each once, sorted. None if there are more than
/// `limit`, or if ranks take turns within kernel blocks in different ways.
///
/// ```text
/// kernel blocks of 4   |0 1 2 3|0 1 2 3|0 1 2 3|     the pattern repeats after 12 tokens
/// kernel blocks of 6   |0 1 2 3 4 5|0 1 2 3 4 5|
/// cuts                 |(0,0,4)|(0,4,2)(2,0,2)|(0,2,4)|
/// ```
pub(crate) fn whole_block_cuts(local: &Group, remote: &Group, limit: usize) -> Option<Vec<TokenCut>> {
    if local.turns_in_kernel_block() != remote.turns_in_kernel_block() {
        return None;
    }
    let (a, b) = (local.kernel_tokens(), remote.kernel_tokens());
    let cycle = (a / gcd(a, b)).checked_mul(b)?;
    if count_cuts(a, b) > limit as u64 {
        return None;
    }
    let mut cuts = Vec::new();
    let mut token = 0;
    while token < cycle {
        let end = ((token / a + 1) * a).min((token / b + 1) * b);
        cuts.push(TokenCut { local: token % a, remote: token % b, count: end - token });
        token = end;
    }
    cuts.sort_unstable();
    Some(cuts)
}

/// Maximum number of ways in which whole kernel blocks of so many tokens cut each other.
pub(crate) fn count_cuts(a: u64, b: u64) -> u64 {
    if a == b { 1 } else { (a / gcd(a, b)).saturating_add(b / gcd(a, b)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::Kind;

    #[test]
    fn blocks_of_4_and_6_cut_each_other_in_four_ways() {
        let group = |block_size| Group::alone(Kind::Full, block_size, 2);
        let cut = |(local, remote, count)| TokenCut { local, remote, count };
        let expected = [(0, 0, 4), (0, 2, 4), (0, 4, 2), (2, 0, 2)].map(cut);
        assert_eq!(whole_block_cuts(&group(8), &group(12), 5), Some(expected.to_vec()));
        assert_eq!(whole_block_cuts(&group(8), &group(12), 4), None);
        assert_eq!(whole_block_cuts(&group(8), &group(8), 2), Some(vec![cut((0, 0, 4))]));
        let by_token = Group { cp_size: 2, cp_interleave: 1, ..group(8) };
        assert_eq!(whole_block_cuts(&by_token, &by_token, 2), Some(vec![cut((0, 0, 4))]));
        assert_eq!(whole_block_cuts(&group(8), &by_token, 2), None);
    }
}
