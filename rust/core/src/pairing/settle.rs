// SPDX-License-Identifier: Apache-2.0
//! Resolves axes that a rank does not fully know, from the knowledge of the ranks of both sides.
use std::collections::HashMap;

use crate::geometry::ranges::gcd;
use crate::geometry::types::{Axis, Geometry, Part};

/// An axis of a page, and its resolved extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Change {
    part: usize,
    axis: usize,
    extent: u64,
}

/// A layer of the geometry `geometry`; all of them have the same name.
struct Holder<'a> {
    geometry: usize,
    layer: usize,
    parts: &'a [Part],
}

impl<'a> Holder<'a> {
    /// The position of an axis by part name and axis name.
    fn axis(&self, part: &str, axis: &str) -> Option<(usize, usize, &'a Axis)> {
        let (part, value) = self.parts.iter().enumerate().find(|(_, other)| other.name == part)?;
        let (axis, value) = value.axes.iter().enumerate().find(|(_, other)| other.name == axis)?;
        Some((part, axis, value))
    }
}

/// Changes of the pages of layers, by the layer's index.
type Changes = HashMap<usize, Vec<Change>>;

/// Rewrites the axes of common layers that may repeat, or have spare indices, on any side; None for a geometry that
/// does not change. Axes that cannot be resolved do not change: the two sides then mean different items. The first
/// geometry is the local one.
pub(crate) fn settle(geometries: &[&Geometry]) -> Vec<Option<Geometry>> {
    let open = |axis: &Axis| axis.may_repeat || axis.spare > 0;
    let parts = geometries.iter().flat_map(|geometry| &geometry.pages).flat_map(|page| &page.parts);
    let Some((local, _)) = geometries.split_first() else { return Vec::new() };
    if !parts.flat_map(|part| &part.axes).any(open) {
        return vec![None; geometries.len()];
    }
    let names: Vec<HashMap<&str, usize>> = geometries
        .iter()
        .map(|geometry| geometry.layers.iter().enumerate().map(|(index, layer)| (layer.name.as_str(), index)).collect())
        .collect();
    let mut changes: Vec<Changes> = vec![HashMap::new(); geometries.len()];
    for layer in &local.layers {
        let holders: Vec<Holder> = geometries
            .iter()
            .enumerate()
            .filter_map(|(index, geometry)| {
                let layer = *names[index].get(layer.name.as_str())?;
                Some(Holder { geometry: index, layer, parts: &geometry.page(&geometry.layers[layer]).parts })
            })
            .collect();
        for part in &local.page(layer).parts {
            for axis in part.sharded_axes() {
                settle_axis_of(&holders, &part.name, &axis.name, &mut changes);
            }
        }
    }
    geometries.iter().zip(changes).map(|(geometry, changes)| rewritten(geometry, changes)).collect()
}

fn settle_axis_of(holders: &[Holder], part: &str, axis: &str, changes: &mut [Changes]) {
    let found = || holders.iter().filter_map(|holder| Some((holder, holder.axis(part, axis)?)));
    let axes: Vec<&Axis> = found().map(|(_, (.., axis))| axis).collect();
    for (holder, (part, index, axis)) in found() {
        if let Some(extent) = settled_extent(axis, &axes) {
            let change = Change { part, axis: index, extent };
            changes[holder.geometry].entry(holder.layer).or_default().push(change);
        }
    }
}

/// The extent of an axis over all geometries that have it; None if it does not change.
fn settled_extent(axis: &Axis, all: &[&Axis]) -> Option<u64> {
    if axis.may_repeat {
        // A rank that knows the extent decides. If no rank does, the true extent divides the ranks of every engine. For
        // every such divisor, ranks that share an index of the greatest common divisor hold the same index.
        let known = all.iter().find(|other| !other.may_repeat).map(|other| other.extent);
        let whole = known.unwrap_or_else(|| all.iter().fold(0, |whole, other| gcd(whole, other.extent)));
        return (axis.extent % whole == 0).then_some(whole);
    }
    // Spare indices that all sides have move with the rest, because a gap costs more.
    let differ = all.iter().any(|other| other.spare != axis.spare);
    (axis.spare > 0 && differ).then_some(axis.extent - axis.spare)
}

fn rewritten(geometry: &Geometry, changes: Changes) -> Option<Geometry> {
    if changes.is_empty() {
        return None;
    }
    let mut new = geometry.clone();
    let mut made: HashMap<(usize, Vec<Change>), usize> = HashMap::new();
    for (layer, changes) in changes {
        let page = new.layers[layer].page;
        let pages = &mut new.pages;
        new.layers[layer].page = *made.entry((page, changes)).or_insert_with_key(|(page, changes)| {
            let mut copy = pages[*page].clone();
            for change in changes {
                rewrite_axis(&mut copy.parts[change.part].axes[change.axis], change.extent);
            }
            pages.push(copy);
            pages.len() - 1
        });
    }
    Some(new)
}

fn rewrite_axis(axis: &mut Axis, extent: u64) {
    if axis.may_repeat {
        // Below the extent, which is a u64.
        axis.start = (u128::from(axis.start) * u128::from(extent) / u128::from(axis.extent)) as u64;
        axis.length = 1;
        axis.may_repeat = false;
    } else {
        axis.length = extent;
        axis.spare = 0;
    }
    axis.extent = extent;
}
