// SPDX-License-Identifier: Apache-2.0
//! Intervals of indices, and boxes with one interval for each axis.

/// Half-open interval of indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Interval {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Interval {
    pub(crate) fn len(self) -> u64 {
        self.end - self.start
    }

    /// The intersection of two intervals, if it is not empty.
    pub(crate) fn intersect(self, other: Self) -> Option<Self> {
        let common = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (common.start < common.end).then_some(common)
    }
}

/// The intersection of two boxes; boxes without axes are equal points.
pub(crate) fn intersect_boxes(one: &[Interval], other: &[Interval]) -> Option<Vec<Interval>> {
    one.iter().zip(other).map(|(one, other)| one.intersect(*other)).collect()
}

/// A box without a `hole` inside it, as disjoint boxes.
///
/// ```text
/// +-----------------+
/// |        0        |      axis 0 is cut first: everything before the hole, everything after it
/// +----+------+-----+
/// | 2  | hole |  3  |      then axis 1 of the rest
/// +----+------+-----+
/// |        1        |
/// +-----------------+
/// ```
pub(crate) fn subtract_box(whole: &[Interval], hole: &[Interval]) -> Vec<Vec<Interval>> {
    let mut rest = Vec::new();
    let mut core = whole.to_vec();
    for axis in 0..whole.len() {
        let before = Interval { start: core[axis].start, end: hole[axis].start };
        let after = Interval { start: hole[axis].end, end: core[axis].end };
        for outside in [before, after] {
            if outside.start < outside.end {
                let mut piece = core.clone();
                piece[axis] = outside;
                rest.push(piece);
            }
        }
        core[axis] = hole[axis];
    }
    rest
}

/// The intersection of two lists; lists are sorted and their intervals disjoint.
pub(crate) fn intersect_lists(one: &[Interval], other: &[Interval]) -> Vec<Interval> {
    let (mut i, mut j) = (0, 0);
    let mut common = Vec::new();
    while i < one.len() && j < other.len() {
        common.extend(one[i].intersect(other[j]));
        if one[i].end < other[j].end { i += 1 } else { j += 1 }
    }
    common
}

/// The first list without the second; lists are sorted and their intervals disjoint.
pub(crate) fn subtract_lists(one: &[Interval], holes: &[Interval]) -> Vec<Interval> {
    let mut rest = Vec::new();
    let mut holes = holes.iter().peekable();
    for &Interval { mut start, end } in one {
        while let Some(&&hole) = holes.peek() {
            if hole.start >= end {
                break;
            }
            if hole.start > start {
                rest.push(Interval { start, end: hole.start });
            }
            start = start.max(hole.end);
            if hole.end > end {
                break;
            }
            holes.next();
        }
        if start < end {
            rest.push(Interval { start, end });
        }
    }
    rest
}

pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn interval((start, end): (u64, u64)) -> Interval {
        Interval { start, end }
    }

    fn lists() -> impl Strategy<Value = Vec<Interval>> {
        proptest::collection::btree_set(0u64..40, 0..12).prop_map(|cuts| {
            cuts.into_iter().collect::<Vec<_>>().chunks_exact(2).map(|cut| interval((cut[0], cut[1]))).collect()
        })
    }

    fn has(list: &[Interval], x: u64) -> bool {
        list.iter().any(|r| r.start <= x && x < r.end)
    }

    proptest! {
        #[test]
        fn lists_agree_with_sets(a in lists(), b in lists()) {
            let both = intersect_lists(&a, &b);
            let rest = subtract_lists(&a, &b);
            for x in 0..40 {
                prop_assert_eq!(has(&both, x), has(&a, x) && has(&b, x));
                prop_assert_eq!(has(&rest, x), has(&a, x) && !has(&b, x));
            }
        }

        #[test]
        fn a_box_is_its_hole_and_the_rest(a in proptest::collection::vec((0u64..4, 5u64..9), 0..4),
                                          cut in proptest::collection::vec((0u64..9, 0u64..9), 4)) {
            let a: Vec<Interval> = a.into_iter().map(interval).collect();
            let wanted: Vec<Interval> = cut[..a.len()].iter().map(|&(x, y)| interval((x.min(y), x.max(y) + 1))).collect();
            if let Some(hole) = intersect_boxes(&a, &wanted) {
                let volume = |b: &Vec<Interval>| b.iter().map(|r| r.len()).product::<u64>();
                let rest = subtract_box(&a, &hole);
                prop_assert_eq!(volume(&a), volume(&hole) + rest.iter().map(volume).sum::<u64>());
                for piece in &rest {
                    prop_assert!(a.is_empty() || intersect_boxes(piece, &hole).is_none());
                }
            }
        }
    }
}
