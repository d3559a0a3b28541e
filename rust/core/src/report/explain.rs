// SPDX-License-Identifier: Apache-2.0
//! A plan in sentences and numbers.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::bytes::pieces::TokenCut;
use crate::geometry::types::{Axis, Group, Part};
use crate::pairing::cuts::{count_cuts, whole_block_cuts};
use crate::pairing::group_pair::{Geometries, GroupPair, LayerPair, PartSlice};
use crate::pairing::plan::{Plan, Source};
use crate::pairing::table::Table;

/// Group pairs of equal kinds with equal cuts, which are described once.
#[derive(PartialEq)]
struct Told {
    local_kind: &'static str,
    remote_kind: &'static str,
    sentences: String,
}

impl Plan {
    /// Describes what is read from which source, how it is cut, and why.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        let (rank, size) = (self.local.tp_rank, self.local.tp_size);
        let (used, sources) = (self.sources().len(), count(self.sources.len(), "source"));
        let _ = writeln!(text, "Rank {rank} of {size} reads from {used} of {sources}.");
        for (index, source) in self.sources.iter().enumerate() {
            let _ =
                write!(text, "\nSource {index} (rank {} of {}): ", source.geometry.tp_rank, source.geometry.tp_size);
            self.explain_source(index, source, &mut text);
        }
        if !self.unsourced.is_empty() {
            let names: Vec<&str> = self.unsourced.group_pairs.iter().flat_map(|pair| self.layer_names(pair)).collect();
            let _ = writeln!(text, "\nNo source has {}: zeroed, not read.", list(&names));
        }
        for (source, finding) in self.findings() {
            let _ = writeln!(text, "Source {source}: {}.", finding.text());
        }
        text
    }

    fn explain_source(&self, index: usize, source: &Source, text: &mut String) {
        let pairs = &source.table.group_pairs;
        if source.table.is_empty() {
            let why = "all it holds is read elsewhere or not needed. It may still wait for a notification.";
            let _ = writeln!(text, "nothing; {why}");
            return;
        }
        let layers: usize = pairs.iter().map(|pair| pair.layers.len()).sum();
        let _ = writeln!(text, "{}.", count(layers, "layer"));
        let mut alike: Vec<(Told, Vec<&GroupPair>)> = Vec::new();
        for (pair_index, pair) in pairs.iter().enumerate() {
            let geometries = self.geometries(index);
            let local_kind = geometries.local.groups[pair.local_group].kind.word();
            let remote_kind = geometries.remote.groups[pair.remote_group].kind.word();
            let sentences = explain_group_pair(&geometries, &source.table, pair_index);
            let told = Told { local_kind, remote_kind, sentences };
            match alike.iter_mut().find(|(known, _)| *known == told) {
                Some((_, pairs)) => pairs.push(pair),
                None => alike.push((told, vec![pair])),
            }
        }
        for (told, pairs) in alike {
            text.push_str(&self.title(&told, &pairs));
            text.push_str(&told.sentences);
        }
    }

    fn layer_names<'a>(&'a self, pair: &'a GroupPair) -> impl Iterator<Item = &'a str> {
        pair.layers.iter().map(|pair| self.local.layers[pair.layers.local].name.as_str())
    }

    fn title(&self, told: &Told, pairs: &[&GroupPair]) -> String {
        let groups = |kind: &str, of: fn(&GroupPair) -> usize| {
            let indices: Vec<String> = pairs.iter().map(|pair| of(pair).to_string()).collect();
            let plural = if pairs.len() == 1 { "group" } else { "groups" };
            format!("{kind} {plural} {}", indices.join(", "))
        };
        let names: Vec<&str> = pairs.iter().flat_map(|pair| self.layer_names(pair)).collect();
        let local = groups(told.local_kind, |pair| pair.local_group);
        let remote = groups(told.remote_kind, |pair| pair.remote_group);
        format!("  {local} from {remote}: {}.\n", list(&names))
    }
}

fn explain_group_pair(geometries: &Geometries, table: &Table, index: usize) -> String {
    let mut text = String::new();
    let pair = &table.group_pairs[index];
    let (local, remote) = (&geometries.local.groups[pair.local_group], &geometries.remote.groups[pair.remote_group]);
    if local.kind.is_attention() {
        explain_blocks(local, remote, &mut text);
    } else {
        text.push_str("    The state-bearing block of one side goes to that of the other; blocks are never split.\n");
    }
    // Layers with equal cuts are described once.
    let mut told: BTreeMap<String, usize> = BTreeMap::new();
    for layer in &pair.layers {
        for slice in &layer.slices {
            *told.entry(explain_slice(geometries, layer, slice)).or_default() += 1;
        }
    }
    let is_any_partial = told.values().any(|&layers| layers < pair.layers.len());
    for (sentence, layers) in told {
        let of = if is_any_partial { format!(", in {}", count(layers, "layer")) } else { String::new() };
        let _ = writeln!(text, "    {sentence}{of}.");
    }
    let (block, cut) = if local.kind.is_attention() {
        ("kernel block", longest_cut(local, remote))
    } else {
        ("state", Some(TokenCut::STATE))
    };
    if let Some(Ok(pieces)) = cut.map(|cut| table.count_pieces(geometries, index, cut)) {
        let (layers, pieces) = (count(pair.layers.len(), "layer"), count(pieces as usize, "piece"));
        let _ = writeln!(text, "    Over {layers} of a group a {block} is {pieces}.");
    }
    text
}

/// The longest cut of whole kernel blocks, or the last such cut; None if each request is cut separately.
fn longest_cut(local: &Group, remote: &Group) -> Option<TokenCut> {
    const FEW_CUTS: usize = 4096;
    let takes_turns_alike = local.turns_in_kernel_block() == remote.turns_in_kernel_block();
    let count = local.kernel_tokens().min(remote.kernel_tokens());
    let first = || takes_turns_alike.then_some(TokenCut { local: 0, remote: 0, count });
    whole_block_cuts(local, remote, FEW_CUTS).map_or_else(first, |cuts| cuts.into_iter().max_by_key(|cut| cut.count))
}

fn explain_blocks(local: &Group, remote: &Group, text: &mut String) {
    let describe = |group: &Group| match group.kernel_blocks_per_block {
        1 => format!("{} tokens", group.block_size),
        blocks => format!("{} tokens ({blocks} kernel blocks of {})", group.block_size, group.kernel_tokens()),
    };
    let _ = write!(text, "    Blocks of {} here, {} there", describe(local), describe(remote));
    let (a, b) = (local.kernel_tokens(), remote.kernel_tokens());
    if local.turns_in_kernel_block() != remote.turns_in_kernel_block() {
        text.push_str("; context-parallel ranks take turns within them in different ways, each request is cut anew");
    } else if a == b {
        text.push_str("; kernel blocks are equal and meet whole");
    } else {
        let ways = count(count_cuts(a, b) as usize - 1, "way");
        let _ = write!(text, "; kernel blocks of {a} and {b} cut each other in {ways}");
    }
    for (rank, group) in [("this rank", local), ("the source", remote)] {
        let Group { cp_size, cp_rank, cp_interleave, .. } = *group;
        if cp_size > 1 && cp_interleave == group.block_size {
            let _ = write!(text, "; {rank} holds every {cp_size}th block, from block {cp_rank}");
        } else if cp_size > 1 {
            let _ = write!(
                text,
                "; {rank} holds turn {cp_rank} of {cp_size}, each of {}",
                count(cp_interleave as usize, "token")
            );
        }
    }
    text.push_str(".\n");
}

fn explain_slice(geometries: &Geometries, layer: &LayerPair, slice: &PartSlice) -> String {
    let (local, remote) = geometries.parts(layer.layers, slice);
    let mut ranges = Vec::new();
    for (axis, wanted) in local.sharded_axes().zip(&slice.ranges) {
        let Some(held) = remote.axis(&axis.name).map(Axis::shard) else { continue };
        let own = axis.shard();
        let why = match (*wanted == own, *wanted == held) {
            (true, true) => continue,
            (true, false) => format!("all this rank holds, the source has {}..{}", held.start, held.end),
            (false, true) => format!("all the source holds, this rank has {}..{}", own.start, own.end),
            (false, false) => {
                let (start, end) = (own.start, own.end);
                format!("what {start}..{end} here and {}..{} there have in common", held.start, held.end)
            }
        };
        ranges.push(format!("{} {}..{} of {}: {why}", axis.name, wanted.start, wanted.end, axis.extent));
    }
    let what = if ranges.is_empty() { "whole".to_owned() } else { ranges.join("; ") };
    let (local_order, remote_order) = (axis_order(local, remote), axis_order(remote, local));
    let order = if local_order == remote_order {
        String::new()
    } else {
        format!("; stored as [{local_order}] here and [{remote_order}] there")
    };
    format!("{} {what}{order}", local.name)
}

/// Axes of a part, outermost first, without those that have only one index on either side.
fn axis_order(part: &Part, other: &Part) -> String {
    let is_long = |part: &Part, name: &str| part.axis(name).is_some_and(|axis| axis.length > 1);
    let mut axes: Vec<_> =
        part.axes.iter().filter(|axis| is_long(part, &axis.name) && is_long(other, &axis.name)).collect();
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.stride));
    axes.iter().map(|axis| axis.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

fn list(names: &[&str]) -> String {
    match names {
        [] => "nothing".to_owned(),
        [one] => (*one).to_owned(),
        [first, .., last] => format!("{first} … {last} ({} layers)", names.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::types::Geometry;
    use crate::pairing::plan::PlanOptions;
    use std::sync::Arc;

    /// A full layer with 8 heads over all ranks and kernel blocks of 4 tokens.
    fn geometry(base: u64, (rank, size): (u64, u64), heads_first: bool, layers: &[&str]) -> Arc<Geometry> {
        let heads = 8 / size;
        let (head, token) = if heads_first { (8, 2) } else { (2, 2 * heads) };
        let layers: Vec<String> = layers
            .iter()
            .map(|name| {
                format!(
                    r#"{{"name":"{name}","group":0,"page":0,"region":0,"offset":0,"num_blocks":4,"block_stride":{}}}"#,
                    16 * heads
                )
            })
            .collect();
        let json = format!(
            r#"{{"kvhma":1,"tp_rank":{rank},"tp_size":{size},"regions":[{{"base":{base},"bytes":512}}],
            "groups":[{{"kind":"full","block_size":8,"ratio":2}}],"pages":[{{"parts":[{{"name":"kv","dtype":"u8",
            "item_bytes":2,"offset":0,"axes":[{{"name":"heads","extent":8,"start":{},"length":{heads},"stride":{head}}},
            {{"name":"tokens","extent":4,"stride":{token}}}]}}]}}],"layers":[{}]}}"#,
            rank * heads,
            layers.join(",")
        );
        Arc::new(Geometry::from_json(json.as_bytes()).expect("a valid geometry"))
    }

    #[test]
    fn every_reason_is_said() {
        let local = geometry(1 << 20, (0, 1), false, &["a", "b"]);
        let remotes = (0..2).map(|rank| geometry(1 << 30, (rank, 2), true, &["a"])).collect();
        let text = Plan::new(local, remotes, PlanOptions::EXACT).expect("pairs").explain();
        for sentence in [
            "Rank 0 of 1 reads from 2 of 2 sources.\n",
            "Source 1 (rank 1 of 2): 1 layer.\n",
            "  full group 0 from full group 0: a.\n",
            "    Blocks of 8 tokens (2 kernel blocks of 4) here, 8 tokens (2 kernel blocks of 4) there; \
             kernel blocks are equal and meet whole.\n",
            "    kv heads 4..8 of 8: all the source holds, this rank has 0..8; \
             stored as [tokens, heads] here and [heads, tokens] there.\n",
            "    Over 1 layer of a group a kernel block is 16 pieces.\n",
            "No source has b: zeroed, not read.\n",
        ] {
            assert!(text.contains(sentence), "{sentence:?} is not in:\n{text}");
        }
    }

    #[test]
    fn a_source_that_is_not_needed_is_said_so() {
        let local = geometry(1 << 20, (0, 1), true, &["a"]);
        let remotes = vec![geometry(1 << 30, (0, 1), true, &["a"]), geometry(1 << 40, (0, 1), true, &["a"])];
        let text = Plan::new(local, remotes, PlanOptions::EXACT).expect("pairs").explain();
        assert!(text.contains("    kv whole.\n    Over 1 layer of a group a kernel block is 1 piece.\n"), "{text}");
        assert!(
            text.contains("Source 1 (rank 0 of 1): nothing; all it holds is read elsewhere or not needed."),
            "{text}"
        );
    }
}
