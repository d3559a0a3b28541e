// SPDX-License-Identifier: Apache-2.0
#![allow(missing_docs)]
//! Benchmarks of the core: plans, transfers and ids, without Python.
use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;

use divan::Bencher;
use kvhma_core::{Geometry, Plan, PlanOptions, Span};

const OPTIONS: PlanOptions = PlanOptions { descriptor_bytes: 131_072, ..PlanOptions::EXACT };

fn main() {
    divan::main();
}

/// `layers` attention layers in as many regions, blocks of `tokens` tokens and 4 heads.
fn attention(layers: usize, blocks: u64, tokens: u64, base: u64, heads: (u64, u64), rank: (u32, u32)) -> Geometry {
    let page = heads.1 * tokens * 512;
    let bytes = page * blocks;
    let (mut regions, mut list) = (String::new(), String::new());
    for layer in 0..layers as u64 {
        let comma = if layer > 0 { "," } else { "" };
        let start = base + layer * (bytes + 4096);
        let _ = write!(regions, r#"{comma}{{"base":{start},"bytes":{bytes}}}"#);
        let _ = write!(
            list,
            r#"{comma}{{"name":"l{layer}","group":0,"page":0,"region":{layer},"offset":0,"num_blocks":{blocks},"block_stride":{page}}}"#
        );
    }
    let json = format!(
        r#"{{"kvhma":1,"tp_rank":{},"tp_size":{},"regions":[{regions}],"layers":[{list}],
        "groups":[{{"kind":"full","block_size":{tokens}}}],
        "pages":[{{"parts":[{{"name":"kv","dtype":"bf16","item_bytes":2,"offset":0,"axes":[
        {{"name":"heads","extent":8,"start":{},"length":{},"stride":{}}},
        {{"name":"tokens","extent":{tokens},"stride":512}},{{"name":"content","extent":256,"stride":2}}]}}]}}]}}"#,
        rank.0,
        rank.1,
        heads.0,
        heads.1,
        tokens * 512
    );
    Geometry::from_json(json.as_bytes()).expect("a valid geometry")
}

fn equal(layers: usize, blocks: u64) -> Plan {
    let side = |base| Arc::new(attention(layers, blocks, 16, base, (0, 8), (0, 1)));
    Plan::new(side(1 << 20), vec![side(1 << 44)], OPTIONS).expect("equal geometries pair")
}

/// Ids in an unhelpful order: neighbours in the list are never neighbours in memory.
fn scattered(count: u64, step: u64) -> Vec<Span> {
    vec![Span { first: 0, ids: (0..count).map(|i| (1 + i * step % 8209) as i32).collect::<Vec<_>>().into() }]
}

#[divan::bench(args = [100, 10_000, 1_000_000])]
fn plan_of_100_layers_tp8(bencher: Bencher, blocks: u64) {
    let side = |rank: u32, base| Arc::new(attention(100, blocks, 16, base, (u64::from(rank), 1), (rank, 8)));
    let local = side(3, 1 << 20);
    let remotes: Vec<_> = (0..8).map(|rank| side(rank, 1 << 45)).collect();
    bencher.bench(|| Plan::new(Arc::clone(&local), remotes.clone(), OPTIONS).expect("pairs"));
}

#[divan::bench(args = [1_000, 50_000, 1_000_000])]
fn views_of_64_regions(bencher: Bencher, blocks: u64) {
    bencher.with_inputs(|| equal(64, blocks)).bench_refs(|plan| black_box(plan.views(0).expect("views").0.len()));
}

#[divan::bench(args = [512, 8_192])]
fn scattered_lists_to_runs_of_64_regions(bencher: Bencher, count: u64) {
    let plan = equal(64, 8_300);
    let (local, remote) = (scattered(count, 2053), vec![scattered(count, 4099)]);
    bencher.bench(|| plan.transfer(count * 16, &local, &remote).expect("fits").reads[0].copies.len());
}

#[divan::bench(args = [512, 8_192])]
fn lists_to_ids_of_64_regions(bencher: Bencher, count: u64) {
    let plan = equal(64, 8_300);
    let (local, remote) = (scattered(count, 2053), vec![scattered(count, 4099)]);
    bencher.bench(|| plan.ids(count * 16, &local, &remote).expect("fits").reads[0].local.len());
}
