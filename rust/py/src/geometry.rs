// SPDX-License-Identifier: Apache-2.0
use std::sync::Arc;

use pyo3::prelude::*;

use crate::error::OrRaise;

#[pyclass(frozen, module = "kvhma._kvhma")]
pub(crate) struct Geometry(pub(crate) Arc<kvhma_core::Geometry>);

#[pymethods]
impl Geometry {
    #[staticmethod]
    fn from_json(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        Ok(Self(Arc::new(kvhma_core::Geometry::from_json(data).or_raise(py)?)))
    }
}

#[pyclass(frozen, eq, get_all, module = "kvhma._kvhma")]
#[derive(Clone, PartialEq)]
pub(crate) struct Finding {
    code: &'static str,
    severity: &'static str,
    place: String,
    field: &'static str,
    local: String,
    remote: String,
    text: String,
}

#[pymethods]
impl Finding {
    fn __repr__(&self) -> String {
        format!("Finding({}, {}: {})", self.severity, self.code, self.text)
    }
}

impl From<&kvhma_core::Finding> for Finding {
    fn from(finding: &kvhma_core::Finding) -> Self {
        Self {
            code: finding.code,
            severity: match finding.severity {
                kvhma_core::Severity::Error => "error",
                kvhma_core::Severity::Warning => "warning",
            },
            place: finding.place.clone(),
            field: finding.field,
            local: finding.local.clone(),
            remote: finding.remote.clone(),
            text: finding.text(),
        }
    }
}
