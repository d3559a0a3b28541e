// SPDX-License-Identifier: Apache-2.0
//! The functions that need no geometry, with any numbers. Results that are legal but longer than a target should
//! allocate are not asked for.
#![no_main]
use arbitrary::{Arbitrary, Unstructured};
use kvhma_core::View;
use kvhma_core::lowlevel::block_ids::{BlockIds, expand_blocks};
use kvhma_core::lowlevel::id_order::IdOrder;
use kvhma_core::lowlevel::ids;
use kvhma_core::lowlevel::out::Out;
use kvhma_core::lowlevel::views::{self, expand_views};
use kvhma_fuzz::case::number;
use libfuzzer_sys::fuzz_target;

/// Longest result that is asked for.
const MAX_ENTRIES: u64 = 1 << 16;

#[derive(Debug)]
struct Input {
    groups: Vec<Vec<i64>>,
    numbers: Vec<u64>,
    others: Vec<u64>,
    members: Vec<Vec<usize>>,
    rows: Vec<View>,
    optional: Vec<Option<u64>>,
    null: Option<i64>,
}

fn list<T>(
    u: &mut Unstructured,
    item: impl Fn(&mut Unstructured) -> arbitrary::Result<T>,
) -> arbitrary::Result<Vec<T>> {
    (0..u.int_in_range(0..=5)?).map(|_| item(u)).collect()
}

impl Arbitrary<'_> for Input {
    fn arbitrary(u: &mut Unstructured) -> arbitrary::Result<Self> {
        let id = |u: &mut Unstructured| number(u).map(|id| id as i64);
        Ok(Self {
            groups: list(u, |u| list(u, id))?,
            numbers: list(u, number)?,
            others: list(u, number)?,
            members: list(u, |u| list(u, |u| u.int_in_range(0..=5)))?,
            rows: list(u, |u| Ok([number(u)?, number(u)?, number(u)?, number(u)?, number(u)?]))?,
            optional: list(u, |u| if u.arbitrary()? { number(u).map(Some) } else { Ok(None) })?,
            null: if u.arbitrary()? { Some(id(u)?) } else { None },
        })
    }
}

fuzz_target!(|input: Input| {
    let Input { groups, numbers, others, members, rows, optional, null } = input;
    let number = |index: usize| numbers.get(index).copied().unwrap_or(0);

    if let Ok(clips) = ids::clips(groups.len(), &numbers, &optional) {
        for (clip, ids) in clips.iter().zip(&groups) {
            let entries = clip.entries(ids.len(), BlockIds::Wide(ids).leading(null));
            assert!(
                ids[entries].first().is_none_or(|&id| Some(id) != null || clip.speculative.is_some() || clip.keep > 0)
            );
        }
    }
    for list in &groups {
        let (ratio, total) = (number(0), number(0).saturating_mul(list.len() as u64));
        if total <= MAX_ENTRIES || total > i32::MAX as u64 {
            let mut kernel = Out::default();
            if expand_blocks(0, BlockIds::Wide(list), ratio, &mut kernel).is_ok() {
                let kernel = kernel.into_new().unwrap_or_default();
                let back: Vec<i64> =
                    kernel.iter().step_by(ratio as usize).map(|&id| i64::from(id) / ratio as i64).collect();
                assert_eq!(&back, list);
                assert!(kernel.iter().all(|&id| id >= 0));
            }
        }
    }
    let tables: Vec<_> = groups.iter().map(|ids| BlockIds::Wide(ids)).collect();
    let mut flat = Out::default();
    let order = IdOrder::new(&vec![1; groups.len()], &numbers, &members);
    if order.is_ok_and(|order| order.write(&tables, &mut flat).is_ok()) {
        let (flat, entries) = (flat.into_new().unwrap_or_default(), numbers.iter().sum::<u64>());
        assert!(flat.iter().all(|&id| (id as u64) < entries));
        assert_eq!(flat.len(), members.iter().flatten().map(|&group| groups[group].len()).sum::<usize>());
    }
    let _ = ids::window_blocks(number(0), number(1));

    // The lists of a call have to be of one length to get further.
    let column = |at: usize| rows.iter().map(|view| view[at]).collect::<Vec<u64>>();
    let [bases, lengths, devices, strides, counts] = [0, 1, 2, 3, 4].map(column);
    let parts: Vec<(u64, u64)> = numbers.iter().copied().zip(others.iter().copied()).collect();
    let lists = [
        views::attention_views(&bases, &lengths, &strides, &counts, &devices),
        views::attention_views(&bases, &numbers, &strides, &counts, &devices),
        views::state_views(&bases, &parts, &strides, &counts, &devices),
        Ok(rows),
    ];
    for list in lists.into_iter().flatten() {
        let total = list.iter().fold(0u64, |sum, view| sum.saturating_add(view[4]));
        let mut rows = Out::default();
        if total > MAX_ENTRIES && total <= i32::MAX as u64 {
            let checked = views::check_views("view", list.iter().copied());
            assert_eq!(checked.map_or(total, |total| total), total);
        } else if expand_views(&list, &mut rows).is_ok() {
            let rows = rows.into_new().unwrap_or_default();
            assert_eq!(rows.len() as u64, total);
            assert!(rows.iter().all(|row| row[0].checked_add(row[1]).is_some()));
        }
    }
});
