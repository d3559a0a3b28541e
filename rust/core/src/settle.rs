// SPDX-License-Identifier: Apache-2.0
//! Axes of which a rank does not know all: written as what the ranks of both sides can only mean together.
use std::collections::HashMap;

use crate::axis::gcd;
use crate::geometry::{Axis, Geometry, Layer, Part};

/// Part, axis and the extent it gets.
type Change = (usize, usize, u64);

/// Rewrites the axes of common layers that may repeat, or have spare indices, on any side; None for a geometry that
/// stays as it is. What cannot be settled stays: the two sides then mean different things. The first geometry is the
/// local one.
pub(crate) fn settle(geometries: &[&Geometry]) -> Vec<Option<Geometry>> {
    let open = |axis: &Axis| axis.may_repeat || axis.spare > 0;
    let parts = geometries.iter().flat_map(|geometry| &geometry.pages).flat_map(|page| &page.parts);
    let Some((local, remotes)) = geometries.split_first() else { return Vec::new() };
    if !parts.flat_map(|part| &part.axes).any(open) {
        return vec![None; geometries.len()];
    }
    let by_name: Vec<HashMap<&str, usize>> = remotes
        .iter()
        .map(|remote| remote.layers.iter().enumerate().map(|(index, layer)| (layer.name.as_str(), index)).collect())
        .collect();
    let mut changes: Vec<HashMap<usize, Vec<Change>>> = vec![HashMap::new(); geometries.len()];
    for (index, layer) in local.layers.iter().enumerate() {
        let mut holders: Vec<(usize, usize, &[Part])> = vec![(0, index, &local.page(layer).parts)];
        for (remote, (geometry, names)) in remotes.iter().zip(&by_name).enumerate() {
            if let Some(&other) = names.get(layer.name.as_str()) {
                holders.push((remote + 1, other, &geometry.page(&geometry.layers[other]).parts));
            }
        }
        for part in &local.page(layer).parts {
            for axis in part.axes.iter().filter(|axis| !axis.is_tokens()) {
                let same: Vec<_> = holders
                    .iter()
                    .filter_map(|&(side, layer, parts)| Some((side, layer, place_of(parts, part, axis)?)))
                    .collect();
                let axes: Vec<&Axis> = same.iter().map(|&(.., (_, _, axis))| axis).collect();
                for &(side, layer, (part, at, axis)) in &same {
                    if let Some(extent) = extent(axis, &axes) {
                        changes[side].entry(layer).or_default().push((part, at, extent));
                    }
                }
            }
        }
    }
    geometries.iter().zip(changes).map(|(geometry, changes)| rewritten(geometry, changes)).collect()
}

/// The axis of the same name in the part of the same name, and where it is.
fn place_of<'a>(parts: &'a [Part], part: &Part, axis: &Axis) -> Option<(usize, usize, &'a Axis)> {
    let (index, other) = parts.iter().enumerate().find(|(_, other)| other.name == part.name)?;
    let (at, axis) = other.axes.iter().enumerate().find(|(_, other)| other.name == axis.name)?;
    Some((index, at, axis))
}

/// The extent that an axis gets among all that meet it; None if it stays.
fn extent(axis: &Axis, all: &[&Axis]) -> Option<u64> {
    if axis.may_repeat {
        // A rank that knows decides. Where none does, the true extent divides the ranks of every engine; whichever
        // divisor it is, ranks with the same of the most indices that are possible hold the same index.
        let known = all.iter().find(|other| !other.may_repeat).map(|other| other.extent);
        let whole = known.unwrap_or_else(|| all.iter().fold(0, |whole, other| gcd(whole, other.extent)));
        return (axis.extent % whole == 0).then_some(whole);
    }
    // Spare indices that all sides have go with the rest, since a gap costs more than they do.
    let differ = all.iter().any(|other| other.spare != axis.spare);
    (axis.spare > 0 && differ).then_some(axis.extent - axis.spare)
}

fn rewritten(geometry: &Geometry, changes: HashMap<usize, Vec<Change>>) -> Option<Geometry> {
    if changes.is_empty() {
        return None;
    }
    let mut new = geometry.clone();
    let mut made: HashMap<(usize, Vec<Change>), usize> = HashMap::new();
    for (layer, changes) in changes {
        let Layer { page, .. } = new.layers[layer];
        let pages = &mut new.pages;
        new.layers[layer].page = *made.entry((page, changes)).or_insert_with_key(|(page, changes)| {
            let mut copy = pages[*page].clone();
            for &(part, axis, extent) in changes {
                settle_axis(&mut copy.parts[part].axes[axis], extent);
            }
            pages.push(copy);
            pages.len() - 1
        });
    }
    Some(new)
}

fn settle_axis(axis: &mut Axis, extent: u64) {
    if axis.may_repeat {
        // Below the extent, which is a u64.
        axis.start = (u128::from(axis.start) * u128::from(extent) / u128::from(axis.extent)) as u64;
        axis.length = Some(1);
        axis.may_repeat = false;
    } else {
        axis.length = Some(extent);
        axis.spare = 0;
    }
    axis.extent = extent;
}
