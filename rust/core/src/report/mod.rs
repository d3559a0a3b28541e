// SPDX-License-Identifier: Apache-2.0
//! A plan in sentences, and what a failed transfer costs.
mod explain;
pub(crate) mod losses;
