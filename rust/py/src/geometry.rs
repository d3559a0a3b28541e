// SPDX-License-Identifier: Apache-2.0
//! Geometries: read from JSON or from Python values, and shown as the arguments that Python makes its values of.
use std::sync::Arc;

use kvhma_core::form::{Axis, Form, Group, Layer, Part};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::type_name;
use crate::error::{OrRaise, type_error};
use crate::values::read_form;

type RegionArguments = (u64, u64, &'static str, u32);
type GroupArguments = (&'static str, u64, u64, Option<u64>, Option<u64>, u64, u64, u64, Option<u64>);
type AxisArguments<'a> = (&'a str, u64, u64, u64, Option<u64>, bool, u64);
type PartArguments<'a> = (&'a str, &'a str, u64, u64, Vec<AxisArguments<'a>>);
type LayerArguments<'a> = (&'a str, usize, usize, u64, u64, u64, usize, Option<u64>);

/// A checked geometry, read from JSON.
///
/// `kvhma.Geometry.core` is an instance. Fields that were left out stay out of the JSON form and the repr.
///
/// Raises:
///     GeometryError: as for `kvhma.Geometry`.
///     AddressOverflowError: as for `kvhma.Geometry`.
#[pyclass(frozen, module = "kvhma._kvhma")]
pub(crate) struct CheckedGeometry {
    /// The written form: fields that were left out stay out.
    form: Form,
    pub(crate) geometry: Arc<kvhma_core::Geometry>,
}

impl CheckedGeometry {
    fn check(form: Form) -> kvhma_core::Result<Self> {
        let geometry = Arc::new(kvhma_core::Geometry::new(form.clone())?);
        Ok(Self { form, geometry })
    }
}

/// The checked form of a `kvhma.Geometry`, or of a checked form itself.
pub(crate) fn read_geometry(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Py<CheckedGeometry>> {
    let core = value.getattr(pyo3::intern!(value.py(), "core")).unwrap_or_else(|_| value.clone());
    let no_geometry = |_| type_error(value.py(), what, &type_name(value), "is not a Geometry");
    Ok(core.cast_into::<CheckedGeometry>().map_err(no_geometry)?.unbind())
}

/// The checked forms of one geometry or of several.
pub(crate) fn read_geometries(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<Py<CheckedGeometry>>> {
    if let Ok(one) = read_geometry(what, value) {
        return Ok(vec![one]);
    }
    let neither = |_| type_error(value.py(), what, &type_name(value), "is not a Geometry or a list of them");
    let items = value.try_iter().map_err(neither)?.enumerate();
    items.map(|(index, item)| read_geometry(&format!("{what}[{index}]"), &item?)).collect()
}

#[pymethods]
impl CheckedGeometry {
    #[new]
    fn new(py: Python<'_>, json: &[u8]) -> PyResult<Self> {
        py.detach(|| Self::check(Form::from_json(json)?)).or_raise(py)
    }

    /// Check a geometry of Python values, and store equal pages of layers once.
    #[staticmethod]
    fn from_values(py: Python<'_>, geometry: &Bound<'_, PyAny>) -> PyResult<Self> {
        let form = read_form(geometry)?;
        py.detach(|| Self::check(form)).or_raise(py)
    }

    /// Return the JSON form in one line, or indented by a number of spaces.
    #[pyo3(signature = (indent = None))]
    fn to_json<'py>(&self, py: Python<'py>, indent: Option<usize>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.form.to_json(indent)))
    }

    /// Rank number among the tensor-parallel ranks.
    #[getter]
    fn tp_rank(&self) -> u32 {
        self.form.tp_rank
    }

    /// Tensor-parallel ranks.
    #[getter]
    fn tp_size(&self) -> u32 {
        self.form.tp_size
    }

    /// The block id that stands for "no block", or None.
    #[getter]
    fn null_block(&self) -> Option<u64> {
        self.form.null_block
    }

    /// Arguments of a `Region`, for each region.
    #[getter]
    fn regions(&self) -> Vec<RegionArguments> {
        self.form
            .regions
            .iter()
            .map(|region| (region.base, region.bytes, region.memory.into(), region.device))
            .collect()
    }

    /// Arguments of a `Group`, for each group.
    #[getter]
    fn groups(&self) -> Vec<GroupArguments> {
        let arguments = |group: &Group| {
            let Group { kind, block_size, ratio, window, chunk, speculative, cp_rank, cp_size, cp_interleave } = *group;
            (kind.word(), block_size, ratio, window, chunk, speculative, cp_rank, cp_size, cp_interleave)
        };
        self.form.groups.iter().map(arguments).collect()
    }

    /// Arguments of a `Part` with those of each `Axis`, for each part of each page.
    #[getter]
    fn pages(&self) -> Vec<Vec<PartArguments<'_>>> {
        self.form.pages.iter().map(|page| page.parts.iter().map(part_arguments).collect()).collect()
    }

    /// Arguments of a `Layer` with an index into the pages, for each layer.
    #[getter]
    fn layers(&self) -> Vec<LayerArguments<'_>> {
        self.form.layers.iter().map(layer_arguments).collect()
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyBytes>,) {
        (self.to_json(py, None),)
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let Form { tp_rank, tp_size, regions, groups, layers, .. } = &self.form;
        let kinds: Vec<_> = groups.iter().map(|group| group.kind.word()).collect();
        format!(
            "CheckedGeometry(rank {tp_rank} of {tp_size}, groups [{}], {} layers, {} regions)",
            kinds.join(", "),
            layers.len(),
            regions.len()
        )
    }
}

fn part_arguments(part: &Part) -> PartArguments<'_> {
    let Part { name, dtype, item_bytes, offset, axes } = part;
    (name, dtype, *item_bytes, *offset, axes.iter().map(axis_arguments).collect())
}

fn axis_arguments(axis: &Axis) -> AxisArguments<'_> {
    let Axis { name, extent, stride, start, length, may_repeat, spare } = axis;
    (name, *extent, *stride, *start, *length, *may_repeat, *spare)
}

fn layer_arguments(layer: &Layer) -> LayerArguments<'_> {
    let Layer { name, group, region, offset, num_blocks, block_stride, page, kernel_stride } = layer;
    (name, *group, *region, *offset, *num_blocks, *block_stride, *page, *kernel_stride)
}
