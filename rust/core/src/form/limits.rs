// SPDX-License-Identifier: Apache-2.0
//! Limits of a geometry, and the checks that name a field.
use std::fmt::Display;

use crate::error::{Error, Result};

pub(crate) const MAX_REGIONS: usize = 4096;
pub(crate) const MAX_GROUPS: usize = 256;
pub(crate) const MAX_PAGES: usize = 4096;
pub(crate) const MAX_PARTS: usize = 64;
pub(crate) const MAX_AXES: usize = 8;
pub(crate) const MAX_LAYERS: usize = 16_384;
/// Pieces of all pages: finer pages can neither be checked for overlap nor moved in reasonable time.
pub(crate) const MAX_PIECES: u64 = 1 << 20;
/// Positions are products of table index (below 2^31), `cp_size` and block size: these bounds keep them in 62 bits.
pub(crate) const MAX_BLOCK_SIZE: u64 = 1 << 24;
pub(crate) const MAX_CP_SIZE: u64 = 1 << 6;
const MAX_NAME: usize = 256;

pub(crate) fn wrong(place: &str, field: &'static str, value: impl Display, expected: impl Display) -> Error {
    Error::geometry(place, field, value.to_string(), expected.to_string())
}

/// Fails unless a condition on a field holds.
pub(crate) fn require(
    holds: bool,
    place: &str,
    field: &'static str,
    value: impl Display,
    expected: impl Display,
) -> Result<()> {
    if holds { Ok(()) } else { Err(wrong(place, field, value, expected)) }
}

pub(crate) fn at_most(place: &str, field: &'static str, count: usize, limit: usize) -> Result<()> {
    let expected = format_args!("at most {limit} are allowed");
    require(count <= limit, place, field, format_args!("a list of {count}"), expected)
}

pub(crate) fn not_zero(place: &str, field: &'static str, value: u64) -> Result<()> {
    require(value != 0, place, field, 0, "has to be at least 1")
}

pub(crate) fn check_name(place: &str, field: &'static str, text: &str) -> Result<()> {
    let expected = format_args!("has to have 1 to {MAX_NAME} bytes");
    let value = format_args!("{} bytes long", text.len());
    require(!text.is_empty() && text.len() <= MAX_NAME, place, field, value, expected)
}
