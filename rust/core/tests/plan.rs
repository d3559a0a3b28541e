// SPDX-License-Identifier: Apache-2.0
//! Plans of small caches against brute force: the bytes, and that no smaller set of copies moves them.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use kvhma_core::{Geometry, Plan, PlanOptions, Span};
use proptest::prelude::*;

/// Sizes of a page, innermost last; the order of heads and tokens may differ between the sides.
#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: (u64, u64, u64),
    tokens: u64,
    content: u64,
    heads_first: bool,
    padding: u64,
    layers: u64,
    blocks: u64,
}

impl Shape {
    /// Strides of heads and tokens, and of blocks.
    fn strides(self) -> (u64, u64, u64) {
        let (heads, tokens) = (self.heads.1, self.tokens);
        let inner =
            if self.heads_first { (tokens * self.content, self.content) } else { (self.content, heads * self.content) };
        (inner.0, inner.1, heads * tokens * self.content + self.padding)
    }

    fn geometry(self, base: u64) -> Geometry {
        let (head, token, block) = self.strides();
        let mut layers = String::new();
        for layer in 0..self.layers {
            let comma = if layer > 0 { "," } else { "" };
            let offset = layer * block * self.blocks;
            let _ = write!(
                layers,
                r#"{comma}{{"name":"l{layer}","group":0,"page":0,"region":0,"offset":{offset},"num_blocks":{},"block_stride":{block}}}"#,
                self.blocks
            );
        }
        let (extent, held, start) = (self.heads.0, self.heads.1, self.heads.2);
        let json = format!(
            r#"{{"kvhma":1,"regions":[{{"base":{base},"bytes":{}}}],"layers":[{layers}],
            "groups":[{{"kind":"full","block_size":{}}}],"pages":[{{"parts":[{{"name":"kv","dtype":"u8","item_bytes":1,
            "offset":0,"axes":[{{"name":"heads","extent":{extent},"start":{start},"length":{held},"stride":{head}}},
            {{"name":"tokens","extent":{},"stride":{token}}},{{"name":"content","extent":{},"stride":1}}]}}]}}]}}"#,
            block * self.blocks * self.layers,
            self.tokens,
            self.tokens,
            self.content
        );
        Geometry::from_json(json.as_bytes()).expect("a valid geometry")
    }

    fn address(self, base: u64, layer: u64, block: u64, head: u64, token: u64, item: u64) -> u64 {
        let (heads, tokens, stride) = self.strides();
        base + (layer * self.blocks + block) * stride + (head - self.heads.2) * heads + token * tokens + item
    }
}

/// Local byte to remote byte, by the definition.
fn brute(local: Shape, remote: Shape, bases: (u64, u64), tokens: u64, ids: (&[i64], &[i64])) -> BTreeMap<u64, u64> {
    let mut bytes = BTreeMap::new();
    for layer in 0..local.layers {
        for t in 0..tokens {
            let to = (ids.0[(t / local.tokens) as usize] as u64, t % local.tokens);
            let from = (ids.1[(t / remote.tokens) as usize] as u64, t % remote.tokens);
            for head in local.heads.2..local.heads.2 + local.heads.1 {
                for item in 0..local.content {
                    let address = local.address(bases.0, layer, to.0, head, to.1, item);
                    bytes.insert(address, remote.address(bases.1, layer, from.0, head, from.1, item));
                }
            }
        }
    }
    bytes
}

fn shuffled(blocks: u64) -> impl Strategy<Value = Vec<i64>> {
    let ids: Vec<i64> = (1..blocks as i64).collect();
    prop_oneof![Just(ids.clone()), Just(ids.iter().rev().copied().collect()), Just(ids).prop_shuffle()]
}

prop_compose! {
    fn pairs()(heads in 1u64..4, content in 1u64..4, layers in 1u64..3, blocks in 4u64..7, other in 4u64..7,
               tokens in 1u64..5, remote_tokens in 1u64..5, first in any::<bool>(), remote_first in any::<bool>(),
               padding in 0u64..3, start in 0u64..3, held in 1u64..4)
              (local in shuffled(blocks), remote in shuffled(other), length in 1u64..100,
               heads in Just(heads), content in Just(content), layers in Just(layers), sizes in Just((blocks, other)),
               tokens in Just((tokens, remote_tokens)), first in Just((first, remote_first)), padding in Just(padding),
               start in Just(start.min(heads - 1)), held in Just(held))
              -> (Shape, Shape, u64, Vec<i64>, Vec<i64>) {
        let held = held.min(heads - start);
        let local_shape = Shape { heads: (heads, held, start), tokens: tokens.0, content, heads_first: first.0, padding, layers, blocks: sizes.0 };
        let remote_shape = Shape { heads: (heads, heads, 0), tokens: tokens.1, heads_first: first.1, padding: 0, blocks: sizes.1, ..local_shape };
        let most = ((sizes.0 - 1) * tokens.0).min((sizes.1 - 1) * tokens.1);
        (local_shape, remote_shape, 1 + length % most, local, remote)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn copies_are_right_and_the_fewest((local_shape, remote_shape, tokens, local, remote) in pairs()) {
        let bases = (4096, 1 << 32);
        let plan = Plan::new(Arc::new(local_shape.geometry(bases.0)), vec![Arc::new(remote_shape.geometry(bases.1))], PlanOptions::EXACT).expect("pairs");
        let spans = |ids: &Vec<i64>| vec![Span { first: 0, ids: ids.clone().into() }];
        let moved = plan.transfer(tokens, &spans(&local), &[spans(&remote)]).expect("fits");
        let expected = brute(local_shape, remote_shape, bases, tokens, (&local, &remote));
        let copies = &moved.reads[0].copies;
        let mut got = BTreeMap::new();
        for (to, from) in copies.local.iter().zip(&copies.remote) {
            prop_assert_eq!(to[1], from[1]);
            for byte in 0..to[1] {
                prop_assert!(got.insert(to[0] + byte, from[0] + byte).is_none());
            }
        }
        prop_assert_eq!(&got, &expected);
        prop_assert_eq!(copies.bytes(), expected.len() as u64);
        let breaks = expected.iter().zip(expected.iter().skip(1)).filter(|(a, b)| (a.0 + 1, a.1 + 1) != (*b.0, *b.1)).count();
        prop_assert_eq!(copies.len(), breaks + 1);
    }
}

/// A cache of two layers next to each other in each block of four tokens; the other side may have only the first layer.
fn side_by_side(base: u64, layers: u64, regions: &str) -> Geometry {
    let layer = |index: u64| {
        let (region, offset) = if regions.is_empty() { (0, index * 4) } else { (index, 0) };
        let stride = if regions.is_empty() { 8 } else { 4 };
        format!(
            r#"{{"name":"l{index}","group":0,"page":0,"region":{region},"offset":{offset},"num_blocks":4,
            "block_stride":{stride}}}"#
        )
    };
    let layers: Vec<String> = (0..layers).map(layer).collect();
    let whole = format!(r#"{{"base":{base},"bytes":32}}"#);
    let json = format!(
        r#"{{"kvhma":1,"null_block":null,"regions":[{}],"layers":[{}],"groups":[{{"kind":"full","block_size":4}}],"pages":[{{"parts":[
        {{"name":"kv","dtype":"u8","item_bytes":1,"offset":0,"axes":[{{"name":"tokens","extent":4,"stride":1}}]}}]}}]}}"#,
        if regions.is_empty() { &whole } else { regions },
        layers.join(",")
    );
    Geometry::from_json(json.as_bytes()).expect("a valid geometry")
}

fn zeroed(local: Geometry, ids: &[i64]) -> Vec<[u64; 3]> {
    let remote = side_by_side(1 << 32, 1, "");
    let plan = Plan::new(Arc::new(local), vec![Arc::new(remote)], PlanOptions::EXACT).expect("pairs");
    let spans = || vec![Span { first: 0, ids: ids.to_vec().into() }];
    plan.transfer(6, &spans(), &[spans()]).expect("fits").zero
}

#[test]
fn zeroed_neighbours_are_one_range_whoever_lacks_their_source() {
    // Tokens 6 and 7 of the first layer, then all of the second, which only the local side has.
    assert_eq!(zeroed(side_by_side(4096, 2, ""), &[1, 2]), [[4096 + 12, 4, 0], [4096 + 18, 6, 0]]);
    assert_eq!(zeroed(side_by_side(4096, 2, ""), &[2, 1]), [[4096 + 10, 6, 0], [4096 + 20, 4, 0]]);
}

#[test]
fn zeroed_neighbours_in_two_regions_stay_apart() {
    let regions = r#"{"base":4096,"bytes":16},{"base":4112,"bytes":16}"#;
    let local = side_by_side(4096, 2, regions);
    assert_eq!(zeroed(local, &[0, 3]), [[4110, 2, 0], [4112, 4, 0], [4124, 4, 0]]);
}
