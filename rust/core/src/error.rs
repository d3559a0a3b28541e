// SPDX-License-Identifier: Apache-2.0
use std::borrow::Cow;

use thiserror::Error as ThisError;

use crate::finding::{Finding, Place};

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can be wrong.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// A value is not what it has to be.
    #[error("{}", .0.text)]
    Input(Box<Wrong>),
    /// Two geometries that cannot be paired.
    #[error("{}", .0.text())]
    Unpairable(Box<Finding>),
    /// Two geometries that can be paired, but not with these sources, or not by this build.
    #[error("{}", .0.sentence())]
    Unplannable(Box<Finding>),
    /// A regular encoding cannot express the plan.
    #[error("views cannot express this plan: {why}")]
    NoViews {
        /// Reason.
        why: String,
    },
}

/// What a wrong value belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A geometry, which contradicts itself.
    Geometry,
    /// An address, a size or a count.
    Overflow,
    /// The arguments of a request or of a function.
    Request,
    /// A block id.
    BlockId,
}

/// A number, or whatever else was found, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A number that was read.
    Number(i128),
    /// Anything else.
    Text(String),
}

impl From<i128> for Value {
    fn from(number: i128) -> Self {
        Self::Number(number)
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// A value that is not what it has to be: the parts of a sentence, and the sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    /// What it belongs to.
    pub class: Class,
    /// Short name that stays as it is, e.g. `overflow`.
    pub code: &'static str,
    /// Object, e.g. `layer "model.layers.0"` or `local group 0`; empty for an argument of its own.
    pub place: String,
    /// Field of it.
    pub field: Cow<'static, str>,
    /// Value found.
    pub value: Value,
    /// What it has to be.
    pub expected: Value,
    /// Why it matters.
    pub reason: Cow<'static, str>,
    /// All of that in one sentence.
    pub text: String,
}

/// A side and the index of one of its groups.
pub(crate) type SideGroup = (&'static str, usize);

impl Error {
    /// A wrong argument of a function: its value, what it has to be, why, and the sentence that says so.
    pub fn argument(code: &'static str, field: &str, values: (Value, Value), reason: &str, text: String) -> Self {
        wrong(Class::Request, code, ("", field.to_owned()), values, reason.to_owned(), text)
    }

    /// A geometry's JSON form that is none: where it is wrong, if that can be said, and what the parser said.
    pub(crate) fn json(version: u32, field: &str, reason: String) -> Self {
        let colon = if field.is_empty() { "" } else { ": " };
        let text = format!("geometry is not valid JSON of schema {version}: {field}{colon}{reason}");
        let expected = format!("JSON of schema {version}");
        wrong(Class::Geometry, "json", ("geometry", field.to_owned()), ("", expected), reason, text)
    }

    /// A JSON form that is longer than is ever read.
    pub(crate) fn too_large(bytes: usize, limit: usize) -> Self {
        let text = format!("geometry has {bytes} bytes of JSON, at most {limit} are read");
        let values = (bytes as i128, format!("at most {limit}"));
        wrong(Class::Geometry, "too-large", ("geometry", "bytes"), values, "a longer geometry is not read", text)
    }

    /// A geometry that contradicts itself: a field of an object, e.g. of `layer "model.layers.0"`.
    pub fn geometry(place: &str, field: &'static str, value: String, expected: String) -> Self {
        let text = format!("{place}: {field} is {value}, {expected}");
        wrong(Class::Geometry, "geometry", (place, field), (value, expected), "the geometry contradicts itself", text)
    }

    /// An address, a size or a count that does not fit so many bits, and the sum or product that gives it.
    pub(crate) fn overflow(place: &str, what: String, bits: u32) -> Self {
        let text = format!("{place}: {what} does not fit {bits} bits");
        let reason = "an address, a size or a count does not fit its type";
        wrong(Class::Overflow, "overflow", (place, ""), (what, format!("{bits} bits")), reason, text)
    }

    /// A list that has the wrong number of entries.
    pub(crate) fn count(what: &'static str, got: usize, expected: usize) -> Self {
        let text = format!("{what} has {got} entries, expected {expected}");
        let values = (got as i128, expected as i128);
        wrong(Class::Request, "count", ("", what), values, "the list has the wrong number of entries", text)
    }

    /// A number of a request that is out of range. The place is empty for an argument of its own.
    pub(crate) fn value(place: &str, field: &'static str, value: impl Into<i128>, expected: String) -> Self {
        let value = value.into();
        let colon = if place.is_empty() { "" } else { ": " };
        let text = format!("{place}{colon}{field} is {value}, {expected}");
        wrong(Class::Request, "value", (place, field), (value, expected), "the number is out of range", text)
    }

    /// A block id outside of the cache, at an index of a list.
    pub(crate) fn block_range(of: SideGroup, index: usize, id: i64, num_blocks: u64) -> Self {
        let place = group_of(of);
        let text = format!("{place}: block id {id} at index {index} is outside 0..{num_blocks}");
        let values = (i128::from(id), format!("0..{num_blocks}"));
        let field = format!("ids[{index}]");
        wrong(Class::BlockId, "block-range", (&place, field), values, "the block is outside of the cache", text)
    }

    /// The null block, at an index of a list.
    pub(crate) fn null_block(of: SideGroup, index: usize, id: i64) -> Self {
        let place = group_of(of);
        let text = format!("{place}: block id {id} at index {index} is the null block");
        let (field, values) = (format!("ids[{index}]"), (i128::from(id), "another block"));
        wrong(Class::BlockId, "null-block", (&place, field), values, "the null block is never moved", text)
    }

    /// The same block twice in one span.
    pub(crate) fn duplicate_block(of: SideGroup, id: u32) -> Self {
        let place = group_of(of);
        let text = format!("{place}: block id {id} is listed twice");
        let reason = "a block of a request has one place in its table";
        wrong(Class::BlockId, "duplicate-block", (&place, "ids"), (i128::from(id), "once"), reason, text)
    }

    /// A span that does not hold a token of the `first..end` that the request needs.
    pub(crate) fn missing_tokens(of: SideGroup, token: u64, first: u64, end: u64) -> Self {
        let place = group_of(of);
        let text = format!("{place}: blocks hold no token {token}, needed are tokens {first}..{end}");
        let values = (i128::from(token), format!("tokens {first}..{end}"));
        let reason = "the blocks do not hold all tokens that the request needs";
        wrong(Class::Request, "missing-tokens", (&place, "ids"), values, reason, text)
    }

    /// A row `(address, length, device)` that is said to have failed, at an index of a list, and is no part of a read.
    pub(crate) fn not_read(index: usize, [address, length, device]: [u64; 3]) -> Self {
        let row = format!("{length} bytes at {address:#x} of device {device}");
        let reason = "a row that is not read cannot have failed: it is of another request, or of another plan";
        let text = format!("failed[{index}]: {row} are no bytes that this request reads: {reason}");
        let values = (row, "bytes that this request reads");
        wrong(Class::Request, "not-read", ("", format!("failed[{index}]")), values, reason, text)
    }

    /// Two ranges `(start, end)` of local bytes that are both written.
    pub(crate) fn overlap(one: (u64, u64), other: (u64, u64)) -> Self {
        let (one, other) = (format!("{:#x}..{:#x}", one.0, one.1), format!("{:#x}..{:#x}", other.0, other.1));
        let reason = "one block in two groups, or layers that alias";
        let text = format!("local bytes {one} and {other} overlap: {reason}");
        wrong(Class::Request, "overlap", ("local", "bytes"), (one, format!("apart from {other}")), reason, text)
    }

    /// What one local rank finds wrong with all of its sources.
    pub(crate) fn unplannable(
        code: &'static str,
        place: Place,
        field: &'static str,
        values: (String, String),
        reason: &'static str,
    ) -> Self {
        Self::Unplannable(Box::new(Finding::error(code, place, field, values, reason)))
    }
}

fn group_of((side, group): SideGroup) -> String {
    format!("{side} group {group}")
}

fn wrong(
    class: Class,
    code: &'static str,
    (place, field): (&str, impl Into<Cow<'static, str>>),
    (value, expected): (impl Into<Value>, impl Into<Value>),
    reason: impl Into<Cow<'static, str>>,
    text: String,
) -> Error {
    let (field, value, expected) = (field.into(), value.into(), expected.into());
    let (place, reason) = (place.to_owned(), reason.into());
    Error::Input(Box::new(Wrong { class, code, place, field, value, expected, reason, text }))
}
