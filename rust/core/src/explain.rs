// SPDX-License-Identifier: Apache-2.0
//! A plan in sentences and numbers.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::geometry::{Geometry, Group, Kind, Part};
use crate::link::{LanePart, Link};
use crate::pieces::{shard, shard_in_order_of, sharded_axes};
use crate::plan::{Plan, Source};

/// Kinds of the local and of the remote group, and how they are paired.
type Told = (Kind, Kind, String);

impl Plan {
    /// What is read from which source, how it is cut, and why.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        let (rank, size) = (self.local.tp_rank, self.local.tp_size);
        let used = self.sources();
        let _ = writeln!(
            text,
            "Rank {rank} of {size} reads from {} of {}.",
            used.len(),
            count(self.sources.len(), "source")
        );
        for (index, source) in self.sources.iter().enumerate() {
            let remote = &source.geometry;
            let _ = write!(text, "\nSource {index} (rank {} of {}): ", remote.tp_rank, remote.tp_size);
            if !used.contains(&index) {
                text.push_str(
                    "nothing; all it holds is read elsewhere or not needed. It may still wait for a notification.\n",
                );
                continue;
            }
            let layers: usize = source.table.links.iter().map(|link| link.layers().len()).sum();
            let _ = writeln!(text, "{}.", count(layers, "layer"));
            // Groups of the same kinds that are paired and cut alike are told once.
            let mut alike: Vec<(Told, Vec<&Link>)> = Vec::new();
            for link in &source.table.links {
                let (local, remote) = (&self.local.groups[link.local_group], &remote.groups[link.remote_group]);
                let told = (local.kind, remote.kind, self.explain_link(link, source));
                match alike.iter_mut().find(|(known, _)| *known == told) {
                    Some((_, links)) => links.push(link),
                    None => alike.push((told, vec![link])),
                }
            }
            for ((local, remote, body), links) in alike {
                text.push_str(&self.title((local, remote), &links));
                text.push_str(&body);
            }
        }
        if !self.orphans.links.is_empty() {
            let names: Vec<&str> = self.orphans.links.iter().flat_map(|link| self.names(link)).collect();
            let _ = writeln!(text, "\nNo source has {}: zeroed, not read.", list(&names));
        }
        for (source, finding) in self.findings() {
            let _ = writeln!(text, "Source {source}: {}.", finding.text());
        }
        text
    }

    fn names<'a>(&'a self, link: &'a Link) -> Vec<&'a str> {
        link.layers().iter().map(|&(layer, _)| self.local.layers[layer].name.as_str()).collect()
    }

    fn title(&self, kinds: (Kind, Kind), links: &[&Link]) -> String {
        let groups = |kind: Kind, of: fn(&Link) -> usize| {
            let indices: Vec<String> = links.iter().map(|link| of(link).to_string()).collect();
            let plural = if links.len() == 1 { "group" } else { "groups" };
            format!("{} {plural} {}", kind.word(), indices.join(", "))
        };
        let names: Vec<&str> = links.iter().flat_map(|link| self.names(link)).collect();
        let local = groups(kinds.0, |link| link.local_group);
        let remote = groups(kinds.1, |link| link.remote_group);
        format!("  {local} from {remote}: {}.\n", list(&names))
    }

    fn explain_link(&self, link: &Link, source: &Source) -> String {
        let mut text = String::new();
        let (local, remote) = (&*self.local, &*source.geometry);
        let (mine, theirs) = (&local.groups[link.local_group], &remote.groups[link.remote_group]);
        if mine.kind.is_attention() {
            explain_blocks(mine, theirs, link.cuts.len(), &mut text);
        } else {
            text.push_str(
                "    The state-bearing block of one side goes to that of the other; blocks are never split.\n",
            );
        }
        // Layers cut alike are told once.
        let mut told: BTreeMap<String, usize> = BTreeMap::new();
        for (layers, parts) in link.parts() {
            for share in parts {
                *told.entry(explain_part(local, remote, layers, share)).or_default() += 1;
            }
        }
        let some = told.values().any(|&layers| layers < link.layers().len());
        for (sentence, layers) in told {
            let of = if some { format!(", in {}", count(layers, "layer")) } else { String::new() };
            let _ = writeln!(text, "    {sentence}{of}.");
        }
        if let Some(&(_, pieces)) = link.cuts.iter().max_by_key(|cut| cut.0.count) {
            let block = if mine.kind.is_attention() { "kernel block" } else { "state" };
            let layers = count(link.layers().len(), "layer");
            let _ = writeln!(text, "    Over {layers} of a group a {block} is {}.", count(pieces as usize, "piece"));
        }
        text
    }
}

fn explain_blocks(mine: &Group, theirs: &Group, cuts: usize, text: &mut String) {
    let describe = |group: &Group| match group.ratio {
        1 => format!("{} tokens", group.block_size),
        ratio => format!("{} tokens ({ratio} kernel blocks of {})", group.block_size, group.kernel_tokens()),
    };
    let _ = write!(text, "    Blocks of {} here, {} there", describe(mine), describe(theirs));
    let (a, b) = (mine.kernel_tokens(), theirs.kernel_tokens());
    if a == b {
        text.push_str("; kernel blocks are equal and meet whole");
    } else if cuts == 0 {
        let _ = write!(
            text,
            "; kernel blocks of {a} and {b} cut each other too often to prepare, each request is cut anew"
        );
    } else {
        let _ = write!(text, "; kernel blocks of {a} and {b} cut each other in {}", count(cuts, "way"));
    }
    for (side, group) in [("this rank", mine), ("the source", theirs)] {
        if group.cp_size > 1 {
            let _ = write!(text, "; {side} holds every {}th block, from block {}", group.cp_size, group.cp_rank);
        }
    }
    text.push_str(".\n");
}

fn explain_part(local: &Geometry, remote: &Geometry, layers: (usize, usize), share: &LanePart) -> String {
    let part = &local.page(&local.layers[layers.0]).parts[share.local];
    let other = &remote.page(&remote.layers[layers.1]).parts[share.remote];
    let held = shard_in_order_of(part, other).unwrap_or_default();
    let mut ranges = Vec::new();
    for (((axis, &wanted), mine), theirs) in sharded_axes(part).zip(&share.ranges).zip(shard(part)).zip(held) {
        if wanted == mine && wanted == theirs {
            continue;
        }
        let why = match (wanted == mine, wanted == theirs) {
            (true, _) => format!("all this rank holds, the source has {}..{}", theirs.0, theirs.1),
            (_, true) => format!("all the source holds, this rank has {}..{}", mine.0, mine.1),
            _ => format!("what {}..{} here and {}..{} there have in common", mine.0, mine.1, theirs.0, theirs.1),
        };
        ranges.push(format!("{} {}..{} of {}: {why}", axis.name, wanted.0, wanted.1, axis.extent));
    }
    let what = if ranges.is_empty() { "whole".to_owned() } else { ranges.join("; ") };
    let (here, there) = (order(part, other), order(other, part));
    let order = if here == there { String::new() } else { format!("; stored as [{here}] here and [{there}] there") };
    format!("{} {what}{order}", part.name)
}

/// Axes of a part, outermost first, without those that have only one index on either side.
fn order(part: &Part, other: &Part) -> String {
    let long = |name: &str, part: &Part| part.axes.iter().any(|axis| axis.name == name && axis.held() > 1);
    let mut axes: Vec<_> = part.axes.iter().filter(|axis| long(&axis.name, part) && long(&axis.name, other)).collect();
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
