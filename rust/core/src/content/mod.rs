// SPDX-License-Identifier: Apache-2.0
//! Sums over what a request's blocks hold, the same however ranks, blocks and strides cut it.
mod keys;
mod memory;
mod part;
mod pieces;
mod request;
mod shares;

pub use keys::index_keys;
pub use memory::ContentMemory;
pub use request::{ContentRequest, ContentSums, RepeatedSums};
