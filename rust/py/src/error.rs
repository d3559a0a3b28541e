// SPDX-License-Identifier: Apache-2.0
use kvhma_core::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn raise(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let find = || -> PyResult<Py<PyType>> {
        let module = ERRORS.get_or_try_init(py, || py.import("kvhma.errors").map(Bound::unbind))?;
        Ok(module.bind(py).getattr(class)?.cast_into::<PyType>()?.unbind())
    };
    match find() {
        Ok(class) => PyErr::from_type(class.into_bound(py), printable(text)),
        Err(error) => error,
    }
}

/// Names and keys in a text may be a peer's, and it ends up in logs.
fn printable(text: &str) -> String {
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

/// The exception of an input whose type is wrong.
pub(crate) fn request_error(py: Python<'_>, text: String) -> PyErr {
    raise(py, "RequestError", &text)
}

/// The exception for an error of the core.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error {
        Error::Json { .. } | Error::TooLarge { .. } | Error::Geometry { .. } => "GeometryError",
        Error::Overflow { .. } => "AddressOverflowError",
        Error::Unpairable { .. } | Error::NoViews { .. } => "UnsupportedPairError",
        Error::BlockRange { .. } | Error::NullBlock { .. } | Error::DuplicateBlock { .. } => "BlockIdError",
        _ => "RequestError",
    };
    raise(py, class, &error.to_string())
}

pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for kvhma_core::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_python(py, &error))
    }
}
