// SPDX-License-Identifier: Apache-2.0
//! Shapes of work whose instructions benches/instructions.py counts: each runs once to fill caches, and once more.
//! Prints a line for each: its name, its blocks, and the ids or descriptors that come out.
use std::hint::black_box;
use std::io::Write as _;
use std::sync::Arc;

use kvhma_core::lowlevel::block_ids::{BlockIds, expand_blocks};
use kvhma_core::lowlevel::id_order::IdOrder;
use kvhma_core::lowlevel::ids::{Clip, first_entries};
use kvhma_core::lowlevel::out::Out;
use kvhma_core::lowlevel::permute::permuted_rows;
use kvhma_core::lowlevel::views::{expand_views, state_views};
use kvhma_core::{Geometry, Plan, PlanOptions, Result, Span};

/// A prime: steps modulo it make every order of the blocks.
const BLOCKS: u64 = 131_101;
const LAYERS: u64 = 8;

fn main() -> Result<()> {
    count("clip a table, half of it null blocks", 8_192, || {
        let table = BlockIds::Narrow(black_box(&HALF_NULL));
        let clip = Clip { keep: 4_000, speculative: None };
        Ok(table.slice(clip.entries(table.len(), table.leading(Some(0)))).len())
    })?;
    let table = ids(8_192, 2_053);
    count("expand blocks, 4 kernel blocks each", 8_192, || {
        let mut out = Out::new(|_| ());
        expand_blocks(0, BlockIds::Narrow(&table), 4, &mut out)?;
        Ok(out.len())
    })?;
    let order = IdOrder::new(&[1], &[BLOCKS + 1; LAYERS as usize], &vec![vec![0]; LAYERS as usize])?;
    let batch = [BlockIds::Narrow(&table[..128]); 64];
    count("ids of a batch in vLLM's order, 64 requests", 8_192, || {
        let mut out = Out::new(|_| ());
        order.write(&batch, &mut out)?;
        Ok(out.len())
    })?;
    count("Mamba descriptors, 3 parts a slot", 1_024, || {
        let bases = [1 << 30, 1 << 31, 1 << 32, 1 << 33];
        let parts = [(0, 8_192), (8_192, 4_096), (12_288, 1 << 20)];
        let views = state_views(&bases, &parts, &[2 << 20; 4], &[1_024; 4], &[0; 4])?;
        let mut out = Out::new(|_| ());
        expand_views(&views, &mut out)?;
        Ok(out.len())
    })?;
    live_spans()?;
    let plan = plan((16, "tokens"), (16, "tokens"))?;
    for (name, of) in [("sorted", (1, 1)), ("descending", (BLOCKS - 1, BLOCKS - 1)), ("scattered", (2_053, 4_099))] {
        let (local, remote) = (spans(8_192, of.0), [spans(8_192, of.1)]);
        count(&format!("Plan.ids, {name}"), 8_192, || Ok(plan.ids(8_192 * 16, &local, &remote)?.reads[0].local.len()))?;
    }
    let scattered = (2_053, 4_099);
    for (name, blocks, steps) in [
        ("16 blocks", 16, scattered),
        ("512 blocks", 512, scattered),
        ("8,192 blocks", 8_192, scattered),
        ("8,192 neighbours", 8_192, (1, 1)),
        ("131,072 blocks", 131_072, scattered),
    ] {
        let (local, remote) = (spans(blocks, steps.0), [spans(blocks, steps.1)]);
        let copies = || Ok(plan.transfer(blocks * 16, &local, &remote)?.reads[0].copies.len());
        count(&format!("Plan.transfer, {name}"), blocks, copies)?;
    }
    permuted()
}

static HALF_NULL: [i32; 8_192] = {
    let mut table = [0; 8_192];
    let mut at = 4_096;
    while at < table.len() {
        table[at] = at as i32;
        at += 1;
    }
    table
};

/// The shape is between two calls of `getpid`, at which callgrind writes what it has counted since the last one.
fn count(name: &str, blocks: u64, mut shape: impl FnMut() -> Result<usize>) -> Result<()> {
    shape()?;
    black_box(std::process::id());
    let out = black_box(shape())?;
    black_box(std::process::id());
    writeln!(std::io::stdout(), "{name}\t{blocks}\t{out}").expect("standard output is open");
    Ok(())
}

/// A full group and six sliding ones, as Gemma 3 has.
fn live_spans() -> Result<()> {
    let full = r#"{"kind":"full","block_size":16}"#.to_owned();
    let sliding = r#"{"kind":"sliding","window":1024,"block_size":16}"#.to_owned();
    let groups: Vec<String> = std::iter::once(full).chain(vec![sliding; 6]).collect();
    let geometry = geometry(&groups, (16, "tokens"), 1 << 30)?;
    count("live spans of 7 groups", 7 * 512, || {
        let starts = first_entries(&geometry, Some(8_192), &[0; 7])?;
        let spans = starts.iter().map(|&start| {
            let live = BlockIds::Narrow(black_box(&HALF_NULL[4_096..4_608])).slice(start as usize..512);
            live.len() - live.leading(Some(0))
        });
        Ok(spans.sum())
    })
}

/// Rows of P's blocks of 16 tokens in D's of 64, heads outside of tokens.
fn permuted() -> Result<()> {
    let plan = plan((64, "heads"), (16, "heads"))?;
    let (local, remote) = (spans(256, 2_053), [spans(1_024, 4_099)]);
    let transfer = plan.transfer(1_024 * 16, &local, &remote)?;
    let rows = &transfer.reads[0].copies;
    count("permuted rows, blocks of 16 in blocks of 64", 1_024, || {
        permuted_rows(&rows.local, &rows.remote, (&[], &[]), u64::MAX)?;
        Ok(rows.len())
    })
}

/// Layers of one page in as many regions, for each group: 8 heads of 512 bytes a token. `outer` are tokens or heads.
fn geometry(groups: &[String], (tokens, outer): (u64, &str), base: u64) -> Result<Geometry> {
    let page = 8 * tokens * 512;
    let bytes = page * (BLOCKS + 1);
    let list = |texts: &mut dyn Iterator<Item = String>| texts.collect::<Vec<_>>().join(",");
    let regions = list(&mut (0..LAYERS).map(|layer| format!(r#"{{"base":{},"bytes":{bytes}}}"#, base + layer * bytes)));
    let places = (0..groups.len()).flat_map(|group| (0..LAYERS).map(move |layer| (group, layer)));
    let layers = list(&mut places.map(|(group, layer)| {
        format!(
            r#"{{"name":"{group}.{layer}","group":{group},"page":0,"region":{layer},"offset":0,
            "num_blocks":{},"block_stride":{page}}}"#,
            BLOCKS + 1
        )
    }));
    let strides = if outer == "heads" { (tokens * 512, 512) } else { (512, 8 * 512) };
    let json = format!(
        r#"{{"kvhma":1,"regions":[{regions}],"layers":[{layers}],"groups":[{}],"pages":[{{"parts":[{{"name":"kv",
        "dtype":"bf16","item_bytes":2,"offset":0,"axes":[{{"name":"heads","extent":8,"stride":{}}},
        {{"name":"tokens","extent":{tokens},"stride":{}}},{{"name":"content","extent":256,"stride":2}}]}}]}}]}}"#,
        groups.join(","),
        strides.0,
        strides.1
    );
    Geometry::from_json(json.as_bytes())
}

fn plan(local: (u64, &str), remote: (u64, &str)) -> Result<Plan> {
    let side = |form: (u64, &str), base| {
        geometry(&[format!(r#"{{"kind":"full","block_size":{}}}"#, form.0)], form, base).map(Arc::new)
    };
    let options = PlanOptions { descriptor_bytes: 0, ..PlanOptions::EXACT };
    Plan::new(side(local, 1 << 30)?, vec![side(remote, 1 << 50)?], options)
}

/// Different blocks: with a step of 1 each follows the one before, with most steps no two are neighbours.
fn ids(count: u64, step: u64) -> Vec<i32> {
    (0..count).map(|index| (1 + index * step % BLOCKS) as i32).collect()
}

fn spans(count: u64, step: u64) -> Vec<Span> {
    vec![Span { first: 0, ids: ids(count, step).into() }]
}
