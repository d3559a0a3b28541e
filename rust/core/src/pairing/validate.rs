// SPDX-License-Identifier: Apache-2.0
//! Reasons against pairing two geometries, and warnings; the words are the same in both directions.
use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::error::{Error, Result};
use crate::finding::{Finding, Place, Severity};
use crate::geometry::types::{Axis, Geometry, Group, Kind, Layer, Page, Part};
use crate::pairing::cost::too_dear;
use crate::pairing::settle::settle;

/// Limit of findings: more than a person reads, because a peer decides how many layers it names.
const MAX_FINDINGS: usize = 1000;
/// Part of a page whose bytes are not described; its dtype has all that must be equal on both sides.
const WHOLE: &str = "whole";
/// Limit of bytes of a quoted value.
const MAX_VALUE: usize = 200;

/// Compares two geometries. Never fails: every problem is a finding.
pub fn validate(local: &Geometry, remote: &Geometry) -> Vec<Finding> {
    let settled = settle(&[local, remote]);
    compare(settled[0].as_ref().unwrap_or(local), settled[1].as_ref().unwrap_or(remote))
}

/// Compares two geometries with resolved axes.
pub(crate) fn compare(local: &Geometry, remote: &Geometry) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Both sides visit all names in one order, so that they find the same differences in the same order.
    let mut layers: BTreeMap<&str, (Option<&Layer>, Option<&Layer>)> = BTreeMap::new();
    for layer in &local.layers {
        layers.entry(&layer.name).or_default().0 = Some(layer);
    }
    for layer in &remote.layers {
        layers.entry(&layer.name).or_default().1 = Some(layer);
    }
    let mut compared = HashSet::new();
    let mut common = 0;
    for (name, holders) in layers {
        if findings.len() >= MAX_FINDINGS {
            break;
        }
        match holders {
            (Some(layer), Some(other)) => {
                common += 1;
                // Layers share pages and groups; the findings of a pair are not repeated for every layer.
                if compared.insert((layer.page, layer.group, other.page, other.group)) {
                    let (local, remote) = (Content::of(local, layer), Content::of(remote, other));
                    Comparison { local, remote, findings: &mut findings }.layers(&Place::layer(name));
                }
            }
            (Some(_), None) => findings.push(one_sided(name, "present", "absent")),
            (None, _) => findings.push(one_sided(name, "absent", "present")),
        }
    }
    if common == 0 {
        findings.push(no_common_layer(local, remote));
    }
    // Costs can only be counted after a successful comparison.
    if findings.iter().all(|finding| finding.severity != Severity::Error) {
        findings.extend(too_dear(local, remote));
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

fn no_common_layer(local: &Geometry, remote: &Geometry) -> Finding {
    let layers = |geometry: &Geometry| format!("{} layers", geometry.layers.len());
    let reason = "no layer has the same name on both sides";
    Finding::error("no-common-layer", Place::default(), "layers", (layers(local), layers(remote)), reason)
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

fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    format!("{:?}", names.collect::<BTreeSet<_>>())
}

/// The content of a layer's blocks.
struct Content<'a> {
    group: &'a Group,
    page: &'a Page,
}

impl<'a> Content<'a> {
    fn of(geometry: &'a Geometry, layer: &Layer) -> Self {
        Self { group: geometry.group(layer), page: geometry.page(layer) }
    }
}

/// A layer of both sides, and the findings.
struct Comparison<'a> {
    local: Content<'a>,
    remote: Content<'a>,
    findings: &'a mut Vec<Finding>,
}

impl Comparison<'_> {
    fn add(
        &mut self,
        place: &Place,
        (code, field): (&'static str, &'static str),
        (local, remote): (String, String),
        reason: &'static str,
    ) {
        let values = (shortened(local), shortened(remote));
        self.findings.push(Finding::error(code, place.clone(), field, values, reason));
    }

    fn layers(&mut self, place: &Place) {
        let (kind, other) = (self.local.group.kind, self.remote.group.kind);
        let both_attention = kind.is_attention() && other.is_attention();
        if !both_attention && kind.word() != other.word() {
            let reason = "attention, state and opaque content do not hold the same bytes";
            self.add(place, ("kind", "kind"), (kind.word().into(), other.word().into()), reason);
        } else if kind == Kind::Opaque && !self.same_opaque() {
            self.opaque(place);
        } else {
            self.parts(place);
        }
    }

    fn same_opaque(&self) -> bool {
        let blocks = |group: &Group| (group.block_size, group.kernel_blocks_per_block);
        self.local.page == self.remote.page && blocks(self.local.group) == blocks(self.remote.group)
    }

    fn opaque(&mut self, place: &Place) {
        // The first different part is the most useful one to quote.
        let parts = self.local.page.parts.iter().zip(&self.remote.page.parts);
        let same = parts.take_while(|(local, remote)| local == remote).count();
        let describe = |Content { group, page }: &Content| {
            let part = page.parts.get(same).map_or_else(|| "equal parts".to_owned(), |part| format!("{part:?}"));
            let (tokens, ratio) = (group.block_size, group.kernel_blocks_per_block);
            format!("blocks of {tokens} / {ratio}, {} parts: {part}", page.parts.len())
        };
        let (local, remote) = (describe(&self.local), describe(&self.remote));
        let reason = "opaque pages are moved only between equal geometries";
        self.add(place, ("opaque", "page"), (local, remote), reason);
    }

    fn parts(&mut self, place: &Place) {
        let part_names = |page: &Page| names(page.parts.iter().map(|part| &part.name));
        let (local, remote) = (part_names(self.local.page), part_names(self.remote.page));
        if local != remote {
            let reason = "parts meet by name";
            return self.add(place, ("parts", "parts"), (local, remote), reason);
        }
        let (local, remote) = (self.local.page, self.remote.page);
        for part in &local.parts {
            let Some(other) = remote.part(&part.name) else { continue };
            self.part(&place.part(&part.name), part, other);
        }
    }

    fn part(&mut self, place: &Place, local: &Part, remote: &Part) {
        if local.dtype != remote.dtype && local.name == WHOLE {
            let reason = "how these bytes are split is not known, so only engines with equal pages and ranks can pair";
            return self.add(place, ("equal-engines", "content"), (local.dtype.clone(), remote.dtype.clone()), reason);
        }
        let reason = "bytes are moved, never converted";
        if local.dtype != remote.dtype {
            self.add(place, ("dtype", "dtype"), (local.dtype.clone(), remote.dtype.clone()), reason);
        } else if local.item_bytes != remote.item_bytes {
            self.add(
                place,
                ("dtype", "item_bytes"),
                (local.item_bytes.to_string(), remote.item_bytes.to_string()),
                reason,
            );
        }
        self.axes(place, local, remote);
    }

    fn axes(&mut self, place: &Place, local: &Part, remote: &Part) {
        let axis_names = |part: &Part| names(part.axes.iter().map(|axis| &axis.name));
        let (local_names, remote_names) = (axis_names(local), axis_names(remote));
        if local_names != remote_names {
            let reason = "axes meet by name; content without a token axis cannot be cut by tokens";
            return self.add(place, ("axes", "axes"), (local_names, remote_names), reason);
        }
        for axis in local.sharded_axes() {
            let Some(other) = remote.axis(&axis.name) else { continue };
            // An axis that may still repeat could not be resolved.
            if axis.extent != other.extent || axis.may_repeat != other.may_repeat {
                let reason = "both sides have to mean the same whole";
                self.add(&place.axis(&axis.name), ("extent", "extent"), (extent(axis), extent(other)), reason);
            }
        }
        if self.local.group.kind.is_attention() && local.tokens().is_none() {
            self.whole_kernel_blocks(place);
        }
    }

    /// Compares what a kernel block holds.
    fn whole_kernel_blocks(&mut self, place: &Place) {
        let reason = "content without a token axis moves by whole kernel blocks, so these have to be equal";
        let (local, remote) = (self.local.group, self.remote.group);
        let (tokens, other_tokens) = (local.kernel_tokens(), remote.kernel_tokens());
        if tokens != other_tokens {
            let values = (tokens.to_string(), other_tokens.to_string());
            self.add(place, ("block-size", "kernel block"), values, reason);
        } else if local.turns_in_kernel_block() != remote.turns_in_kernel_block() {
            self.add(place, ("cp-turns", "cp_interleave"), (turns(local), turns(remote)), reason);
        }
    }
}

/// How context-parallel ranks share a kernel block.
fn turns(group: &Group) -> String {
    match group.turns_in_kernel_block() {
        None => "whole kernel blocks".to_owned(),
        Some((ranks, tokens)) => format!("{tokens} tokens of {ranks} ranks"),
    }
}
