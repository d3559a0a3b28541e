// SPDX-License-Identifier: Apache-2.0
//! Sums over the content of a request's blocks that do not depend on ranks, blocks or strides.
mod keys;
mod memory;
mod part;
mod pieces;
mod request;
mod shares;

pub use keys::index_keys;
pub use memory::ContentMemory;
pub use request::{ContentRequest, ContentSums, RepeatedSums};
