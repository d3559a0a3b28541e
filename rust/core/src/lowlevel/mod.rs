// SPDX-License-Identifier: Apache-2.0
//! Functions on block ids and views that need no plan.
pub mod block_ids;
pub mod id_order;
pub mod ids;
pub mod out;
pub mod permute;
pub mod views;
