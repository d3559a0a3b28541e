// SPDX-License-Identifier: Apache-2.0
//! Block tables as callers have them, read without a copy where that is possible.
use std::ops::Range;

use kvhma_core::Error;
use kvhma_core::lowlevel::block_ids::BlockIds;
use kvhma_core::lowlevel::ids::Clip;
use numpy::ndarray::Axis;
use numpy::{Element, PyArrayDescrMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyList};

use crate::convert::{array_error, nulls_in_list, read_ids, read_list, read_u64s};
use crate::error::{raise, type_error};

/// The ids of one table, or those of them that move.
pub(crate) struct Ids<'py> {
    stored: Stored<'py>,
    entries: Range<usize>,
}

enum Stored<'py> {
    Narrow(PyReadonlyArray1<'py, i32>),
    Wide(PyReadonlyArray1<'py, i64>),
    Read(Vec<i64>),
}

impl<'py> Ids<'py> {
    /// All ids of a list, tuple or range of int, or of an array of integers with one dimension.
    pub(crate) fn read(what: &str, table: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::read_clipped(what, table, Clip { keep: 0, speculative: None }, None)
    }

    /// The ids that move. Of a list, the others are not read, except for null blocks at its front.
    pub(crate) fn read_clipped(
        what: &str,
        table: &Bound<'py, PyAny>,
        clip: Clip,
        null_block: Option<i64>,
    ) -> PyResult<Self> {
        if let Ok(list) = table.cast_exact::<PyList>() {
            let nulls = null_block.map_or(Ok(0), |null| nulls_in_list(what, list, 0, null))?;
            let live = read_list(what, list, clip.entries(list.len(), nulls))?;
            return Ok(Self { entries: 0..live.len(), stored: Stored::Read(live) });
        }
        let stored = match (contiguous(table), contiguous(table)) {
            (Some(narrow), _) => Stored::Narrow(narrow),
            (_, Some(wide)) => Stored::Wide(wide),
            _ => Stored::Read(read_ids(what, table)?),
        };
        let all = stored.all();
        let entries = clip.entries(all.len(), all.leading(null_block));
        Ok(Self { stored, entries })
    }

    /// Which entries of an array they are.
    pub(crate) fn entries(&self) -> Range<usize> {
        self.entries.clone()
    }

    pub(crate) fn get(&self) -> BlockIds<'_> {
        self.stored.all().slice(self.entries())
    }
}

impl Stored<'_> {
    fn all(&self) -> BlockIds<'_> {
        // `contiguous` has made sure that arrays are slices.
        match self {
            Self::Narrow(ids) => BlockIds::Narrow(ids.as_slice().unwrap_or_default()),
            Self::Wide(ids) => BlockIds::Wide(ids.as_slice().unwrap_or_default()),
            Self::Read(ids) => BlockIds::Wide(ids),
        }
    }
}

fn contiguous<'py, T: Element>(table: &Bound<'py, PyAny>) -> Option<PyReadonlyArray1<'py, T>> {
    let array = table.extract::<PyReadonlyArray1<'py, T>>().ok()?;
    array.as_slice().is_ok().then_some(array)
}

/// The tables of several requests: row after row of a matrix, of which each has some entries.
pub(crate) struct Table<'py> {
    rows: Rows<'py>,
    lengths: Vec<usize>,
}

enum Rows<'py> {
    Narrow(PyReadonlyArray2<'py, i32>),
    Wide(PyReadonlyArray2<'py, i64>),
}

impl<'py> Table<'py> {
    pub(crate) fn read(table: &Bound<'py, PyAny>, lengths: &Bound<'_, PyAny>) -> PyResult<Self> {
        let what = "block_tables";
        let Ok(array) = table.cast::<PyUntypedArray>() else {
            return Err(type_error(table.py(), what, "", "expected an array of integers of shape (requests, columns)"));
        };
        if array.ndim() != 2 || !matches!(array.dtype().kind(), b'i' | b'u') {
            return Err(array_error(what, array, 2));
        }
        let rows = match (matrix(array), matrix(array)) {
            (Some(narrow), _) => Rows::Narrow(narrow),
            (_, Some(wide)) => Rows::Wide(wide),
            // Other widths, byte orders and steps: numpy converts them.
            _ => {
                let order = [("order", "C")].into_py_dict(table.py())?;
                Rows::Wide(array.call_method("astype", ("int64",), Some(&order))?.extract()?)
            }
        };
        let lengths = read_u64s("num_blocks", lengths)?;
        let [requests, columns] = [array.shape()[0], array.shape()[1]];
        if lengths.len() != requests {
            return Err(raise(table.py(), &Error::count("num_blocks", lengths.len(), requests)));
        }
        if let Some(long) = lengths.iter().find(|&&length| length > columns as u64) {
            let reason = format!("is more than the {columns} columns of its block table");
            return Err(type_error(table.py(), "num_blocks", &long.to_string(), &reason));
        }
        Ok(Self { rows, lengths: lengths.into_iter().map(|length| length as usize).collect() })
    }

    pub(crate) fn requests(&self) -> usize {
        self.lengths.len()
    }

    pub(crate) fn row(&self, request: usize) -> BlockIds<'_> {
        let ids = match &self.rows {
            Rows::Narrow(rows) => BlockIds::Narrow(row(rows, request).unwrap_or_default()),
            Rows::Wide(rows) => BlockIds::Wide(row(rows, request).unwrap_or_default()),
        };
        ids.slice(0..self.lengths[request])
    }
}

/// A matrix whose rows are slices.
fn matrix<'py, T: Element>(table: &Bound<'py, PyUntypedArray>) -> Option<PyReadonlyArray2<'py, T>> {
    let array = table.extract::<PyReadonlyArray2<'py, T>>().ok()?;
    (array.is_aligned() && array.strides()[1] == size_of::<T>() as isize).then_some(array)
}

fn row<'a, T: Element>(matrix: &'a PyReadonlyArray2<'_, T>, index: usize) -> Option<&'a [T]> {
    matrix.as_array().index_axis_move(Axis(0), index).to_slice()
}
