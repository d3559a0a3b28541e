// SPDX-License-Identifier: Apache-2.0
use kvhma_core::{TokenDigest, Value};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::convert::read_item;
use crate::error::argument_error;

const WHAT: &str = "tokens";

/// Number of ids that are hashed at a time.
const PIECE: usize = 16384;

/// Return the first 16 bytes of BLAKE3 over the length of a header (u64), the header and token ids (i32).
///
/// Numbers are little-endian.
///
/// Args:
///     header: what identifies the prompt besides its tokens.
///     tokens: token ids. The list is read in place, not copied.
///     num_tokens: the length of the prefix that counts.
///
/// Raises:
///     RequestError: there are fewer tokens, or a token is not an integer of 32 bits.
#[pyfunction]
pub(crate) fn digest_tokens<'py>(
    py: Python<'py>,
    header: &[u8],
    tokens: &Bound<'py, PyList>,
    num_tokens: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut digest = TokenDigest::new(header);
    push_tokens(&mut digest, tokens, 0, num_tokens)?;
    Ok(PyBytes::new(py, &digest.finish()))
}

/// Return `digest_tokens` without a header for each of several prefixes of a token list, in one pass.
///
/// Args:
///     tokens: token ids. The list is read in place, not copied.
///     counts: lengths of the prefixes, in ascending order.
///
/// Raises:
///     RequestError: there are fewer tokens, a token is not an integer of 32 bits, or counts decrease.
#[pyfunction]
pub(crate) fn digest_prefixes<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyList>,
    counts: Vec<usize>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let mut digest = TokenDigest::new(b"");
    let mut first = 0;
    let mut found = Vec::with_capacity(counts.len());
    for (index, &count) in counts.iter().enumerate() {
        if count < first {
            let values = (Value::Number(count as i128), Value::Text(format!("at least {first}")));
            return Err(argument_error(
                py,
                "value",
                "counts",
                values,
                &format!("entry {index} is less than the one before"),
            ));
        }
        push_tokens(&mut digest, tokens, first, count)?;
        found.push(PyBytes::new(py, &digest.finish()));
        first = count;
    }
    Ok(found)
}

/// Feeds the ids of a list between two indices.
fn push_tokens(digest: &mut TokenDigest, tokens: &Bound<'_, PyList>, from: usize, to: usize) -> PyResult<()> {
    if tokens.len() < to {
        let reason = format!("{} of {to} are in the list", tokens.len());
        return Err(count_error(tokens, Value::Number(to as i128), &reason));
    }
    let mut piece = vec![0; PIECE.min(to - from)];
    for first in (from..to).step_by(PIECE) {
        let count = PIECE.min(to - first);
        for (index, token) in (first..).zip(&mut piece[..count]) {
            *token = read_token(tokens, index)?;
        }
        // Hashing fewer ids takes less time than reacquiring the interpreter.
        if count == PIECE {
            tokens.py().detach(|| digest.push(&piece));
        } else {
            digest.push(&piece[..count]);
        }
    }
    Ok(())
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
    // A number of more than 64 bits also returns -1, with an exception.
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
