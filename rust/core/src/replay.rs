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

/// What fills a cache, and how its hits are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The engine computes whole prompts. All groups hit the same number of tokens.
    Prefill,
    /// The engine loads what each prompt still needs. All groups hit the same number of tokens.
    DecodeOneHit,
    /// The same, and full attention hits its own number of tokens, windows at most as many.
    DecodeEachGroup,
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

/// Return the tokens that each group hits, for each request: all of the first group, then all of the second.
///
/// `pool` is the bytes of an engine's cache. Requests end before the next ones begin.
#[must_use]
pub fn prefix_hits(requests: Requests<'_>, groups: &[CacheGroup], pool: u64, side: Side) -> Vec<u32> {
    let number = requests.prompts.len();
    let engines = requests.engines.iter().max().map_or(0, |&most| most as usize + 1);
    let mut caches: Vec<Cache<'_>> = (0..engines).map(|_| Cache::new(groups, pool, side)).collect();
    let mut hits = vec![0; number * groups.len()];
    for request in 0..number {
        let nodes = requests.offsets[request] as usize..requests.offsets[request + 1] as usize;
        let prompt = Prompt {
            nodes: &requests.nodes[nodes.clone()],
            ends: &requests.ends[nodes],
            tokens: requests.prompts[request].into(),
            answer: requests.answers[request].into(),
        };
        let cache = &mut caches[requests.engines[request] as usize];
        for (group, hit) in cache.run(&prompt).into_iter().enumerate() {
            hits[group * number + request] = u32::try_from(hit).unwrap_or(u32::MAX);
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
        (u64::from(begin) / block, u64::from(self.ends[index]) / block)
    }
}

/// Blocks of a group that end in a node: `first..last`, in a list from the least to the most recently used.
struct Held {
    key: (usize, i64),
    first: u64,
    last: u64,
    before: u32,
    after: u32,
}

const NONE: u32 = u32::MAX;

struct Cache<'a> {
    groups: &'a [CacheGroup],
    side: Side,
    room: u64,
    used: u64,
    places: HashMap<(usize, i64), u32, BuildHasherDefault<Mix>>,
    held: Vec<Held>,
    free: Vec<u32>,
    oldest: u32,
    newest: u32,
    /// Blocks without a known prefix, such as those of answers, get separate names.
    unnamed: i64,
}

impl<'a> Cache<'a> {
    fn new(groups: &'a [CacheGroup], room: u64, side: Side) -> Self {
        let (places, held, free) = Default::default();
        Self { groups, side, room, used: 0, places, held, free, oldest: NONE, newest: NONE, unnamed: 0 }
    }

    /// Return the hits of a prompt, and keep what the engine has of it afterwards.
    fn run(&mut self, prompt: &Prompt<'_>) -> Vec<u64> {
        let limit = prompt.tokens - 1;
        let runs: Vec<Vec<(u64, u64)>> = (0..self.groups.len()).map(|group| self.runs(prompt, group)).collect();
        let hit = |group: usize, limit: u64| longest_hit(&runs[group], &self.groups[group].group, limit);
        let numbers = 0..self.groups.len();
        let has_state = self.groups.iter().any(CacheGroup::is_state);
        let full = numbers.clone().find(|&group| self.groups[group].is_whole());
        let own_hits = self.side == Side::DecodeEachGroup || (self.side == Side::DecodeOneHit && has_state);
        let hits: Vec<u64> = match full {
            Some(full) if own_hits => {
                let most = hit(full, limit);
                numbers.map(|group| hit(group, most)).collect()
            }
            _ => {
                let mut most = limit;
                loop {
                    let least = numbers.clone().fold(most, |least, group| hit(group, least));
                    if least == most {
                        break;
                    }
                    most = least;
                }
                vec![most; self.groups.len()]
            }
        };
        self.keep(prompt, &hits);
        hits
    }

    /// The blocks of a prompt that a group holds, as ascending ranges.
    fn runs(&self, prompt: &Prompt<'_>, group: usize) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let is_whole = self.groups[group].is_whole();
        for (index, &node) in prompt.nodes.iter().enumerate() {
            let (first, last) = prompt.blocks(index, self.groups[group].group.tokens_per_entry());
            let Some(&place) = self.places.get(&(group, node)) else {
                if is_whole && first < last {
                    break;
                }
                continue;
            };
            let held = &self.held[place as usize];
            match runs.last_mut() {
                Some(run) if run.1 == held.first => run.1 = held.last,
                _ => runs.push((held.first, held.last)),
            }
            if is_whole && held.last < last {
                break;
            }
        }
        runs
    }

    /// Keep the blocks of a request that ends, the last ones as the least recently used, group after group.
    fn keep(&mut self, prompt: &Prompt<'_>, hits: &[u64]) {
        let tokens = prompt.tokens;
        for (number, &hit) in hits.iter().enumerate() {
            let CacheGroup { group, .. } = &self.groups[number];
            if self.groups[number].is_state() {
                self.keep_states(prompt, number, hit);
                continue;
            }
            let block = group.tokens_per_entry();
            // Only whole blocks stay; vLLM uses others again at once.
            let after = tokens + prompt.answer.saturating_sub(1);
            let unnamed = after / block - tokens / block;
            // Before these blocks the request holds none when it ends.
            let (needed, hit) = (group.first_needed_token(tokens) / block, hit / block);
            // At P the blocks of the hit, and of the prompt, are used until the window has gone on. A load goes past them.
            let used = match group.kind {
                Kind::Sliding { window } => hit.saturating_sub((window - 1).div_ceil(block)),
                Kind::Chunked { chunk } => hit * block / chunk * chunk / block,
                _ => needed,
            };
            let dropped = if self.side == Side::Prefill { used..needed } else { 0..0 };
            self.put_unnamed(number, unnamed);
            for index in 0..prompt.nodes.len() {
                self.put_part(prompt, index, number, dropped.clone());
            }
            for index in (0..prompt.nodes.len()).rev() {
                self.put_part(prompt, index, number, needed..u64::MAX);
            }
        }
        self.evict();
    }

    fn put_part(&mut self, prompt: &Prompt<'_>, index: usize, group: usize, part: Range<u64>) {
        let (first, last) = prompt.blocks(index, self.groups[group].group.tokens_per_entry());
        let (first, last) = (first.max(part.start), last.min(part.end));
        if first < last {
            self.put((group, prompt.nodes[index]), first, last);
        }
    }

    /// P keeps a state at the end of each step of its prefill; of a loaded prompt D has none at the end of a block.
    fn keep_states(&mut self, prompt: &Prompt<'_>, number: usize, hit: u64) {
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
            self.put((number, prompt.nodes[index]), state - 1, state);
        }
    }

    fn put_unnamed(&mut self, group: usize, blocks: u64) {
        if blocks > 0 && self.room < u64::MAX {
            self.unnamed += 1;
            // Names of traces are not negative.
            self.put((group, -self.unnamed), 0, blocks);
        }
    }

    /// Add blocks to what is held of a node, which then was used last.
    fn put(&mut self, key: (usize, i64), first: u64, last: u64) {
        let bytes = self.groups[key.0].bytes;
        let place = if let Some(&place) = self.places.get(&key) {
            self.unlink(place);
            let held = &mut self.held[place as usize];
            self.used -= (held.last - held.first) * bytes;
            if held.first <= last && first <= held.last {
                (held.first, held.last) = (held.first.min(first), held.last.max(last));
            } else {
                (held.first, held.last) = (first, last);
            }
            place
        } else {
            let new = Held { key, first, last, before: NONE, after: NONE };
            let place = self.free.pop().unwrap_or_else(|| u32::try_from(self.held.len()).unwrap_or(NONE));
            if place as usize == self.held.len() {
                self.held.push(new);
            } else {
                self.held[place as usize] = new;
            }
            self.places.insert(key, place);
            place
        };
        let held = &mut self.held[place as usize];
        self.used += (held.last - held.first) * bytes;
        (held.before, held.after) = (self.newest, NONE);
        match self.newest {
            NONE => self.oldest = place,
            newest => self.held[newest as usize].after = place,
        }
        self.newest = place;
    }

    fn unlink(&mut self, place: u32) {
        let (before, after) = (self.held[place as usize].before, self.held[place as usize].after);
        match before {
            NONE => self.oldest = after,
            before => self.held[before as usize].after = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.held[after as usize].before = before,
        }
    }

    /// Evict the least recently used blocks until the rest has room, from the end of a node to its beginning.
    fn evict(&mut self) {
        while self.used > self.room && self.oldest != NONE {
            let place = self.oldest;
            let held = &mut self.held[place as usize];
            let bytes = self.groups[held.key.0].bytes;
            let evicted = (self.used - self.room).div_ceil(bytes).min(held.last - held.first);
            held.last -= evicted;
            self.used -= evicted * bytes;
            if held.first == held.last {
                let key = held.key;
                self.unlink(place);
                self.places.remove(&key);
                self.free.push(place);
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
