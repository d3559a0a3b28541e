// SPDX-License-Identifier: Apache-2.0
//! Errors become Python exceptions that carry what their texts say; the classes are in `kvhma.errors`.
// A new error of the core has to be given a class and its data here.
#![deny(clippy::wildcard_enum_match_arm)]

use kvhma_core::{Error, Finding, Place};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// A number, or whatever else was found, as text.
#[derive(IntoPyObject)]
pub(crate) enum Value {
    Number(i128),
    Text(String),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// What was compared.
enum Values {
    /// A value, and what it has to be.
    One { value: Value, expected: Value },
    /// The two sides of a pair.
    Two { local: String, remote: String, about: Place },
}

/// An exception before it is made.
struct Exception {
    class: &'static str,
    code: &'static str,
    place: String,
    field: String,
    reason: String,
    values: Values,
}

impl Exception {
    /// One value that is not what it has to be; the caller adds the reason, and the place if there is one.
    fn of_value(class: &'static str, code: &'static str, field: &str, value: Value, expected: Value) -> Self {
        let values = Values::One { value, expected };
        Self { class, code, place: String::new(), field: field.to_owned(), reason: String::new(), values }
    }

    fn at(self, place: String) -> Self {
        Self { place, ..self }
    }

    fn because(self, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..self }
    }

    fn of_pair(finding: &Finding) -> Self {
        let Finding { code, place, field, local, remote, reason, severity: _ } = finding.clone();
        Self {
            class: "UnsupportedPairError",
            code,
            place: place.to_string(),
            field: field.to_owned(),
            reason: reason.to_owned(),
            values: Values::Two { local, remote, about: place },
        }
    }

    fn make(self, py: Python<'_>, text: &str) -> PyResult<PyErr> {
        let data = PyDict::new(py);
        for (name, value) in
            [("code", self.code), ("place", &self.place), ("field", &self.field), ("reason", &self.reason)]
        {
            data.set_item(name, value)?;
        }
        match self.values {
            Values::One { value, expected } => {
                data.set_item("value", value)?;
                data.set_item("expected", expected)?;
            }
            Values::Two { local, remote, about } => {
                data.set_item("local", local)?;
                data.set_item("remote", remote)?;
                for (name, value) in [("layer", about.layer), ("part", about.part), ("axis", about.axis)] {
                    data.set_item(name, value)?;
                }
            }
        }
        let errors = ERRORS.get_or_try_init(py, || py.import("kvhma.errors").map(Bound::unbind))?;
        let exception = errors.bind(py).getattr(self.class)?.call((printable(text),), Some(&data))?;
        Ok(PyErr::from_value(exception))
    }

    /// The exception, or what kept it from being made.
    fn raise(self, py: Python<'_>, text: &str) -> PyErr {
        self.make(py, text).unwrap_or_else(|error| error)
    }
}

/// Names and keys in a text may be a peer's, and it ends up in logs.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() {
            out.extend(letter.escape_default());
        } else {
            out.push(letter);
        }
    }
    out
}

/// The exception of an argument that is wrong: its value, what it has to be, and a sentence that says both.
pub(crate) fn argument_error(
    py: Python<'_>,
    code: &'static str,
    field: &str,
    (value, expected): (Value, Value),
    reason: &str,
) -> PyErr {
    let text = format!("{field}: {reason}");
    Exception::of_value("RequestError", code, field, value, expected).because(reason).raise(py, &text)
}

/// The exception of an argument whose type is wrong; `value` is empty where the reason says it.
pub(crate) fn type_error(py: Python<'_>, field: &str, value: &str, reason: &str) -> PyErr {
    let space = if value.is_empty() { "" } else { " " };
    let text = format!("{field}: {value}{space}{reason}");
    Exception::of_value("RequestError", "type", field, value.into(), "".into()).because(reason).raise(py, &text)
}

/// The class of an error of the core, and what it carries.
fn describe(error: &Error) -> Exception {
    let number = |value: u64| Value::Number(value.into());
    let text = |text: &str| Value::from(text);
    match error {
        Error::Json { version, reason } => {
            let expected = format!("JSON of schema {version}");
            Exception::of_value("GeometryError", "json", "", text(""), text(&expected))
                .at("geometry".to_owned())
                .because(reason)
        }
        Error::TooLarge { bytes, limit } => {
            let expected = format!("at most {limit}");
            Exception::of_value("GeometryError", "too-large", "bytes", number(*bytes as u64), text(&expected))
                .at("geometry".to_owned())
                .because("a longer geometry is not read")
        }
        Error::Geometry { place, field, value, expected } => {
            Exception::of_value("GeometryError", "geometry", field, text(value), text(expected))
                .at(place.clone())
                .because("the geometry contradicts itself")
        }
        Error::Overflow { place, what, bits } => {
            let expected = format!("{bits} bits");
            Exception::of_value("AddressOverflowError", "overflow", "", text(what), text(&expected))
                .at(place.clone())
                .because("an address, a size or a count does not fit its type")
        }
        Error::Unpairable(finding) | Error::Unplannable(finding) => Exception::of_pair(finding),
        Error::Count { what, got, expected } => {
            Exception::of_value("RequestError", "count", what, number(*got as u64), number(*expected as u64))
                .because("the list has the wrong number of entries")
        }
        Error::Value { place, field, value, expected } => {
            Exception::of_value("RequestError", "value", field, Value::Number(*value), text(expected))
                .at(place.clone())
                .because("the number is out of range")
        }
        Error::BlockRange { side, group, index, id, num_blocks } => {
            let (field, expected) = (format!("ids[{index}]"), format!("0..{num_blocks}"));
            Exception::of_value("BlockIdError", "block-range", &field, Value::Number((*id).into()), text(&expected))
                .at(group_of(side, *group))
                .because("the block is outside of the cache")
        }
        Error::NullBlock { side, group, index, id } => {
            let field = format!("ids[{index}]");
            Exception::of_value(
                "BlockIdError",
                "null-block",
                &field,
                Value::Number((*id).into()),
                text("another block"),
            )
            .at(group_of(side, *group))
            .because("the null block is never moved")
        }
        Error::DuplicateBlock { side, group, id } => {
            Exception::of_value("BlockIdError", "duplicate-block", "ids", Value::Number((*id).into()), text("once"))
                .at(group_of(side, *group))
                .because("a block of a request has one place in its table")
        }
        Error::MissingTokens { side, group, token, first, end } => {
            let expected = format!("tokens {first}..{end}");
            Exception::of_value("RequestError", "missing-tokens", "ids", number(*token), text(&expected))
                .at(group_of(side, *group))
                .because("the blocks do not hold all tokens that the request needs")
        }
        Error::Overlap { first, first_end, second, second_end } => {
            let (one, other) = (format!("{first:#x}..{first_end:#x}"), format!("{second:#x}..{second_end:#x}"));
            Exception::of_value("RequestError", "overlap", "bytes", text(&one), text(&format!("apart from {other}")))
                .at("local".to_owned())
                .because("one block in two groups, or layers that alias")
        }
        Error::NoViews { why } => Exception {
            class: "UnsupportedPairError",
            code: "no-views",
            place: String::new(),
            field: "views".to_owned(),
            reason: why.clone(),
            values: Values::Two { local: String::new(), remote: String::new(), about: Place::default() },
        },
    }
}

fn group_of(side: &str, group: usize) -> String {
    format!("{side} group {group}")
}

pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for kvhma_core::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| describe(&error).raise(py, &error.to_string()))
    }
}
