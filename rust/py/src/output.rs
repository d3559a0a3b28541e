// SPDX-License-Identifier: Apache-2.0
//! Results in new arrays, or in arrays that the caller gives.
#![allow(unsafe_code, reason = "slices of arrays, used while this thread holds the interpreter and runs no Python")]
use std::ops::Range;

use kvhma_core::lowlevel::block_ids::BlockIds;
use kvhma_core::lowlevel::out::Out;
use numpy::ndarray::Dimension;
use numpy::{
    Element, IntoPyArray, Ix1, Ix2, PyArray, PyArray1, PyArray2, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::prelude::*;
use pyo3::types::PySlice;
use pyo3::{PyTypeCheck, PyTypeInfo};

use crate::convert::{advise, rows};
use crate::error::{OrRaise, type_error};

/// The ids that `write` gives: in a new array, or in the front of `out`, of which they are a view.
///
/// `read` has the ids that `write` reads. No Python code runs from its call until the ids are written.
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
    let array = writable::<i32, Ix1>(given, "an int32 array of shape (n,)")?;
    // SAFETY: it is writable, and no other code runs while the slice is used.
    let memory = unsafe { array.as_slice_mut() }.map_err(|_| wrong(given, "an int32 array of shape (n,)"))?;
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
    let array = writable::<u64, Ix2>(given, &form)?;
    if array.shape()[1] != N {
        return Err(wrong(given, &form));
    }
    // SAFETY: it is writable, and no other code runs while the slice is used.
    let memory = unsafe { array.as_slice_mut() }.map_err(|_| wrong(given, &form))?;
    let mut memory = Out::Given(as_rows(memory), 0);
    write(&mut memory).or_raise(py)?;
    front(given, memory.len())
}

fn as_rows<const N: usize>(numbers: &mut [u64]) -> &mut [[u64; N]] {
    // SAFETY: the rows follow each other inside of the slice, which is borrowed as long as they are.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len() / N) }
}

fn writable<'a, 'py, T: Element, D: Dimension>(
    given: &'a Bound<'py, PyAny>,
    form: &str,
) -> PyResult<&'a Bound<'py, PyArray<T, D>>> {
    let array = given.cast::<PyArray<T, D>>().map_err(|_| wrong(given, form))?;
    if !array.is_c_contiguous() {
        return Err(wrong(given, form));
    }
    array.try_readwrite().map_err(|_| type_error(given.py(), "out", "", "is read-only"))?;
    Ok(array)
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
    PyUntypedArray::type_object(py).call_method1("__getitem__", (array, slice))
}
