// SPDX-License-Identifier: Apache-2.0
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// Counts the blocks that some requests hold; several requests may hold the same block.
#[pyclass(module = "kvhma._kvhma")]
#[derive(Default, Clone)]
pub(crate) struct BlockUsers(kvhma_core::BlockUsers);

#[pymethods]
impl BlockUsers {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Blocks that at least one request holds.
    #[getter]
    fn used(&self) -> usize {
        self.0.used()
    }

    /// Add a request's blocks. A repeated id counts once.
    ///
    /// Raises:
    ///     RequestError: an id is not in 0..2**31; then no block is added.
    fn add(&mut self, py: Python<'_>, ids: PyReadonlyArray1<'_, i64>) -> PyResult<()> {
        self.0.add(ids.as_slice()?).or_raise(py)
    }

    /// Remove a request's blocks, ignoring blocks that were not added.
    fn remove(&mut self, ids: PyReadonlyArray1<'_, i64>) -> PyResult<()> {
        self.0.remove(ids.as_slice()?);
        Ok(())
    }

    /// Return whether no other request holds any of a request's blocks.
    fn has_own(&self, ids: PyReadonlyArray1<'_, i64>) -> PyResult<bool> {
        Ok(self.0.has_own(ids.as_slice()?))
    }

    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        self.clone()
    }
}
