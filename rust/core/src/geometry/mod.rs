// SPDX-License-Identifier: Apache-2.0
//! One worker's checked cache, and which of its groups share memory.
pub(crate) mod objects;
pub(crate) mod ranges;
pub(crate) mod sharing;
pub(crate) mod types;
