// SPDX-License-Identifier: Apache-2.0
//! Sums over what a request's blocks hold, the same however ranks, blocks and strides cut it.
mod keys;
mod part;
mod pieces;
mod request;
mod shares;

pub use keys::index_keys;
pub use request::{ContentMemory, ContentRequest, ContentSums, RepeatedSums};
