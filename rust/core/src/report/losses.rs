// SPDX-License-Identifier: Apache-2.0
//! The reverse direction: which tokens of which layers local bytes belong to, and which prefix is left without them.
use std::collections::{BTreeMap, BTreeSet};

use crate::bytes::pieces::{Cutout, PageBases, Piece, TokenCut, part_pieces};
use crate::bytes::rows::{Descriptor, NO_ADVICE};
use crate::error::{Error, Result};
use crate::geometry::ranges::Interval;
use crate::geometry::types::{Geometry, KernelBlockId, Layer};
use crate::pairing::plan::Plan;
use crate::request::block_pairs::visit_pairs;
use crate::request::checked::CheckedRequest;
use crate::request::group_span::GroupSpan;
use crate::request::span::Span;
use crate::request::token_ranges::{TailPolicy, TokenRange};

/// The lost tokens of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Local group.
    pub group: usize,
    /// Name of the layer.
    pub layer: String,
    /// Absolute token ranges, sorted; empty for state, which is lost as a whole.
    pub tokens: Vec<(u64, u64)>,
}

/// The losses of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Losses {
    /// Layers that lost data, in the order of the geometry.
    pub layers: Vec<Loss>,
    /// The longest prefix, in tokens, for which every group has all that it needs.
    pub whole_prefix: u64,
}

/// Bytes of some rows: sorted ranges that do not touch.
fn join(rows: impl Iterator<Item = Descriptor>) -> Vec<Interval> {
    let mut ranges: Vec<Interval> =
        rows.map(|[start, length, _]| Interval { start, end: start.saturating_add(length) }).collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let touches = next.start <= last.end;
        if touches {
            last.end = last.end.max(next.end);
        }
        touches
    });
    ranges
}

/// Failed bytes: sorted ranges that do not touch.
struct Failed(Vec<Interval>);

impl Failed {
    fn new(rows: &[Descriptor]) -> Self {
        Self(join(rows.iter().copied()))
    }

    /// Whether any byte of `start..end` failed.
    fn touches(&self, start: u64, end: u64) -> bool {
        let begun = self.0.partition_point(|range| range.start < end);
        begun > 0 && self.0[begun - 1].end > start
    }

    /// Whether any byte of a token of a layer's kernel block failed; every token of a state covers the whole state.
    fn touches_token(&self, geometry: &Geometry, layer: &Layer, block: KernelBlockId, token: u64) -> bool {
        let page = page_address(geometry, layer, block);
        let mut pieces: Vec<Piece> = Vec::new();
        for part in &geometry.page(layer).parts {
            let ranges = part.shard();
            let cutout = Cutout { ranges: &ranges, tokens: Some(TokenCut { local: token, remote: token, count: 1 }) };
            part_pieces(part, part, cutout, PageBases { local: page, remote: page }, &mut pieces);
        }
        pieces.iter().any(|piece| self.touches(piece.local, piece.local + piece.len))
    }
}

/// Where the page of a kernel block begins, see the picture of [`Layer`].
fn page_address(geometry: &Geometry, layer: &Layer, block: KernelBlockId) -> u64 {
    let kernel_blocks = geometry.group(layer).kernel_blocks_per_block;
    geometry.first_page(layer)
        + block.0 / kernel_blocks * layer.block_stride
        + block.0 % kernel_blocks * layer.kernel_stride
}

impl Plan {
    /// Maps failed local rows of a request to layers and tokens. Fails if a row is not part of what the request reads,
    /// with its last kernel block whole or not, so no failed row is ignored.
    ///
    /// The other arguments are those of the transfer. `cached` tokens were there before it, so the remaining prefix is
    /// never shorter.
    pub fn losses(
        &self,
        num_tokens: u64,
        local: &[Span],
        remote: &[Vec<Span>],
        failed: &[Descriptor],
        cached: u64,
    ) -> Result<Losses> {
        let request = self.check(num_tokens, local, remote, TailPolicy::Whole)?;
        self.require_read(&request, failed)?;
        let failed = Failed::new(failed);
        let mut layers = Vec::new();
        for layer in &self.local.layers {
            let blocks = self.local_span(&request.spans, layer.group);
            let (is_hit, tokens) = match request.token_ranges[layer.group] {
                Some(range) => {
                    let tokens = self.lost_tokens(layer, &blocks, range, num_tokens, &failed);
                    (!tokens.is_empty(), tokens)
                }
                None => {
                    (blocks.kernel_blocks().any(|block| failed.touches_token(&self.local, layer, block, 0)), vec![])
                }
            };
            if is_hit {
                layers.push(Loss { group: layer.group, layer: layer.name.clone(), tokens });
            }
        }
        let whole_prefix = self.whole_prefix(cached.min(num_tokens), &request, &layers);
        Ok(Losses { layers, whole_prefix })
    }

    /// Fails unless each row is inside the bytes that a request reads. Rows may be cut or joined: with ids each block
    /// has a row.
    fn require_read(&self, request: &CheckedRequest, failed: &[Descriptor]) -> Result<()> {
        if failed.is_empty() {
            return Ok(());
        }
        let reads = self.reads(request, &[], NO_ADVICE)?;
        let rows = || reads.iter().flat_map(|read| &read.copies.local).copied();
        let mut by_device: BTreeMap<u64, Vec<Interval>> = BTreeMap::new();
        for device in rows().map(|[_, _, device]| device).collect::<BTreeSet<u64>>() {
            by_device.insert(device, join(rows().filter(|row| row[2] == device)));
        }
        let is_read = |&[start, length, device]: &Descriptor| {
            let end = start.checked_add(length).filter(|&end| end > start);
            let ranges = by_device.get(&device).map_or(&[] as &[Interval], Vec::as_slice);
            let begun = ranges.partition_point(|range| range.start <= start);
            begun > 0 && end.is_some_and(|end| end <= ranges[begun - 1].end)
        };
        match failed.iter().position(|row| !is_read(row)) {
            Some(index) => Err(Error::not_read(index, failed[index])),
            None => Ok(()),
        }
    }

    /// Ranges of moved tokens of a layer that failed.
    fn lost_tokens(
        &self,
        layer: &Layer,
        blocks: &GroupSpan,
        range: TokenRange,
        num_tokens: u64,
        failed: &Failed,
    ) -> Vec<(u64, u64)> {
        let mut lost: Vec<(u64, u64)> = Vec::new();
        let mut moved = range.moved();
        moved.end = moved.end.min(num_tokens);
        let mut at = moved.start;
        visit_pairs(blocks, blocks, moved, |pair| {
            // Pairs are in the order of the sequence; gaps are other ranks' positions.
            for offset in 0..pair.cut.count {
                at = blocks.next_held(at);
                if failed.touches_token(&self.local, layer, pair.local, pair.cut.local + offset) {
                    push_token(&mut lost, at);
                }
                at += 1;
            }
        });
        lost
    }

    fn whole_prefix(&self, cached: u64, request: &CheckedRequest, lost: &[Loss]) -> u64 {
        let mut prefix = request.spans.num_tokens;
        loop {
            let before = prefix;
            for group in 0..self.local.groups.len() {
                prefix = self.whole_prefix_of(group, prefix, cached, request, lost);
            }
            if prefix == before {
                return prefix;
            }
        }
    }

    /// The longest part of the first `prefix` tokens for which a group has all that it needs, at least the `cached`
    /// tokens.
    fn whole_prefix_of(&self, index: usize, prefix: u64, cached: u64, request: &CheckedRequest, lost: &[Loss]) -> u64 {
        let group = &self.local.groups[index];
        let is_shorter = prefix < request.spans.num_tokens;
        let mut lost = lost.iter().filter(|loss| loss.group == index);
        let Some(range) = request.token_ranges[index] else {
            // A state belongs to all tokens or to none.
            let is_lost = lost.next().is_some() || (is_shorter && !request.spans.local[index].ids.is_empty());
            return if is_lost { cached } else { prefix };
        };
        // A shorter prefix lacks the tokens that a window has freed.
        let needed = group.first_needed_token(prefix);
        let is_freed = needed < range.start.min(prefix) && range.start > cached;
        if group.kind.frees_early_tokens() && is_shorter && is_freed {
            return cached;
        }
        let hits = lost.flat_map(|loss| &loss.tokens).filter(|range| range.1 > needed && range.0 < prefix);
        let first = hits.map(|range| range.0.max(needed)).min();
        first.unwrap_or(prefix).min(prefix).max(cached)
    }
}

fn push_token(ranges: &mut Vec<(u64, u64)>, token: u64) {
    match ranges.last_mut() {
        Some(last) if last.1 == token => last.1 += 1,
        _ => ranges.push((token, token + 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::plan::PlanOptions;
    use std::sync::Arc;

    /// A full group of one layer with blocks of 4 tokens of 2 bytes: two kernel blocks of 4 bytes, and 8 bytes of
    /// padding after each block. And a state group with slots of 6 bytes.
    fn geometry(base: u64) -> Arc<Geometry> {
        let json = format!(
            r#"{{"kvhma":1,"null_block":null,"regions":[{{"base":{base},"bytes":200}},{{"base":{},"bytes":60}}],
            "groups":[{{"kind":"full","block_size":4,"ratio":2}},{{"kind":"ssm","block_size":4}}],
            "pages":[{{"parts":[{{"name":"kv","dtype":"u8","item_bytes":2,"offset":0,
            "axes":[{{"name":"tokens","extent":2,"stride":2}}]}}]}},
            {{"parts":[{{"name":"s","dtype":"u8","item_bytes":6,"offset":0,"axes":[]}}]}}],
            "layers":[{{"name":"a","group":0,"page":0,"region":0,"offset":0,"num_blocks":10,"block_stride":16,
            "kernel_stride":4}},
            {{"name":"s","group":1,"page":1,"region":1,"offset":0,"num_blocks":10,"block_stride":6}}]}}"#,
            base + 1000
        );
        Arc::new(Geometry::from_json(json.as_bytes()).expect("a valid geometry"))
    }

    /// Losses of a request of 10 tokens, of which 2 were cached, in blocks 7, 3 and 5 and with its state in slot 4.
    fn losses(failed: &[(u64, u64)]) -> Losses {
        tried(failed).expect("a whole request")
    }

    fn tried(failed: &[(u64, u64)]) -> Result<Losses> {
        let failed: Vec<Descriptor> = failed.iter().map(|&(address, length)| [address, length, 0]).collect();
        let plan =
            Plan::new(geometry(1 << 20), vec![geometry(1 << 30)], PlanOptions::EXACT).expect("equal geometries pair");
        let spans = [Span { first: 0, ids: vec![7i64, 3, 5].into() }, Span { first: 0, ids: vec![4i64].into() }];
        plan.losses(10, &spans, &[spans.to_vec()], &failed, 2)
    }

    #[test]
    fn bytes_are_of_tokens_in_kernel_blocks() {
        // Tokens 4..8 are in block 3, at bytes 48..56 of the layer: two kernel blocks with a stride of 4, not of 8.
        let one = losses(&[((1 << 20) + 52, 1)]);
        assert_eq!(one.layers, [Loss { group: 0, layer: "a".into(), tokens: vec![(6, 7)] }]);
        // The state belongs to all tokens, so only the cached tokens are left.
        assert_eq!(one.whole_prefix, 2);
        let touching = losses(&[((1 << 20) + 54, 2), ((1 << 20) + 112, 4), ((1 << 20) + 51, 2)]);
        assert_eq!(touching.layers[0].tokens, [(0, 2), (5, 8)]);
    }

    #[test]
    fn what_is_not_read_cannot_have_failed() {
        // Padding after block 3, block 1, the end of a row, nothing at all, and another device.
        for row in [(56, 8), (16, 8), (54, 3), (52, 0)] {
            let error = tried(&[((1 << 20) + 48, 4), ((1 << 20) + row.0, row.1)]).expect_err("not read");
            assert!(error.to_string().starts_with("failed[1]: "), "{error}");
        }
        assert!(tried(&[(u64::MAX, 8)]).is_err());
        // Block 5 has tokens 8 and 9 in its first kernel block; the other kernel block is not read.
        assert!(tried(&[((1 << 20) + 84, 4)]).is_err());
        assert_eq!(losses(&[]), Losses { layers: vec![], whole_prefix: 10 });
    }

    #[test]
    fn a_state_is_lost_as_a_whole() {
        let lost = losses(&[((1 << 20) + 1000 + 4 * 6 + 5, 1)]);
        assert_eq!(lost.layers, [Loss { group: 1, layer: "s".into(), tokens: vec![] }]);
        assert_eq!(lost.whole_prefix, 2);
    }
}
