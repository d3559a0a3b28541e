// SPDX-License-Identifier: Apache-2.0
//! Results in new arrays, or in arrays that the caller gives.
use kvhma_core::lowlevel::block_ids::BlockIds;
use kvhma_core::lowlevel::out::Out;
use numpy::ndarray::Dimension;
use numpy::{
    BorrowError, Element, IntoPyArray, Ix1, Ix2, PyArray, PyArray1, PyArray2, PyArrayMethods, PyReadwriteArray,
    PyUntypedArrayMethods,
};
use pyo3::PyTypeCheck;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::convert::rows;
use crate::error::{OrRaise, type_error};

/// The ids that `write` gives: in a new array, or in the front of `out`, of which they are a view.
pub(crate) fn column_into<'py>(
    py: Python<'py>,
    out: Option<&Bound<'py, PyAny>>,
    inputs: &[BlockIds<'_>],
    write: impl FnOnce(&mut Out<'_, i32>) -> kvhma_core::Result<()>,
) -> PyResult<Bound<'py, PyArray1<i32>>> {
    let Some(given) = out else {
        let mut new = Out::new();
        write(&mut new).or_raise(py)?;
        return Ok(new.into_new().unwrap_or_default().into_pyarray(py));
    };
    let mut array = writable::<i32, Ix1>(given, "an int32 array of shape (n,)")?;
    let memory = array.as_slice_mut().map_err(|_| wrong(given, "an int32 array of shape (n,)"))?;
    let written = memory.as_ptr_range();
    if inputs.iter().any(|ids| ids.overlaps(written.start as usize..written.end as usize)) {
        return Err(overlaps(given));
    }
    let mut memory = Out::Given(memory, 0);
    write(&mut memory).or_raise(py)?;
    let filled = memory.len();
    drop(array);
    front(given, filled)
}

/// The rows that `write` gives: in a new array, or in the front of `out`, of which they are a view.
pub(crate) fn rows_into<'py, const N: usize>(
    py: Python<'py>,
    out: Option<&Bound<'py, PyAny>>,
    write: impl FnOnce(&mut Out<'_, [u64; N]>) -> kvhma_core::Result<()> + Send,
) -> PyResult<Bound<'py, PyArray2<u64>>> {
    let Some(given) = out else {
        let mut new = Out::new();
        py.detach(|| write(&mut new)).or_raise(py)?;
        return rows(py, new.into_new().unwrap_or_default());
    };
    let form = format!("a uint64 array of shape (n, {N})");
    let mut array = writable::<u64, Ix2>(given, &form)?;
    let columns = array.as_array().ncols();
    let memory = array.as_slice_mut().map_err(|_| wrong(given, &form))?;
    if columns != N {
        return Err(wrong(given, &form));
    }
    let mut memory = Out::Given(as_rows(memory), 0);
    write(&mut memory).or_raise(py)?;
    let filled = memory.len();
    drop(array);
    front(given, filled)
}

#[allow(
    unsafe_code,
    reason = "arrays have the alignment and the bytes of their numbers; `as_chunks_mut` needs Rust 1.88"
)]
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
        BorrowError::AlreadyBorrowed => overlaps(given),
        _ => type_error(given.py(), "out", "", "is read-only"),
    })
}

fn wrong(given: &Bound<'_, PyAny>, form: &str) -> PyErr {
    type_error(given.py(), "out", "", &format!("expected C-contiguous, {form}"))
}

fn overlaps(given: &Bound<'_, PyAny>) -> PyErr {
    type_error(given.py(), "out", "", "shares memory with an array that is read")
}

fn front<'py, A: PyTypeCheck>(given: &Bound<'py, PyAny>, filled: usize) -> PyResult<Bound<'py, A>> {
    let front = given.get_item(PySlice::new(given.py(), 0, filled as isize, 1))?;
    front.cast_into::<A>().map_err(PyErr::from)
}
