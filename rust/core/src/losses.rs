// SPDX-License-Identifier: Apache-2.0
//! The way back: which tokens of which layers local bytes belong to, and what is whole without them.
use crate::error::{Error, Result};
use crate::geometry::{Kind, Layer};
use crate::pieces::{Chunk, Lane, Tokens, Window, part_chunks, shard};
use crate::plan::Plan;
use crate::runs::Descriptor;
use crate::segment::{Segment, pair};
use crate::span::Span;
use crate::transfer::{Checked, Tail, local_side};

/// What of one layer did not arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Local group.
    pub group: usize,
    /// Name of the layer.
    pub layer: String,
    /// Absolute token ranges, sorted; empty for state, which is lost as a whole.
    pub tokens: Vec<(u64, u64)>,
}

/// What a request lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Losses {
    /// Layers that lost anything, in the order of the geometry.
    pub layers: Vec<Loss>,
    /// The most leading tokens for which every group has all it needs.
    pub whole_prefix: u64,
}

impl Plan {
    /// Maps failed local ranges `(address, length)` of a request back to layers and tokens.
    ///
    /// The other arguments are those of the transfer. `cached` tokens were there before it: the prefix that is whole
    /// is never shorter.
    pub fn losses(
        &self,
        num_tokens: u64,
        local: &[Span],
        remote: &[Vec<Span>],
        failed: &[(u64, u64)],
        cached: u64,
    ) -> Result<Losses> {
        let request = self.check(num_tokens, local, remote, Tail::Whole)?;
        let mut failed: Vec<(u64, u64)> = failed.iter().map(|&(at, len)| (at, at.saturating_add(len))).collect();
        failed.sort_unstable();
        failed.dedup_by(|next, last| {
            let joined = next.0 <= last.1;
            if joined {
                last.1 = last.1.max(next.1);
            }
            joined
        });
        let mut layers = Vec::new();
        for layer in &self.local.layers {
            let side = local_side(&self.local, &request, layer.group);
            let mut hit = false;
            let mut tokens: Vec<(u64, u64)> = Vec::new();
            if let Some(reach) = request.reach[layer.group] {
                let mut at = reach.start;
                pair(&side, &side, reach.start, num_tokens.min(reach.end), |segment: Segment| {
                    // Segments come in the order of the sequence; gaps are other ranks' positions.
                    at = side.next_held(at);
                    for offset in 0..segment.tokens.count {
                        let token = segment.tokens.local + offset;
                        if self.touches(layer, segment.local, token, &failed) {
                            push_token(&mut tokens, at + offset);
                        }
                    }
                    at += segment.tokens.count;
                });
            } else {
                let ratio = side.group.ratio;
                hit = side.blocks.ids.iter().any(|&id| {
                    let first = u64::from(id) * ratio;
                    (first..first + ratio).any(|block| self.touches(layer, block, 0, &failed))
                });
            }
            if hit || !tokens.is_empty() {
                layers.push(Loss { group: layer.group, layer: layer.name.clone(), tokens });
            }
        }
        let whole_prefix = self.whole_prefix(num_tokens, cached.min(num_tokens), &request, &layers);
        Ok(Losses { layers, whole_prefix })
    }

    /// Whether any byte of a token of a kernel block lies in a failed range; ranges are sorted and do not touch.
    fn touches(&self, layer: &Layer, block: u64, token: u64, failed: &[(u64, u64)]) -> bool {
        let ratio = self.local.groups[layer.group].ratio;
        let kernel = layer.kernel_stride.unwrap_or(layer.block_stride);
        let page = self.local.regions[layer.region].base
            + layer.offset
            + block / ratio * layer.block_stride
            + block % ratio * kernel;
        let mut chunks: Vec<Chunk> = Vec::new();
        for part in &self.local.page(layer).parts {
            let ranges = shard(part);
            let window = Window { ranges: &ranges, tokens: Some(Tokens { local: token, remote: token, count: 1 }) };
            part_chunks(part, part, window, Lane { local: page, remote: page }, &mut chunks);
        }
        chunks.iter().any(|chunk| {
            let end = chunk.local + chunk.len;
            let behind = failed.partition_point(|range| range.0 < end);
            behind > 0 && failed[behind - 1].1 > chunk.local
        })
    }

    fn whole_prefix(&self, num_tokens: u64, cached: u64, request: &Checked, lost: &[Loss]) -> u64 {
        let mut prefix = num_tokens;
        loop {
            let before = prefix;
            for (index, group) in self.local.groups.iter().enumerate() {
                let of_group = || lost.iter().filter(|loss| loss.group == index);
                let Some(reach) = request.reach[index] else {
                    // A state is that of all tokens or of none.
                    if of_group().next().is_some() || (prefix < num_tokens && !request.local[index].ids.is_empty()) {
                        prefix = cached;
                    }
                    continue;
                };
                let needed = group.need_start(prefix);
                // What a window has dropped is not there for a shorter prefix either.
                let drops = matches!(group.kind, Kind::Sliding | Kind::Chunked);
                if drops && prefix < num_tokens && needed < reach.start.min(prefix) && reach.start > cached {
                    prefix = cached;
                }
                let ranges = of_group().flat_map(|loss| &loss.tokens);
                let hit = ranges.filter(|range| range.1 > needed && range.0 < prefix).map(|range| range.0.max(needed));
                prefix = prefix.min(hit.min().unwrap_or(prefix)).max(cached);
            }
            if prefix == before {
                return prefix;
            }
        }
    }

    /// Descriptors of the local side that ids of a source stand for.
    pub fn id_descriptors(&self, source: usize, ids: &[i32]) -> Result<Vec<Descriptor>> {
        let (views, _) = self.views(source)?;
        let ends: Vec<u64> = views
            .iter()
            .scan(0, |sum, view| {
                *sum += view[4];
                Some(*sum)
            })
            .collect();
        let total = ends.last().copied().unwrap_or(0);
        ids.iter()
            .enumerate()
            .map(|(index, &id)| {
                let id = u64::try_from(id).ok().filter(|&id| id < total).ok_or(Error::BlockRange {
                    side: "view",
                    group: source,
                    index,
                    id: id.into(),
                    num_blocks: total,
                })?;
                let row = ends.partition_point(|&end| end <= id);
                let [address, length, device, stride, count] = views[row];
                Ok([address + (id - (ends[row] - count)) * stride, length, device])
            })
            .collect()
    }
}

fn push_token(ranges: &mut Vec<(u64, u64)>, token: u64) {
    match ranges.last_mut() {
        Some(last) if last.1 == token => last.1 += 1,
        _ => ranges.push((token, token + 1)),
    }
}
