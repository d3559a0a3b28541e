// SPDX-License-Identifier: Apache-2.0
//! Functions on block ids and views that need no plan.
pub mod ids;
pub mod permute;
pub mod views;
