// SPDX-License-Identifier: Apache-2.0
use thiserror::Error as ThisError;

use crate::finding::{Finding, Place, Severity};

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can be wrong, with the numbers in it.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// The JSON form is not one.
    #[error("geometry is not valid JSON of schema {version}: {reason}")]
    Json {
        /// Version this build reads.
        version: u32,
        /// What the parser said.
        reason: String,
    },
    /// The JSON form is longer than is ever read.
    #[error("geometry has {bytes} bytes of JSON, at most {limit} are read")]
    TooLarge {
        /// Length found.
        bytes: usize,
        /// Limit.
        limit: usize,
    },
    /// A geometry contradicts itself.
    #[error("{place}: {field} is {value}, {expected}")]
    Geometry {
        /// Object, e.g. `layer "model.layers.0"`.
        place: String,
        /// Field of it.
        field: &'static str,
        /// Value found.
        value: String,
        /// What it has to be.
        expected: String,
    },
    /// An address or a size does not fit.
    #[error("{place}: {what} does not fit {bits} bits")]
    Overflow {
        /// Object.
        place: String,
        /// Which sum or product.
        what: String,
        /// Bits available.
        bits: u32,
    },
    /// Two geometries that cannot be paired.
    #[error("{}", .0.text())]
    Unpairable(Box<Finding>),
    /// Two geometries that can be paired, but not with these sources, or not by this build.
    #[error("{}", .0.sentence())]
    Unplannable(Box<Finding>),
    /// A list has the wrong number of entries.
    #[error("{what} has {got} entries, expected {expected}")]
    Count {
        /// Which list.
        what: &'static str,
        /// Entries found.
        got: usize,
        /// Entries expected.
        expected: usize,
    },
    /// A number of a request is out of range.
    #[error("{}{field} is {value}, {expected}", in_front(.place))]
    Value {
        /// Object, e.g. `local group 0`; empty for an argument of its own.
        place: String,
        /// Which number of it.
        field: &'static str,
        /// Value found.
        value: i128,
        /// What it has to be.
        expected: String,
    },
    /// A block id outside the cache.
    #[error("{side} group {group}: block id {id} at index {index} is outside 0..{num_blocks}")]
    BlockRange {
        /// `local` or `remote`.
        side: &'static str,
        /// Group index.
        group: usize,
        /// Index in the list.
        index: usize,
        /// The id.
        id: i64,
        /// Blocks there are.
        num_blocks: u64,
    },
    /// The null block is never moved.
    #[error("{side} group {group}: block id {id} at index {index} is the null block")]
    NullBlock {
        /// `local` or `remote`.
        side: &'static str,
        /// Group index.
        group: usize,
        /// Index in the list.
        index: usize,
        /// The id.
        id: i64,
    },
    /// The same block twice in one span.
    #[error("{side} group {group}: block id {id} is listed twice")]
    DuplicateBlock {
        /// `local` or `remote`.
        side: &'static str,
        /// Group index.
        group: usize,
        /// The id.
        id: i64,
    },
    /// A span does not hold tokens that the request needs.
    #[error("{side} group {group}: blocks hold no token {token}, needed are tokens {first}..{end}")]
    MissingTokens {
        /// `local` or `remote`.
        side: &'static str,
        /// Group index.
        group: usize,
        /// First token that is missing.
        token: u64,
        /// First token needed.
        first: u64,
        /// One past the last token needed.
        end: u64,
    },
    /// Two pieces of one request write the same local byte.
    #[error(
        "local bytes {first:#x}..{first_end:#x} and {second:#x}..{second_end:#x} overlap: one block in two groups, or layers that alias"
    )]
    Overlap {
        /// Start of the first range.
        first: u64,
        /// End of the first range.
        first_end: u64,
        /// Start of the second range.
        second: u64,
        /// End of the second range.
        second_end: u64,
    },
    /// A regular encoding cannot express the plan.
    #[error("views cannot express this plan: {why}")]
    NoViews {
        /// Reason.
        why: String,
    },
}

fn in_front(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!("{place}: ") }
}

impl Error {
    /// What one local rank finds wrong with all of its sources.
    pub(crate) fn unplannable(
        code: &'static str,
        place: Place,
        field: &'static str,
        values: (String, String),
        reason: &'static str,
    ) -> Self {
        let (local, remote) = values;
        Self::Unplannable(Box::new(Finding { code, severity: Severity::Error, place, field, local, remote, reason }))
    }
}
