// SPDX-License-Identifier: Apache-2.0
//! The written form of a geometry, and the check that makes a [`Geometry`](crate::Geometry) of it.
mod check;
mod check_page;
mod limits;
mod written;

pub use written::{Axis, Form, Group, Kind, Layer, MAX_JSON_BYTES, Page, Part, SCHEMA_VERSION};
