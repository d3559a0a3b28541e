// SPDX-License-Identifier: Apache-2.0
//! Which leading tokens the prefix caches of engines hold when requests of a trace come, one after the other.
//! How long requests wait for their first token in the queues of engines.
//!
//! A prompt is a path of nodes: a node stands for its tokens with all tokens before it, so equal nodes are equal
//! prefixes. Blocks, hits and evictions follow vLLM's rules; a block belongs to the node in which it ends.
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use crate::geometry::types::{Group, Kind};

pub mod rows;

/// A group of an engine's cache.
#[derive(Clone, Debug)]
pub struct CacheGroup {
    /// What its blocks hold.
    pub group: Group,
    /// Bytes of a block in all layers and ranks, at least 1.
    pub bytes: u64,
}

impl CacheGroup {
    fn is_state(&self) -> bool {
        self.group.is_state()
    }

    /// Whether a request needs all its tokens.
    fn is_whole(&self) -> bool {
        matches!(self.group.kind, Kind::Full | Kind::Mla | Kind::Opaque)
    }
}

/// What fills a cache. Requests hit no more than its rules of hits say, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The engine computes whole prompts. All groups hit the same number of tokens.
    Prefill,
    /// The engine loads what each prompt still needs. By vLLM's rule all groups hit the same number of tokens, but beside
    /// a state each its own. By the other rule full attention hits its own number, and windows at most as many.
    Decode,
}

impl Side {
    /// How many rules of hits there are.
    #[must_use]
    pub fn rules(self) -> usize {
        1 + usize::from(self == Side::Decode)
    }
}

/// Requests in the order of their arrival.
#[derive(Clone, Copy, Debug)]
pub struct Requests<'a> {
    /// Nodes of all prompts, one prompt after the other.
    pub nodes: &'a [i64],
    /// Tokens of a prompt up to the end of each node.
    pub ends: &'a [u32],
    /// Where the nodes of a prompt begin; one more than there are prompts.
    pub offsets: &'a [u64],
    /// Tokens of each prompt.
    pub prompts: &'a [u32],
    /// Tokens that the engine decodes.
    pub answers: &'a [u32],
    /// Number of the engine of each request.
    pub engines: &'a [u32],
}

impl Requests<'_> {
    /// Whether the lengths of the arrays fit, prompts have tokens, and the nodes of each ascend within it.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let number = self.prompts.len();
        let ascending = |index: usize| {
            let nodes = self.offsets[index] as usize..self.offsets[index + 1] as usize;
            let Some(ends) = self.ends.get(nodes) else { return false };
            ends.is_sorted() && ends.last().is_none_or(|&end| end <= self.prompts[index]) && self.prompts[index] > 0
        };
        self.offsets.len() == number + 1
            && [self.answers.len(), self.engines.len()] == [number; 2]
            && self.nodes.len() == self.ends.len()
            && self.nodes.iter().all(|&node| node >= 0)
            && self.engines.iter().all(|&engine| engine < MAX_ENGINES)
            && self.offsets.is_sorted()
            && (0..number).all(ascending)
    }
}

const MAX_ENGINES: u32 = 1 << 16;

/// Tokens of a step of a prefill: vLLM keeps a state at its end, cut down to a whole block.
const STEP_TOKENS: u64 = 8192;

/// Return the tokens that each group hits, for each request: all of the first group, then all of the second; all of the
/// first rule, then all of the second.
///
/// `pool` is the bytes of an engine's cache. Requests end before the next ones begin.
#[must_use]
pub fn prefix_hits(requests: Requests<'_>, groups: &[CacheGroup], pool: u64, side: Side) -> Vec<u32> {
    let number = requests.prompts.len();
    let engines = requests.engines.iter().max().map_or(0, |&most| most as usize + 1);
    let mut caches: Vec<Cache<'_>> = (0..engines).map(|_| Cache::new(groups, pool, side)).collect();
    let mut hits = vec![0; number * groups.len() * side.rules()];
    for request in 0..number {
        let nodes = requests.offsets[request] as usize..requests.offsets[request + 1] as usize;
        let prompt = Prompt {
            nodes: &requests.nodes[nodes.clone()],
            ends: &requests.ends[nodes],
            tokens: requests.prompts[request].into(),
            answer: requests.answers[request].into(),
        };
        let cache = &mut caches[requests.engines[request] as usize];
        for (row, hit) in cache.run(&prompt).into_iter().enumerate() {
            hits[row * number + request] = u32::try_from(hit).unwrap_or(u32::MAX);
        }
    }
    hits
}

struct Prompt<'a> {
    nodes: &'a [i64],
    ends: &'a [u32],
    tokens: u64,
    answer: u64,
}

impl Prompt<'_> {
    /// The blocks that end in a node.
    fn blocks(&self, index: usize, block: u64) -> (u64, u64) {
        let begin = if index == 0 { 0 } else { self.ends[index - 1] };
        let block = u32::try_from(block).unwrap_or(u32::MAX); // twice as fast as u64
        (u64::from(begin / block), u64::from(self.ends[index] / block))
    }
}

/// Blocks of a group that end in a node: `first..last`.
#[derive(Clone, Copy)]
struct Held {
    first: u32,
    last: u32,
}

/// The places before and after one in a list from the least to the most recently used.
#[derive(Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

const NONE: u32 = u32::MAX;
const EMPTY: Held = Held { first: 0, last: 0 };
const UNLINKED: Link = Link { before: NONE, after: NONE };
/// The name of blocks without a known prefix, such as those of answers. Names of traces are not negative.
const UNNAMED: i64 = -1;

struct Cache<'a> {
    groups: &'a [CacheGroup],
    side: Side,
    room: u64,
    used: u64,
    /// Numbers of the nodes that have blocks in a group.
    numbers: HashMap<i64, u32, BuildHasherDefault<Mix>>,
    /// Blocks of all groups of the first number, then of the second.
    held: Vec<Held>,
    /// Names of all numbers, and links of all of `held`; empty if nothing is ever evicted.
    names: Vec<i64>,
    links: Vec<Link>,
    free: Vec<u32>,
    oldest: u32,
    newest: u32,
}

impl<'a> Cache<'a> {
    fn new(groups: &'a [CacheGroup], room: u64, side: Side) -> Self {
        let (numbers, names, held, links, free) = Default::default();
        Self { groups, side, room, used: 0, numbers, held, names, links, free, oldest: NONE, newest: NONE }
    }

    fn has_end(&self) -> bool {
        self.room < u64::MAX
    }

    /// Return the hits of a prompt, and keep what the engine has of it afterwards.
    fn run(&mut self, prompt: &Prompt<'_>) -> Vec<u64> {
        let limit = prompt.tokens - 1;
        let mut at: Vec<u32> =
            prompt.nodes.iter().map(|node| self.numbers.get(node).copied().unwrap_or(NONE)).collect();
        let runs: Vec<Vec<(u64, u64)>> = (0..self.groups.len()).map(|group| self.runs(prompt, &at, group)).collect();
        let groups = self.groups;
        let hit = |group: usize, limit: u64| longest_hit(&runs[group], &groups[group].group, limit);
        let numbers = 0..groups.len();
        let has_state = groups.iter().any(CacheGroup::is_state);
        let full = numbers.clone().find(|&group| groups[group].is_whole());
        let mut most = limit;
        loop {
            let least = numbers.clone().fold(most, |least, group| hit(group, least));
            if least == most {
                break;
            }
            most = least;
        }
        let mut hits = vec![most; groups.len()];
        self.keep(prompt, &mut at, most);
        if self.side == Side::Decode {
            let own: Vec<u64> = full.map_or_else(
                || hits.clone(),
                |full| {
                    let most = hit(full, limit);
                    numbers.map(|group| hit(group, most)).collect()
                },
            );
            if has_state {
                hits.clone_from(&own);
            }
            hits.extend(own);
        }
        hits
    }

    fn place(&self, number: u32, group: usize) -> usize {
        number as usize * self.groups.len() + group
    }

    /// The blocks of a prompt that a group holds, as ascending ranges.
    fn runs(&self, prompt: &Prompt<'_>, at: &[u32], group: usize) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let is_whole = self.groups[group].is_whole();
        let block = self.groups[group].group.tokens_per_entry();
        for (index, &number) in at.iter().enumerate() {
            let held = if number == NONE { EMPTY } else { self.held[self.place(number, group)] };
            let (begin, end) = prompt.blocks(index, block);
            if held.first == held.last {
                if is_whole && begin < end {
                    break;
                }
                continue;
            }
            let (first, last) = (u64::from(held.first), u64::from(held.last));
            match runs.last_mut() {
                Some(run) if run.1 == first => run.1 = last,
                _ => runs.push((first, last)),
            }
            if is_whole && last < end {
                break;
            }
        }
        runs
    }

    /// Keep the blocks of a request that ends, the last ones as the least recently used, group after group.
    fn keep(&mut self, prompt: &Prompt<'_>, at: &mut [u32], hit: u64) {
        let tokens = prompt.tokens;
        for number in 0..self.groups.len() {
            let CacheGroup { group, .. } = &self.groups[number];
            if self.groups[number].is_state() {
                self.keep_states(prompt, at, number, hit);
                continue;
            }
            let block = group.tokens_per_entry();
            // Only whole blocks stay; vLLM uses others again at once.
            let after = tokens + prompt.answer.saturating_sub(1);
            let unnamed = after / block - tokens / block;
            // Before these blocks the request holds none when it ends.
            let needed = group.first_needed_token(tokens) / block;
            // At P the blocks of the hit, and of the prompt, are used until the window has gone on. A load goes past them.
            let used = match group.kind {
                Kind::Sliding { window } => (hit / block).saturating_sub((window - 1).div_ceil(block)),
                Kind::Chunked { chunk } => hit / chunk * chunk / block,
                _ => needed,
            };
            let dropped = if self.side == Side::Prefill { used..needed } else { 0..0 };
            if unnamed > 0 && self.has_end() {
                let unnamed_at = self.number(UNNAMED);
                self.put(unnamed_at, number, 0, unnamed);
            }
            if !dropped.is_empty() {
                for index in 0..at.len() {
                    self.put_part(prompt, at, index, number, dropped.clone());
                }
            }
            for index in (0..at.len()).rev() {
                self.put_part(prompt, at, index, number, needed..u64::MAX);
            }
        }
        self.evict();
    }

    fn put_part(&mut self, prompt: &Prompt<'_>, at: &mut [u32], index: usize, group: usize, part: Range<u64>) {
        let (first, last) = prompt.blocks(index, self.groups[group].group.tokens_per_entry());
        let (first, last) = (first.max(part.start), last.min(part.end));
        if first < last {
            self.put_node(prompt, at, index, group, first, last);
        }
    }

    fn put_node(&mut self, prompt: &Prompt<'_>, at: &mut [u32], index: usize, group: usize, first: u64, last: u64) {
        if at[index] == NONE {
            // A prompt may have a node twice.
            let known = self.numbers.get(&prompt.nodes[index]).copied();
            at[index] = known.unwrap_or_else(|| self.number(prompt.nodes[index]));
        }
        self.put(at[index], group, first, last);
    }

    /// P keeps a state at the end of each step of its prefill; of a loaded prompt D has none at the end of a block.
    fn keep_states(&mut self, prompt: &Prompt<'_>, at: &mut [u32], number: usize, hit: u64) {
        let block = self.groups[number].group.tokens_per_entry();
        let last = prompt.tokens / block;
        if self.side != Side::Prefill && prompt.tokens % block != 0 {
            return;
        }
        let step = (STEP_TOKENS / block).max(1);
        let steps = (1..).map(|count| hit / block + count * step).take_while(|&state| state < last);
        let states = if self.side == Side::Prefill { steps.chain([last]).collect() } else { vec![last] };
        for state in states.into_iter().filter(|&state| state > 0) {
            let Some(index) = prompt.ends.iter().position(|&end| u64::from(end) >= state * block) else { continue };
            self.put_node(prompt, at, index, number, state - 1, state);
        }
    }

    /// Give a number to a node.
    fn number(&mut self, name: i64) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            let number = self.held.len() / self.groups.len();
            self.held.resize(self.held.len() + self.groups.len(), EMPTY);
            if self.has_end() {
                self.names.push(name);
                self.links.resize(self.held.len(), UNLINKED);
            }
            u32::try_from(number).unwrap_or(NONE)
        });
        if self.has_end() {
            self.names[number as usize] = name;
        }
        if name != UNNAMED {
            self.numbers.insert(name, number);
        }
        number
    }

    /// Add blocks to what is held of a node, which then was used last.
    fn put(&mut self, number: u32, group: usize, first: u64, last: u64) {
        let bytes = self.groups[group].bytes;
        let (first, last) = (first as u32, last as u32);
        let place = self.place(number, group);
        let held = &mut self.held[place];
        let before = u64::from(held.last - held.first) * bytes;
        if held.first < held.last && held.first <= last && first <= held.last {
            (held.first, held.last) = (held.first.min(first), held.last.max(last));
        } else {
            (held.first, held.last) = (first, last);
        }
        let after = u64::from(held.last - held.first) * bytes;
        self.used = self.used - before + after;
        if self.has_end() {
            if before > 0 {
                self.unlink(place);
            }
            self.links[place] = Link { before: self.newest, after: NONE };
            match self.newest {
                NONE => self.oldest = place as u32,
                newest => self.links[newest as usize].after = place as u32,
            }
            self.newest = place as u32;
        }
    }

    fn unlink(&mut self, place: usize) {
        let Link { before, after } = self.links[place];
        match before {
            NONE => self.oldest = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.links[after as usize].before = before,
        }
    }

    /// Evict the least recently used blocks until the rest has room, from the end of a node to its beginning.
    fn evict(&mut self) {
        while self.used > self.room && self.oldest != NONE {
            let place = self.oldest as usize;
            let (number, group) = (place / self.groups.len(), place % self.groups.len());
            let held = &mut self.held[place];
            let bytes = self.groups[group].bytes;
            let evicted = (self.used - self.room).div_ceil(bytes).min(u64::from(held.last - held.first));
            held.last -= evicted as u32;
            self.used -= evicted * bytes;
            if held.first == held.last {
                self.unlink(place);
                self.held[place] = EMPTY;
                let all = self.place(number as u32, 0)..self.place(number as u32 + 1, 0);
                if self.held[all].iter().all(|held| held.first == held.last) {
                    self.numbers.remove(&self.names[number]);
                    self.free.push(number as u32);
                }
            }
        }
    }
}

/// The most tokens up to `limit` that a group with these blocks hits, in whole blocks.
fn longest_hit(runs: &[(u64, u64)], group: &Group, limit: u64) -> u64 {
    let block = group.tokens_per_entry();
    let most = limit / block;
    let blocks = match group.kind {
        Kind::Sliding { window } => {
            let needed = (window - 1).div_ceil(block);
            let is_enough = |&&(first, last): &&(u64, u64)| {
                let last = last.min(most);
                last > first && (first == 0 || last - first >= needed)
            };
            runs.iter().rev().find(is_enough).map_or(0, |run| run.1.min(most))
        }
        Kind::Chunked { chunk } => {
            // The null blocks before the chunk count as hits.
            let start = limit / chunk * chunk / block;
            runs.iter().find(|run| (run.0..run.1).contains(&start)).map_or(start, |run| run.1.min(most).max(start))
        }
        Kind::Ssm { .. } => runs.iter().rev().find(|run| run.0 < most).map_or(0, |run| run.1.min(most)),
        Kind::Full | Kind::Mla | Kind::Opaque => runs.first().filter(|run| run.0 == 0).map_or(0, |run| run.1.min(most)),
    };
    blocks * block
}

/// A beginning that so many prompts have continued is a shared one, such as a system prompt, and no conversation.
const SHARED: u32 = 8;

/// Return the engine of each prompt: that of the longest earlier prompt which it continues, else the next of `number`.
///
/// `offsets` say where the nodes of a prompt begin, and are one more than there are prompts.
#[must_use]
pub fn turns(nodes: &[i64], offsets: &[usize], number: u32) -> Vec<u32> {
    // The engine of the last prompt that ended with a node, or with a part of the node after it, and how many continued.
    let mut last: HashMap<i64, (u32, u32), BuildHasherDefault<Mix>> = HashMap::default();
    let mut next = (0..number).cycle();
    let mut engine_of = |path: &[i64]| {
        let is_open = |node: &&i64| last.get(node).is_some_and(|&(_, continued)| continued < SHARED);
        let engine = match path.iter().rev().find(is_open).and_then(|node| last.get_mut(node)) {
            Some((engine, continued)) => {
                *continued += 1;
                *engine
            }
            None => next.next().unwrap_or(0),
        };
        for &node in path.iter().rev().take(2) {
            last.entry(node).or_insert((engine, 0)).0 = engine;
        }
        engine
    };
    offsets.windows(2).map(|ends| engine_of(&nodes[ends[0]..ends[1]])).collect()
}

/// What requests take on either way, in seconds, in the order of their arrival.
#[derive(Clone, Copy, Debug)]
pub struct Ways<'a> {
    /// When each request arrives.
    pub arrivals: &'a [f64],
    /// Number of its prefill engine.
    pub at_prefill: &'a [u32],
    /// Number of its decode engine.
    pub at_decode: &'a [u32],
    /// Time in which P computes what it lacks of the prompt.
    pub prefill: &'a [f64],
    /// Time in which D reads what it lacks of the prompt.
    pub read: &'a [f64],
    /// Time in which D computes what it lacks of the prompt.
    pub decode: &'a [f64],
    /// Time that the router expects of the read. Minus infinity always hands off, infinity never.
    pub expected: &'a [f64],
}

impl Ways<'_> {
    /// Whether all arrays have the same length, arrivals ascend, and times are not negative.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let number = self.arrivals.len();
        let is_time = |&seconds: &f64| seconds >= 0.0 && seconds.is_finite();
        let times = [self.arrivals, self.prefill, self.read, self.decode];
        let engines = [self.at_prefill, self.at_decode];
        times.iter().all(|each| each.len() == number && each.iter().all(is_time))
            && engines.iter().all(|each| each.len() == number && each.iter().all(|&engine| engine < MAX_ENGINES))
            && self.expected.len() == number
            && !self.expected.iter().any(|seconds| seconds.is_nan())
            && self.arrivals.is_sorted()
    }
}

/// Return the seconds from each arrival to the first token, and which requests are handed off.
///
/// An engine computes its prompts in the order in which they arrived, a D beside its reads. D reads one prompt after the
/// other, in the order in which P's have computed them.
#[must_use]
pub fn first_tokens(ways: Ways<'_>) -> (Vec<f64>, Vec<bool>) {
    let free = |engines: &[u32]| vec![0.0_f64; engines.iter().max().map_or(0, |&most| most as usize + 1)];
    let (mut prefill_free, mut decode_free) = (free(ways.at_prefill), free(ways.at_decode));
    let mut link_free = decode_free.clone();
    let mut reads = Vec::new();
    let mut handed_off = vec![false; ways.arrivals.len()];
    let mut waits = vec![0.0; ways.arrivals.len()];
    for (request, &arrival) in ways.arrivals.iter().enumerate() {
        let at_prefill = &mut prefill_free[ways.at_prefill[request] as usize];
        let at_decode = &mut decode_free[ways.at_decode[request] as usize];
        let by_prefill = arrival.max(*at_prefill) + ways.prefill[request];
        let by_decode = arrival.max(*at_decode) + ways.decode[request];
        if by_prefill + ways.expected[request] < by_decode {
            *at_prefill = by_prefill;
            handed_off[request] = true;
            reads.push((by_prefill, request));
        } else {
            *at_decode = by_decode;
            waits[request] = by_decode - arrival;
        }
    }
    // The router looks at no link, so the reads can follow when all decisions are made.
    reads.sort_by(|left, right| left.0.total_cmp(&right.0));
    for (ready, request) in reads {
        let link = &mut link_free[ways.at_decode[request] as usize];
        *link = ready.max(*link) + ways.read[request];
        waits[request] = *link - ways.arrivals[request];
    }
    (waits, handed_off)
}

/// Return the paths without nearly all nodes of a single prompt, which no prompt hits: nodes, ends and offsets.
///
/// They are the last ones of each prompt, because a node of a single prompt is followed by others of that prompt alone.
#[must_use]
pub fn shared(nodes: &[i64], ends: &[u32], offsets: &[u64]) -> (Vec<i64>, Vec<u32>, Vec<u64>) {
    // Bits of what came once and of what came again; eight times as many as nodes, so few different ones are the same.
    let bits = (nodes.len() * 8).next_power_of_two().max(64);
    let (mut once, mut again) = (vec![0_u64; bits / 64], vec![0_u64; bits / 64]);
    let place = |node: i64| {
        let mut mix = Mix::default();
        mix.write_i64(node);
        let bit = mix.finish() as usize & (bits - 1);
        (bit / 64, 1_u64 << (bit % 64))
    };
    for &node in nodes {
        let (word, bit) = place(node);
        again[word] |= once[word] & bit;
        once[word] |= bit;
    }
    let is_shared = |&&node: &&i64| {
        let (word, bit) = place(node);
        again[word] & bit != 0
    };
    let mut kept = (Vec::new(), Vec::new(), vec![0]);
    for prompt in offsets.windows(2) {
        let all = prompt[0] as usize..prompt[1] as usize;
        let count = nodes[all.clone()].iter().take_while(is_shared).count();
        kept.0.extend_from_slice(&nodes[all.start..all.start + count]);
        kept.1.extend_from_slice(&ends[all.start..all.start + count]);
        kept.2.push(kept.0.len() as u64);
    }
    kept
}

/// Mixes the bits of a key: the names of nodes often count up.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_i64(&mut self, value: i64) {
        self.write_u64(u64::from_ne_bytes(value.to_ne_bytes()));
    }
}
