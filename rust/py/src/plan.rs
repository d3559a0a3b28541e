// SPDX-License-Identifier: Apache-2.0
use std::sync::Arc;

use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;

use crate::convert::{column, read_descriptors, read_ids, read_remote_spans, read_spans, read_u64, room, rows};
use crate::error::OrRaise;
use crate::geometry::{Finding, Geometry};

/// A source's index; one too large for any list is refused where the list is known.
fn read_index(source: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(usize::try_from(read_u64("source", source)?).unwrap_or(usize::MAX))
}

type Rows = Py<PyArray2<u64>>;
type BoundRows<'py> = Bound<'py, PyArray2<u64>>;

#[pyclass(frozen, module = "kvhma._kvhma")]
pub(crate) struct Plan(Arc<kvhma_core::Plan>);

#[pyclass(frozen, get_all, module = "kvhma._kvhma")]
pub(crate) struct Read {
    source: usize,
    local: Rows,
    remote: Rows,
    bytes: u64,
    descriptors: usize,
}

#[pyclass(frozen, get_all, module = "kvhma._kvhma")]
pub(crate) struct Transfer {
    reads: Vec<Py<Read>>,
    zero: Rows,
    bytes: u64,
    descriptors: usize,
    excess_bytes: u64,
    first_tokens: Vec<u64>,
    bytes_by_group: Vec<u64>,
    descriptors_by_group: Vec<u64>,
}

#[pyclass(frozen, get_all, module = "kvhma._kvhma")]
pub(crate) struct IdRead {
    source: usize,
    local: Py<PyArray1<i32>>,
    remote: Py<PyArray1<i32>>,
    bytes: u64,
    descriptors: u64,
}

#[pyclass(frozen, get_all, module = "kvhma._kvhma")]
pub(crate) struct IdTransfer {
    reads: Vec<Py<IdRead>>,
    zero: Rows,
    bytes: u64,
    descriptors: u64,
    excess_bytes: u64,
    first_tokens: Vec<u64>,
}

#[pyclass(frozen, get_all, eq, module = "kvhma._kvhma")]
#[derive(Clone, PartialEq)]
pub(crate) struct Loss {
    group: usize,
    layer: String,
    tokens: Vec<(u64, u64)>,
}

#[pymethods]
impl Loss {
    fn __repr__(&self) -> String {
        format!("Loss(group={}, layer={:?}, tokens={:?})", self.group, self.layer, self.tokens)
    }
}

#[pyclass(frozen, get_all, module = "kvhma._kvhma")]
pub(crate) struct Losses {
    layers: Vec<Loss>,
    whole_prefix: u64,
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (local, remotes, *, descriptor_bytes))]
    fn new(
        py: Python<'_>,
        local: &Bound<'_, Geometry>,
        remotes: Vec<Bound<'_, Geometry>>,
        descriptor_bytes: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let descriptor_bytes = read_u64("descriptor_bytes", descriptor_bytes)?;
        let local = Arc::clone(&local.get().0);
        let remotes = remotes.iter().map(|remote| Arc::clone(&remote.get().0)).collect();
        let plan = py.detach(|| kvhma_core::Plan::new(local, remotes, descriptor_bytes)).or_raise(py)?;
        Ok(Self(Arc::new(plan)))
    }

    #[getter]
    fn sources(&self) -> Vec<usize> {
        self.0.sources()
    }

    #[getter]
    fn findings(&self) -> Vec<(usize, Finding)> {
        self.0.findings().iter().map(|(source, finding)| (*source, finding.into())).collect()
    }

    fn transfer(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
    ) -> PyResult<Transfer> {
        let num_tokens = read_u64("num_tokens", num_tokens)?;
        let (local, remote) = (read_spans("local", local)?, read_remote_spans(remote)?);
        let transfer = py.detach(|| self.0.transfer_in(room, num_tokens, &local, &remote)).or_raise(py)?;
        let (mut bytes, mut descriptors) = (0, 0);
        let mut reads = Vec::with_capacity(transfer.reads.len());
        for kvhma_core::Read { source, copies } in transfer.reads {
            let (read_bytes, count) = (copies.bytes, copies.len());
            bytes += read_bytes;
            descriptors += count;
            let (local, remote) = (rows(py, copies.local)?.unbind(), rows(py, copies.remote)?.unbind());
            reads.push(Py::new(py, Read { source, local, remote, bytes: read_bytes, descriptors: count })?);
        }
        let zero = rows(py, transfer.zero)?.unbind();
        let kvhma_core::Transfer { excess_bytes, first_tokens, bytes_by_group, descriptors_by_group, .. } = transfer;
        Ok(Transfer {
            reads,
            zero,
            bytes,
            descriptors,
            excess_bytes,
            first_tokens,
            bytes_by_group,
            descriptors_by_group,
        })
    }

    fn explain(&self) -> String {
        self.0.explain()
    }

    #[getter]
    fn num_sources(&self) -> usize {
        self.0.num_sources()
    }

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
        let num_tokens = read_u64("num_tokens", num_tokens)?;
        let (local, remote) = (read_spans("local", local)?, read_remote_spans(remote)?);
        let failed = read_descriptors("failed", failed)?;
        let losses = py.detach(|| self.0.losses(num_tokens, &local, &remote, &failed, cached)).or_raise(py)?;
        let layers = losses.layers.into_iter();
        Ok(Losses {
            layers: layers.map(|kvhma_core::Loss { group, layer, tokens }| Loss { group, layer, tokens }).collect(),
            whole_prefix: losses.whole_prefix,
        })
    }

    fn id_descriptors<'py>(
        &self,
        py: Python<'py>,
        source: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
    ) -> PyResult<BoundRows<'py>> {
        let ids: Vec<i32> = read_ids("ids", ids)?.into_iter().map(|id| i32::try_from(id).unwrap_or(-1)).collect();
        rows(py, self.0.id_descriptors(read_index(source)?, &ids).or_raise(py)?)
    }

    fn views<'py>(&self, py: Python<'py>, source: &Bound<'_, PyAny>) -> PyResult<(BoundRows<'py>, BoundRows<'py>)> {
        let (local, remote) = self.0.views(read_index(source)?).or_raise(py)?;
        Ok((rows(py, local.to_vec())?, rows(py, remote.to_vec())?))
    }

    fn ids(
        &self,
        py: Python<'_>,
        num_tokens: &Bound<'_, PyAny>,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
    ) -> PyResult<IdTransfer> {
        let num_tokens = read_u64("num_tokens", num_tokens)?;
        let (local, remote) = (read_spans("local", local)?, read_remote_spans(remote)?);
        let kvhma_core::IdTransfer { reads: ids, zero, excess_bytes, first_tokens } =
            py.detach(|| self.0.ids(num_tokens, &local, &remote)).or_raise(py)?;
        let (bytes, descriptors_after_merge) =
            (ids.iter().map(|read| read.bytes).sum(), ids.iter().map(|read| read.merged).sum());
        let mut reads = Vec::with_capacity(ids.len());
        for read in ids {
            let (local, remote) = (column(py, read.local).unbind(), column(py, read.remote).unbind());
            let read = IdRead { source: read.source, local, remote, bytes: read.bytes, descriptors: read.merged };
            reads.push(Py::new(py, read)?);
        }
        let zero = rows(py, zero)?.unbind();
        Ok(IdTransfer { reads, zero, bytes, descriptors: descriptors_after_merge, excess_bytes, first_tokens })
    }
}
