// SPDX-License-Identifier: Apache-2.0
//! Errors become Python exceptions with the values in their texts; the classes are in `kvhma.errors`.
use kvhma_core::{Class, Error, Value};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Names and keys in a text may come from a peer, and the text ends up in logs.
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

/// The exception for a wrong argument: its value, the required value, and a sentence with both.
pub(crate) fn argument_error(
    py: Python<'_>,
    code: &'static str,
    field: &str,
    values: (Value, Value),
    reason: &str,
) -> PyErr {
    raise(py, &Error::argument(code, field, values, reason, format!("{field}: {reason}")))
}

/// The exception for an argument of the wrong type; `value` is empty if the reason has it.
pub(crate) fn type_error(py: Python<'_>, field: &str, value: &str, reason: &str) -> PyErr {
    let space = if value.is_empty() { "" } else { " " };
    let text = format!("{field}: {value}{space}{reason}");
    raise(py, &Error::argument("type", field, (value.into(), "".into()), reason, text))
}

/// The exception of an error, or the exception that prevented making it.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).map_or_else(|error| error, PyErr::from_value)
}

fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let attributes = PyDict::new(py);
    for (name, value) in error.fields() {
        match value {
            Some(Value::Number(number)) => attributes.set_item(name, number)?,
            Some(Value::Text(text)) => attributes.set_item(name, text)?,
            None => attributes.set_item(name, py.None())?,
        }
    }
    let errors = ERRORS.get_or_try_init(py, || py.import("kvhma.errors").map(Bound::unbind))?;
    let class = errors.bind(py).getattr(class_name(error.class()))?;
    class.call((printable(&error.to_string()),), Some(&attributes))
}

fn class_name(class: Class) -> &'static str {
    match class {
        Class::Geometry => "GeometryError",
        Class::Overflow => "AddressOverflowError",
        Class::Request => "RequestError",
        Class::BlockId => "BlockIdError",
        Class::Pair => "UnsupportedPairError",
    }
}

pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for kvhma_core::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}
