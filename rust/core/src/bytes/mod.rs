// SPDX-License-Identifier: Apache-2.0
//! Bytes that two pages share, and the rows in which the transfer library takes them.
pub(crate) mod pieces;
pub(crate) mod rows;
