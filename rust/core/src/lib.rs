// SPDX-License-Identifier: Apache-2.0
//! Plans the copies when a prefill engine hands off a request's KV cache to a decode engine.
//!
//! Two [`Geometry`] values make a [`Plan`] once; a plan and a request's [`Span`]s make a [`Transfer`]: the fewest
//! contiguous copies, sorted by local address, and the local ranges to zero. [`lowlevel`] has functions that need no plan.
//!
//! ```text
//! lowlevel   report        explain, losses; content: sums that do not depend on the layout
//!       |      |
//!       |   request        spans of one request -> transfer, ids
//!       |      |
//!       |   pairing        two geometries -> plan
//!       |      |
//!       |   form           written form -> a checked geometry
//!       |      |
//!       |   bytes          bytes that two pages share
//!       |      |
//!       +-- geometry       one worker's cache
//!              |
//!           error, finding
//! ```
#![forbid(unsafe_code)]

mod block_users;
mod bytes;
mod digest;
mod error;
mod finding;
pub mod form;
mod geometry;
mod id_text;
pub mod lowlevel;
mod pairing;
pub mod replay;
mod report;
mod request;

pub use block_users::BlockUsers;
pub use bytes::rows::{Advise, Descriptor, View};
pub use digest::TokenDigest;
pub use error::{Class, Error, Fields, Result, Value, Wrong};
pub use finding::{Finding, Place, Severity};
pub use geometry::types::{Axis, Geometry, Group, Kind, Layer, Memory, Page, Part, Region};
pub use id_text::{ids_to_text, text_to_ids};
pub use pairing::plan::{Plan, PlanOptions};
pub use pairing::validate::validate;
pub use report::losses::{Loss, Losses};
pub use request::copies::Copies;
pub use request::ids::Ids;
pub use request::span::{Span, SpanIds};
pub use request::transfer::{Read, Transfer};
