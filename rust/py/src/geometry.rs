// SPDX-License-Identifier: Apache-2.0
use std::sync::Arc;

use pyo3::prelude::*;

use crate::error::{OrRaise, printable};

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
    layer: Option<String>,
    part: Option<String>,
    axis: Option<String>,
    field: &'static str,
    local: String,
    remote: String,
    reason: &'static str,
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
            place: finding.place.to_string(),
            layer: finding.place.layer.clone(),
            part: finding.place.part.clone(),
            axis: finding.place.axis.clone(),
            field: finding.field,
            local: finding.local.clone(),
            remote: finding.remote.clone(),
            reason: finding.reason,
            text: printable(&finding.text()),
        }
    }
}
