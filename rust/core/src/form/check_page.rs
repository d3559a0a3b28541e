// SPDX-License-Identifier: Apache-2.0
//! Checks a page: names, shards, strides, and that no two parts share a byte.
use crate::bytes::pieces::{Cutout, PageBases, TokenCut, part_pieces};
use crate::error::{Error, Result};
use crate::form::limits::{MAX_AXES, MAX_PARTS, MAX_PIECES, at_most, check_name, not_zero, require, wrong};
use crate::form::written;
use crate::geometry::types::{Axis, Page, Part};

/// Checks a page. `pieces` counts the contiguous pieces of all pages.
pub(crate) fn check_page(place: &str, page: written::Page, pieces: &mut u64) -> Result<Page> {
    require(!page.parts.is_empty(), place, "parts", "empty", "a page has at least one part")?;
    at_most(place, "parts", page.parts.len(), MAX_PARTS)?;
    let mut checked = Page { parts: Vec::with_capacity(page.parts.len()) };
    for part in page.parts {
        let place = format!("{place} part {:?}", part.name);
        check_name(&place, "name", &part.name)?;
        let is_new = checked.part(&part.name).is_none();
        require(is_new, &place, "name", &part.name, "is the name of another part of the page too")?;
        let (part, part_pieces) = check_part(&place, part)?;
        checked.parts.push(part);
        *pieces = pieces.saturating_add(part_pieces);
    }
    let value = format_args!("cut into {pieces} pieces with the pages before");
    require(*pieces <= MAX_PIECES, place, "parts", value, format_args!("at most {MAX_PIECES} are allowed"))?;
    check_parts_overlap(place, &checked)?;
    Ok(checked)
}

fn check_parts_overlap(place: &str, page: &Page) -> Result<()> {
    if page.parts.len() == 1 {
        return Ok(());
    }
    let mut pieces = Vec::new();
    for part in &page.parts {
        let cutout = Cutout { ranges: &part.shard(), tokens: TokenCut::whole(part) };
        part_pieces(part, part, cutout, PageBases::default(), &mut pieces);
    }
    pieces.sort_unstable_by_key(|piece| piece.local);
    for pair in pieces.windows(2) {
        let (end, start) = (pair[0].local + pair[0].len, pair[1].local);
        require(end <= start, place, "parts", format_args!("two at byte {start}"), "parts may not overlap")?;
    }
    Ok(())
}

/// Checks a part, and counts its contiguous pieces.
fn check_part(place: &str, part: written::Part) -> Result<(Part, u64)> {
    let written::Part { name, dtype, item_bytes, offset, axes } = part;
    at_most(place, "axes", axes.len(), MAX_AXES)?;
    not_zero(place, "item_bytes", item_bytes)?;
    check_name(place, "dtype", &dtype)?;
    let mut part = Part { name, dtype, item_bytes, offset, axes: Vec::with_capacity(axes.len()) };
    for axis in axes {
        let place = format!("{place} axis {:?}", axis.name);
        check_name(&place, "name", &axis.name)?;
        let is_new = part.axis(&axis.name).is_none();
        require(is_new, &place, "name", &axis.name, "is the name of another axis of the part too")?;
        part.axes.push(check_axis(&place, axis)?);
    }
    let pieces = check_strides(place, &part)?;
    Ok((part, pieces))
}

/// Checks that no two items share a byte and that the end of the part fits 64 bits. Counts its contiguous pieces.
///
/// ```text
/// heads 2, tokens 3, items of 2 bytes
///   |t0|t1|t2|  |t0|t1|t2|       one index of tokens has 2 bytes, so its stride must be at least 2
///   |--------|                   one index of heads has 6 bytes, so its stride must be at least 6:
///   |------------|               here it is 8, and the part is two pieces
/// ```
fn check_strides(place: &str, part: &Part) -> Result<u64> {
    let overflow = |what: String| Error::overflow(place, what, 64);
    let mut by_stride: Vec<&Axis> = part.axes.iter().filter(|axis| axis.length > 1).collect();
    by_stride.sort_by_key(|axis| axis.stride);
    let mut inner = part.item_bytes;
    let mut pieces = 1u64;
    for axis in by_stride {
        if axis.stride < inner {
            let place = format!("{place} axis {:?}", axis.name);
            let expected = format!("has to be at least {inner}, the bytes of one index");
            return Err(wrong(&place, "stride", axis.stride, expected));
        }
        if axis.stride > inner || pieces > 1 {
            pieces = pieces.saturating_mul(axis.length);
        }
        inner = (axis.length - 1)
            .checked_mul(axis.stride)
            .and_then(|far| far.checked_add(inner))
            .ok_or_else(|| overflow(format!("axis {:?}: {} x stride {}", axis.name, axis.length, axis.stride)))?;
    }
    match part.offset.checked_add(inner) {
        Some(_) => Ok(pieces),
        None => Err(overflow(format!("offset {} + {inner}", part.offset))),
    }
}

fn check_axis(place: &str, axis: written::Axis) -> Result<Axis> {
    let written::Axis { name, extent, stride, start, length, may_repeat, spare } = axis;
    let length = length.unwrap_or(extent.saturating_sub(start));
    let axis = Axis { name, extent, stride, start, length, may_repeat, spare };
    not_zero(place, "extent", extent)?;
    not_zero(place, "stride", stride)?;
    not_zero(place, "length", length)?;
    let is_inside = start.checked_add(length).is_some_and(|end| end <= extent);
    let value = format_args!("{length} behind start {start}");
    require(is_inside, place, "length", value, format_args!("has to end within extent {extent}"))?;
    let is_one = length == 1 && !axis.is_tokens();
    let expected = "has to be 1 on an axis that may repeat, which is not tokens";
    require(!may_repeat || is_one, place, "length", length, expected)?;
    let is_more = spare < extent && length == extent && !axis.is_tokens();
    let expected = format_args!("has to be below the extent {extent}, on an axis held whole that is not tokens");
    require(spare == 0 || is_more, place, "spare", spare, expected)?;
    let expected = format_args!("has to be the extent {extent}: tokens of a block are not sharded");
    require(!axis.is_tokens() || length == extent, place, "length", length, expected)?;
    Ok(axis)
}
