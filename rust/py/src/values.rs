// SPDX-License-Identifier: Apache-2.0
//! A geometry of Python values, read once.
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use kvhma_core::form::{Axis, Form, Group, Layer, Page, Part, SCHEMA_VERSION};
use kvhma_core::{Error, Region};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::convert::{show, type_name};
use crate::error::raise;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// A Python value whose attributes are read, and its name in errors.
struct Fields<'a, 'py> {
    value: Any<'a, 'py>,
    class: &'static str,
    place: String,
}

impl<'py> Fields<'_, 'py> {
    fn get(&self, field: &'static str) -> PyResult<Bound<'py, PyAny>> {
        self.value.getattr(field).map_err(|_| {
            let expected = format!("{} is not a {}", type_name(self.value), self.class);
            wrong(self.value.py(), &self.place, field, "missing", &expected)
        })
    }

    fn number<T: TryFrom<u64>>(&self, field: &'static str) -> PyResult<T> {
        let value = self.get(field)?;
        // True and False are integers in Python, but are not sizes.
        let number = if value.is_instance_of::<PyBool>() { None } else { value.extract::<u64>().ok() };
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
            let expected = format!("has to be an integer in 0..2**{}", 8 * size_of::<T>());
            self.wrong(field, &value, &expected)
        })
    }

    fn number_or_none(&self, field: &'static str) -> PyResult<Option<u64>> {
        if self.get(field)?.is_none() { Ok(None) } else { self.number(field).map(Some) }
    }

    fn text(&self, field: &'static str) -> PyResult<String> {
        let value = self.get(field)?;
        value.extract().map_err(|_| self.wrong(field, &value, "has to be a string"))
    }

    fn flag(&self, field: &'static str) -> PyResult<bool> {
        let value = self.get(field)?;
        value.extract().map_err(|_| self.wrong(field, &value, "has to be True or False"))
    }

    /// One of a few words.
    fn word<T: TryFrom<String, Error = String>>(&self, field: &'static str) -> PyResult<T> {
        T::try_from(self.text(field)?).map_err(|reason| {
            let expected = reason.split_once(", ").map_or(reason.as_str(), |(_, expected)| expected);
            self.get(field).map_or_else(|error| error, |value| self.wrong(field, &value, expected))
        })
    }

    fn list(&self, field: &'static str) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let value = self.get(field)?;
        value.try_iter().map_err(|_| self.wrong(field, &value, "has to be a tuple or a list"))?.collect()
    }

    fn wrong(&self, field: &'static str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
        wrong(value.py(), &self.place, field, &show(value), expected)
    }
}

fn wrong(py: Python<'_>, place: &str, field: &'static str, value: &str, expected: &str) -> PyErr {
    raise(py, &Error::geometry(place, field, value.to_owned(), expected.to_owned()))
}

/// Reads a Python `Geometry`, and stores equal pages of layers once.
pub(crate) fn read_form(value: Any<'_, '_>) -> PyResult<Form> {
    let geometry = Fields { value, class: "Geometry", place: "geometry".to_owned() };
    let mut pages = Pages::default();
    Ok(Form {
        kvhma: SCHEMA_VERSION,
        tp_rank: geometry.number("tp_rank")?,
        tp_size: geometry.number("tp_size")?,
        null_block: geometry.number_or_none("null_block")?,
        regions: each(geometry.list("regions")?, "Region", "region", read_region)?,
        groups: each(geometry.list("groups")?, "Group", "group", read_group)?,
        layers: each(geometry.list("layers")?, "Layer", "layer", |layer| read_layer(layer, &mut pages))?,
        pages: pages.list,
    })
}

fn each<'py, T>(
    values: Vec<Bound<'py, PyAny>>,
    class: &'static str,
    place: &str,
    mut read: impl FnMut(&Fields<'_, 'py>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let values = values.iter().enumerate();
    values.map(|(index, value)| read(&Fields { value, class, place: format!("{place} {index}") })).collect()
}

fn read_region(region: &Fields<'_, '_>) -> PyResult<Region> {
    Ok(Region {
        base: region.number("base")?,
        bytes: region.number("bytes")?,
        memory: region.word("memory")?,
        device: region.number("device")?,
    })
}

fn read_group(group: &Fields<'_, '_>) -> PyResult<Group> {
    Ok(Group {
        kind: group.word("kind")?,
        block_size: group.number("block_size")?,
        ratio: group.number("ratio")?,
        window: group.number_or_none("window")?,
        chunk: group.number_or_none("chunk")?,
        speculative: group.number("speculative")?,
        cp_rank: group.number("cp_rank")?,
        cp_size: group.number("cp_size")?,
        cp_interleave: group.number_or_none("cp_interleave")?,
    })
}

fn read_layer<'py>(layer: &Fields<'_, 'py>, pages: &mut Pages<'py>) -> PyResult<Layer> {
    Ok(Layer {
        name: layer.text("name")?,
        group: layer.number("group")?,
        region: layer.number("region")?,
        offset: layer.number("offset")?,
        num_blocks: layer.number("num_blocks")?,
        block_stride: layer.number("block_stride")?,
        page: pages.index(layer)?,
        kernel_stride: layer.number_or_none("kernel_stride")?,
    })
}

/// Pages of the layers so far.
#[derive(Default)]
struct Pages<'py> {
    list: Vec<Page>,
    by_content: HashMap<Page, usize>,
    /// Most layers share the same object, which is then read once. It is held so that no other object gets its address.
    by_address: HashMap<usize, (usize, Bound<'py, PyAny>)>,
}

impl<'py> Pages<'py> {
    fn index(&mut self, layer: &Fields<'_, 'py>) -> PyResult<usize> {
        let value = layer.get("page")?;
        let vacant = match self.by_address.entry(value.as_ptr() as usize) {
            Entry::Occupied(known) => return Ok(known.get().0),
            Entry::Vacant(vacant) => vacant,
        };
        let page = read_page(&Fields { value: &value, class: "Page", place: format!("page of {}", layer.place) })?;
        let index = *self.by_content.entry(page).or_insert_with_key(|page| {
            self.list.push(page.clone());
            self.list.len() - 1
        });
        vacant.insert((index, value));
        Ok(index)
    }
}

fn read_page(page: &Fields<'_, '_>) -> PyResult<Page> {
    let place = format!("{} part", page.place);
    Ok(Page { parts: each(page.list("parts")?, "Part", &place, read_part)? })
}

fn read_part(part: &Fields<'_, '_>) -> PyResult<Part> {
    let place = format!("{} axis", part.place);
    Ok(Part {
        name: part.text("name")?,
        dtype: part.text("dtype")?,
        item_bytes: part.number("item_bytes")?,
        offset: part.number("offset")?,
        axes: each(part.list("axes")?, "Axis", &place, read_axis)?,
    })
}

fn read_axis(axis: &Fields<'_, '_>) -> PyResult<Axis> {
    Ok(Axis {
        name: axis.text("name")?,
        extent: axis.number("extent")?,
        stride: axis.number("stride")?,
        start: axis.number("start")?,
        length: axis.number_or_none("length")?,
        may_repeat: axis.flag("may_repeat")?,
        spare: axis.number("spare")?,
    })
}
