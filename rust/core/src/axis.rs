// SPDX-License-Identifier: Apache-2.0
//! Ranges of global indices, and the part of a box that others do not cover.

/// Half-open range of global indices.
pub(crate) type Range = (u64, u64);

/// One range per axis.
pub(crate) type Box = Vec<Range>;

fn meet(a: Range, b: Range) -> Option<Range> {
    let range = (a.0.max(b.0), a.1.min(b.1));
    (range.0 < range.1).then_some(range)
}

/// What two boxes have in common; boxes without axes are equal points.
pub(crate) fn intersect(a: &[Range], b: &[Range]) -> Option<Box> {
    a.iter().zip(b).map(|(&a, &b)| meet(a, b)).collect()
}

/// `a` without `hole`, which lies inside `a`, as disjoint boxes.
pub(crate) fn subtract(a: &[Range], hole: &[Range]) -> Vec<Box> {
    let mut rest = Vec::new();
    let mut core = a.to_vec();
    for axis in 0..a.len() {
        for side in [(core[axis].0, hole[axis].0), (hole[axis].1, core[axis].1)] {
            if side.0 < side.1 {
                let mut piece = core.clone();
                piece[axis] = side;
                rest.push(piece);
            }
        }
        core[axis] = hole[axis];
    }
    rest
}

/// Sorted disjoint ranges that are in both lists.
pub(crate) fn meet_all(a: &[Range], b: &[Range]) -> Vec<Range> {
    let (mut i, mut j) = (0, 0);
    let mut out = Vec::new();
    while i < a.len() && j < b.len() {
        out.extend(meet(a[i], b[j]));
        if a[i].1 < b[j].1 { i += 1 } else { j += 1 }
    }
    out
}

/// Sorted disjoint ranges of `a` that are not in `b`.
pub(crate) fn without(a: &[Range], b: &[Range]) -> Vec<Range> {
    let mut out = Vec::new();
    let mut holes = b.iter().peekable();
    for &(mut start, end) in a {
        while let Some(&&hole) = holes.peek() {
            if hole.0 >= end {
                break;
            }
            if hole.0 > start {
                out.push((start, hole.0));
            }
            start = start.max(hole.1);
            if hole.1 > end {
                break;
            }
            holes.next();
        }
        if start < end {
            out.push((start, end));
        }
    }
    out
}

pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        proptest::collection::btree_set(0u64..40, 0..12)
            .prop_map(|cuts| cuts.into_iter().collect::<Vec<_>>().chunks_exact(2).map(|c| (c[0], c[1])).collect())
    }

    fn has(list: &[Range], x: u64) -> bool {
        list.iter().any(|r| r.0 <= x && x < r.1)
    }

    proptest! {
        #[test]
        fn lists_agree_with_sets(a in ranges(), b in ranges()) {
            let both = meet_all(&a, &b);
            let rest = without(&a, &b);
            for x in 0..40 {
                prop_assert_eq!(has(&both, x), has(&a, x) && has(&b, x));
                prop_assert_eq!(has(&rest, x), has(&a, x) && !has(&b, x));
            }
        }

        #[test]
        fn a_box_is_its_hole_and_the_rest(a in proptest::collection::vec((0u64..4, 5u64..9), 0..4),
                                          cut in proptest::collection::vec((0u64..9, 0u64..9), 4)) {
            let wanted: Box = cut[..a.len()].iter().map(|&(x, y)| (x.min(y), x.max(y) + 1)).collect();
            if let Some(hole) = intersect(&a, &wanted) {
                let volume = |b: &Box| b.iter().map(|r| r.1 - r.0).product::<u64>();
                let rest = subtract(&a, &hole);
                prop_assert_eq!(volume(&a), volume(&hole) + rest.iter().map(volume).sum::<u64>());
                for piece in &rest {
                    prop_assert!(a.is_empty() || intersect(piece, &hole).is_none());
                }
            }
        }
    }
}
