// SPDX-License-Identifier: Apache-2.0
//! Rows of the arrays that the transfer library takes.

/// `(address, length, device)`.
pub type Descriptor = [u64; 3];

/// A regular cut of a region: `(address, length, device, stride, count)`.
pub type View = [u64; 5];
