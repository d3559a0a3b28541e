// SPDX-License-Identifier: Apache-2.0
//! Pairs of pages, and their places: layers with equal layouts are cut once.
use std::collections::BTreeMap;

use crate::bytes::pieces::{Cutout, PageBases, Piece, TokenCut, count_pieces, join_neighbours, part_pieces};
use crate::geometry::types::{Geometry, Part};
use crate::pairing::group_pair::{Geometries, GroupPair, LayerIndices, PartSlice, StridePair};

/// Regions on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub(crate) struct RegionPair {
    pub(crate) local: u16,
    pub(crate) remote: u16,
}

impl RegionPair {
    fn of(geometries: &Geometries, layers: LayerIndices) -> Self {
        let Geometries { local, remote } = geometries;
        // The check allows fewer regions than that.
        Self { local: local.layers[layers.local].region as u16, remote: remote.layers[layers.remote].region as u16 }
    }

    /// Device ids of the regions, local and remote.
    pub(crate) fn devices(self, geometries: &Geometries) -> (u64, u64) {
        let device = |geometry: &Geometry, region: u16| geometry.regions[usize::from(region)].device.into();
        (device(geometries.local, self.local), device(geometries.remote, self.remote))
    }
}

/// A layer of a pair of pages, and its slices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    group_pair: usize,
    /// Indices of the layer's page on both sides.
    pages: (usize, usize),
    slices: Vec<PartSlice>,
    /// Offset from the place of the pages.
    bases: PageBases,
    strides: StridePair,
}

/// The slices of layers whose blocks are interleaved: of one layer, of layers that share its memory, or of all layers
/// of a block-major cache.
///
/// ```text
/// layers apart         |a0|a1|a2| |b0|b1|b2|     one pair of pages at two places
/// block-major          |a0 b0|a1 b1|a2 b2|       a pair of two layers, whose pieces touch
/// ```
#[derive(Debug, Default)]
pub(crate) struct PagePair {
    members: Vec<Member>,
    pub(crate) num_places: u64,
}

/// Where the pages of block 0 are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) page_pair: usize,
    pub(crate) bases: PageBases,
    pub(crate) regions: RegionPair,
}

/// Pieces of one cut of a pair of pages, joined over parts and layers, by their repetitions.
#[derive(Debug)]
pub(crate) struct PagePieces {
    pub(crate) by_strides: Vec<(StridePair, Vec<Piece>)>,
    pub(crate) count: u64,
}

impl PagePair {
    /// The pairs of groups of its layers.
    pub(crate) fn group_pairs(&self) -> impl Iterator<Item = usize> {
        self.members.chunk_by(|one, next| one.group_pair == next.group_pair).map(|members| members[0].group_pair)
    }

    fn members_of(&self, group_pair: usize) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.group_pair == group_pair)
    }

    /// Parts of the layers of a pair of groups.
    pub(crate) fn num_slices(&self, group_pair: usize) -> u64 {
        self.members_of(group_pair).map(|member| member.slices.len() as u64).sum()
    }

    /// The parts with bytes in a cut.
    fn part_cuts<'a>(
        &'a self,
        group_pair: usize,
        cut: TokenCut,
        geometries: &Geometries<'a>,
    ) -> impl Iterator<Item = (&'a Member, PartCut<'a>)> {
        let Geometries { local, remote } = *geometries;
        let part_cut = move |member: &Member, slice: &'a PartSlice| PartCut {
            local: &local.pages[member.pages.0].parts[slice.local_part],
            remote: &remote.pages[member.pages.1].parts[slice.remote_part],
            cutout: Cutout { ranges: &slice.ranges, tokens: Some(cut) },
        };
        self.members_of(group_pair)
            .flat_map(move |member| member.slices.iter().map(move |slice| (member, part_cut(member, slice))))
            // Content that tokens do not cut belongs to the block's first token.
            .filter(move |(_, part)| part.local.tokens().is_some() || cut.local == 0)
    }

    /// Number of pieces of a block for a cut, before they are joined.
    pub(crate) fn count_unjoined(&self, group_pair: usize, cut: TokenCut, geometries: &Geometries) -> u64 {
        let parts = self.part_cuts(group_pair, cut, geometries).map(|(_, part)| part);
        parts.map(|part| count_pieces(part.local, part.remote, part.cutout)).fold(0, u64::saturating_add)
    }

    /// The pieces of a block for a cut of a pair of groups.
    pub(crate) fn pieces(&self, group_pair: usize, cut: TokenCut, geometries: &Geometries) -> PagePieces {
        let mut by_strides: Vec<(StridePair, Vec<Piece>)> = Vec::new();
        for (member, PartCut { local, remote, cutout }) in self.part_cuts(group_pair, cut, geometries) {
            let index = by_strides.iter().position(|known| known.0 == member.strides).unwrap_or_else(|| {
                by_strides.push((member.strides, Vec::new()));
                by_strides.len() - 1
            });
            part_pieces(local, remote, cutout, member.bases, &mut by_strides[index].1);
        }
        for (_, pieces) in &mut by_strides {
            join_neighbours(pieces);
        }
        let count = by_strides.iter().map(|(_, pieces)| pieces.len() as u64).sum();
        PagePieces { by_strides, count }
    }
}

/// A pair of parts, and the slice to cut.
struct PartCut<'a> {
    local: &'a Part,
    remote: &'a Part,
    cutout: Cutout<'a>,
}

/// A layer of a pair of groups, and its place.
struct Placed<'a> {
    regions: RegionPair,
    bases: PageBases,
    /// One past the local page of block 0.
    end: u64,
    group_pair: usize,
    layers: LayerIndices,
    slices: &'a [PartSlice],
    strides: StridePair,
}

impl<'a> Placed<'a> {
    fn all(group_pairs: &'a [GroupPair], geometries: &Geometries) -> Vec<Self> {
        let Geometries { local, remote } = geometries;
        let mut found = Vec::new();
        for (group_pair, pair) in group_pairs.iter().enumerate() {
            for layer in &pair.layers {
                let (layer_here, layer_there) =
                    (&local.layers[layer.layers.local], &remote.layers[layer.layers.remote]);
                let bases = PageBases { local: local.first_page(layer_here), remote: remote.first_page(layer_there) };
                found.push(Self {
                    regions: RegionPair::of(geometries, layer.layers),
                    bases,
                    end: bases.local.saturating_add(local.page(layer_here).end()),
                    group_pair,
                    layers: layer.layers,
                    slices: &layer.slices,
                    strides: StridePair::of(geometries, layer.layers),
                });
            }
        }
        found.sort_by_key(|layer| (layer.regions, layer.bases, layer.group_pair));
        found
    }

    /// The layer as a member of a pair of pages at a place.
    fn member(&self, place: PageBases, geometries: &Geometries) -> Member {
        let Geometries { local, remote } = geometries;
        Member {
            group_pair: self.group_pair,
            pages: (local.layers[self.layers.local].page, remote.layers[self.layers.remote].page),
            slices: self.slices.to_vec(),
            bases: PageBases { local: self.bases.local - place.local, remote: self.bases.remote - place.remote },
            strides: self.strides,
        }
    }
}

/// Distinct pairs of pages, and all their places, by local address.
pub(crate) fn pair_pages(group_pairs: &[GroupPair], geometries: &Geometries) -> (Vec<PagePair>, Vec<Place>) {
    let mut known: BTreeMap<Vec<Member>, usize> = BTreeMap::new();
    let mut places: Vec<Place> = Vec::new();
    let layers = Placed::all(group_pairs, geometries);
    let mut rest = layers.as_slice();
    while let Some(first) = rest.first() {
        let (interleaved, others) = rest.split_at(count_interleaved(rest));
        let remote = interleaved.iter().map(|layer| layer.bases.remote).min().unwrap_or_default();
        let bases = PageBases { local: first.bases.local, remote };
        let mut members: Vec<Member> = interleaved.iter().map(|layer| layer.member(bases, geometries)).collect();
        members.sort_unstable();
        let next = known.len();
        let page_pair = *known.entry(members).or_insert(next);
        places.push(Place { page_pair, bases, regions: first.regions });
        rest = others;
    }
    places.sort_by_key(|place| place.bases.local);
    let mut page_pairs: Vec<PagePair> = Vec::new();
    page_pairs.resize_with(known.len(), PagePair::default);
    for (members, index) in known {
        page_pairs[index].members = members;
    }
    for place in &places {
        page_pairs[place.page_pair].num_places += 1;
    }
    (page_pairs, places)
}

/// Number of layers whose blocks are interleaved with those of the first layer; at least 1.
fn count_interleaved(layers: &[Placed]) -> usize {
    let (first, others) = (&layers[0], &layers[1..]);
    let (mut end, mut stride) = (first.end, first.strides.local.block);
    let in_same_regions = others.iter().take_while(|layer| layer.regions == first.regions);
    let interleaved = in_same_regions.take_while(|layer| {
        // Blocks of the layer are between those of the others, or its page continues where theirs ends.
        let is_near = layer.bases.local - first.bases.local < stride || layer.bases.local <= end;
        (end, stride) = (end.max(layer.end), stride.max(layer.strides.local.block));
        is_near
    });
    1 + interleaved.count()
}
