// SPDX-License-Identifier: Apache-2.0
//! Checks a geometry once, so that nothing after it can overflow or leave a region.
use std::collections::HashSet;
use std::fmt::Display;

use crate::error::{Error, Result};
use crate::geometry::{Axis, Geometry, Group, Kind, Layer, Page, Part};
use crate::pieces::{Lane, Window, all_tokens, part_chunks, shard};

const MAX_REGIONS: usize = 4096;
const MAX_GROUPS: usize = 256;
const MAX_PAGES: usize = 4096;
const MAX_PARTS: usize = 64;
const MAX_AXES: usize = 8;
const MAX_LAYERS: usize = 16_384;
const MAX_NAME: usize = 256;
/// Pieces of all pages: finer ones can neither be checked for overlap nor moved in reasonable time.
const MAX_CHUNKS: u64 = 1 << 20;

fn wrong(place: &str, field: &'static str, value: impl Display, expected: impl Display) -> Error {
    Error::Geometry { place: place.to_owned(), field, value: value.to_string(), expected: expected.to_string() }
}

fn at_most(place: &str, field: &'static str, count: usize, limit: usize) -> Result<()> {
    if count > limit {
        return Err(wrong(place, field, format!("a list of {count}"), format!("at most {limit} are allowed")));
    }
    Ok(())
}

fn not_zero(place: &str, field: &'static str, value: u64) -> Result<()> {
    if value == 0 { Err(wrong(place, field, 0, "has to be at least 1")) } else { Ok(()) }
}

fn name(place: &str, field: &'static str, text: &str) -> Result<()> {
    if text.is_empty() || text.len() > MAX_NAME {
        let value = format!("{} bytes long", text.len());
        return Err(wrong(place, field, value, format!("has to have 1 to {MAX_NAME} bytes")));
    }
    Ok(())
}

/// Checks everything and fills in default strides.
pub(crate) fn check(geometry: &mut Geometry) -> Result<()> {
    let top = "geometry";
    at_most(top, "regions", geometry.regions.len(), MAX_REGIONS)?;
    at_most(top, "groups", geometry.groups.len(), MAX_GROUPS)?;
    at_most(top, "pages", geometry.pages.len(), MAX_PAGES)?;
    at_most(top, "layers", geometry.layers.len(), MAX_LAYERS)?;
    not_zero(top, "tp_size", geometry.tp_size.into())?;
    if geometry.tp_rank >= geometry.tp_size {
        return Err(wrong(top, "tp_rank", geometry.tp_rank, format!("has to be below tp_size {}", geometry.tp_size)));
    }
    for (index, region) in geometry.regions.iter().enumerate() {
        let place = format!("region {index}");
        not_zero(&place, "bytes", region.bytes)?;
        if region.base.checked_add(region.bytes).is_none() {
            let what = format!("base {:#x} + bytes {:#x}", region.base, region.bytes);
            return Err(Error::Overflow { place, what, bits: 64 });
        }
    }
    for (index, group) in geometry.groups.iter().enumerate() {
        check_group(&format!("group {index}"), group)?;
    }
    let mut spans = Vec::with_capacity(geometry.pages.len());
    let mut chunks = 0;
    for (index, page) in geometry.pages.iter().enumerate() {
        spans.push(check_page(&format!("page {index}"), page, &mut chunks)?);
    }
    for index in 0..geometry.layers.len() {
        let kernel_stride = check_layer(geometry, index, &spans)?;
        geometry.layers[index].kernel_stride = Some(kernel_stride);
    }
    let mut names = HashSet::new();
    match geometry.layers.iter().enumerate().find(|(_, layer)| !names.insert(layer.name.as_str())) {
        Some((index, layer)) => {
            Err(wrong(&format!("layer {index}"), "name", &layer.name, "is the name of another layer too"))
        }
        None => Ok(()),
    }
}

fn check_group(place: &str, group: &Group) -> Result<()> {
    // Positions are products of table index (below 2^31), cp_size and block size: these bounds keep them in 62 bits.
    const MAX_TOKENS: u64 = 1 << 24;
    const MAX_PARALLEL: u64 = 1 << 6;
    for (field, value) in [("block_size", group.block_size), ("ratio", group.ratio), ("cp_size", group.cp_size)] {
        not_zero(place, field, value)?;
    }
    if group.block_size > MAX_TOKENS {
        return Err(wrong(place, "block_size", group.block_size, format!("has to be at most {MAX_TOKENS}")));
    }
    if group.cp_size > MAX_PARALLEL {
        return Err(wrong(place, "cp_size", group.cp_size, format!("has to be at most {MAX_PARALLEL}")));
    }
    if group.block_size % group.ratio != 0 {
        return Err(wrong(place, "ratio", group.ratio, format!("has to divide block_size {}", group.block_size)));
    }
    if group.cp_rank >= group.cp_size {
        return Err(wrong(place, "cp_rank", group.cp_rank, format!("has to be below cp_size {}", group.cp_size)));
    }
    for (field, value, kind) in [("window", group.window, Kind::Sliding), ("chunk", group.chunk, Kind::Chunked)] {
        match (group.kind == kind, value) {
            (true, None) => return Err(wrong(place, field, "missing", format!("a {} group needs it", kind.word()))),
            (false, Some(value)) => {
                let expected = format!("only {} groups have it, this one is {}", kind.word(), group.kind.word());
                return Err(wrong(place, field, value, expected));
            }
            (true, Some(value)) => not_zero(place, field, value)?,
            (false, None) => {}
        }
    }
    if group.kind == Kind::Ssm {
        if group.ratio != 1 {
            return Err(wrong(place, "ratio", group.ratio, "has to be 1: state is never split into kernel blocks"));
        }
    } else if group.speculative != 0 {
        let expected = format!("has to be 0 in a {} group", group.kind.word());
        return Err(wrong(place, "speculative", group.speculative, expected));
    }
    if !group.kind.is_attention() && group.cp_size != 1 {
        let expected = format!("has to be 1 in a {} group: it has no positions", group.kind.word());
        return Err(wrong(place, "cp_size", group.cp_size, expected));
    }
    Ok(())
}

/// Checks a page and returns one past its last byte. `chunks` counts the pieces of all pages.
fn check_page(place: &str, page: &Page, chunks: &mut u64) -> Result<u64> {
    if page.parts.is_empty() {
        return Err(wrong(place, "parts", "empty", "a page has at least one part"));
    }
    at_most(place, "parts", page.parts.len(), MAX_PARTS)?;
    let mut end = 0;
    for (index, part) in page.parts.iter().enumerate() {
        let place = format!("{place} part {:?}", part.name);
        name(&place, "name", &part.name)?;
        if page.parts[..index].iter().any(|other| other.name == part.name) {
            return Err(wrong(&place, "name", &part.name, "is the name of another part of the page too"));
        }
        let (part_end, part_chunk_count) = check_part(&place, part)?;
        end = end.max(part_end);
        *chunks = chunks.saturating_add(part_chunk_count);
    }
    if *chunks > MAX_CHUNKS {
        let value = format!("cut into {chunks} pieces with the pages before");
        return Err(wrong(place, "parts", value, format!("at most {MAX_CHUNKS} are allowed")));
    }
    if page.parts.len() > 1 {
        parts_apart(place, page)?;
    }
    Ok(end)
}

fn parts_apart(place: &str, page: &Page) -> Result<()> {
    let mut chunks = Vec::new();
    for part in &page.parts {
        let window = Window { ranges: &shard(part), tokens: all_tokens(part) };
        part_chunks(part, part, window, Lane::default(), &mut chunks);
    }
    chunks.sort_unstable_by_key(|chunk| chunk.local);
    for pair in chunks.windows(2) {
        if pair[0].local + pair[0].len > pair[1].local {
            return Err(wrong(place, "parts", format!("two at byte {}", pair[1].local), "parts may not overlap"));
        }
    }
    Ok(())
}

/// Checks a part; returns one past its last byte, and how many contiguous chunks it has.
fn check_part(place: &str, part: &Part) -> Result<(u64, u64)> {
    at_most(place, "axes", part.axes.len(), MAX_AXES)?;
    not_zero(place, "item_bytes", part.item_bytes)?;
    name(place, "dtype", &part.dtype)?;
    let overflow = |what: String| Error::Overflow { place: place.to_owned(), what, bits: 64 };
    for (index, axis) in part.axes.iter().enumerate() {
        let place = format!("{place} axis {:?}", axis.name);
        name(&place, "name", &axis.name)?;
        if part.axes[..index].iter().any(|other| other.name == axis.name) {
            return Err(wrong(&place, "name", &axis.name, "is the name of another axis of the part too"));
        }
        check_axis(&place, axis)?;
    }
    let mut by_stride: Vec<&Axis> = part.axes.iter().filter(|axis| axis.held() > 1).collect();
    by_stride.sort_by_key(|axis| axis.stride);
    let mut inner = part.item_bytes;
    let mut chunks = 1u64;
    for axis in by_stride {
        if axis.stride < inner {
            let place = format!("{place} axis {:?}", axis.name);
            let expected = format!("has to be at least {inner}, the bytes of one index");
            return Err(wrong(&place, "stride", axis.stride, expected));
        }
        if axis.stride > inner || chunks > 1 {
            chunks = chunks.saturating_mul(axis.held());
        }
        inner = (axis.held() - 1)
            .checked_mul(axis.stride)
            .and_then(|far| far.checked_add(inner))
            .ok_or_else(|| overflow(format!("axis {:?}: {} x stride {}", axis.name, axis.held(), axis.stride)))?;
    }
    let end = part.offset.checked_add(inner).ok_or_else(|| overflow(format!("offset {} + {inner}", part.offset)))?;
    Ok((end, chunks))
}

fn check_axis(place: &str, axis: &Axis) -> Result<()> {
    not_zero(place, "extent", axis.extent)?;
    not_zero(place, "stride", axis.stride)?;
    not_zero(place, "length", axis.held())?;
    match axis.start.checked_add(axis.held()) {
        Some(end) if end <= axis.extent => {}
        _ => {
            let value = format!("{} behind start {}", axis.held(), axis.start);
            return Err(wrong(place, "length", value, format!("has to end within extent {}", axis.extent)));
        }
    }
    if axis.may_repeat && (axis.held() != 1 || axis.is_tokens()) {
        let expected = "has to be 1 on an axis that may repeat, which is not tokens".to_owned();
        return Err(wrong(place, "length", axis.held(), expected));
    }
    if axis.spare > 0 && (axis.spare >= axis.extent || axis.held() != axis.extent || axis.is_tokens()) {
        let expected = format!("has to be below the extent {}, on an axis held whole that is not tokens", axis.extent);
        return Err(wrong(place, "spare", axis.spare, expected));
    }
    if axis.is_tokens() && axis.held() != axis.extent {
        let expected = format!("has to be the extent {}: tokens of a block are not sharded", axis.extent);
        return Err(wrong(place, "length", axis.held(), expected));
    }
    Ok(())
}

/// Checks a layer and returns its kernel stride.
fn check_layer(geometry: &Geometry, index: usize, page_ends: &[u64]) -> Result<u64> {
    let layer = &geometry.layers[index];
    name(&format!("layer {index}"), "name", &layer.name)?;
    let place = format!("layer {:?}", layer.name);
    for (field, value, count) in [
        ("group", layer.group, geometry.groups.len()),
        ("page", layer.page, geometry.pages.len()),
        ("region", layer.region, geometry.regions.len()),
    ] {
        if value >= count {
            return Err(wrong(&place, field, value, format!("there are {count}")));
        }
    }
    let group = &geometry.groups[layer.group];
    not_zero(&place, "num_blocks", layer.num_blocks)?;
    not_zero(&place, "block_stride", layer.block_stride)?;
    let kernel_stride = kernel_stride(&place, layer, group)?;
    check_tokens(&place, group, &geometry.pages[layer.page])?;
    let kernel_blocks = layer.num_blocks.checked_mul(group.ratio).filter(|&blocks| blocks <= i32::MAX as u64);
    if kernel_blocks.is_none() {
        let what = format!("num_blocks {} x ratio {}", layer.num_blocks, group.ratio);
        return Err(Error::Overflow { place, what, bits: 31 });
    }
    let end = (layer.num_blocks - 1)
        .checked_mul(layer.block_stride)
        .and_then(|far| (group.ratio - 1).checked_mul(kernel_stride)?.checked_add(far))
        .and_then(|far| far.checked_add(page_ends[layer.page]))
        .and_then(|far| far.checked_add(layer.offset));
    let Some(end) = end else {
        let what = format!(
            "offset {} + ({} blocks - 1) x stride {} + page {}",
            layer.offset, layer.num_blocks, layer.block_stride, page_ends[layer.page]
        );
        return Err(Error::Overflow { place, what, bits: 64 });
    };
    let bytes = geometry.regions[layer.region].bytes;
    if end > bytes {
        let expected = format!("but the last page ends at byte {end} of region {}, which has {bytes}", layer.region);
        return Err(wrong(&place, "offset", layer.offset, expected));
    }
    Ok(kernel_stride)
}

fn kernel_stride(place: &str, layer: &Layer, group: &Group) -> Result<u64> {
    match layer.kernel_stride {
        Some(stride) => not_zero(place, "kernel_stride", stride).map(|()| stride),
        None if layer.block_stride % group.ratio == 0 => Ok(layer.block_stride / group.ratio),
        None => {
            let expected = format!("has to be a multiple of ratio {} when kernel_stride is left out", group.ratio);
            Err(wrong(place, "block_stride", layer.block_stride, expected))
        }
    }
}

fn check_tokens(place: &str, group: &Group, page: &Page) -> Result<()> {
    for part in &page.parts {
        let Some(axis) = part.tokens() else { continue };
        let place = format!("{place} part {:?} axis \"tokens\"", part.name);
        if !group.kind.is_attention() {
            let expected = format!("a {} group has no token axis", group.kind.word());
            return Err(wrong(&place, "extent", axis.extent, expected));
        }
        if axis.extent != group.kernel_tokens() {
            let expected = format!(
                "has to be block_size {} / ratio {} = {}",
                group.block_size,
                group.ratio,
                group.kernel_tokens()
            );
            return Err(wrong(&place, "extent", axis.extent, expected));
        }
    }
    Ok(())
}
