// SPDX-License-Identifier: Apache-2.0
use kvhma_core::{TokenDigest, Value};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::read_item;
use crate::error::argument_error;

const WHAT: &str = "tokens";

/// Ids that are hashed at a time.
const PIECE: usize = 16384;

/// Return the first 16 bytes of BLAKE3 over the length of a header (u64), the header and token ids (i32).
#[pyfunction]
pub(crate) fn digest_tokens<'py>(
    py: Python<'py>,
    header: &[u8],
    tokens: &Bound<'py, PyList>,
    num_tokens: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    if tokens.len() < num_tokens {
        let reason = format!("{} of {num_tokens} are in the list", tokens.len());
        return Err(count_error(tokens, Value::Number(num_tokens as i128), &reason));
    }
    let mut digest = TokenDigest::new(header);
    let mut piece = vec![0; PIECE.min(num_tokens)];
    for first in (0..num_tokens).step_by(PIECE) {
        let count = PIECE.min(num_tokens - first);
        for (index, token) in (first..).zip(&mut piece[..count]) {
            *token = read_token(tokens, index)?;
        }
        digest.push(&piece[..count]);
    }
    Ok(PyBytes::new(py, &digest.finish()))
}

/// Reads an id of a list through the C API: this is most of the time of a digest.
#[inline]
#[allow(unsafe_code, reason = "a borrowed item of a list, read while this thread holds the interpreter")]
fn read_token(tokens: &Bound<'_, PyList>, index: usize) -> PyResult<i32> {
    // SAFETY: an index past the end gives null and an exception. The borrowed item is used at once: converting an exact
    // int runs no Python code that could drop it.
    let value = unsafe {
        let item = ffi::PyList_GetItem(tokens.as_ptr(), index as ffi::Py_ssize_t);
        if !item.is_null() && ffi::PyLong_CheckExact(item) != 0 { ffi::PyLong_AsLongLong(item) } else { -1 }
    };
    // -1 is also what a number of more than 64 bits gives, and an exception.
    if value == -1 { read_slowly(tokens, index) } else { to_token(tokens.py(), value) }
}

#[cold]
fn read_slowly(tokens: &Bound<'_, PyList>, index: usize) -> PyResult<i32> {
    PyErr::take(tokens.py());
    let shorter = |_| {
        let expected = Value::Text(format!("more than {index}"));
        count_error(tokens, expected, &format!("the list has lost id {index} while it was read"))
    };
    to_token(tokens.py(), read_item(WHAT, &tokens.get_item(index).map_err(shorter)?)?)
}

#[inline]
fn to_token(py: Python<'_>, value: i64) -> PyResult<i32> {
    i32::try_from(value).map_err(|_| {
        let values = (Value::Number(value.into()), "32 bits".into());
        argument_error(py, "value", WHAT, values, &format!("{value} does not fit 32 bits"))
    })
}

fn count_error(tokens: &Bound<'_, PyList>, expected: Value, reason: &str) -> PyErr {
    argument_error(tokens.py(), "count", WHAT, (Value::Number(tokens.len() as i128), expected), reason)
}
