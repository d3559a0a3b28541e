// SPDX-License-Identifier: Apache-2.0
//! Functions on block ids and views, each usable alone, without a plan.
pub mod ids;
pub mod permute;
pub mod views;
