// SPDX-License-Identifier: Apache-2.0
//! What one request moves and zeroes.
pub(crate) mod block_pairs;
pub(crate) mod bound;
pub(crate) mod checked;
pub(crate) mod copies;
pub(crate) mod count;
pub(crate) mod fill;
pub(crate) mod group_span;
pub(crate) mod ids;
pub(crate) mod pairs_by_cut;
pub(crate) mod span;
pub(crate) mod token_ranges;
pub(crate) mod transfer;
pub(crate) mod zero;
