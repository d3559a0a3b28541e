// SPDX-License-Identifier: Apache-2.0
//! The results of plans and comparisons: plain values made of their attributes, so copies and pickles work.
#![allow(clippy::too_many_arguments, reason = "a value's constructor takes all of its attributes")]
use kvhma_core::Copies;
use numpy::PyArray2;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::convert::{column, read_u64, rows, rows_of_three};
use crate::error::{printable, type_error};
use crate::output::part;

/// The arguments of a value's constructor: its attributes, which pickle and copies preserve.
fn attributes<'py>(value: &Bound<'py, PyAny>, names: &str) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(value.py(), names.split(' ').map(|name| value.getattr(name)).collect::<PyResult<Vec<_>>>()?)
}

/// A difference between two geometries; `UnsupportedPairError` has the same text.
#[pyclass(frozen, eq, get_all, new = "from_fields", module = "kvhma._kvhma")]
#[derive(Clone, PartialEq)]
pub(crate) struct Finding {
    /// Stable short name, e.g. ``"dtype"``.
    code: String,
    /// ``"error"`` if the pair is refused.
    severity: String,
    /// The object that differs, e.g. ``'layer "model.layers.0" part "kv"'``.
    place: String,
    /// Name of the layer in `place`, if it has one.
    layer: Option<String>,
    /// Name of the part of the layer's page, if `place` has one.
    part: Option<String>,
    /// Name of the axis of the part, if `place` has one.
    axis: Option<String>,
    /// Field that differs.
    field: String,
    /// Value on the local side.
    local: String,
    /// Value on the remote side.
    remote: String,
    /// Why it matters.
    reason: String,
    /// A printable sentence, the same for both orders of the two geometries.
    text: String,
}

#[pymethods]
impl Finding {
    fn __repr__(&self) -> String {
        format!("Finding({}, {}: {})", self.severity, self.code, self.text)
    }

    fn __getnewargs__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        attributes(slf, "code severity place layer part axis field local remote reason text")
    }
}

impl From<&kvhma_core::Finding> for Finding {
    fn from(finding: &kvhma_core::Finding) -> Self {
        let text = printable(&finding.text());
        let kvhma_core::Finding { code, severity, place, field, local, remote, reason } = finding.clone();
        Self {
            code: code.to_owned(),
            severity: match severity {
                kvhma_core::Severity::Error => "error",
                kvhma_core::Severity::Warning => "warning",
            }
            .to_owned(),
            place: place.to_string(),
            layer: place.layer,
            part: place.part,
            axis: place.axis,
            field: field.to_owned(),
            local,
            remote,
            reason: reason.to_owned(),
            text,
        }
    }
}

/// The read of a request from one source: descriptors, or ids into prepared views.
///
/// `Plan.transfer` returns ``Read[np.uint64]``, the default of ``Read``; `Plan.ids` returns ``Read[np.int32]``.
#[pyclass(frozen, generic, get_all, new = "from_fields", module = "kvhma._kvhma")]
pub(crate) struct Read {
    /// Index of the source in the list that the plan was made with.
    source: usize,
    /// Descriptors of shape (n, 3), sorted by address: address, length in bytes, device. Or ids of shape (n,).
    local: Py<PyAny>,
    /// Descriptors or ids of the source: row or id i is read into row or id i of `local`.
    remote: Py<PyAny>,
    /// Bytes moved.
    bytes: u64,
    /// Number of descriptors: the minimum for these bytes, or for ids the number after NIXL joins neighbours.
    ///
    /// NIXL joins consecutive ids in dense strided views on both sides. NIXL before 1.5 writes views out row by row,
    /// and may also join ids across views that touch.
    descriptors: u64,
    /// Bytes read into each local group, in the order of the local geometry's groups. Empty for ids and batches.
    bytes_by_group: Vec<u64>,
    /// Descriptors of each local group, in the same order. Empty for ids and batches.
    descriptors_by_group: Vec<u64>,
}

#[pymethods]
impl Read {
    fn __getnewargs__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        attributes(slf, "source local remote bytes descriptors bytes_by_group descriptors_by_group")
    }

    fn __repr__(&self) -> String {
        format!("Read(source={}, descriptors={}, bytes={})", self.source, self.descriptors, self.bytes)
    }
}

impl Read {
    pub(crate) fn of_rows(py: Python<'_>, read: kvhma_core::Read) -> PyResult<Self> {
        let kvhma_core::Read { source, copies } = read;
        let (bytes, descriptors) = (copies.bytes(), copies.len() as u64);
        let Copies { local, remote, bytes_by_group, descriptors_by_group, .. } = copies;
        let (local, remote) = (rows(py, local)?.into_any().unbind(), rows(py, remote)?.into_any().unbind());
        Ok(Self { source, local, remote, bytes, descriptors, bytes_by_group, descriptors_by_group })
    }

    /// Appends batches of at most `limit` descriptors.
    fn append_batches(&self, py: Python<'_>, limit: usize, batches: &mut Vec<Self>) -> PyResult<()> {
        let (local, remote) = (self.local.bind(py), self.remote.bind(py));
        let lengths = rows_of_three("reads.local", local)?;
        let (count, other) = (lengths.as_array().nrows(), rows_of_three("reads.remote", remote)?.as_array().nrows());
        if count != other {
            return Err(type_error(py, "reads", "", &format!("have {count} local and {other} remote descriptors")));
        }
        for start in (0..count).step_by(limit) {
            let rows = start..start.saturating_add(limit).min(count);
            batches.push(Self {
                source: self.source,
                local: part(local, rows.clone())?.unbind(),
                remote: part(remote, rows.clone())?.unbind(),
                bytes: lengths
                    .as_array()
                    .column(1)
                    .iter()
                    .skip(start)
                    .take(limit)
                    .copied()
                    .fold(0, u64::saturating_add),
                descriptors: rows.len() as u64,
                bytes_by_group: Vec::new(),
                descriptors_by_group: Vec::new(),
            });
        }
        Ok(())
    }

    #[allow(clippy::unnecessary_wraps, reason = "as `of_rows`")]
    pub(crate) fn of_ids(py: Python<'_>, read: kvhma_core::Ids) -> PyResult<Self> {
        let kvhma_core::Ids { source, local, remote, bytes, merged: descriptors } = read;
        let (local, remote) = (column(py, local).into_any().unbind(), column(py, remote).into_any().unbind());
        let (bytes_by_group, descriptors_by_group) = (Vec::new(), Vec::new());
        Ok(Self { source, local, remote, bytes, descriptors, bytes_by_group, descriptors_by_group })
    }
}

/// All reads of a request, and the ranges to zero.
///
/// `Plan.transfer` returns ``Transfer[np.uint64]``, the default of ``Transfer``; `Plan.ids` returns
/// ``Transfer[np.int32]``.
#[pyclass(frozen, generic, get_all, new = "from_fields", module = "kvhma._kvhma")]
pub(crate) struct Transfer {
    /// One entry for each source with something to read.
    reads: Vec<Py<Read>>,
    /// Ranges to zero before a read is posted, of shape (m, 3): local address, length in bytes, device.
    zero: Py<PyArray2<u64>>,
    /// Bytes moved from all sources.
    bytes: u64,
    /// Descriptors for all sources.
    descriptors: u64,
    /// Bytes of tokens after the request's last token, read because a whole last block needs fewer descriptors.
    ///
    /// Ids always read them, because views have whole kernel blocks only.
    excess_bytes: u64,
    /// For each local group, the first token from which its blocks are filled up to the request's last token.
    ///
    /// A block that begins before this token has zeros before it. The block is valid for this request but not for other
    /// requests that share its tokens, so it must not stay in a prefix cache. 0 for groups whose blocks hold no tokens.
    first_tokens: Vec<u64>,
    /// Bytes read into each local group, in the order of the local geometry's groups. Their sum is ``bytes``.
    ///
    /// Empty for ids, which are not counted by group.
    bytes_by_group: Vec<u64>,
    /// Descriptors of each local group, in the same order. Their sum is ``descriptors``.
    ///
    /// A descriptor that continues from one group's block into another group's block counts for the group of its first
    /// byte. Empty for ids, which are not counted by group.
    descriptors_by_group: Vec<u64>,
}

#[pymethods]
impl Transfer {
    /// Split the reads for a transport that takes a limited number of descriptors at once.
    ///
    /// Together, the batches are the rows of `reads` in their order. Neighbours are joined already: two rows that touch
    /// on both sides are in different regions, which a transport registers separately.
    ///
    /// Args:
    ///     limit: descriptors of a batch, at most; at least 1.
    ///
    /// Returns:
    ///     Parts of `reads`, source by source. Their arrays are views of the arrays of `reads`.
    ///
    /// Raises:
    ///     RequestError: `limit` is 0 or not a number; or the reads are ids, which NIXL joins.
    fn batches(&self, py: Python<'_>, limit: &Bound<'_, PyAny>) -> PyResult<Vec<Read>> {
        let limit = usize::try_from(read_u64("limit", limit)?).unwrap_or(usize::MAX);
        if limit == 0 {
            return Err(type_error(py, "limit", "0", "is not at least 1"));
        }
        let mut batches = Vec::new();
        for read in &self.reads {
            read.get().append_batches(py, limit, &mut batches)?;
        }
        Ok(batches)
    }

    fn __getnewargs__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        attributes(slf, "reads zero bytes descriptors excess_bytes first_tokens bytes_by_group descriptors_by_group")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { reads, zero, bytes, descriptors, excess_bytes, first_tokens, .. } = self;
        Ok(format!(
            "Transfer({} reads, {} zeroed, descriptors={descriptors}, bytes={bytes}, excess_bytes={excess_bytes}, \
             first_tokens={first_tokens:?})",
            reads.len(),
            zero.bind(py).len()?
        ))
    }
}

impl Transfer {
    /// Converts a transfer of the core, with each read as a `Read`; `groups` is the number of counted groups.
    pub(crate) fn new<R>(
        py: Python<'_>,
        transfer: kvhma_core::Transfer<R>,
        groups: usize,
        read: impl Fn(Python<'_>, R) -> PyResult<Read>,
    ) -> PyResult<Self> {
        let kvhma_core::Transfer { reads, zero, excess_bytes, first_tokens } = transfer;
        let reads = reads.into_iter().map(|one| read(py, one)).collect::<PyResult<Vec<_>>>()?;
        let sums = |of: fn(&Read) -> &Vec<u64>| {
            (0..groups).map(|group| reads.iter().map(|read| of(read)[group]).sum()).collect()
        };
        Ok(Self {
            bytes: reads.iter().map(|read| read.bytes).sum(),
            descriptors: reads.iter().map(|read| read.descriptors).sum(),
            bytes_by_group: sums(|read| &read.bytes_by_group),
            descriptors_by_group: sums(|read| &read.descriptors_by_group),
            reads: reads.into_iter().map(|read| Py::new(py, read)).collect::<PyResult<_>>()?,
            zero: rows(py, zero)?.unbind(),
            excess_bytes,
            first_tokens,
        })
    }
}

/// The lost tokens of one layer.
#[pyclass(frozen, get_all, eq, new = "from_fields", from_py_object, module = "kvhma._kvhma")]
#[derive(Clone, PartialEq)]
pub(crate) struct Loss {
    /// Local group.
    group: usize,
    /// Name of the layer.
    layer: String,
    /// Half-open ranges of absolute token positions, sorted; empty for state, which is lost as a whole.
    tokens: Vec<(u64, u64)>,
}

#[pymethods]
impl Loss {
    fn __getnewargs__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        attributes(slf, "group layer tokens")
    }

    fn __repr__(&self) -> String {
        format!("Loss(group={}, layer={:?}, tokens={:?})", self.group, self.layer, self.tokens)
    }
}

impl From<kvhma_core::Loss> for Loss {
    fn from(loss: kvhma_core::Loss) -> Self {
        let kvhma_core::Loss { group, layer, tokens } = loss;
        Self { group, layer, tokens }
    }
}

/// The losses of a request.
#[pyclass(frozen, get_all, eq, new = "from_fields", module = "kvhma._kvhma")]
#[derive(PartialEq)]
pub(crate) struct Losses {
    /// Layers that lost data, in the order of the geometry.
    pub(crate) layers: Vec<Loss>,
    /// The longest prefix, in tokens, for which every group has all that it needs; never shorter than `cached`.
    pub(crate) whole_prefix: u64,
}

#[pymethods]
impl Losses {
    fn __getnewargs__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        attributes(slf, "layers whole_prefix")
    }

    fn __repr__(&self) -> String {
        format!("Losses({} layers, whole_prefix={})", self.layers.len(), self.whole_prefix)
    }
}
