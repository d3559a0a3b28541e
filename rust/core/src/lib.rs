// SPDX-License-Identifier: Apache-2.0
//! What must move when a prefill engine hands a request's KV cache to a decode engine.
//!
//! Two [`Geometry`] values make a [`Plan`] once; a plan and a request's [`Span`]s make a [`Transfer`]: the fewest
//! contiguous copies, sorted by local address, and the local ranges to zero. [`ids`] has the functions that need no
//! geometry.
#![forbid(unsafe_code)]

mod alias;
mod axis;
mod by_group;
mod check;
mod digest;
mod encode;
mod error;
mod explain;
mod finding;
mod geometry;
pub mod ids;
mod link;
mod losses;
mod pieces;
mod plan;
mod runs;
mod segment;
mod settle;
mod source;
mod span;
mod table;
mod transfer;
mod validate;
pub mod views;

pub use digest::TokenDigest;
pub use encode::{IdTransfer, Ids};
pub use error::{Error, Result};
pub use finding::{Finding, Place, Severity};
pub use geometry::{
    Axis, Form, Geometry, Group, Kind, Layer, MAX_JSON_BYTES, Memory, Page, Part, Region, SCHEMA_VERSION,
};
pub use losses::{Loss, Losses};
pub use plan::Plan;
pub use runs::{Copies, Descriptor, Room};
pub use span::Span;
pub use transfer::{Read, Transfer};
pub use validate::validate;
