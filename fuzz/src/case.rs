// SPDX-License-Identifier: Apache-2.0
//! Two engines with the same model and a request between them, made of bytes. Most cases are valid: the model is drawn
//! first, then each engine lays it out in its own way. A few numbers are spoiled at the end.
use arbitrary::{Arbitrary, Result, Unstructured};
use kvhma_core::{Span, SpanIds};
use serde_json::{Value, json};

/// What the plan target runs.
#[derive(Debug)]
pub struct Case {
    pub local: Value,
    pub remotes: Vec<Value>,
    pub descriptor_bytes: u64,
    pub num_tokens: u64,
    pub local_spans: Vec<Span>,
    pub remote_spans: Vec<Vec<Span>>,
}

impl Case {
    /// The form of tests/attacks/corpus.
    pub fn to_json(&self) -> Value {
        let spans = |spans: &[Span]| spans.iter().map(|span| json!([span.first, wide_ids(span)])).collect::<Vec<_>>();
        json!({
            "local": self.local,
            "remotes": self.remotes,
            "descriptor_bytes": self.descriptor_bytes,
            "num_tokens": self.num_tokens,
            "local_spans": spans(&self.local_spans),
            "remote_spans": self.remote_spans.iter().map(|list| spans(list)).collect::<Vec<_>>(),
        })
    }
}

/// Numbers at which types and bounds end, and small ones.
pub fn number(u: &mut Unstructured) -> Result<u64> {
    // The last stands for 2^64.
    const EDGES: [u64; 9] = [1 << 16, 1 << 24, 1 << 31, 1 << 32, 1 << 40, 1 << 53, 1 << 62, 1 << 63, 0];
    let small = u.int_in_range(0..=20u64)?;
    match u.int_in_range(0..=7)? {
        0 => u.arbitrary(),
        1 => Ok(u.choose(&EDGES)?.wrapping_sub(small)),
        2 => Ok(u.choose(&EDGES)?.wrapping_add(small)),
        _ => Ok(small),
    }
}

/// Chance; never where the bytes have run out and all numbers are 0.
fn one_in(u: &mut Unstructured, many: u32) -> Result<bool> {
    Ok(u.int_in_range(1..=many)? == many)
}

/// Layers with equal pages.
struct Family {
    kind: &'static str,
    layers: Vec<String>,
    parts: Vec<PartShape>,
    /// Tokens of a kernel block and kernel blocks in a logical one, where both sides have to have the same.
    kernel: Option<u64>,
    ratio: Option<u64>,
    window: u64,
    speculative: u64,
}

struct PartShape {
    item: u64,
    /// Extents of the axes but the tokens.
    axes: Vec<u64>,
    tokens: bool,
}

fn model(u: &mut Unstructured) -> Result<Vec<Family>> {
    let mut number_of_layers = 0;
    (0..u.int_in_range(1..=3)?)
        .map(|_| {
            let kind = *u.choose(&["full", "sliding", "chunked", "mla", "ssm", "opaque"])?;
            let attention = !matches!(kind, "ssm" | "opaque");
            let layers = (0..u.int_in_range(1..=3)?)
                .map(|_| {
                    number_of_layers += 1;
                    format!("l{number_of_layers}")
                })
                .collect();
            let mut kernel = (kind == "opaque").then_some(2);
            let ratio = if kind == "opaque" && !one_in(u, 4)? { Some(u.int_in_range(1..=3)?) } else { None };
            let parts = (0..u.int_in_range(1..=2)?)
                .map(|_| {
                    let tokens = attention && !one_in(u, 6)?;
                    if !tokens {
                        kernel = Some(u.int_in_range(1..=4)?);
                    }
                    let axes = (0..u.int_in_range(0..=2)?).map(|_| u.int_in_range(1..=4)).collect::<Result<_>>()?;
                    Ok(PartShape { item: *u.choose(&[1, 2, 4, 3])?, axes, tokens })
                })
                .collect::<Result<_>>()?;
            Ok(Family {
                kind,
                layers,
                parts,
                kernel,
                ratio,
                window: u.int_in_range(1..=40)?,
                speculative: u.int_in_range(0..=2)?,
            })
        })
        .collect()
}

/// Layers with one block table.
struct Group<'a> {
    family: &'a Family,
    layers: Vec<&'a str>,
    kernel: u64,
    ratio: u64,
    cp: bool,
}

/// How an engine lays the model out, whatever the rank.
struct Engine<'a> {
    groups: Vec<Group<'a>>,
    tp: u64,
    cp: u64,
    blocks: u64,
    null: Option<u64>,
    /// The j-th layers of all groups lie over each other.
    alias: bool,
    /// 0: a region for each slot; 1: slot after slot; 2: the slots of a block side by side; 3: outermost axes over all.
    order: u32,
    tokens_first: bool,
    pad: u64,
    /// Bytes are this many times as many, to get to the end of the address space.
    scale: u64,
    high: bool,
}

fn engine<'a>(u: &mut Unstructured, families: &'a [Family], scale: u64) -> Result<Engine<'a>> {
    let mut groups = Vec::new();
    let common = (u.int_in_range(1..=8)?, u.int_in_range(1..=3)?);
    let cp = *u.choose(&[1, 1, 1, 2, 3])?;
    for family in families {
        let size = u.int_in_range(1..=3)?;
        for layers in family.layers.chunks(size) {
            let (kernel, ratio) = match u.int_in_range(0..=99)? {
                // So large that blocks of the two sides cut each other in too many ways to prepare; slow with many items.
                99 if family.parts.iter().all(|part| part.axes.len() < 2) => (*u.choose(&[2051, 2053])?, 1),
                75..99 => (*u.choose(&[1, 2, 3, 4, 6, 8, 12, 16])?, u.int_in_range(1..=4)?),
                _ => common,
            };
            let layers = layers.iter().map(String::as_str).filter(|_| !one_in(u, 20).unwrap_or(false)).collect();
            groups.push(Group {
                family,
                layers,
                kernel: family.kernel.unwrap_or(kernel),
                ratio: if family.kind == "ssm" { 1 } else { family.ratio.unwrap_or(ratio) },
                cp: !matches!(family.kind, "ssm" | "opaque") && !one_in(u, 5)?,
            });
        }
    }
    Ok(Engine {
        groups,
        tp: *u.choose(&[1, 1, 2, 3])?,
        cp,
        blocks: *u.choose(&[140, 140, 140, 20, 2000])?,
        null: *u.choose(&[Some(0), None, Some(3)])?,
        alias: u.arbitrary()?,
        order: u.int_in_range(0..=3)?,
        tokens_first: u.arbitrary()?,
        pad: *u.choose(&[0, 0, 0, 1, 5])?,
        scale,
        high: one_in(u, 4)?,
    })
}

impl Engine<'_> {
    /// The geometry of one rank. Numbers saturate: what does not fit is refused or, with luck, is not.
    fn geometry(&self, tp_rank: u64, cp_rank: u64) -> Value {
        let slots = match self.alias {
            true => self.groups.iter().map(|group| group.layers.len()).max().unwrap_or(0),
            false => self.groups.iter().map(|group| group.layers.len()).sum(),
        } as u64;
        let inner = self.groups.iter().map(|group| self.page(group, tp_rank, 0).1).max().unwrap_or(1);
        let ratio = self.groups.iter().map(|group| group.ratio).max().unwrap_or(1);
        let block = inner.saturating_add(self.pad * self.scale).saturating_mul(ratio);
        let slot_bytes = block.saturating_mul(self.blocks);
        let plane = slot_bytes.saturating_mul(slots.max(1));
        let spread = if self.order == 3 { plane } else { 0 };
        let region_bytes = match self.order {
            0 => slot_bytes,
            3 => plane.saturating_mul(4),
            _ => plane,
        };
        let regions = if self.order == 0 { slots.max(1) } else { 1 };
        let all = region_bytes.saturating_mul(regions);
        let first = if self.high { u64::MAX - all } else { (u64::MAX - all).min(4096) };
        let mut layers = Vec::new();
        for (index, group) in self.groups.iter().enumerate() {
            for (place, name) in group.layers.iter().enumerate() {
                let slot = if self.alias { place } else { layers.len() } as u64;
                let (region, offset, stride) = match self.order {
                    0 => (slot, 0, block),
                    2 => (0, slot.saturating_mul(block), block.saturating_mul(slots)),
                    _ => (0, slot.saturating_mul(slot_bytes), block),
                };
                layers.push(json!({"name": name, "group": index, "page": index, "region": region, "offset": offset,
                    "num_blocks": self.blocks, "block_stride": stride, "kernel_stride": block / group.ratio}));
            }
        }
        json!({
            "kvhma": 1, "tp_rank": tp_rank, "tp_size": self.tp, "null_block": self.null,
            "regions": (0..regions).map(|index| json!({"base": first.saturating_add(index.saturating_mul(region_bytes)), "bytes": region_bytes})).collect::<Vec<_>>(),
            "groups": self.groups.iter().map(|group| self.group(group, cp_rank)).collect::<Vec<_>>(),
            "pages": self.groups.iter().map(|group| self.page(group, tp_rank, spread).0).collect::<Vec<_>>(),
            "layers": layers,
        })
    }

    fn group(&self, group: &Group, cp_rank: u64) -> Value {
        let family = group.family;
        let mut form = json!({"kind": family.kind, "block_size": group.kernel * group.ratio, "ratio": group.ratio});
        match family.kind {
            "sliding" => form["window"] = family.window.into(),
            "chunked" => form["chunk"] = family.window.into(),
            "ssm" => form["speculative"] = family.speculative.into(),
            _ => {}
        }
        if group.cp {
            form["cp_rank"] = cp_rank.into();
            form["cp_size"] = self.cp.into();
        }
        form
    }

    /// A page and its bytes. With `spread`, the outermost axis of each part has that stride.
    fn page(&self, group: &Group, rank: u64, spread: u64) -> (Value, u64) {
        let mut offset = 0;
        let mut parts = Vec::new();
        for (index, part) in group.family.parts.iter().enumerate() {
            let mut bytes = part.item.saturating_mul(self.scale);
            let item = bytes;
            let mut axes = Vec::new();
            let shard = |extent: u64| {
                (extent * rank / self.tp, (extent * (rank + 1) / self.tp).max(extent * rank / self.tp + 1))
            };
            let mut dims: Vec<(String, u64, u64, u64)> = part
                .axes
                .iter()
                .enumerate()
                .map(|(index, &extent)| {
                    // Only the first axis is cut over the ranks.
                    let cut = index == 0 && group.family.kind != "opaque";
                    let (start, end) = if cut { shard(extent) } else { (0, extent) };
                    (format!("a{index}"), extent, start, end - start)
                })
                .collect();
            if part.tokens {
                dims.insert(
                    if self.tokens_first { 0 } else { dims.len() },
                    ("tokens".into(), group.kernel, 0, group.kernel),
                );
            }
            let outermost = dims.len();
            for (place, (name, extent, start, length)) in dims.into_iter().enumerate() {
                let far = spread > 0 && place + 1 == outermost && name != "tokens" && group.family.kind != "opaque";
                let stride = if far { spread } else { bytes };
                axes.push(json!({"name": name, "extent": extent, "start": start, "length": length, "stride": stride}));
                if !far {
                    bytes = bytes.saturating_mul(length);
                }
            }
            parts.push(
                json!({"name": format!("p{index}"), "dtype": "u8", "item_bytes": item, "offset": offset, "axes": axes}),
            );
            offset = bytes.saturating_add(offset);
        }
        (json!({"parts": parts}), offset)
    }

    /// Blocks of a request: mostly just those that `num_tokens` tokens need, behind the null block.
    fn spans(&self, u: &mut Unstructured, num_tokens: u64) -> Result<Vec<Span>> {
        let mut next = 4;
        let down = u.arbitrary()?;
        self.groups
            .iter()
            .map(|group| {
                let unit = group.kernel * group.ratio * if group.cp { self.cp } else { 1 };
                let entries = if group.family.kind == "ssm" { 1 } else { num_tokens.div_ceil(unit) };
                let first = if one_in(u, 5)? { u.int_in_range(0..=entries)? } else { 0 };
                let more = if one_in(u, 3)? { u.int_in_range(0..=2)? } else { 0 };
                let count = entries - first + more;
                let mut ids: Vec<i64> = (next..next + count as i64).collect();
                next += count as i64;
                if down {
                    ids.reverse();
                }
                if one_in(u, 8)? && !ids.is_empty() {
                    let place = u.choose_index(ids.len())?;
                    ids.rotate_left(place);
                }
                if one_in(u, 30)? && !ids.is_empty() {
                    let place = u.choose_index(ids.len())?;
                    ids[place] = number(u)? as i64;
                }
                let narrow: Result<Vec<i32>, _> = ids.iter().map(|&id| i32::try_from(id)).collect();
                let ids = if u.arbitrary()? { narrow.map_or_else(|_| ids.into(), Into::into) } else { ids.into() };
                Ok(Span { first: if one_in(u, 40)? { number(u)? } else { first }, ids })
            })
            .collect()
    }
}

/// Puts a number at the edge of something into one place of a form.
fn spoil(u: &mut Unstructured, form: &mut Value) -> Result<()> {
    fn numbers<'a>(value: &'a mut Value, out: &mut Vec<&'a mut Value>) {
        match value {
            Value::Number(_) => out.push(value),
            Value::Array(list) => list.iter_mut().for_each(|item| numbers(item, out)),
            Value::Object(map) => map.values_mut().for_each(|item| numbers(item, out)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    numbers(form, &mut found);
    let place = u.choose_index(found.len())?;
    *found[place] = number(u)?.into();
    Ok(())
}

impl Arbitrary<'_> for Case {
    fn arbitrary(u: &mut Unstructured) -> Result<Self> {
        let families = model(u)?;
        let scale = 1 << *u.choose(&[0, 0, 0, 0, 3, 20, 40, 44, 48])?;
        let receiver = engine(u, &families, scale)?;
        let num_tokens = match u.int_in_range(0..=39)? {
            39 => number(u)?,
            36..39 => u.int_in_range(1..=600)?,
            _ => u.int_in_range(1..=40)?,
        };
        let place = (u.int_in_range(0..=receiver.tp - 1)?, u.int_in_range(0..=receiver.cp - 1)?);
        let mut local = receiver.geometry(place.0, place.1);
        let local_spans = receiver.spans(u, num_tokens.min(600))?;
        // Mostly the ranks of one engine, with one list of spans.
        let (engines, own_spans) = (if one_in(u, 6)? { 2 } else { 1 }, one_in(u, 8)?);
        let mut sources = Vec::new();
        for _ in 0..engines {
            let sender = engine(u, &families, scale)?;
            let mut spans = sender.spans(u, num_tokens.min(600))?;
            for (tp, cp) in (0..sender.tp).flat_map(|tp| (0..sender.cp).map(move |cp| (tp, cp))) {
                if own_spans {
                    spans = sender.spans(u, num_tokens.min(600))?;
                }
                sources.push((sender.geometry(tp, cp), spans.clone()));
            }
        }
        if sources.len() > 1 && one_in(u, 20)? {
            sources.remove(u.choose_index(sources.len())?);
        }
        let (mut remotes, mut remote_spans): (Vec<_>, Vec<_>) = sources.into_iter().unzip();
        if engines == 1 && !own_spans {
            remote_spans.truncate(1);
        }
        for _ in 0..u.int_in_range(0..=5)?.max(3) - 3 {
            let which = u.choose_index(remotes.len() + 1)?;
            spoil(u, if which == 0 { &mut local } else { &mut remotes[which - 1] })?;
        }
        let descriptor_bytes = *u.choose(&[0, 1, 16, 1 << 17, u64::MAX])?;
        Ok(Self { local, remotes, descriptor_bytes, num_tokens, local_spans, remote_spans })
    }
}

/// A span's ids of either width.
pub fn wide_ids(span: &Span) -> Vec<i64> {
    match &span.ids {
        SpanIds::Narrow(ids) => ids.iter().map(|&id| id.into()).collect(),
        SpanIds::Wide(ids) => ids.clone(),
    }
}
