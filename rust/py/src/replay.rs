// SPDX-License-Identifier: Apache-2.0
use kvhma_core::replay::rows;
use kvhma_core::replay::{self, CacheGroup, Requests, Side, Ways};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::error::type_error;
use crate::geometry::read_geometry;

type Array<'py, T> = Bound<'py, PyArray1<T>>;

/// Return the tokens that the groups of engines' caches hit, for each request of a trace.
///
/// Args:
///     nodes: int64, the nodes of all prompts, not negative.
///     ends: uint32, the tokens of a prompt up to the end of each node, ascending.
///     offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.
///     prompts: uint32 of shape (n,), tokens.
///     answers: uint32 of shape (n,), tokens that the engine decodes.
///     engines: uint32 of shape (n,), numbers of engines.
///     geometry: a rank of an engine, which has the groups.
///     groups: numbers of groups, and the bytes of a block of each in all layers and ranks.
///     pool: bytes of an engine's cache.
///     side: ``prefill``, or ``decode``, which has two rules: one hit for all groups, and a hit of each group.
///
/// Returns:
///     uint32 of shape (rules * groups * n,).
///
/// Raises:
///     RequestError: the arrays do not fit.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "arrays of a trace")]
pub(crate) fn prefix_hits<'py>(
    py: Python<'py>,
    nodes: PyReadonlyArray1<'py, i64>,
    ends: PyReadonlyArray1<'py, u32>,
    offsets: PyReadonlyArray1<'py, u64>,
    prompts: PyReadonlyArray1<'py, u32>,
    answers: PyReadonlyArray1<'py, u32>,
    engines: PyReadonlyArray1<'py, u32>,
    geometry: &Bound<'py, PyAny>,
    groups: Vec<(usize, u64)>,
    pool: u64,
    side: &str,
) -> PyResult<Array<'py, u32>> {
    let requests = Requests {
        nodes: nodes.as_slice()?,
        ends: ends.as_slice()?,
        offsets: offsets.as_slice()?,
        prompts: prompts.as_slice()?,
        answers: answers.as_slice()?,
        engines: engines.as_slice()?,
    };
    let side = match side {
        "prefill" => Side::Prefill,
        "decode" => Side::Decode,
        other => return Err(type_error(py, "side", other, "is no side")),
    };
    let known = read_geometry("geometry", geometry)?;
    let known = known.get().geometry.groups();
    let find = |(number, bytes): (usize, u64)| {
        let group = known.get(number).cloned().map(|group| CacheGroup { group, bytes: bytes.max(1) });
        group.ok_or_else(|| type_error(py, "groups", &number.to_string(), "is no group"))
    };
    let groups = groups.into_iter().map(find).collect::<PyResult<Vec<_>>>()?;
    if !requests.is_sound() {
        return Err(type_error(py, "nodes", "", "do not fit the other arrays"));
    }
    let hits = py.detach(|| replay::prefix_hits(requests, &groups, pool, side));
    Ok(hits.into_pyarray(py))
}

/// Return the engine of each prompt: that of the longest earlier prompt which it continues, else the next one.
///
/// A beginning that eight prompts have continued is a shared one, and no earlier prompt.
///
/// Args:
///     nodes: int64, the nodes of all prompts.
///     offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.
///     number: of engines.
///
/// Returns:
///     uint32 of shape (n,).
///
/// Raises:
///     RequestError: the arrays do not fit.
#[pyfunction]
pub(crate) fn turns<'py>(
    py: Python<'py>,
    nodes: PyReadonlyArray1<'py, i64>,
    offsets: PyReadonlyArray1<'py, u64>,
    number: u32,
) -> PyResult<Array<'py, u32>> {
    let nodes = nodes.as_slice()?;
    let offsets: Vec<usize> = offsets.as_slice()?.iter().map(|&offset| offset as usize).collect();
    if !offsets.is_sorted() || offsets.last().is_none_or(|&end| end > nodes.len()) {
        return Err(type_error(py, "offsets", "", "do not fit the nodes"));
    }
    Ok(py.detach(|| replay::turns(nodes, &offsets, number)).into_pyarray(py))
}

/// Return how long requests wait for their first token in the queues of engines, and which of them are handed off.
///
/// Args:
///     arrivals: float64 of shape (n,), seconds, ascending. All other arrays have the same shape.
///     at_prefill: uint32, numbers of prefill engines.
///     at_decode: uint32, numbers of decode engines.
///     prefill: float64, seconds in which P computes what it lacks of a prompt.
///     read: float64, seconds in which D reads what it lacks.
///     decode: float64, seconds in which D computes what it lacks.
///     expected: float64, seconds of the read that the router expects. Minus infinity always hands off, infinity never.
///
/// Returns:
///     float64 of shape (n,), seconds from the arrival to the first token, and bool of shape (n,), whether P computed.
///
/// Raises:
///     RequestError: the arrays do not fit, or a time is negative.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "arrays of a trace")]
pub(crate) fn first_tokens<'py>(
    py: Python<'py>,
    arrivals: PyReadonlyArray1<'py, f64>,
    at_prefill: PyReadonlyArray1<'py, u32>,
    at_decode: PyReadonlyArray1<'py, u32>,
    prefill: PyReadonlyArray1<'py, f64>,
    read: PyReadonlyArray1<'py, f64>,
    decode: PyReadonlyArray1<'py, f64>,
    expected: PyReadonlyArray1<'py, f64>,
) -> PyResult<(Array<'py, f64>, Array<'py, bool>)> {
    let ways = Ways {
        arrivals: arrivals.as_slice()?,
        at_prefill: at_prefill.as_slice()?,
        at_decode: at_decode.as_slice()?,
        prefill: prefill.as_slice()?,
        read: read.as_slice()?,
        decode: decode.as_slice()?,
        expected: expected.as_slice()?,
    };
    if !ways.is_sound() {
        return Err(type_error(py, "arrivals", "", "do not fit the other arrays, or a time is negative"));
    }
    let (waits, handed_off) = py.detach(|| replay::first_tokens(ways));
    Ok((waits.into_pyarray(py), handed_off.into_pyarray(py)))
}

/// Return the paths of a trace without nearly all nodes of a single prompt, which are the last ones of each prompt.
///
/// Args:
///     nodes: int64, the nodes of all prompts.
///     ends: uint32, the tokens of a prompt up to the end of each node.
///     offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.
///
/// Returns:
///     The same arrays of what stays.
///
/// Raises:
///     RequestError: the arrays do not fit.
#[pyfunction]
pub(crate) fn shared_paths<'py>(
    py: Python<'py>,
    nodes: PyReadonlyArray1<'py, i64>,
    ends: PyReadonlyArray1<'py, u32>,
    offsets: PyReadonlyArray1<'py, u64>,
) -> PyResult<(Array<'py, i64>, Array<'py, u32>, Array<'py, u64>)> {
    let (nodes, ends, offsets) = (nodes.as_slice()?, ends.as_slice()?, offsets.as_slice()?);
    if !offsets.is_sorted() || offsets.last().is_none_or(|&end| end > nodes.len().min(ends.len()) as u64) {
        return Err(type_error(py, "offsets", "", "do not fit the nodes"));
    }
    let (nodes, ends, offsets) = py.detach(|| replay::shared(nodes, ends, offsets));
    Ok((nodes.into_pyarray(py), ends.into_pyarray(py), offsets.into_pyarray(py)))
}

type Rows<'py> = (Array<'py, f64>, Array<'py, i64>, Array<'py, i64>, Array<'py, i64>, Array<'py, i64>);

/// Read the lines of a trace up to the first one that is no plain row: numbers, identities, and no session.
///
/// Args:
///     text: whole lines, JSON objects with ``timestamp``, ``input_length``, ``output_length`` and maybe ``hash_ids``.
///     at: where the first of the lines begins.
///     most: limit of the tokens of a prompt, and of an answer.
///
/// Returns:
///     float64 timestamps, int64 prompts and int64 answers of shape (rows,). Then int64 identities of all rows.
///     Then int64 counts of identities of shape (rows,), or (0,) if rows have none. Then the bytes and the lines that
///     were read.
#[pyfunction]
pub(crate) fn plain_rows<'py>(py: Python<'py>, text: &[u8], at: usize, most: i64) -> (Rows<'py>, usize, usize) {
    let found = py.detach(|| rows::plain_rows(text.get(at..).unwrap_or_default(), most));
    let columns = (
        found.timestamps.into_pyarray(py),
        found.prompts.into_pyarray(py),
        found.answers.into_pyarray(py),
        found.ids.into_pyarray(py),
        found.counts.into_pyarray(py),
    );
    (columns, found.bytes, found.lines)
}
