// SPDX-License-Identifier: Apache-2.0
//! Block ids as callers have them, and their kernel blocks.
use std::ops::Range;

use super::out::Out;
use crate::error::{Error, Result};
use crate::geometry::types::BlockId;

/// Block ids of 32 or 64 bits.
#[derive(Debug, Clone, Copy)]
pub enum BlockIds<'a> {
    /// What vLLM's workers have.
    Narrow(&'a [i32]),
    /// What Python's integers are read as.
    Wide(&'a [i64]),
}

/// Calls a generic function with the slice of either width.
macro_rules! either {
    ($ids:expr, $slice:ident => $call:expr) => {
        match $ids {
            BlockIds::Narrow($slice) => $call,
            BlockIds::Wide($slice) => $call,
        }
    };
}

impl BlockIds<'_> {
    /// How many there are.
    pub fn len(self) -> usize {
        either!(self, ids => ids.len())
    }

    /// Whether the list is empty.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether a range of addresses has some of their bytes.
    pub fn overlaps(self, memory: Range<usize>) -> bool {
        let own = either!(self, ids => ids.as_ptr_range().start as usize..ids.as_ptr_range().end as usize);
        !own.is_empty() && own.start < memory.end && memory.start < own.end
    }

    /// Some of them, one after the other.
    #[must_use]
    pub fn slice(self, entries: Range<usize>) -> Self {
        match self {
            Self::Narrow(ids) => Self::Narrow(&ids[entries]),
            Self::Wide(ids) => Self::Wide(&ids[entries]),
        }
    }

    /// How many at the front are `null`.
    pub fn leading(self, null: Option<i64>) -> usize {
        null.map_or(0, |null| either!(self, ids => leading(ids, null)))
    }

    /// The first that is outside of `0..limit`, and its index. The limit is at most 2^31.
    pub fn first_outside(self, limit: u64) -> Option<(usize, i64)> {
        // Nearly always all are inside, and one pass without a branch finds that. An id below 0 has a sign; if an id is
        // too large, the difference from the last has one.
        let last = limit as i64 - 1;
        let signs = match self {
            Self::Narrow(ids) => {
                let last = last as i32;
                i64::from(ids.iter().fold(0, |signs, &id| signs | id | last.wrapping_sub(id)))
            }
            Self::Wide(ids) => ids.iter().fold(0, |signs, &id| signs | id | last.wrapping_sub(id)),
        };
        if signs >= 0 {
            return None;
        }
        self.find(|id| id as u64 >= limit)
    }

    /// The smallest and the largest id, if each id is above the one before, or each below it; else None.
    pub(crate) fn ends_if_ordered(self) -> Option<(i64, i64)> {
        either!(self, ids => ends_if_ordered(ids))
    }

    /// Whether one of them is `id`.
    pub(crate) fn has(self, id: i64) -> bool {
        match self {
            Self::Narrow(ids) => i32::try_from(id).is_ok_and(|id| has(ids, id)),
            Self::Wide(ids) => has(ids, id),
        }
    }

    /// The first that is wanted, and its index.
    pub(crate) fn find(self, is_wanted: impl Fn(i64) -> bool) -> Option<(usize, i64)> {
        either!(self, ids => find(ids, is_wanted))
    }

    /// All of them, which must be blocks.
    pub(crate) fn to_blocks(self) -> Vec<BlockId> {
        either!(self, ids => ids.iter().map(|&id| BlockId(id as u32)).collect())
    }

    /// Appends the kernel blocks of each, of which there are `ratio`; all of them fit int32.
    fn expand_into(self, ratio: u64, out: &mut Out<'_, i32>) {
        either!(self, ids => expand_into(ids, ratio as i32, out));
    }

    /// The kernel blocks of each; all of them fit int32.
    pub(super) fn expanded(self, ratio: u64) -> Result<Vec<i32>> {
        let mut out = Out::default();
        out.reserve(self.len() * ratio as usize)?;
        self.expand_into(ratio, &mut out);
        Ok(out.into_new().unwrap_or_default())
    }
}

fn leading<T: Copy + Into<i64>>(ids: &[T], null: i64) -> usize {
    ids.iter().take_while(|&&id| id.into() == null).count()
}

fn ends_if_ordered<T: Copy + Ord + Into<i64>>(ids: &[T]) -> Option<(i64, i64)> {
    let (&[first, .., last] | &[first @ last]) = ids else { return None };
    if first <= last {
        holds_for_each(ids, |one, next| one < next).then(|| (first.into(), last.into()))
    } else {
        holds_for_each(ids, |one, next| one > next).then(|| (last.into(), first.into()))
    }
}

/// Whether a comparison holds for each id and the next. It compares some at once, which takes less time than to stop at
/// the first for which it does not hold.
fn holds_for_each<T: Copy>(ids: &[T], compare: impl Fn(T, T) -> bool) -> bool {
    const CHUNK: usize = 256;
    let Some((_, rest)) = ids.split_first() else { return true };
    let fails = |(&one, &next): (&T, &T)| u32::from(!compare(one, next));
    let any = |(ones, nexts): (&[T], &[T])| ones.iter().zip(nexts).map(fails).fold(0, |any, fails| any | fails) > 0;
    !ids.chunks(CHUNK).zip(rest.chunks(CHUNK)).any(any)
}

fn has<T: Copy + Eq>(ids: &[T], id: T) -> bool {
    ids.iter().fold(0, |any, &one| any | u32::from(one == id)) > 0
}

fn find<T: Copy + Into<i64>>(ids: &[T], is_wanted: impl Fn(i64) -> bool) -> Option<(usize, i64)> {
    ids.iter().map(|&id| id.into()).enumerate().find(|&(_, id)| is_wanted(id))
}

fn expand_into<T: Copy + Into<i64>>(ids: &[T], ratio: i32, out: &mut Out<'_, i32>) {
    /// Has a separate loop for each of some ratios. The loop for any ratio begins anew at each block, which takes
    /// longer than to write so few ids.
    macro_rules! expand {
        ($($known:literal)*) => {
            match ratio {
                1 => out.extend(ids.iter().map(|&id| id.into() as i32)),
                $($known => expand_each::<T, $known>(ids, out),)*
                _ => {
                    for &id in ids {
                        let first = (id.into() as i32).wrapping_mul(ratio);
                        out.extend((0..ratio).map(|kernel| first.wrapping_add(kernel)));
                    }
                }
            }
        };
    }
    expand!(2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
}

/// Appends so many kernel blocks of each block: a number that the compiler knows is written several at once.
fn expand_each<T: Copy + Into<i64>, const RATIO: usize>(ids: &[T], out: &mut Out<'_, i32>) {
    out.extend_arrays(ids.iter().map(|&id| -> [i32; RATIO] {
        let first = (id.into() as i32).wrapping_mul(RATIO as i32);
        std::array::from_fn(|kernel| first.wrapping_add(kernel as i32))
    }));
}

/// Kernel block ids of logical block ids: `id` becomes `id * ratio .. (id + 1) * ratio`. Errors name the group.
pub fn expand_blocks(group: usize, ids: BlockIds<'_>, ratio: u64, out: &mut Out<'_, i32>) -> Result<()> {
    if ratio == 0 {
        return Err(Error::value("", "ratio", 0, "has to be at least 1".into()));
    }
    let total = (ids.len() as u64).checked_mul(ratio).filter(|&total| total <= i32::MAX as u64);
    let Some(total) = total else {
        let what = format!("{} blocks x ratio {ratio}", ids.len());
        return Err(Error::overflow("block ids", what, 31));
    };
    // The last kernel id of a block is (id + 1) * ratio - 1.
    let limit = (1 << 31) / ratio;
    if let Some((index, id)) = ids.first_outside(limit) {
        return Err(Error::block_range(("logical", group), index, id, limit));
    }
    out.reserve(total as usize)?;
    ids.expand_into(ratio, out);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(ids: &[i64], ratio: u64) -> Result<Vec<i32>> {
        let mut out = Out::default();
        expand_blocks(0, BlockIds::Wide(ids), ratio, &mut out)?;
        Ok(out.into_new().unwrap_or_default())
    }

    #[test]
    fn a_block_is_its_kernel_blocks() {
        for ratio in 1..40 {
            let kernel = |id: i32| (0..ratio).map(move |kernel| id * ratio + kernel);
            assert_eq!(expanded(&[3, 0], ratio as u64), Ok(kernel(3).chain(kernel(0)).collect()));
        }
        assert!(expanded(&[1 << 30], 2).is_err());
        assert_eq!(expanded(&[(1 << 30) - 1], 2), Ok(vec![i32::MAX - 1, i32::MAX]));
        assert_eq!(expanded(&[i32::MAX.into()], 1), Ok(vec![i32::MAX]));
        assert!(expanded(&[(1 << 31) / 3], 3).is_err());
        assert!(expanded(&[-1], 2).is_err());
        assert!(expanded(&[1], 0).is_err());
    }

    #[test]
    fn ids_that_rise_or_fall_have_ends() {
        let ends = |ids: &[i64]| {
            let narrow: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
            let found = BlockIds::Wide(ids).ends_if_ordered();
            if ids.iter().all(|&id| i32::try_from(id).is_ok()) {
                assert_eq!(BlockIds::Narrow(&narrow).ends_if_ordered(), found);
            }
            found
        };
        assert_eq!((ends(&[]), ends(&[4]), ends(&[4, 4])), (None, Some((4, 4)), None));
        assert_eq!((ends(&[1, 2, 5]), ends(&[5, 2, 1])), (Some((1, 5)), Some((1, 5))));
        assert_eq!((ends(&[1, 2, 2]), ends(&[3, 2, 2]), ends(&[1, 3, 2])), (None, None, None));
        assert_eq!(ends(&[i64::MIN, i64::MAX]), Some((i64::MIN, i64::MAX)));
        assert_eq!(ends(&[5, i64::MAX, i64::MIN, 6]), None);
        for count in [255, 256, 257, 1000] {
            let rising: Vec<i64> = (0..count).collect();
            assert_eq!(ends(&rising), Some((0, count - 1)));
            for index in 1..rising.len() {
                let mut other = rising.clone();
                other[index] = other[index - 1];
                assert_eq!(ends(&other), None, "{count} ids, at {index}");
            }
        }
    }

    #[test]
    fn an_id_is_found_at_its_own_width() {
        assert!(BlockIds::Narrow(&[3, 0]).has(0) && BlockIds::Wide(&[3, 0]).has(0));
        assert!(!BlockIds::Narrow(&[3, 0]).has(1 << 32) && !BlockIds::Wide(&[3, 1 << 32]).has(0));
    }

    #[test]
    fn a_callers_memory_is_filled_from_its_front() {
        let mut memory = [7; 5];
        assert!(expand_blocks(0, BlockIds::Narrow(&[4, 1]), 2, &mut Out::Given(&mut memory, 0)).is_ok());
        assert_eq!(memory, [8, 9, 2, 3, 7]);
        assert!(expand_blocks(0, BlockIds::Narrow(&[4, 1]), 3, &mut Out::Given(&mut memory, 0)).is_err());
        assert_eq!(memory, [8, 9, 2, 3, 7]);
    }
}
