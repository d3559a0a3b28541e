// SPDX-License-Identifier: Apache-2.0
//! What has to hold for every geometry, plan and transfer there is.
use std::sync::Arc;

use kvhma_core::lowlevel::ids;
use kvhma_core::{
    Class, Descriptor, Error, Geometry, Ids, Plan, PlanOptions, Severity, Span, Transfer, View, validate,
};
use serde_json::Value;

use crate::case::{Case, wide_ids};

/// More kernel blocks than this are left out: they take long, as they should.
const MAX_KERNEL_BLOCKS: u64 = 1 << 14;

/// Regions end within the address space, as do views of whole layers.
pub fn addresses(geometry: &Geometry) {
    for region in geometry.regions() {
        assert!(region.base.checked_add(region.bytes).is_some());
    }
    for layer in geometry.layers() {
        assert!(layer.kernel_stride > 0);
        assert!(layer.num_blocks * geometry.groups()[layer.group].kernel_blocks_per_block <= i32::MAX as u64);
    }
}

/// A copy never leaves a region.
fn inside(geometry: &Geometry, row: Descriptor) {
    let [address, length, device] = row;
    assert!(length > 0, "an empty copy");
    let end = address.checked_add(length);
    let held = geometry.regions().iter().any(|region| {
        u64::from(region.device) == device
            && region.base <= address
            && end.is_some_and(|end| end <= region.base + region.bytes)
    });
    assert!(held, "{row:?} leaves its region");
}

fn view_inside(geometry: &Geometry, &[address, length, device, stride, count]: &View) {
    inside(geometry, [address, length, device]);
    let last = (count - 1).checked_mul(stride).and_then(|far| far.checked_add(address));
    inside(geometry, [last.expect("a view overflows"), length, device]);
}

/// Views stay in their regions.
pub fn views(plan: &Plan) {
    for source in plan.sources() {
        if let Ok((local, remote)) = plan.views(source) {
            local.iter().for_each(|view| view_inside(plan.local(), view));
            remote.iter().for_each(|view| view_inside(plan.remote(source), view));
        }
    }
}

/// Rows are ascending and share no byte. Returns their bytes.
fn apart(rows: &[Descriptor]) -> u64 {
    assert!(rows.windows(2).all(|two| two[0][0] + two[0][1] <= two[1][0]), "copies are out of order or overlap");
    rows.iter().map(|row| row[1]).sum()
}

/// A copy `(local address, remote address, length)`.
type Copy = (u64, u64, u64);

/// Copies with neighbours joined, so that equal bytes give equal lists.
fn joined(mut copies: Vec<Copy>) -> Vec<Copy> {
    copies.sort_unstable();
    copies.dedup_by(|next, last| {
        let goes_on = last.0 + last.2 == next.0 && last.1 + last.2 == next.1;
        if goes_on {
            last.2 += next.2;
        }
        goes_on
    });
    copies
}

fn transfer(plan: &Plan, moved: &Transfer) -> Vec<(usize, Vec<Copy>)> {
    let mut written: Vec<Descriptor> = moved.zero.clone();
    apart(&moved.zero);
    moved.zero.iter().for_each(|&row| inside(plan.local(), row));
    let mut bytes = 0u64;
    let mut out = Vec::new();
    for read in &moved.reads {
        let (local, remote) = (&read.copies.local, &read.copies.remote);
        assert_eq!(local.len(), remote.len());
        assert!(!local.is_empty());
        assert_eq!(apart(local), read.copies.bytes());
        bytes += read.copies.bytes();
        local.iter().for_each(|&row| inside(plan.local(), row));
        remote.iter().for_each(|&row| inside(plan.remote(read.source), row));
        written.extend(local);
        let pairs = local.iter().zip(remote).map(|(local, remote)| {
            assert_eq!(local[1], remote[1]);
            (local[0], remote[0], local[1])
        });
        out.push((read.source, joined(pairs.collect())));
    }
    assert!(moved.excess_bytes <= bytes);
    written.sort_unstable();
    apart(&written);
    out
}

/// The descriptors that ids into views stand for.
fn expand(views: &[View], ids: &[i32]) -> Vec<Descriptor> {
    let mut ends = Vec::new();
    for view in views {
        ends.push(ends.last().unwrap_or(&0) + view[4]);
    }
    let row = |&id: &i32| {
        let at = ends.partition_point(|&end| end <= id as u64);
        let [address, length, device, stride, count] = views[at];
        [address + (id as u64 - (ends[at] - count)) * stride, length, device]
    };
    ids.iter().map(row).collect()
}

fn id_transfer(plan: &Plan, moved: &Transfer<Ids>) -> Vec<(usize, Vec<Copy>)> {
    let mut written: Vec<Descriptor> = moved.zero.clone();
    apart(&moved.zero);
    moved.zero.iter().for_each(|&row| inside(plan.local(), row));
    let mut out = Vec::new();
    for read in &moved.reads {
        let (local, remote) = plan.views(read.source).expect("there are ids into them");
        assert_eq!(read.local.len(), read.remote.len());
        assert_eq!(plan.id_descriptors(read.source, &read.local).as_ref(), Ok(&expand(local, &read.local)));
        let (local, remote) = (expand(local, &read.local), expand(remote, &read.remote));
        let pairs: Vec<Copy> = local
            .iter()
            .zip(&remote)
            .map(|(local, remote)| {
                assert_eq!(local[1], remote[1]);
                (local[0], remote[0], local[1])
            })
            .collect();
        written.extend(&local);
        assert_eq!(read.bytes, local.iter().map(|row| row[1]).sum::<u64>());
        assert!(read.merged <= read.local.len() as u64);
        let runs = joined(pairs);
        assert!(read.merged >= runs.len() as u64);
        out.push((read.source, runs));
    }
    written.sort_unstable();
    apart(&written);
    out
}

/// Whatever the order, the two directions say the same.
fn same_words(local: &Geometry, remote: &Geometry) {
    let [there, back] = [validate(local, remote), validate(remote, local)].map(|found| {
        let mut texts: Vec<_> = found.iter().map(|finding| finding.text()).collect();
        texts.sort_unstable();
        texts
    });
    assert_eq!(there, back);
}

fn kernel_blocks(geometry: &Geometry, spans: &[Span]) -> u64 {
    let lists = geometry.groups().iter().zip(spans);
    lists
        .map(|(group, span)| group.kernel_blocks_per_block.saturating_mul(wide_ids(span).len() as u64))
        .fold(0, u64::saturating_add)
}

fn read(form: &Value) -> Option<Arc<Geometry>> {
    let geometry = Geometry::from_json(form.to_string().as_bytes()).ok()?;
    addresses(&geometry);
    Some(Arc::new(geometry))
}

/// As `kvhma.plan` has it, where nothing else is asked for.
const MAX_DESCRIPTORS: u64 = 1 << 22;

/// Runs a case.
pub fn case(case: &Case) {
    let Some(local) = read(&case.local) else { return };
    let Some(remotes) = case.remotes.iter().map(read).collect::<Option<Vec<_>>>() else { return };
    for remote in &remotes {
        same_words(&local, remote);
    }
    entries(case, &local);
    let Some(remote) = remotes.first().cloned() else { return };
    let options = PlanOptions { descriptor_bytes: case.descriptor_bytes, max_descriptors: MAX_DESCRIPTORS };
    let Ok(plan) = Plan::new(local.clone(), remotes.clone(), options) else {
        return;
    };
    for (_, finding) in plan.findings() {
        assert_eq!(finding.severity, Severity::Warning);
    }
    views(&plan);
    assert!(!plan.explain().is_empty());
    request(&plan, case);
    // The other direction, from one source.
    if let Ok(plan) = Plan::new(remote, vec![local], options) {
        views(&plan);
        let mirrored = Case {
            local: Value::Null,
            remotes: vec![],
            local_spans: case.remote_spans[0].clone(),
            remote_spans: vec![case.local_spans.clone()],
            ..*case
        };
        request(&plan, &mirrored);
    }
}

/// Numbers of a request that no plan has seen.
fn entries(case: &Case, local: &Geometry) {
    let cached: Vec<u64> = case.local_spans.iter().map(|span| span.first).collect();
    let first = ids::first_entries(local, Some(case.num_tokens), &cached);
    assert_eq!(first.map_or(cached.len(), |first| first.len()), cached.len());
}

fn losses(plan: &Plan, case: &Case, moved: &Transfer) {
    // Every other copy fails.
    let rows = moved.reads.iter().flat_map(|read| read.copies.local.iter().step_by(2));
    let failed: Vec<Descriptor> = rows.copied().collect();
    let cached = case.descriptor_bytes;
    let find = |failed: &[Descriptor]| {
        plan.losses(case.num_tokens, &case.local_spans, &case.remote_spans, failed, cached)
            .expect("the transfer is good")
    };
    assert!(find(&[]).layers.is_empty());
    assert_eq!(find(&[]).whole_prefix, case.num_tokens);
    let lost = find(&failed);
    assert!(lost.whole_prefix <= case.num_tokens && lost.whole_prefix >= cached.min(case.num_tokens));
    for loss in &lost.layers {
        assert!(loss.tokens.iter().all(|range| range.0 < range.1 && range.1 <= case.num_tokens));
        assert!(loss.tokens.windows(2).all(|two| two[0].1 < two[1].0));
    }
}

fn request(plan: &Plan, case: &Case) {
    let sides = std::iter::once((plan.local(), case.local_spans.as_slice()));
    let remote = case.remote_spans.first().map(|spans| (plan.remote(0), spans.as_slice()));
    if sides.chain(remote).any(|(geometry, spans)| kernel_blocks(geometry, spans) > MAX_KERNEL_BLOCKS) {
        return;
    }
    let exact = plan.transfer(case.num_tokens, &case.local_spans, &case.remote_spans);
    let by_ids = plan.ids(case.num_tokens, &case.local_spans, &case.remote_spans);
    match (&exact, &by_ids) {
        (Ok(exact), Ok(by_ids)) => {
            losses(plan, case, exact);
            let (runs, id_runs) = (transfer(plan, exact), id_transfer(plan, by_ids));
            let bytes = |reads: &[(usize, Vec<Copy>)]| {
                reads.iter().flat_map(|(_, runs)| runs).map(|run| u128::from(run.2)).sum::<u128>()
            };
            let exact_bytes = bytes(&runs) - u128::from(exact.excess_bytes);
            assert_eq!(exact_bytes, bytes(&id_runs) - u128::from(by_ids.excess_bytes), "ids move other bytes");
            assert!(exact.excess_bytes <= by_ids.excess_bytes);
            if exact.excess_bytes == by_ids.excess_bytes {
                assert_eq!(runs, id_runs, "ids move other bytes");
                assert_eq!(exact.zero, by_ids.zero);
            }
        }
        (Ok(exact), Err(error)) => {
            transfer(plan, exact);
            let views_only = match error {
                Error::Input(wrong) => wrong.class == Class::Overflow,
                _ => matches!(error, Error::NoViews { .. }),
            };
            assert!(views_only, "only ids are refused: {error}");
        }
        (Err(error), Ok(_)) => panic!("ids are not refused: {error}"),
        (Err(_), Err(_)) => {}
    }
}
