// SPDX-License-Identifier: Apache-2.0
//! Plans: geometries in, transfers out.
use std::sync::Arc;

use numpy::PyArray2;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::convert::{advise, read_ids, read_remote_spans, read_rows, read_spans, read_u64, rows};
use crate::error::OrRaise;
use crate::geometry::{CheckedGeometry, read_geometries, read_geometry};
use crate::results::{Finding, Loss, Losses, Read, Transfer};

/// A source's index. An index beyond the list is refused later, where the list is known.
fn read_index(source: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(usize::try_from(read_u64("source", source)?).unwrap_or(usize::MAX))
}

type Rows<'py> = Bound<'py, PyArray2<u64>>;
type Sides = (Py<CheckedGeometry>, Vec<Py<CheckedGeometry>>);

/// The pairing of a local rank with its sources, valid for every request. Made by `kvhma.plan`.
///
/// A plan is immutable, so a copy is the plan itself. Pickle stores its geometries and options and plans again when it
/// loads them.
#[pyclass(frozen, module = "kvhma._kvhma")]
pub(crate) struct Plan {
    pub(crate) core: kvhma_core::Plan,
    /// The arguments that it was made from.
    sides: Sides,
    options: kvhma_core::PlanOptions,
}

/// A request's blocks on both sides.
struct Request {
    num_tokens: u64,
    local: Vec<kvhma_core::Span>,
    remote: Vec<Vec<kvhma_core::Span>>,
}

impl Request {
    fn read(num_tokens: &Bound<'_, PyAny>, local: &Bound<'_, PyAny>, remote: &Bound<'_, PyAny>) -> PyResult<Self> {
        let num_tokens = read_u64("num_tokens", num_tokens)?;
        Ok(Self { num_tokens, local: read_spans("local", local)?, remote: read_remote_spans(remote)? })
    }
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (local, remote, *, descriptor_bytes, max_descriptors))]
    fn new(
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        descriptor_bytes: &Bound<'_, PyAny>,
        max_descriptors: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let (local, remotes) = (read_geometry("local", local)?, read_geometries("remote", remote)?);
        let options = kvhma_core::PlanOptions {
            descriptor_bytes: read_u64("descriptor_bytes", descriptor_bytes)?,
            max_descriptors: read_u64("max_descriptors", max_descriptors)?,
        };
        let checked = |side: &Py<CheckedGeometry>| Arc::clone(&side.get().geometry);
        let (one, others) = (checked(&local), remotes.iter().map(checked).collect());
        let core = py.detach(|| kvhma_core::Plan::new(one, others, options)).or_raise(py)?;
        Ok(Self { core, sides: (local, remotes), options })
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(&Sides, Bound<'py, PyDict>)> {
        let kvhma_core::PlanOptions { descriptor_bytes, max_descriptors } = self.options;
        let options = [("descriptor_bytes", descriptor_bytes), ("max_descriptors", max_descriptors)];
        Ok((&self.sides, options.into_py_dict(py)?))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let (read, sources) = (self.core.sources(), self.core.num_sources());
        let kvhma_core::PlanOptions { descriptor_bytes, max_descriptors } = self.options;
        let warnings = self.core.findings().len();
        format!(
            "Plan(reads from {read:?} of {sources} sources, {warnings} warnings, descriptor_bytes={descriptor_bytes}, \
             max_descriptors={max_descriptors})"
        )
    }

    /// Indices of the sources with something to read.
    #[getter]
    fn sources(&self) -> Vec<usize> {
        self.core.sources()
    }

    /// Number of sources, including those with nothing to read.
    #[getter]
    fn num_sources(&self) -> usize {
        self.core.num_sources()
    }

    /// Warnings, each with the index of its source.
    #[getter]
    fn findings(&self) -> Vec<(usize, Finding)> {
        self.core.findings().iter().map(|(source, finding)| (*source, finding.into())).collect()
    }

    /// Return a text that says which bytes are read from which source, how they are cut, and why.
    ///
    /// Ranges such as ``heads 4..8`` are half-open.
    fn explain(&self, py: Python<'_>) -> String {
        py.detach(|| self.core.explain())
    }

    /// Compute the copies of a request, as descriptors.
    ///
    /// Args:
    ///     num_tokens: number of tokens whose cache the source holds; later tokens are not read.
    ///     local: a span for each local group with the blocks to fill. For a group that already holds all blocks, pass
    ///         an empty span that starts at or after the last block.
    ///     remote: a span for each group of the sources, or a list of such spans for each source.
    ///
    /// Returns:
    ///     The read from each source, and the ranges to zero before the reads.
    ///
    /// Raises:
    ///     RequestError: a count, type or position does not fit; two reads would write the same byte; or there are more
    ///         descriptors than the layouts explain, or more than `max_descriptors`.
    ///     BlockIdError: an id is negative, too large, listed twice, or the null block.
    fn transfer(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
    ) -> PyResult<Transfer> {
        let Request { num_tokens, local, remote } = Request::read(num_tokens, local, remote)?;
        let transfer = py.detach(|| self.core.transfer_in(advise, num_tokens, &local, &remote)).or_raise(py)?;
        let groups = transfer.first_tokens.len();
        Transfer::new(py, transfer, groups, Read::of_rows)
    }

    /// Compute the copies of a request, as ids into `views`.
    ///
    /// Arguments, result and errors are as for `transfer`.
    ///
    /// Raises:
    ///     UnsupportedPairError: `views` raises it. Or a local group reads two groups of the source whose kernel blocks
    ///         differ, and they cut its first or last block differently; use `transfer`.
    fn ids(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
    ) -> PyResult<Transfer> {
        let Request { num_tokens, local, remote } = Request::read(num_tokens, local, remote)?;
        let transfer = py.detach(|| self.core.ids_in(advise, num_tokens, &local, &remote)).or_raise(py)?;
        Transfer::new(py, transfer, 0, Read::of_ids)
    }

    /// Return the bytes and the descriptors that fill tokens ``first_token..num_tokens`` of a local group from all
    /// sources, in blocks with consecutive ids on both sides.
    ///
    /// A state group moves one state for any tokens.
    ///
    /// Args:
    ///     group: index of the local group.
    ///     first_token: first token to fill. A partial first block has only these tokens on both sides.
    ///     num_tokens: number of tokens whose cache the source holds.
    ///
    /// Raises:
    ///     RequestError: there is no such group, there are no tokens, or the caches have too few blocks.
    fn count(
        &self,
        py: Python<'_>,
        group: &Bound<'_, PyAny>,
        first_token: &Bound<'_, PyAny>,
        num_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, u64)> {
        let group = usize::try_from(read_u64("group", group)?).unwrap_or(usize::MAX);
        let (first, num_tokens) = (read_u64("first_token", first_token)?, read_u64("num_tokens", num_tokens)?);
        py.detach(|| self.core.count(group, first, num_tokens)).or_raise(py)
    }

    /// Map the failed local descriptors of a request to layers and tokens.
    ///
    /// Args:
    ///     num_tokens: as for the transfer.
    ///     local: as for the transfer.
    ///     remote: as for the transfer.
    ///     failed: uint64 of shape (n, 3): rows of `Read.local` that did not arrive, or parts of such rows. For a read
    ///         by ids, pass `id_descriptors`.
    ///     cached: leading tokens that every group had before the transfer.
    ///
    /// Returns:
    ///     The layers that lost tokens, with the tokens, and the length of the prefix that remains.
    ///
    /// Raises:
    ///     RequestError: as for `transfer`; `failed` has another form; or a row is not part of the request's reads.
    ///     BlockIdError: as for `transfer`.
    #[pyo3(signature = (num_tokens, local, remote, failed, *, cached = None), text_signature = "($self, num_tokens, local, remote, failed, *, cached=0)")]
    fn losses(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        failed: &Bound<'_, PyAny>,
        cached: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Losses> {
        let cached = cached.map_or(Ok(0), |tokens| read_u64("cached", tokens))?;
        let Request { num_tokens, local, remote } = Request::read(num_tokens, local, remote)?;
        let failed = read_rows("failed", failed)?;
        let kvhma_core::Losses { layers, whole_prefix } =
            py.detach(|| self.core.losses(num_tokens, &local, &remote, &failed, cached)).or_raise(py)?;
        Ok(Losses { layers: layers.into_iter().map(Loss::from).collect(), whole_prefix })
    }

    /// Return the local descriptors that ids into the views of a source stand for, of shape (n, 3).
    ///
    /// Args:
    ///     source: its index in the list that the plan was made with.
    ///     ids: entries of the source's local view, as in `Read.local`.
    ///
    /// Raises:
    ///     BlockIdError: an id is outside the views.
    ///     UnsupportedPairError: the source has no views.
    fn id_descriptors<'py>(
        &self,
        py: Python<'py>,
        source: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
    ) -> PyResult<Rows<'py>> {
        let ids: Vec<i32> = read_ids("ids", ids)?.into_iter().map(|id| i32::try_from(id).unwrap_or(-1)).collect();
        let source = read_index(source)?;
        rows(py, py.detach(|| self.core.id_descriptors(source, &ids)).or_raise(py)?)
    }

    /// Return the local and the remote views of a source, to prepare once.
    ///
    /// Args:
    ///     source: its index in the list that the plan was made with.
    ///
    /// Returns:
    ///     Two arrays of shape (r, 5): address, length in bytes, device, stride in bytes, count.
    ///
    /// Raises:
    ///     UnsupportedPairError: there are too many views, or blocks are not evenly spaced; use `transfer`.
    fn views<'py>(&self, py: Python<'py>, source: &Bound<'_, PyAny>) -> PyResult<(Rows<'py>, Rows<'py>)> {
        let source = read_index(source)?;
        let views = || self.core.views(source).map(|(local, remote)| (local.to_vec(), remote.to_vec()));
        let (local, remote) = py.detach(views).or_raise(py)?;
        Ok((rows(py, local)?, rows(py, remote)?))
    }
}
