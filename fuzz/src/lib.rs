// SPDX-License-Identifier: Apache-2.0
//! What the fuzz targets share: cases made of bytes, what has to hold for them, and a bound on allocations.
pub mod case;
pub mod check;
mod limit;
