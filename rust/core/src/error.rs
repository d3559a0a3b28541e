// SPDX-License-Identifier: Apache-2.0
use std::borrow::Cow;

use thiserror::Error as ThisError;

use crate::finding::{Finding, Place};

/// Result of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// All errors of this crate.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// A value is not as required.
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

/// What an error is about. Every class has an exception in Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A geometry that contradicts itself.
    Geometry,
    /// An address, a size or a count.
    Overflow,
    /// The arguments of a request or of a function.
    Request,
    /// A block id.
    BlockId,
    /// Two geometries.
    Pair,
}

/// A number, or another value as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// A number that was read.
    Number(i128),
    /// Another value.
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

/// Values of an error by name, for the attributes of an exception; None for a place that the error does not have.
pub type Fields = Vec<(&'static str, Option<Value>)>;

/// A wrong value: the parts of a sentence, and the sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    /// What the value belongs to.
    pub class: Class,
    /// Short stable name, e.g. `overflow`.
    pub code: &'static str,
    /// Object, e.g. `layer "model.layers.0"` or `local group 0`; empty for a direct argument.
    pub place: String,
    /// Field of the object.
    pub field: Cow<'static, str>,
    /// The value that was found.
    pub value: Value,
    /// The required value.
    pub expected: Value,
    /// Why it matters.
    pub reason: Cow<'static, str>,
    /// All of that in one sentence.
    pub text: String,
}

impl Wrong {
    fn fields(&self) -> Fields {
        let Self { class: _, code, place, field, value, expected, reason, text: _ } = self;
        vec![
            named("code", *code),
            named("place", place.as_str()),
            named("field", &**field),
            named("reason", &**reason),
            named("value", value.clone()),
            named("expected", expected.clone()),
        ]
    }
}

fn finding_fields(finding: &Finding) -> Fields {
    let Finding { code, severity: _, place, field, local, remote, reason } = finding;
    let Place { layer, part, axis } = place;
    let name = |name: &Option<String>| name.as_deref().map(Value::from);
    vec![
        named("code", *code),
        named("place", place.to_string()),
        named("field", *field),
        named("reason", *reason),
        named("local", local.as_str()),
        named("remote", remote.as_str()),
        ("layer", name(layer)),
        ("part", name(part)),
        ("axis", name(axis)),
    ]
}

fn named(name: &'static str, value: impl Into<Value>) -> (&'static str, Option<Value>) {
    (name, Some(value.into()))
}

/// A side and the index of one of its groups.
pub(crate) type SideGroup = (&'static str, usize);

impl Error {
    /// What the error is about.
    pub fn class(&self) -> Class {
        match self {
            Self::Input(wrong) => wrong.class,
            Self::Unpairable(_) | Self::Unplannable(_) | Self::NoViews { .. } => Class::Pair,
        }
    }

    /// The values from which the text was made.
    pub fn fields(&self) -> Fields {
        match self {
            Self::Input(wrong) => wrong.fields(),
            Self::Unpairable(finding) | Self::Unplannable(finding) => finding_fields(finding),
            Self::NoViews { why } => {
                vec![named("code", "no-views"), named("field", "views"), named("reason", why.as_str())]
            }
        }
    }

    /// A wrong argument of a function: its value, the required value, the reason, and the sentence.
    pub fn argument(code: &'static str, field: &str, values: (Value, Value), reason: &str, text: String) -> Self {
        wrong(Class::Request, code, ("", field.to_owned()), values, reason.to_owned(), text)
    }

    /// An invalid JSON form of a geometry: the place, if it is known, and the parser's message.
    pub(crate) fn json(version: u32, field: &str, reason: String) -> Self {
        let colon = if field.is_empty() { "" } else { ": " };
        let text = format!("geometry is not valid JSON of schema {version}: {field}{colon}{reason}");
        let expected = format!("JSON of schema {version}");
        wrong(Class::Geometry, "json", ("geometry", field.to_owned()), ("", expected), reason, text)
    }

    /// A JSON form above the size limit.
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

    /// An address, a size or a count that does not fit a number of bits, and the sum or product that gives it.
    pub(crate) fn overflow(place: &str, what: String, bits: u32) -> Self {
        let text = format!("{place}: {what} does not fit {bits} bits");
        let reason = "an address, a size or a count does not fit its type";
        wrong(Class::Overflow, "overflow", (place, ""), (what, format!("{bits} bits")), reason, text)
    }

    /// A list that has the wrong number of entries.
    pub fn count(what: &'static str, got: usize, expected: usize) -> Self {
        let text = format!("{what} has {got} entries, expected {expected}");
        let values = (got as i128, expected as i128);
        wrong(Class::Request, "count", ("", what), values, "the list has the wrong number of entries", text)
    }

    /// A number of a request that is out of range. The place is empty for a direct argument.
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

    /// A span without a token of the `first..end` that the request needs.
    pub(crate) fn missing_tokens(of: SideGroup, token: u64, first: u64, end: u64) -> Self {
        let place = group_of(of);
        let text = format!("{place}: blocks hold no token {token}, needed are tokens {first}..{end}");
        let values = (i128::from(token), format!("tokens {first}..{end}"));
        let reason = "the blocks do not hold all tokens that the request needs";
        wrong(Class::Request, "missing-tokens", (&place, "ids"), values, reason, text)
    }

    /// A row `(address, length, device)`, reported as failed at an index of a list, that is not part of any read.
    pub(crate) fn not_read(index: usize, [address, length, device]: [u64; 3]) -> Self {
        let row = format!("{length} bytes at {address:#x} of device {device}");
        let reason = "a row that is not read cannot have failed: it is of another request, or of another plan";
        let text = format!("failed[{index}]: {row} are no bytes that this request reads: {reason}");
        let values = (row, "bytes that this request reads");
        wrong(Class::Request, "not-read", ("", format!("failed[{index}]")), values, reason, text)
    }

    /// Two ranges `(start, end)` of local bytes that are both written and overlap.
    pub(crate) fn overlap(one: (u64, u64), other: (u64, u64)) -> Self {
        let (one, other) = (format!("{:#x}..{:#x}", one.0, one.1), format!("{:#x}..{:#x}", other.0, other.1));
        let reason = "one block in two groups, or layers that alias";
        let text = format!("local bytes {one} and {other} overlap: {reason}");
        wrong(Class::Request, "overlap", ("local", "bytes"), (one, format!("apart from {other}")), reason, text)
    }

    /// All errors of one local rank about its sources.
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
