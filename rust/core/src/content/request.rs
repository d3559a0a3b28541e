// SPDX-License-Identifier: Apache-2.0
//! The sums of a request over all layers of a rank.
use std::collections::{BTreeMap, HashSet};

use crate::content::keys::{HEADS, Keys};
use crate::content::memory::ContentMemory;
use crate::content::part::PartSum;
use crate::content::pieces::{Counted, Pieces, pieces_of};
use crate::content::shares::Ranks;
use crate::error::{Error, Result};
use crate::geometry::types::{Axis, Geometry, Group, Kind, Layer, Part};
use crate::pairing::plan::Plan;
use crate::request::span::{CheckedSpan, MAX_TOKENS, Span, check_spans};

/// The arguments of a sum.
#[derive(Debug)]
pub struct ContentRequest<'a> {
    /// Tokens that the blocks hold.
    pub num_tokens: u64,
    /// For each group the blocks.
    pub spans: &'a [Span],
    /// For each group the first token that counts; None to count all needed tokens.
    pub first_tokens: Option<&'a [u64]>,
    /// Seed of the keys of coordinates.
    pub seed: u64,
    /// How many neighbouring tensor-parallel ranks share the tokens of context-parallel groups.
    pub cp_tp_size: u64,
}

/// Sums over layers of one kind of group. The first sum is over coordinates alone: equal if both sides count the same
/// items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentSums {
    /// Kind of the group; `full` also for latent attention, which may share a group with other layers.
    pub kind: &'static str,
    /// Window or chunk; 0 without either.
    pub limit: u64,
    /// First needed token.
    pub first_token: u64,
    /// First token that counts here, in all groups. For a state: the end of the request if a state is missing, else 0.
    pub from_token: u64,
    /// The sum over coordinates, then the sum of each range of tokens.
    pub sums: Vec<u64>,
    /// Sums of parts whose heads this rank cannot number.
    pub repeated: Option<RepeatedSums>,
    /// Extents of the heads, over all ranks.
    pub heads: Vec<u64>,
}

/// Sums of parts whose heads neighbouring ranks may share, with a head key of 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepeatedSums {
    /// Number of this rank.
    pub place: u64,
    /// Number of ranks.
    pub places: u64,
    /// Sums like those of [`ContentSums`].
    pub sums: Vec<u64>,
}

/// Layers that are summed together: layers of equal kind, however engines group them.
type Class = (&'static str, u64);

fn class_of(group: &Group) -> Class {
    match group.kind {
        Kind::Sliding { window } => ("sliding", window),
        Kind::Chunked { chunk } => ("chunked", chunk),
        Kind::Full | Kind::Mla => ("full", 0),
        Kind::Ssm { .. } | Kind::Opaque => (group.kind.word(), 0),
    }
}

impl Geometry {
    /// Sums the content of a request's blocks. The sums of all ranks of an engine must be added.
    pub fn content_sums(&self, request: &ContentRequest, memory: &dyn ContentMemory) -> Result<Vec<ContentSums>> {
        sums(self, request, memory, |_| true)
    }
}

impl Plan {
    /// Sums the local rank with the axes that it and its sources agree on, over layers with a source.
    pub fn content_sums(&self, request: &ContentRequest, memory: &dyn ContentMemory) -> Result<Vec<ContentSums>> {
        let layers = self.sources.iter().flat_map(|source| &source.geometry.layers);
        let names: HashSet<&str> = layers.map(|layer| layer.name.as_str()).collect();
        sums(&self.local, request, memory, |layer| names.contains(layer.name.as_str()))
    }
}

fn sums(
    geometry: &Geometry,
    request: &ContentRequest,
    memory: &dyn ContentMemory,
    is_wanted: impl Fn(&Layer) -> bool,
) -> Result<Vec<ContentSums>> {
    request.check_num_tokens()?;
    let first_tokens = request.check_first_tokens(geometry.groups.len())?;
    let spans = check_spans("local", geometry, request.spans)?;
    let keys = Keys::new(request.seed);
    let mut classes: BTreeMap<Class, ContentSums> = BTreeMap::new();
    for (index, group) in geometry.groups.iter().enumerate() {
        if group.kind == Kind::Opaque {
            continue; // only its owner knows what its blocks mean for a request
        }
        let (span, counted) = (&spans[index], Counted::new(group, request.num_tokens, first_tokens[index]));
        let sums = classes.entry(class_of(group)).or_insert_with(|| ContentSums::empty(group, counted));
        sums.from_token = sums.from_token.max(from_token(group, span, counted));
        let group_sum = GroupSum {
            geometry,
            memory,
            cp_rank: group.cp_rank,
            keys,
            ranks: Ranks::of_group(group, (geometry.tp_rank, geometry.tp_size), request.cp_tp_size),
            pieces: pieces_of(group, span, counted, keys),
        };
        for layer in geometry.layers.iter().filter(|layer| layer.group == index && is_wanted(layer)) {
            group_sum.add_layer(layer, sums)?;
        }
    }
    Ok(classes.into_values().collect())
}

impl ContentRequest<'_> {
    fn check_num_tokens(&self) -> Result<()> {
        if self.num_tokens == 0 || self.num_tokens > MAX_TOKENS {
            return Err(Error::value("", "num_tokens", self.num_tokens, format!("has to be 1 to {MAX_TOKENS}")));
        }
        Ok(())
    }

    /// For each group the first token that counts.
    fn check_first_tokens(&self, groups: usize) -> Result<Vec<u64>> {
        let first_tokens = self.first_tokens.map_or_else(|| vec![0; groups], <[u64]>::to_vec);
        if first_tokens.len() != groups {
            return Err(Error::count("first tokens", first_tokens.len(), groups));
        }
        Ok(first_tokens)
    }
}

/// First token that counts in a group. For a state: the end of the request if the state is missing, else 0.
fn from_token(group: &Group, span: &CheckedSpan, counted: Counted) -> u64 {
    if group.kind.is_attention() {
        counted.from
    } else if span.ids.is_empty() {
        counted.num_tokens
    } else {
        0
    }
}

/// What the sums of a group's layers have in common.
struct GroupSum<'a> {
    geometry: &'a Geometry,
    memory: &'a dyn ContentMemory,
    cp_rank: u64,
    keys: Keys,
    ranks: Ranks,
    pieces: Pieces,
}

impl GroupSum<'_> {
    /// Adds the parts of a layer to the sums of its class.
    fn add_layer(&self, layer: &Layer, sums: &mut ContentSums) -> Result<()> {
        for part in &self.geometry.page(layer).parts {
            let part_sum = PartSum::new(self.keys, &layer.name, part, weight(self.ranks, layer, part)?);
            let sums = sums.of_part(layer, part)?;
            // Context-parallel ranks hold the same items of other tokens.
            if self.cp_rank == 0 {
                sums[0] = sums[0].wrapping_add(part_sum.coverage());
            }
            for piece in if part_sum.has_tokens() { &self.pieces.tokens } else { &self.pieces.whole } {
                let of_piece = part_sum.sum(self.memory, layer.region, piece.offset(layer, part), &piece.keys);
                sums[piece.range + 1] = sums[piece.range + 1].wrapping_add(of_piece);
            }
        }
        Ok(())
    }
}

/// The weight of a rank's copy. Only one copy of heads that ranks may repeat is used, so it counts fully.
fn weight(ranks: Ranks, layer: &Layer, part: &Part) -> Result<u64> {
    if part.axes.iter().any(|axis| axis.may_repeat) { Ok(1) } else { ranks.weight(layer, part) }
}

impl ContentSums {
    fn empty(group: &Group, counted: Counted) -> Self {
        let (kind, limit) = class_of(group);
        let sums = vec![0; counted.ranges(group.kind) + 1];
        let first_token = if group.kind.is_attention() { counted.low } else { 0 };
        Self { kind, limit, first_token, from_token: 0, sums, repeated: None, heads: Vec::new() }
    }

    /// The sums that a part is added to.
    fn of_part(&mut self, layer: &Layer, part: &Part) -> Result<&mut [u64]> {
        if let Some(heads) = part.axis(HEADS).filter(|axis| !axis.may_repeat && !self.heads.contains(&axis.extent)) {
            self.heads.push(heads.extent);
        }
        let Some(axis) = part.axes.iter().find(|axis| axis.may_repeat) else { return Ok(&mut self.sums) };
        let count = self.sums.len();
        let empty = || RepeatedSums { place: axis.start, places: axis.extent, sums: vec![0; count] };
        let repeated = self.repeated.get_or_insert_with(empty);
        if axis.name != HEADS || (repeated.place, repeated.places) != (axis.start, axis.extent) {
            return Err(not_alone(layer, part, axis));
        }
        Ok(&mut repeated.sums)
    }
}

fn not_alone(layer: &Layer, part: &Part, axis: &Axis) -> Error {
    let place = format!("layer {:?} part {:?}", layer.name, part.name);
    let found = format!("{} {} of {}", axis.name, axis.start, axis.extent);
    let expected = "expected the same place on the axis \"heads\" in all layers of its kind".into();
    Error::geometry(&place, "axis that may repeat", found, expected)
}
