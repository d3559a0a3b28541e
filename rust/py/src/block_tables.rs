// SPDX-License-Identifier: Apache-2.0
//! Block tables as callers have them, read without a copy where that is possible.
//!
//! Reading may run Python code, of an `__index__` for example, which may change an array in place. So everything that
//! can run Python is read first, and arrays last: what `get` and `rows` return is used before Python runs again.
#![allow(unsafe_code, reason = "slices of arrays, used while this thread holds the interpreter and runs no Python")]
use std::ops::Range;

use kvhma_core::Error;
use kvhma_core::lowlevel::block_ids::BlockIds;
use kvhma_core::lowlevel::ids::Clip;
use numpy::ndarray::Axis;
use numpy::{Element, PyArray2, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyList};

use crate::convert::{array_error, array_ids, nulls_in_list, read_entry, read_ids, read_list, read_u64s};
use crate::error::{raise, type_error};

/// The ids of one table, or those of them that move.
pub(crate) struct Ids<'py> {
    stored: Stored<'py>,
    clip: Clip,
    null_block: Option<i64>,
}

enum Stored<'py> {
    Array(Bound<'py, PyUntypedArray>),
    Read(Vec<i64>),
}

const ALL: Clip = Clip { keep: 0, speculative: None };

impl<'py> Ids<'py> {
    /// All ids of a list, tuple or range of int, or of an array of integers with one dimension.
    pub(crate) fn read(what: &str, table: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::read_clipped(what, table, ALL, None)
    }

    /// The ids that move. Of a list, the others are not read, except for null blocks at its front if they can matter.
    pub(crate) fn read_clipped(
        what: &str,
        table: &Bound<'py, PyAny>,
        clip: Clip,
        null_block: Option<i64>,
    ) -> PyResult<Self> {
        if let Ok(list) = table.cast_exact::<PyList>() {
            // If the first that may move is no null block, none before it matters.
            let first = clip.entries(list.len(), 0).start;
            let nulls = match null_block {
                Some(null) if read_entry(what, list, first)? == Some(null) => nulls_in_list(what, list, 0, null)?,
                _ => 0,
            };
            let live = read_list(what, list, clip.entries(list.len(), nulls))?;
            return Ok(Self { stored: Stored::Read(live), clip: ALL, null_block: None });
        }
        let stored = match table.cast::<PyUntypedArray>() {
            Ok(array) if ids_of(array).is_some() => Stored::Array(array.clone()),
            _ => Stored::Read(read_ids(what, table)?),
        };
        Ok(Self { stored, clip, null_block })
    }

    /// Which entries of its array or sequence they are, and the ids.
    pub(crate) fn get(&self) -> Option<(Range<usize>, BlockIds<'_>)> {
        let all = match &self.stored {
            Stored::Array(array) => ids_of(array)?,
            Stored::Read(ids) => BlockIds::Wide(ids),
        };
        let entries = self.clip.select(all, self.null_block);
        Some((entries.clone(), all.slice(entries)))
    }
}

fn ids_of<'a>(array: &'a Bound<'_, PyUntypedArray>) -> Option<BlockIds<'a>> {
    // SAFETY: no other code runs while the ids are used, see above.
    unsafe { array_ids(array) }
}

/// The tables of several requests: row after row of a matrix, of which each has some entries.
pub(crate) struct Table<'py> {
    matrix: Bound<'py, PyUntypedArray>,
    lengths: Vec<usize>,
}

impl<'py> Table<'py> {
    pub(crate) fn read(table: &Bound<'py, PyAny>, lengths: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, what) = (table.py(), "block_tables");
        let Ok(array) = table.cast::<PyUntypedArray>() else {
            return Err(type_error(py, what, "", "expected an array of integers of shape (requests, columns)"));
        };
        let lengths = read_u64s("num_blocks", lengths)?;
        if array.ndim() != 2 || !matches!(array.dtype().kind(), b'i' | b'u') {
            return Err(array_error(what, array, 2));
        }
        let [requests, columns] = [array.shape()[0], array.shape()[1]];
        if lengths.len() != requests {
            return Err(raise(py, &Error::count("num_blocks", lengths.len(), requests)));
        }
        if let Some(long) = lengths.iter().find(|&&length| length > columns as u64) {
            let reason = format!("is more than the {columns} columns of its block table");
            return Err(type_error(py, "num_blocks", &long.to_string(), &reason));
        }
        let lengths: Vec<_> = lengths.into_iter().map(|length| length as usize).collect();
        let matrix =
            if has_rows::<i32>(array) || has_rows::<i64>(array) { array.clone() } else { converted(array, &lengths)? };
        Ok(Self { matrix, lengths })
    }

    pub(crate) fn requests(&self) -> usize {
        self.lengths.len()
    }

    /// The ids of each request that move; None if the matrix was changed after it was read.
    pub(crate) fn rows<'a>(&'a self, clip: Clip, null_block: Option<i64>) -> Option<Vec<BlockIds<'a>>> {
        let live = |(ids, &length): (BlockIds<'a>, &usize)| {
            let ids = (length <= ids.len()).then(|| ids.slice(0..length))?;
            Some(ids.slice(clip.select(ids, null_block)))
        };
        let (lengths, matrix) = (&self.lengths, &self.matrix);
        match rows_of::<i32>(matrix, lengths.len()) {
            Some(rows) => rows.map(BlockIds::Narrow).zip(lengths).map(live).collect(),
            None => rows_of::<i64>(matrix, lengths.len())?.map(BlockIds::Wide).zip(lengths).map(live).collect(),
        }
    }
}

/// A matrix of another width, byte order or step as int64, as far as its rows are used.
fn converted<'py>(array: &Bound<'py, PyUntypedArray>, lengths: &[usize]) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = array.py();
    let used = lengths.iter().copied().max().unwrap_or(0);
    let all = pyo3::types::PySlice::full(py);
    let columns = pyo3::types::PySlice::new(py, 0, used as isize, 1);
    let order = [("order", "C")].into_py_dict(py)?;
    let wide = array.get_item((all, columns))?.call_method("astype", ("int64",), Some(&order))?;
    let wide = wide.cast_into::<PyUntypedArray>()?;
    if array.dtype().kind() == b'u' {
        let mut rows = rows_of::<i64>(&wide, lengths.len()).into_iter().flatten().zip(lengths);
        let negative = |(row, &length): (&[i64], &usize)| row[..length].iter().find(|&&id| id < 0).copied();
        if let Some(id) = rows.find_map(negative) {
            return Err(type_error(py, "block_tables", &(id as u64).to_string(), "is not an integer of 64 bits"));
        }
    }
    Ok(wide)
}

fn has_rows<T: Element>(matrix: &Bound<'_, PyUntypedArray>) -> bool {
    matrix.cast::<PyArray2<T>>().is_ok()
        && matrix.is_aligned()
        && (matrix.shape()[1] < 2 || matrix.strides()[1] == size_of::<T>() as isize)
}

/// The rows of a matrix, if it has so many, and the entries of each one after the other in memory.
fn rows_of<'a, T: Element + 'a>(
    matrix: &'a Bound<'_, PyUntypedArray>,
    count: usize,
) -> Option<impl Iterator<Item = &'a [T]> + use<'a, T>> {
    if !has_rows::<T>(matrix) || matrix.shape()[0] != count {
        return None;
    }
    // SAFETY: no other code runs while the rows are used, see above.
    let all = unsafe { matrix.cast::<PyArray2<T>>().ok()?.as_array() };
    Some((0..count).map(move |row| all.index_axis_move(Axis(0), row).to_slice().unwrap_or_default()))
}
