// SPDX-License-Identifier: Apache-2.0
//! What keeps two geometries from being paired, or is worth knowing; the same words in both directions.
use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::error::{Error, Result};
use crate::finding::{Finding, Place, Severity};
use crate::geometry::{Axis, Geometry, Group, Kind, Layer, Part};
use crate::settle::settle;

/// More than a person reads; a peer decides how many layers it names.
const MAX_FINDINGS: usize = 1000;
/// Part of a page whose bytes nobody describes; its dtype says all that has to be equal on both sides.
const WHOLE: &str = "whole";
/// Bytes of a value that are quoted.
const MAX_VALUE: usize = 200;

/// Compares two geometries. Never fails: whatever is wrong is a finding.
pub fn validate(local: &Geometry, remote: &Geometry) -> Vec<Finding> {
    let both = settle(&[local, remote]);
    compare(both[0].as_ref().unwrap_or(local), both[1].as_ref().unwrap_or(remote))
}

/// Compares two geometries whose axes are settled.
pub(crate) fn compare(local: &Geometry, remote: &Geometry) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Both sides walk all names in one order, so that they find the same things in the same order.
    let mut layers: BTreeMap<&str, (Option<&Layer>, Option<&Layer>)> = BTreeMap::new();
    for layer in &local.layers {
        layers.entry(&layer.name).or_default().0 = Some(layer);
    }
    for layer in &remote.layers {
        layers.entry(&layer.name).or_default().1 = Some(layer);
    }
    let mut compared = HashSet::new();
    let mut common = 0;
    for (name, sides) in layers {
        if findings.len() >= MAX_FINDINGS {
            break;
        }
        let (layer, other) = match sides {
            (Some(layer), Some(other)) => (layer, other),
            (mine, _) => {
                let side = |has: bool| if has { "present" } else { "absent" };
                findings.push(one_sided(name, side(mine.is_some()), side(mine.is_none())));
                continue;
            }
        };
        common += 1;
        // Layers share pages and groups; what was said of one pair of them is not said again for every layer.
        let key = (layer.page, layer.group, other.page, other.group);
        if compared.insert(key) {
            compare_layers(local, layer, remote, other, &mut findings);
        }
    }
    if common == 0 {
        findings.push(Finding {
            code: "no-common-layer",
            severity: Severity::Error,
            place: Place::default(),
            field: "layers",
            local: format!("{} layers", local.layers.len()),
            remote: format!("{} layers", remote.layers.len()),
            reason: "no layer has the same name on both sides",
        });
    }
    findings
}

/// Refuses the pair with its first error.
pub(crate) fn refuse_errors(findings: &[Finding]) -> Result<()> {
    match findings.iter().find(|finding| finding.severity == Severity::Error) {
        Some(finding) => Err(Error::Unpairable(Box::new(finding.clone()))),
        None => Ok(()),
    }
}

fn one_sided(name: &str, local: &str, remote: &str) -> Finding {
    Finding {
        code: "one-sided-layer",
        severity: Severity::Warning,
        place: Place::layer(name),
        field: "name",
        local: local.into(),
        remote: remote.into(),
        reason: "a layer that one side lacks is not moved; where D has it, it is zeroed and begins cold: drafts of such a \
                 layer are accepted less often until it has computed its window itself",
    }
}

/// Size of an axis over all ranks, as far as the rank knows it.
fn extent(axis: &Axis) -> String {
    if axis.may_repeat { format!("a divisor of {}", axis.extent) } else { axis.extent.to_string() }
}

fn shortened(mut value: String) -> String {
    if let Some((end, _)) = value.char_indices().nth(MAX_VALUE) {
        value.truncate(end);
        value.push('…');
    }
    value
}

fn compare_layers(local: &Geometry, layer: &Layer, remote: &Geometry, other: &Layer, out: &mut Vec<Finding>) {
    let place = Place::layer(&layer.name);
    let (group, other_group) = (&local.groups[layer.group], &remote.groups[other.group]);
    let mut add = |place: &Place, code, field, local: String, remote: String, reason| {
        let (local, remote) = (shortened(local), shortened(remote));
        out.push(Finding { code, severity: Severity::Error, place: place.clone(), field, local, remote, reason });
    };
    let (kind, other_kind) = (group.kind, other_group.kind);
    if kind.is_attention() != other_kind.is_attention() || (!kind.is_attention() && kind != other_kind) {
        let why = "attention, state and opaque content do not hold the same bytes";
        return add(&place, "kind", "kind", kind.word().into(), other_kind.word().into(), why);
    }
    let (page, other_page) = (local.page(layer), remote.page(other));
    let blocks = |group: &Group| (group.block_size, group.ratio);
    if kind == Kind::Opaque && (page != other_page || blocks(group) != blocks(other_group)) {
        let why = "opaque pages are moved only between equal geometries";
        // The first part that differs is the one worth quoting.
        let same = page.parts.iter().zip(&other_page.parts).take_while(|(mine, theirs)| mine == theirs).count();
        let describe = |group: &Group, parts: &[Part]| {
            let part = parts.get(same).map_or_else(|| "equal parts".to_owned(), |part| format!("{part:?}"));
            format!("blocks of {} / {}, {} parts: {part}", group.block_size, group.ratio, parts.len())
        };
        let (mine, theirs) = (describe(group, &page.parts), describe(other_group, &other_page.parts));
        return add(&place, "opaque", "page", mine, theirs, why);
    }
    let names = |parts: &[Part]| parts.iter().map(|part| part.name.clone()).collect::<BTreeSet<_>>();
    let (mine, theirs) = (names(&page.parts), names(&other_page.parts));
    if mine != theirs {
        let why = "parts meet by name";
        return add(&place, "parts", "parts", format!("{mine:?}"), format!("{theirs:?}"), why);
    }
    for part in &page.parts {
        let Some(other) = other_page.parts.iter().find(|other| other.name == part.name) else { continue };
        let place = place.part(&part.name);
        if part.dtype != other.dtype && part.name == WHOLE {
            let why = "how these bytes are split is not known, so only engines with equal pages and ranks can pair";
            add(&place, "equal-engines", "content", part.dtype.clone(), other.dtype.clone(), why);
            continue;
        }
        if part.dtype != other.dtype {
            let why = "bytes are moved, never converted";
            add(&place, "dtype", "dtype", part.dtype.clone(), other.dtype.clone(), why);
        } else if part.item_bytes != other.item_bytes {
            let (mine, theirs) = (part.item_bytes.to_string(), other.item_bytes.to_string());
            add(&place, "dtype", "item_bytes", mine, theirs, "bytes are moved, never converted");
        }
        let axes = |part: &Part| part.axes.iter().map(|axis| axis.name.clone()).collect::<BTreeSet<_>>();
        let (mine, theirs) = (axes(part), axes(other));
        if mine != theirs {
            let why = "axes meet by name; content without a token axis cannot be cut by tokens";
            add(&place, "axes", "axes", format!("{mine:?}"), format!("{theirs:?}"), why);
            continue;
        }
        for axis in part.axes.iter().filter(|axis| !axis.is_tokens()) {
            let Some(other) = other.axes.iter().find(|other| other.name == axis.name) else { continue };
            // What is still open could not be settled.
            if axis.extent != other.extent || axis.may_repeat != other.may_repeat {
                let place = place.axis(&axis.name);
                let why = "both sides have to mean the same whole";
                add(&place, "extent", "extent", extent(axis), extent(other), why);
            }
        }
        let (tokens, other_tokens) = (group.kernel_tokens(), other_group.kernel_tokens());
        if kind.is_attention() && part.tokens().is_none() && tokens != other_tokens {
            let why = "content without a token axis moves by whole kernel blocks, so these have to be equal";
            add(&place, "block-size", "kernel block", tokens.to_string(), other_tokens.to_string(), why);
        }
    }
}
