// SPDX-License-Identifier: Apache-2.0
use kvhma_core::replay::{self, CacheGroup, Kept, Requests, Side};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::error::type_error;

/// Return the tokens that the groups of engines' caches hit, for each request of a trace.
///
/// Args:
///     nodes: int64, the nodes of all prompts, not negative.
///     ends: uint32, the tokens of a prompt up to the end of each node, ascending.
///     offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.
///     prompts: uint32 of shape (n,), tokens.
///     answers: uint32 of shape (n,), tokens that the engine decodes.
///     engines: uint32 of shape (n,), numbers of engines.
///     groups: for each group what it keeps (``full``, ``window``, ``chunk``, ``state``), the size of a window or
///         chunk, the tokens of a block and its bytes.
///     pool: bytes of an engine's cache.
///     side: ``prefill``, ``one hit`` or ``each group``.
///
/// Returns:
///     uint32 of shape (groups * n,).
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
    groups: Vec<(String, u64, u64, u64)>,
    pool: u64,
    side: &str,
) -> PyResult<Bound<'py, PyArray1<u32>>> {
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
        "one hit" => Side::DecodeOneHit,
        "each group" => Side::DecodeEachGroup,
        other => return Err(type_error(py, "side", other, "is no side")),
    };
    let read = |(kept, size, block, bytes): (String, u64, u64, u64)| {
        let kept = match kept.as_str() {
            "full" => Kept::All,
            "window" => Kept::Window(size),
            "chunk" => Kept::Chunk(size),
            "state" => Kept::State,
            other => return Err(type_error(py, "groups", other, "is no kind")),
        };
        if block == 0 || (size == 0 && matches!(kept, Kept::Window(_) | Kept::Chunk(_))) {
            return Err(type_error(py, "groups", "0", "must be 1 or more"));
        }
        Ok(CacheGroup { kept, block, bytes })
    };
    let groups = groups.into_iter().map(read).collect::<PyResult<Vec<_>>>()?;
    if !requests.is_sound() {
        return Err(type_error(py, "nodes", "", "do not fit the other arrays"));
    }
    let hits = py.detach(|| replay::prefix_hits(requests, &groups, pool, side));
    Ok(hits.into_pyarray(py))
}
