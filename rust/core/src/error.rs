// SPDX-License-Identifier: Apache-2.0
use thiserror::Error as ThisError;

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can be wrong, with the numbers in it.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[non_exhaustive]
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
    #[error("{place}: {field} cannot be paired: {left} with {right}; {why}")]
    Unpairable {
        /// Object.
        place: String,
        /// Field that differs.
        field: &'static str,
        /// The smaller of the two values, so that both directions say the same.
        left: String,
        /// The other value.
        right: String,
        /// Why that matters.
        why: &'static str,
    },
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
    #[error("{what} is {value}, {expected}")]
    Value {
        /// Which number.
        what: String,
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
