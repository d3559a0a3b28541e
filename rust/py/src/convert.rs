// SPDX-License-Identifier: Apache-2.0
//! Block ids and numbers of any accepted form, read in one pass.
use std::ops::Range;

use kvhma_core::lowlevel::block_ids::BlockIds;
use kvhma_core::{Descriptor, Span, SpanIds};
use numpy::ndarray::Array2;
use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2,
    PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList, PySequence, PyString, PyTuple};
use pyo3::{Borrowed, ffi};

use crate::error::type_error;

pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

pub(crate) fn read_item(what: &str, item: &Bound<'_, PyAny>) -> PyResult<i64> {
    let id = if is_bool(item) { None } else { item.extract::<i64>().ok() };
    id.ok_or_else(|| type_error(item.py(), what, &typed(item), "is not an integer of 64 bits"))
}

/// True and False are integers in Python, but are not accepted as ids or numbers.
fn is_bool(item: &Bound<'_, PyAny>) -> bool {
    item.is_instance_of::<PyBool>()
}

fn typed(value: &Bound<'_, PyAny>) -> String {
    format!("{} of type {}", show(value), type_name(value))
}

pub(crate) fn show(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| "a value".to_owned(), |text| text.to_string());
    if text.chars().count() > 60 { text.chars().take(60).chain("...".chars()).collect() } else { text }
}

/// Ids of a list, tuple or range of int, or of an array of integers with one dimension; an empty array may have any
/// type.
pub(crate) fn read_ids(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Ok(list) = value.cast_exact::<PyList>() {
        return read_list(what, list, 0..list.len());
    }
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        return read_array(what, array);
    }
    // Text is a sequence too, and bytes are a sequence of integers.
    let is_text = value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>();
    let Some(sequence) = value.cast::<PySequence>().ok().filter(|_| !is_text) else {
        return Err(type_error(value.py(), what, &type_name(value), "is not a list or array of integers"));
    };
    let length = sequence.len()?;
    (0..length).map(|index| read_item(what, &sequence.get_item(index)?)).collect()
}

/// The ids of an array with one dimension that has them one after the other in memory, in the form that the core reads.
///
/// # Safety
///
/// No other code runs while the ids are used.
#[allow(unsafe_code, reason = "slices of arrays, used while this thread holds the interpreter and runs no Python")]
pub(crate) unsafe fn array_ids<'a>(array: &'a Bound<'_, PyUntypedArray>) -> Option<BlockIds<'a>> {
    let dtype = array.dtype();
    if array.ndim() != 1 || dtype.kind() != b'i' || dtype.byteorder() != b'=' {
        return None;
    }
    // SAFETY: the array has the dimension and the type that are named, and no other code runs.
    match dtype.itemsize() {
        4 => unsafe { array.cast_unchecked::<PyArray1<i32>>().as_slice() }.ok().map(BlockIds::Narrow),
        8 => unsafe { array.cast_unchecked::<PyArray1<i64>>().as_slice() }.ok().map(BlockIds::Wide),
        _ => None,
    }
}

#[allow(unsafe_code, reason = "as `array_ids`")]
fn read_array(what: &str, array: &Bound<'_, PyUntypedArray>) -> PyResult<Vec<i64>> {
    check_array(what, array)?;
    // SAFETY: the slice is copied at once.
    match unsafe { array_ids(array) } {
        Some(BlockIds::Narrow(ids)) => return Ok(ids.iter().map(|&id| id.into()).collect()),
        Some(BlockIds::Wide(ids)) => return Ok(ids.to_vec()),
        None => {}
    }
    // Other widths, byte orders and steps: numpy converts them.
    if array.is_empty() || array.dtype().kind() == b'i' {
        let ids = array.call_method1("astype", ("int64",)).map_err(|_| array_error(what, array, 1))?;
        return Ok(ids.extract::<PyReadonlyArray1<'_, i64>>()?.as_array().to_vec());
    }
    let ids = array.call_method1("astype", ("uint64",))?;
    let too_large = |id| type_error(array.py(), what, &u64::to_string(&id), "is not an integer of 64 bits");
    let ids = ids.extract::<PyReadonlyArray1<'_, u64>>()?;
    ids.as_array().iter().map(|&id| i64::try_from(id).map_err(|_| too_large(id))).collect()
}

/// Fails unless an array has one dimension, and integers if it is not empty.
fn check_array(what: &str, array: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
    if array.ndim() == 1 && (array.is_empty() || matches!(array.dtype().kind(), b'i' | b'u')) {
        return Ok(());
    }
    Err(array_error(what, array, 1))
}

/// The error of an array that has no integers, or another number of dimensions.
pub(crate) fn array_error(what: &str, array: &Bound<'_, PyUntypedArray>, dimensions: usize) -> PyErr {
    let dtype = array.dtype().str().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    let reason = format!("has dtype {dtype} and {} dimensions, expected integers and {dimensions}", array.ndim());
    type_error(array.py(), what, "array", &reason)
}

/// Number of ids. Fails as `read_ids` does, but reads no item of an array or a list: who uses an item reads it.
fn count_ids(what: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    if let Ok(list) = value.cast_exact::<PyList>() {
        return Ok(list.len());
    }
    match value.cast::<PyUntypedArray>() {
        Ok(array) => check_array(what, array).map(|()| array.len()),
        Err(_) => read_ids(what, value).map(|ids| ids.len()),
    }
}

/// Reads some items of a list one by one through the C API: half of the time of a short request is spent here. There
/// are fewer if converting an item that is no int ran Python code that shortened the list.
pub(crate) fn read_list(what: &str, list: &Bound<'_, PyList>, entries: Range<usize>) -> PyResult<Vec<i64>> {
    let mut ids = Vec::with_capacity(entries.len());
    for index in entries {
        match read_entry(what, list, index)? {
            Some(id) => ids.push(id),
            None => break,
        }
    }
    Ok(ids)
}

/// How many items of a list, from `start` on, are `null`.
pub(crate) fn nulls_in_list(what: &str, list: &Bound<'_, PyList>, start: usize, null: i64) -> PyResult<usize> {
    let mut end = start;
    while end < list.len() && read_entry(what, list, end)? == Some(null) {
        end = end_of_same(list, end);
    }
    Ok(end - start)
}

/// One past the last of the items from `start` on that are one object. Null blocks mostly are: it takes half of the time
/// of reading each.
#[allow(unsafe_code, reason = "addresses of borrowed items, which are only compared")]
fn end_of_same(list: &Bound<'_, PyList>, start: usize) -> usize {
    // SAFETY: every index is inside of the list, which nothing changes meanwhile.
    let item = |index: usize| unsafe { ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t) };
    let length = list.len();
    if start >= length {
        return start + 1;
    }
    let first = item(start);
    (start + 1..length).find(|&index| item(index) != first).unwrap_or(length)
}

/// One item of a list; None past its end.
#[allow(unsafe_code, reason = "a borrowed item of a list, read while this thread holds the interpreter")]
#[inline]
pub(crate) fn read_entry(what: &str, list: &Bound<'_, PyList>, index: usize) -> PyResult<Option<i64>> {
    // SAFETY: an index past the end returns null and an exception. The borrowed item is used at once, and reading it
    // runs no Python code that could drop it.
    let item = unsafe {
        let item = ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t);
        Borrowed::from_ptr_or_opt(list.py(), item)
    };
    let Some(item) = item else {
        PyErr::take(list.py());
        return Ok(None);
    };
    match exact_int(&item) {
        Some(value) => Ok(Some(value)),
        None => read_item(what, &list.get_item(index)?).map(Some),
    }
}

/// An exact int of 64 bits, read without running Python code; None for anything else, and for -1.
#[allow(unsafe_code, reason = "the C API's conversion of an exact int")]
#[inline]
fn exact_int(item: &Bound<'_, PyAny>) -> Option<i64> {
    // SAFETY: the item is an int, and this thread holds the interpreter.
    let value = unsafe {
        if ffi::PyLong_CheckExact(item.as_ptr()) == 0 {
            return None;
        }
        ffi::PyLong_AsLongLong(item.as_ptr())
    };
    if value == -1 {
        // Also the result of an overflow. The slow path distinguishes it.
        PyErr::take(item.py());
        return None;
    }
    Some(value)
}

/// Lists of ids, one for each group.
pub(crate) fn read_groups(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<i64>>> {
    items(what, value)?.iter().map(|item| read_ids(what, item)).collect()
}

/// Number of ids of each of some lists.
pub(crate) fn count_groups(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let lists = items(what, value)?;
    lists.iter().enumerate().map(|(index, item)| count_ids(&format!("{what}[{index}]"), item)).collect()
}

/// Rows of a uint64 array of shape `(n, 3)`.
pub(crate) fn read_rows(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<Descriptor>> {
    let rows = rows_of_three(what, value)?;
    Ok(rows.as_array().rows().into_iter().map(|row| [row[0], row[1], row[2]]).collect())
}

/// The same in place.
pub(crate) fn rows_of_three<'py>(what: &str, value: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray2<'py, u64>> {
    let array = value.extract::<PyReadonlyArray2<'py, u64>>().ok().filter(|array| array.as_array().ncols() == 3);
    array.ok_or_else(|| type_error(value.py(), what, "", "expected a uint64 array of shape (n, 3)"))
}

/// Unsigned numbers of 64 bits: a list or an array of integers.
pub(crate) fn read_u64s(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let array = value.cast::<PyUntypedArray>().ok();
    if let Some(array) = array.and_then(|array| array.extract::<PyReadonlyArray1<'_, u64>>().ok()) {
        return Ok(array.as_array().to_vec());
    }
    collect(items(what, value)?.iter().map(|item| read_u64(what, item)))
}

/// One unsigned number of 64 bits.
pub(crate) fn read_u64(what: &str, item: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Some(number) = exact_int(item).and_then(|number| u64::try_from(number).ok()) {
        return Ok(number);
    }
    let number = if is_bool(item) { None } else { item.extract::<u64>().ok() };
    number.ok_or_else(|| {
        let is_int = item.is_instance_of::<PyInt>() && !is_bool(item);
        type_error(item.py(), what, &typed(item), if is_int { "is not in 0..2**64" } else { "is not an integer" })
    })
}

/// The items of a list, tuple or array.
pub(crate) fn items<'py>(what: &str, value: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = value.cast_exact::<PyList>() {
        return Ok(list.iter().collect());
    }
    let iterable =
        value.cast::<PyList>().is_ok() || value.cast::<PyTuple>().is_ok() || value.cast::<PyUntypedArray>().is_ok();
    if !iterable {
        return Err(type_error(value.py(), what, &type_name(value), "is not a list"));
    }
    // An array without a dimension has no items.
    value.try_iter().map_err(|_| type_error(value.py(), what, &typed(value), "is not a list"))?.collect()
}

/// Collects results in memory that is allocated once. `Iterator::collect` grows it, because a result may be an error.
pub(crate) fn collect<T, E>(results: impl ExactSizeIterator<Item = Result<T, E>>) -> Result<Vec<T>, E> {
    let mut all = Vec::with_capacity(results.len());
    for result in results {
        all.push(result?);
    }
    Ok(all)
}

fn as_pair<'py>(value: &Bound<'py, PyAny>) -> Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let pair = value.cast::<PyTuple>().ok()?;
    if pair.len() != 2 {
        return None;
    }
    Some((pair.get_item(0).ok()?, pair.get_item(1).ok()?))
}

fn read_span(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Span> {
    let Some((first, ids)) = as_pair(value) else {
        return Err(type_error(value.py(), what, &typed(value), "is not a Span(first, ids)"));
    };
    let first = match exact_int(&first).and_then(|first| u64::try_from(first).ok()) {
        Some(first) => first,
        None => read_u64(&format!("{what}: first"), &first)?,
    };
    Ok(Span { first, ids: read_span_ids(what, &ids)? })
}

/// As `read_ids`, but ids of 32 bits stay as they are: that is less memory to write and to read.
#[allow(unsafe_code, reason = "as `array_ids`")]
fn read_span_ids(what: &str, value: &Bound<'_, PyAny>) -> PyResult<SpanIds> {
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        // SAFETY: the slice is copied at once.
        if let Some(BlockIds::Narrow(ids)) = unsafe { array_ids(array) } {
            return Ok(ids.to_vec().into());
        }
    }
    Ok(read_ids(what, value)?.into())
}

/// A span for each group.
pub(crate) fn read_spans(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<Span>> {
    items(what, value)?.iter().map(|item| read_span(what, item)).collect()
}

/// A span for each group, or a list of spans for each source.
pub(crate) fn read_remote_spans(value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<Span>>> {
    let what = "remote";
    let list = items(what, value)?;
    let is_span = |item: &Bound<'_, PyAny>| as_pair(item).is_some_and(|(first, _)| as_pair(&first).is_none());
    if list.is_empty() || list.iter().all(is_span) {
        return Ok(vec![list.iter().map(|item| read_span(what, item)).collect::<PyResult<_>>()?]);
    }
    list.iter().map(|item| read_spans(what, item)).collect()
}

/// Asks for huge pages for the memory of a large result, as numpy does for its own. Without them most of the time is
/// spent in the first access to every small page.
#[allow(unsafe_code, reason = "advice on pages, which changes no byte")]
pub(crate) fn advise(addresses: Range<usize>) {
    #[cfg(target_os = "linux")]
    if addresses.len() >= 4 << 20 {
        const PAGE: usize = 4096;
        let first = addresses.start.next_multiple_of(PAGE);
        let length = (addresses.end - first) / PAGE * PAGE;
        // SAFETY: the advice does not change what any memory holds. If the system ignores it, nothing is lost.
        unsafe { libc::madvise(first as *mut libc::c_void, length, libc::MADV_HUGEPAGE) };
    }
}

/// Moves rows out as an array of shape `(n, N)`.
pub(crate) fn rows<const N: usize>(py: Python<'_>, values: Vec<[u64; N]>) -> PyResult<Bound<'_, PyArray2<u64>>> {
    let shape = [values.len(), N];
    let rows = Array2::from_shape_vec(shape, values.into_flattened());
    Ok(rows.map_err(|error| PyValueError::new_err(error.to_string()))?.into_pyarray(py))
}

/// Moves a vector out.
pub(crate) fn column(py: Python<'_>, values: Vec<i32>) -> Bound<'_, PyArray1<i32>> {
    values.into_pyarray(py)
}
