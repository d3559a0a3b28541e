// SPDX-License-Identifier: Apache-2.0
//! A request's spans: from block tables of vLLM's manager, to fill, and as texts.
use std::ops::Range;

use kvhma_core::Error;
use kvhma_core::lowlevel::ids;
use numpy::IntoPyArray;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PySlice, PyString, PyTuple};

use crate::block_tables::Ids;
use crate::convert::{count_groups, items, nulls_in_list, read_ids, read_u64, read_u64s};
use crate::error::{OrRaise, raise};
use crate::geometry::read_geometry;

static SPAN: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A `kvhma.Span`.
fn span<'py>(py: Python<'py>, first: u64, ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let class = SPAN.get_or_try_init(py, || Ok::<_, PyErr>(py.import("kvhma.types")?.getattr("Span")?.unbind()))?;
    class.bind(py).call1((first, ids))
}

/// Return the spans of a request's live blocks, from block tables of vLLM's manager.
///
/// Dropped blocks appear as the null block at the front of a table. Blocks wholly before the tokens that the token
/// after `num_tokens` attends to are left out (the token-exact rule). Of a state group, only the slot with the state is
/// used.
///
/// Args:
///     geometry: the rank whose blocks these are.
///     num_tokens: number of tokens that the cache holds for the request, or will hold. None to use every block in the
///         tables, for a reader whose larger blocks begin earlier.
///     block_tables: logical block ids from position 0, for each group.
///     cached: for each group, how many leading table entries must not be filled (a prefix hit); None for no hit.
///
/// Returns:
///     A span for each group.
///
/// Raises:
///     RequestError: a list has the wrong number of entries or the wrong type.
#[pyfunction]
#[pyo3(signature = (geometry, num_tokens, block_tables, cached = None))]
pub(crate) fn live_spans<'py>(
    py: Python<'py>,
    geometry: &Bound<'_, PyAny>,
    num_tokens: &Bound<'_, PyAny>,
    block_tables: &Bound<'py, PyAny>,
    cached: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let geometry = read_geometry("geometry", geometry)?;
    let geometry = &geometry.get().geometry;
    let lengths = count_groups("block_tables", block_tables)?;
    let num_tokens = if num_tokens.is_none() { None } else { Some(read_u64("num_tokens", num_tokens)?) };
    let cached = cached.map_or_else(|| Ok(vec![0; lengths.len()]), |list| read_u64s("cached", list))?;
    let entries = ids::live_entries(geometry, num_tokens, &lengths, &cached).or_raise(py)?;
    let mut spans = Vec::with_capacity(entries.len());
    for ((group, table), live) in geometry.groups().iter().zip(items("block_tables", block_tables)?).zip(entries) {
        let nulls = match geometry.null_block() {
            Some(null) if !live.is_empty() => leading_nulls(&table, live.start, null as i64)?,
            _ => 0,
        };
        let (first, stop) = (live.start + nulls, live.end);
        // Slices keep a list a list and an array an array: the ids are read once, where they are used.
        let ids = table.get_item(PySlice::new(py, first as isize, stop as isize, 1))?;
        spans.push(span(py, if group.is_state() { 0 } else { first as u64 }, &ids)?);
    }
    Ok(spans)
}

/// How many consecutive entries of a block table, from `start` on, are null blocks.
fn leading_nulls(table: &Bound<'_, PyAny>, start: usize, null_block: i64) -> PyResult<usize> {
    if let Ok(list) = table.cast_exact::<PyList>() {
        return nulls_in_list("block_tables", list, start, null_block);
    }
    let ids = Ids::read("block_tables", table)?;
    Ok(ids.get().map_or(0, |(_, ids)| ids.slice(start.min(ids.len())..ids.len()).leading(Some(null_block))))
}

/// Return the spans of the blocks that a load fills: those that its tokens need, and that are no prefix-cache hits.
///
/// Hits, which other requests may share, and the null blocks before them come first in a table. The blocks that vLLM
/// allocates for a load have no hash yet. Each group has its own hit.
///
/// Args:
///     geometry: the rank whose blocks these are.
///     num_tokens: tokens that the cache will hold.
///     tables: vLLM's objects of the blocks from position 0, for each group.
///
/// Raises:
///     RequestError: vLLM has allocated no block for a state; a list has the wrong number of entries.
#[pyfunction]
pub(crate) fn spans_to_fill<'py>(
    py: Python<'py>,
    geometry: &Bound<'_, PyAny>,
    num_tokens: &Bound<'_, PyAny>,
    tables: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let geometry = read_geometry("geometry", geometry)?;
    let geometry = &geometry.get().geometry;
    let tables = items("tables", tables)?;
    let lengths = tables.iter().map(PyAnyMethods::len).collect::<PyResult<Vec<_>>>()?;
    let num_tokens = Some(read_u64("num_tokens", num_tokens)?);
    let entries = ids::live_entries(geometry, num_tokens, &lengths, &vec![0; lengths.len()]).or_raise(py)?;
    let mut spans = Vec::with_capacity(entries.len());
    for ((group, table), Range { start, end }) in geometry.groups().iter().zip(tables).zip(entries) {
        let (mut first, mut ids) = (start, Vec::with_capacity(end - start));
        for (index, block) in (start..end).zip(table.try_iter()?.skip(start)) {
            let block = block?;
            let is_null = ids.is_empty() && block.getattr(intern!(py, "is_null"))?.is_truthy()?;
            if is_null && group.is_state() {
                let (reason, values) = ("the block of its state is the null block", ("null".into(), "a block".into()));
                return Err(raise(py, &Error::argument("value", "tables", values, reason, reason.to_owned())));
            }
            if !group.is_state() && ids.is_empty() && (is_null || !block.getattr(intern!(py, "block_hash"))?.is_none())
            {
                first = index + 1;
                continue;
            }
            ids.push(block.getattr(intern!(py, "block_id"))?.extract::<i64>()?);
        }
        let ids = ids.into_pyarray(py).into_any();
        spans.push(span(py, if group.is_state() { 0 } else { first as u64 }, &ids)?);
    }
    PyTuple::new(py, spans)
}

/// Return the first entry and `ids_to_text` of each of some spans.
///
/// Raises:
///     RequestError: an id is not an integer of 64 bits.
#[pyfunction]
pub(crate) fn spans_to_texts(spans: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, String)>> {
    let text = |span: &Bound<'_, PyAny>| {
        let ids = read_ids("ids", &span.get_item(1)?)?;
        Ok((read_u64("first", &span.get_item(0)?)?, kvhma_core::ids_to_text(&ids)))
    };
    items("spans", spans)?.iter().map(text).collect()
}

/// Return the spans of texts of `spans_to_texts`, which may come from an untrusted peer.
///
/// Args:
///     texts: first entry and text of each group.
///     limit: the largest number of ids of a group.
///     limit_of_all: the largest number of ids of all groups together.
///
/// Raises:
///     RequestError: as for `text_to_ids`.
#[pyfunction]
pub(crate) fn texts_to_spans<'py>(
    py: Python<'py>,
    texts: Vec<(u64, Bound<'py, PyString>)>,
    limit: usize,
    limit_of_all: usize,
) -> PyResult<Bound<'py, PyTuple>> {
    let (mut left, mut spans) = (limit_of_all, Vec::with_capacity(texts.len()));
    for (first, text) in texts {
        let ids = read_text(&text, limit.min(left)).or_raise(py)?;
        left -= ids.len();
        spans.push(span(py, first, &ids.into_pyarray(py).into_any())?);
    }
    PyTuple::new(py, spans)
}

/// The block ids of a text.
pub(crate) fn read_text(text: &Bound<'_, PyString>, limit: usize) -> kvhma_core::Result<Vec<i64>> {
    // JSON may have lone surrogates, which are not UTF-8.
    kvhma_core::text_to_ids(text.to_str().unwrap_or("\u{fffd}"), limit)
}
