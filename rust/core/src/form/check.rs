// SPDX-License-Identifier: Apache-2.0
//! Checks a geometry once, so that no later code can overflow, leave a region or miss a value.
use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::form::check_page::check_page;
use crate::form::limits::{
    MAX_BLOCK_SIZE, MAX_CP_SIZE, MAX_GROUPS, MAX_LAYERS, MAX_PAGES, MAX_REGIONS, at_most, check_name, not_zero,
    require, wrong,
};
use crate::form::written;
use crate::form::written::Form;
use crate::geometry::types::{Geometry, Group, Kind, Layer, Page, Region};

impl Geometry {
    /// Reads the JSON form and checks it. Safe on any input.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        Self::new(Form::from_json(json)?)
    }

    /// Checks the values, and fills in omitted values.
    pub fn new(form: Form) -> Result<Self> {
        check_lists(&form)?;
        check_regions(&form.regions)?;
        let Form { kvhma: _, tp_rank, tp_size, null_block, regions, groups, pages, layers } = form;
        let groups = groups.iter().enumerate().map(|(index, group)| check_group(&format!("group {index}"), group));
        let groups = groups.collect::<Result<Vec<_>>>()?;
        let mut pieces = 0;
        let pages = pages.into_iter().enumerate();
        let pages = pages.map(|(index, page)| check_page(&format!("page {index}"), page, &mut pieces));
        let pages = pages.collect::<Result<Vec<_>>>()?;
        let num_blocks = vec![i32::MAX as u64; groups.len()];
        let mut geometry =
            Self { tp_rank, tp_size, null_block, regions, groups, pages, layers: Vec::new(), num_blocks };
        let page_ends: Vec<u64> = geometry.pages.iter().map(Page::end).collect();
        for (index, layer) in layers.into_iter().enumerate() {
            let layer = check_layer(&geometry, index, layer, &page_ends)?;
            let blocks = &mut geometry.num_blocks[layer.group];
            *blocks = layer.num_blocks.min(*blocks);
            geometry.layers.push(layer);
        }
        check_layer_names(&geometry.layers)?;
        Ok(geometry)
    }
}

fn check_lists(form: &Form) -> Result<()> {
    let top = "geometry";
    at_most(top, "regions", form.regions.len(), MAX_REGIONS)?;
    at_most(top, "groups", form.groups.len(), MAX_GROUPS)?;
    at_most(top, "pages", form.pages.len(), MAX_PAGES)?;
    at_most(top, "layers", form.layers.len(), MAX_LAYERS)?;
    not_zero(top, "tp_size", form.tp_size.into())?;
    let expected = format_args!("has to be below tp_size {}", form.tp_size);
    require(form.tp_rank < form.tp_size, top, "tp_rank", form.tp_rank, expected)
}

fn check_regions(regions: &[Region]) -> Result<()> {
    for (index, region) in regions.iter().enumerate() {
        let place = format!("region {index}");
        not_zero(&place, "bytes", region.bytes)?;
        if region.base.checked_add(region.bytes).is_none() {
            let what = format!("base {:#x} + bytes {:#x}", region.base, region.bytes);
            return Err(Error::overflow(&place, what, 64));
        }
    }
    Ok(())
}

fn check_layer_names(layers: &[Layer]) -> Result<()> {
    let mut names = HashSet::new();
    match layers.iter().position(|layer| !names.insert(layer.name.as_str())) {
        Some(index) => {
            Err(wrong(&format!("layer {index}"), "name", &layers[index].name, "is the name of another layer too"))
        }
        None => Ok(()),
    }
}

fn check_group(place: &str, group: &written::Group) -> Result<Group> {
    for (field, value) in [("block_size", group.block_size), ("ratio", group.ratio), ("cp_size", group.cp_size)] {
        not_zero(place, field, value)?;
    }
    let written::Group { block_size, ratio, cp_rank, cp_size, .. } = *group;
    let below =
        |field, value, limit| require(value <= limit, place, field, value, format_args!("has to be at most {limit}"));
    below("block_size", block_size, MAX_BLOCK_SIZE)?;
    below("cp_size", cp_size, MAX_CP_SIZE)?;
    let divides = block_size % ratio == 0;
    require(divides, place, "ratio", ratio, format_args!("has to divide block_size {block_size}"))?;
    require(cp_rank < cp_size, place, "cp_rank", cp_rank, format_args!("has to be below cp_size {cp_size}"))?;
    let kind = check_kind(place, group)?;
    let cp_interleave = check_interleave(place, group, kind)?;
    let expected = format_args!("has to be 1 in a {} group: it has no positions", kind.word());
    require(kind.is_attention() || cp_size == 1, place, "cp_size", cp_size, expected)?;
    Ok(Group { kind, block_size, kernel_blocks_per_block: ratio, cp_rank, cp_size, cp_interleave })
}

/// Tokens of a turn: a block by default.
fn check_interleave(place: &str, group: &written::Group, kind: Kind) -> Result<u64> {
    let written::Group { block_size, cp_size, cp_interleave, .. } = *group;
    let Some(given) = cp_interleave else { return Ok(block_size) };
    let field = "cp_interleave";
    require(cp_size > 1, place, field, given, "only groups with a cp_size above 1 have it")?;
    require(given != 0 && block_size % given == 0, place, field, given, format_args!("has to divide {block_size}"))?;
    // Blocks that a window has passed are dropped whole, which is only possible for turns of whole blocks.
    let keeps_all = matches!(kind, Kind::Full | Kind::Mla);
    let expected = format_args!("has to be the block_size {block_size} in a {} group", kind.word());
    require(keeps_all || given == block_size, place, field, given, expected)?;
    Ok(given)
}

/// The kind with the numbers that it needs; refuses numbers of other kinds.
fn check_kind(place: &str, group: &written::Group) -> Result<Kind> {
    let window = number_of(written::Kind::Sliding, (place, group), "window", group.window)?;
    let chunk = number_of(written::Kind::Chunked, (place, group), "chunk", group.chunk)?;
    check_state(place, group)?;
    Ok(match group.kind {
        written::Kind::Full => Kind::Full,
        written::Kind::Sliding => Kind::Sliding { window },
        written::Kind::Chunked => Kind::Chunked { chunk },
        written::Kind::Mla => Kind::Mla,
        written::Kind::Ssm => Kind::Ssm { num_speculative_blocks: group.speculative },
        written::Kind::Opaque => Kind::Opaque,
    })
}

/// A number that groups of one kind need, and other groups may not have: they get 0.
fn number_of(
    kind: written::Kind,
    (place, group): (&str, &written::Group),
    field: &'static str,
    value: Option<u64>,
) -> Result<u64> {
    match (group.kind == kind, value) {
        (true, None) => Err(wrong(place, field, "missing", format!("a {} group needs it", kind.word()))),
        (true, Some(value)) => not_zero(place, field, value).map(|()| value),
        (false, None) => Ok(0),
        (false, Some(value)) => {
            let expected = format!("only {} groups have it, this one is {}", kind.word(), group.kind.word());
            Err(wrong(place, field, value, expected))
        }
    }
}

/// Checks that only state has speculative slots, and that state is not split.
fn check_state(place: &str, group: &written::Group) -> Result<()> {
    if group.kind == written::Kind::Ssm {
        let expected = "has to be 1: state is never split into kernel blocks";
        require(group.ratio == 1, place, "ratio", group.ratio, expected)
    } else {
        let expected = format_args!("has to be 0 in a {} group", group.kind.word());
        require(group.speculative == 0, place, "speculative", group.speculative, expected)
    }
}

fn check_layer(geometry: &Geometry, index: usize, layer: written::Layer, page_ends: &[u64]) -> Result<Layer> {
    check_name(&format!("layer {index}"), "name", &layer.name)?;
    let place = format!("layer {:?}", layer.name);
    for (field, value, count) in [
        ("group", layer.group, geometry.groups.len()),
        ("page", layer.page, geometry.pages.len()),
        ("region", layer.region, geometry.regions.len()),
    ] {
        require(value < count, &place, field, value, format_args!("there are {count}"))?;
    }
    let group = &geometry.groups[layer.group];
    not_zero(&place, "num_blocks", layer.num_blocks)?;
    not_zero(&place, "block_stride", layer.block_stride)?;
    let kernel_stride = kernel_stride(&place, &layer, group)?;
    let written::Layer { name, group: group_index, region, offset, num_blocks, block_stride, page, .. } = layer;
    let layer = Layer { name, group: group_index, page, region, offset, num_blocks, block_stride, kernel_stride };
    check_tokens(&place, group, &geometry.pages[page])?;
    check_extent(&place, geometry, &layer, page_ends[page])?;
    Ok(layer)
}

/// Checks that the last page ends within the region, and that kernel block ids fit 31 bits.
///
/// ```text
/// region   offset   block 0 .. block n-2   block n-1: kernel block 0 .. kernel block m-1
/// |--------|--------(n - 1) x block_stride-|---------(m - 1) x kernel_stride-|--page--|
/// ```
fn check_extent(place: &str, geometry: &Geometry, layer: &Layer, page_end: u64) -> Result<()> {
    let ratio = geometry.group(layer).kernel_blocks_per_block;
    let kernel_blocks = layer.num_blocks.checked_mul(ratio).filter(|&blocks| blocks <= i32::MAX as u64);
    if kernel_blocks.is_none() {
        let what = format!("num_blocks {} x ratio {ratio}", layer.num_blocks);
        return Err(Error::overflow(place, what, 31));
    }
    let end = (layer.num_blocks - 1)
        .checked_mul(layer.block_stride)
        .and_then(|far| (ratio - 1).checked_mul(layer.kernel_stride)?.checked_add(far))
        .and_then(|far| far.checked_add(page_end)?.checked_add(layer.offset));
    let Some(end) = end else {
        let Layer { offset, num_blocks, block_stride, .. } = layer;
        let what = format!("offset {offset} + ({num_blocks} blocks - 1) x stride {block_stride} + page {page_end}");
        return Err(Error::overflow(place, what, 64));
    };
    let bytes = geometry.regions[layer.region].bytes;
    let expected = format_args!("but the last page ends at byte {end} of region {}, which has {bytes}", layer.region);
    require(end <= bytes, place, "offset", layer.offset, expected)
}

fn kernel_stride(place: &str, layer: &written::Layer, group: &Group) -> Result<u64> {
    let ratio = group.kernel_blocks_per_block;
    match layer.kernel_stride {
        Some(stride) => not_zero(place, "kernel_stride", stride).map(|()| stride),
        None if layer.block_stride % ratio == 0 => Ok(layer.block_stride / ratio),
        None => {
            let expected = format!("has to be a multiple of ratio {ratio} when kernel_stride is left out");
            Err(wrong(place, "block_stride", layer.block_stride, expected))
        }
    }
}

fn check_tokens(place: &str, group: &Group, page: &Page) -> Result<()> {
    for part in &page.parts {
        let Some(axis) = part.tokens() else { continue };
        let place = format!("{place} part {:?} axis \"tokens\"", part.name);
        let expected = format_args!("a {} group has no token axis", group.kind.word());
        require(group.kind.is_attention(), &place, "extent", axis.extent, expected)?;
        let Group { block_size, kernel_blocks_per_block: ratio, .. } = group;
        let tokens = group.kernel_tokens();
        let expected = format_args!("has to be block_size {block_size} / ratio {ratio} = {tokens}");
        require(axis.extent == tokens, &place, "extent", axis.extent, expected)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two kernel blocks of 8 bytes in a block of 24: without a `kernel_stride`, the 8 bytes after them are padding.
    fn kernel_stride_of(stride: &str, block_stride: u64) -> Result<u64> {
        let json = format!(
            r#"{{"kvhma":1,"regions":[{{"base":0,"bytes":96}}],"groups":[{{"kind":"full","block_size":4,"ratio":2}}],
            "pages":[{{"parts":[{{"name":"kv","dtype":"u8","item_bytes":4,"offset":0,"axes":[
            {{"name":"tokens","extent":2,"stride":4}}]}}]}}],"layers":[{{"name":"a","group":0,"page":0,"region":0,
            "offset":0,"num_blocks":4,"block_stride":{block_stride}{stride}}}]}}"#
        );
        Geometry::from_json(json.as_bytes()).map(|geometry| geometry.layers[0].kernel_stride)
    }

    #[test]
    fn kernel_blocks_share_the_stride_of_their_block() {
        assert_eq!(kernel_stride_of("", 24), Ok(12));
        assert_eq!(kernel_stride_of(r#","kernel_stride":8"#, 24), Ok(8));
        let error = kernel_stride_of("", 21).expect_err("two kernel blocks cannot share 21 bytes");
        assert!(error.to_string().contains("block_stride is 21, has to be a multiple of ratio 2"), "{error}");
    }
}
