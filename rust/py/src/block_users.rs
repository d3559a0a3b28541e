// SPDX-License-Identifier: Apache-2.0
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// How many blocks some requests keep, of whom several may keep the same.
#[pyclass(module = "kvhma._kvhma")]
#[derive(Default, Clone)]
pub(crate) struct BlockUsers(kvhma_core::BlockUsers);

#[pymethods]
impl BlockUsers {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Blocks that at least one request keeps.
    #[getter]
    fn used(&self) -> usize {
        self.0.used()
    }

    /// Add a request's blocks, each once.
    ///
    /// Raises:
    ///     RequestError: an id is not in 0..2**31; none is added then.
    fn add(&mut self, py: Python<'_>, ids: PyReadonlyArray1<'_, i64>) -> PyResult<()> {
        self.0.add(ids.as_slice()?).or_raise(py)
    }

    /// Take a request's blocks off again; those that were not added are passed over.
    fn remove(&mut self, ids: PyReadonlyArray1<'_, i64>) -> PyResult<()> {
        self.0.remove(ids.as_slice()?);
        Ok(())
    }

    /// Return whether no other request keeps one of a request's blocks.
    fn has_own(&self, ids: PyReadonlyArray1<'_, i64>) -> PyResult<bool> {
        Ok(self.0.has_own(ids.as_slice()?))
    }

    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        self.clone()
    }
}
