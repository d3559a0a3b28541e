// SPDX-License-Identifier: Apache-2.0
//! Results in new arrays, or in arrays that the caller gives.
use std::ops::Range;

use kvhma_core::lowlevel::block_ids::BlockIds;
use kvhma_core::lowlevel::out::Out;
use numpy::ndarray::Dimension;
use numpy::{
    BorrowError, Element, IntoPyArray, Ix1, Ix2, PyArray, PyArray1, PyArray2, PyArrayMethods, PyReadwriteArray,
    PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::prelude::*;
use pyo3::types::PySlice;
use pyo3::{PyTypeCheck, PyTypeInfo};

use crate::convert::{advise, rows};
use crate::error::{OrRaise, type_error};

/// The ids that `write` gives: in a new array, or in the front of `out`, of which they are a view.
///
/// `read` has the ids that `write` reads. No Python code runs from its call until the ids are written: this thread holds
/// the interpreter, because another thread could change the arrays of ids after they were checked.
pub(crate) fn column_into<'a, 'py, R>(
    py: Python<'py>,
    out: Option<&Bound<'py, PyAny>>,
    read: impl FnOnce() -> Option<Vec<BlockIds<'a>>>,
    write: impl FnOnce(&[BlockIds<'a>], &mut Out<'_, i32>) -> kvhma_core::Result<R>,
) -> PyResult<(Bound<'py, PyArray1<i32>>, R)> {
    let changed = || type_error(py, "block_ids", "", "were changed while they were read");
    let Some(given) = out else {
        let mut new = Out::new(advise);
        let result = read().map(|tables| write(&tables, &mut new)).ok_or_else(changed)?.or_raise(py)?;
        return Ok((new.into_new().unwrap_or_default().into_pyarray(py), result));
    };
    let form = "an int32 array of shape (n,)";
    let mut array = writable::<i32, Ix1>(given, form)?;
    let memory = array.as_slice_mut().map_err(|_| wrong(given, form))?;
    let tables = read().ok_or_else(changed)?;
    let written = memory.as_ptr_range();
    if tables.iter().any(|ids| ids.overlaps(written.start as usize..written.end as usize)) {
        return Err(type_error(py, "out", "", "shares memory with an array that is read"));
    }
    let mut memory = Out::Given(memory, 0);
    let result = write(&tables, &mut memory).or_raise(py)?;
    Ok((front(given, memory.len())?, result))
}

/// The rows that `write` gives: in a new array, or in the front of `out`, of which they are a view.
///
/// `write` reads nothing of Python's, so other threads run meanwhile. `out` is borrowed until it is written: two calls
/// cannot write it at once. As with numpy's own `out=`, no other code may use it before the call returns.
pub(crate) fn rows_into<'py, const N: usize>(
    py: Python<'py>,
    out: Option<&Bound<'py, PyAny>>,
    write: impl FnOnce(&mut Out<'_, [u64; N]>) -> kvhma_core::Result<()> + Send,
) -> PyResult<Bound<'py, PyArray2<u64>>> {
    let Some(given) = out else {
        let mut new = Out::new(advise);
        py.detach(|| write(&mut new)).or_raise(py)?;
        return rows(py, new.into_new().unwrap_or_default());
    };
    let form = format!("a uint64 array of shape (n, {N})");
    let mut array = writable::<u64, Ix2>(given, &form)?;
    if array.shape()[1] != N {
        return Err(wrong(given, &form));
    }
    let memory = array.as_slice_mut().map_err(|_| wrong(given, &form))?;
    let mut memory = Out::Given(as_rows(memory), 0);
    py.detach(|| write(&mut memory)).or_raise(py)?;
    front(given, memory.len())
}

#[allow(unsafe_code, reason = "numbers as rows, before Rust 1.88 has `as_chunks_mut`")]
fn as_rows<const N: usize>(numbers: &mut [u64]) -> &mut [[u64; N]] {
    // SAFETY: the rows follow each other inside of the slice, which is borrowed as long as they are.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len() / N) }
}

fn writable<'py, T: Element, D: Dimension>(
    given: &Bound<'py, PyAny>,
    form: &str,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    let array = given.cast::<PyArray<T, D>>().map_err(|_| wrong(given, form))?;
    if !array.is_c_contiguous() {
        return Err(wrong(given, form));
    }
    array.try_readwrite().map_err(|error| match error {
        BorrowError::AlreadyBorrowed => {
            type_error(given.py(), "out", "", "is in use by another call, or shares memory with an array that is read")
        }
        _ => type_error(given.py(), "out", "", "is read-only"),
    })
}

fn wrong(given: &Bound<'_, PyAny>, form: &str) -> PyErr {
    type_error(given.py(), "out", "", &format!("expected C-contiguous, {form}"))
}

fn front<'py, A: PyTypeCheck>(given: &Bound<'py, PyAny>, filled: usize) -> PyResult<Bound<'py, A>> {
    Ok(part(given, 0..filled)?.cast_into::<A>()?)
}

/// A view of some entries of an array. A subclass may have another way to get items.
pub(crate) fn part<'py>(array: &Bound<'py, PyAny>, entries: Range<usize>) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    let slice = PySlice::new(py, entries.start as isize, entries.end as isize, 1);
    if array.is_exact_instance_of::<PyUntypedArray>() {
        return array.get_item(slice);
    }
    PyUntypedArray::type_object(py).call_method1("__getitem__", (array, slice))
}
