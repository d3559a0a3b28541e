// SPDX-License-Identifier: Apache-2.0
use kvhma_core::View;
use kvhma_core::lowlevel::{ids, permute, views};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::convert::{items, read_groups, read_ids, read_rows, read_u64, read_u64s, rows};
use crate::error::{OrRaise, type_error};
use crate::geometry::read_geometry;
use crate::ids::NullBlock;
use crate::output::rows_into;
use crate::results::Finding;
use crate::spans::read_text;

/// Compare two geometries, and return the reasons against pairing them and the warnings.
///
/// Never raises on content. ``validate(a, b)`` and ``validate(b, a)`` return the same texts.
///
/// Args:
///     local: the rank that reads.
///     remote: a rank that `local` may read from.
///
/// Returns:
///     Every difference that matters. The pair is refused if one of them is an error.
///
/// Raises:
///     RequestError: an argument has the wrong type.
#[pyfunction]
pub(crate) fn validate(py: Python<'_>, local: &Bound<'_, PyAny>, remote: &Bound<'_, PyAny>) -> PyResult<Vec<Finding>> {
    let (local, remote) = (read_geometry("local", local)?, read_geometry("remote", remote)?);
    let (local, remote) = (&local.get().geometry, &remote.get().geometry);
    let findings = py.detach(|| kvhma_core::validate(local, remote));
    Ok(findings.iter().map(Finding::from).collect())
}

/// Return how many trailing blocks vLLM 0.32 holds of a sliding-window group: ``ceil(window / block_size) + 1``.
///
/// Args:
///     window: tokens that a query sees, including itself.
///     block_size: tokens of a block.
///
/// Raises:
///     RequestError: a number is out of range.
#[pyfunction]
pub(crate) fn window_blocks(py: Python<'_>, window: &Bound<'_, PyAny>, block_size: &Bound<'_, PyAny>) -> PyResult<u64> {
    ids::window_blocks(read_u64("window", window)?, read_u64("block_size", block_size)?).or_raise(py)
}

/// Return block ids as a text of ascending and descending ranges, e.g. ``7-9,4,2-1``.
///
/// Args:
///     ids: block ids, list or array.
///
/// Raises:
///     RequestError: an id is not an integer of 64 bits.
#[pyfunction]
pub(crate) fn ids_to_text(ids: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(kvhma_core::ids_to_text(&read_ids("ids", ids)?))
}

/// Return the block ids of a text of `ids_to_text`, which may come from an untrusted peer.
///
/// Args:
///     text: the text.
///     limit: the largest number of ids.
///
/// Raises:
///     RequestError: the text has another form, an id has more than 31 bits, or there are more ids than `limit`.
#[pyfunction]
pub(crate) fn text_to_ids<'py>(text: &Bound<'py, PyString>, limit: usize) -> PyResult<Bound<'py, PyArray1<i64>>> {
    Ok(read_text(text, limit).or_raise(text.py())?.into_pyarray(text.py()))
}

/// Return the ids of several block tables, one after the other, without null blocks.
///
/// Args:
///     tables: block ids of each group.
///     null_block: the id that stands for "no block", or None.
///
/// Raises:
///     RequestError: a table has the wrong type.
#[pyfunction]
#[pyo3(signature = (tables, null_block))]
pub(crate) fn join_tables<'py>(
    py: Python<'py>,
    tables: &Bound<'_, PyAny>,
    null_block: NullBlock,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let mut ids = read_groups("tables", tables)?.concat();
    ids.retain(|&id| null_block.0 != Some(id));
    Ok(ids.into_pyarray(py))
}

/// Return the first block table entry of each group that a request needs after the `cached` entries; 0 for state.
///
/// Without `num_tokens`, returns `cached`.
#[pyfunction]
pub(crate) fn first_entries(
    py: Python<'_>,
    geometry: &Bound<'_, PyAny>,
    num_tokens: &Bound<'_, PyAny>,
    cached: &Bound<'_, PyAny>,
) -> PyResult<Vec<u64>> {
    let geometry = read_geometry("geometry", geometry)?;
    let num_tokens = if num_tokens.is_none() { None } else { Some(read_u64("num_tokens", num_tokens)?) };
    ids::first_entries(&geometry.get().geometry, num_tokens, &read_u64s("cached", cached)?).or_raise(py)
}

/// Return the first token of each group that the token after `num_tokens` tokens still attends to; 0 for state.
///
/// It is `num_tokens` if that token attends to none of them, as with a window of one token.
///
/// Args:
///     geometry: has the groups.
///     num_tokens: tokens of the request.
///
/// Raises:
///     RequestError: an argument has the wrong type, or a number is out of range.
#[pyfunction]
pub(crate) fn first_needed_tokens(geometry: &Bound<'_, PyAny>, num_tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let (geometry, num_tokens) = (read_geometry("geometry", geometry)?, read_u64("num_tokens", num_tokens)?);
    Ok(geometry.get().geometry.groups().iter().map(|group| group.first_needed_token(num_tokens)).collect())
}

struct Lists {
    bases: Vec<u64>,
    strides: Vec<u64>,
    counts: Vec<u64>,
    devices: Vec<u64>,
}

impl Lists {
    fn read(
        bases: &Bound<'_, PyAny>,
        strides: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        devices: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let bases = read_u64s("bases", bases)?;
        let devices = devices.map_or_else(|| Ok(vec![0; bases.len()]), |list| read_u64s("devices", list))?;
        Ok(Self { strides: read_u64s("strides", strides)?, counts: read_u64s("counts", counts)?, devices, bases })
    }

    fn attention(&self, py: Python<'_>, lengths: &Bound<'_, PyAny>) -> PyResult<Vec<View>> {
        let lengths = read_u64s("lengths", lengths)?;
        views::attention_views(&self.bases, &lengths, &self.strides, &self.counts, &self.devices).or_raise(py)
    }

    fn state(&self, py: Python<'_>, parts: &Bound<'_, PyAny>) -> PyResult<Vec<View>> {
        let parts = items("parts", parts)?
            .iter()
            .map(|item| match items("parts", item)?.as_slice() {
                [offset, length] => Ok((read_u64("offset", offset)?, read_u64("length", length)?)),
                _ => Err(type_error(py, "parts", "", "every entry is a pair (offset, length)")),
            })
            .collect::<PyResult<Vec<_>>>()?;
        views::state_views(&self.bases, &parts, &self.strides, &self.counts, &self.devices).or_raise(py)
    }
}

fn expand<'py>(py: Python<'py>, views: Vec<View>, out: Given<'_, 'py>) -> PyResult<Bound<'py, PyArray2<u64>>> {
    rows_into(py, out, |out| views::expand_views(&views, out))
}

fn copy<'py>(py: Python<'py>, views: Vec<View>, out: Given<'_, 'py>) -> PyResult<Bound<'py, PyArray2<u64>>> {
    rows_into(py, out, |out| {
        out.reserve(views.len())?;
        out.extend(views.into_iter());
        Ok(())
    })
}

type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// A function of regions: `$read` makes the views, and `$finish` writes them to an array.
macro_rules! of_regions {
    ($(#[$doc:meta])* $name:ident(bases, $what:ident, ..) = $read:ident, $finish:ident) => {
        $(#[$doc])*
        #[pyfunction]
        #[pyo3(signature = (bases, $what, strides, counts, devices = None, *, out = None))]
        pub(crate) fn $name<'py>(
            py: Python<'py>,
            bases: &Bound<'_, PyAny>,
            $what: &Bound<'_, PyAny>,
            strides: &Bound<'_, PyAny>,
            counts: &Bound<'_, PyAny>,
            devices: Option<&Bound<'_, PyAny>>,
            out: Given<'_, 'py>,
        ) -> PyResult<Bound<'py, PyArray2<u64>>> {
            $finish(py, Lists::read(bases, strides, counts, devices)?.$read(py, $what)?, out)
        }
    };
}

of_regions! {
    /// Return one view for each attention region, of shape (n, 5): address, length, device, stride, count.
    ///
    /// Args:
    ///     bases: address of each region.
    ///     lengths: bytes of a block.
    ///     strides: bytes from one block to the next.
    ///     counts: blocks of each region.
    ///     devices: device of each region; None for 0.
    ///     out: a uint64 array of as many columns, filled from its front; None for a new array.
    ///
    /// Returns:
    ///     A new array, or a view of `out`.
    ///
    /// Raises:
    ///     RequestError: a length, stride or count is 0, or lists differ in length; `out` has another form, is
    ///         read-only, or too short.
    ///     AddressOverflowError: a view leaves the address space, or there are more than 2**31 - 1 entries.
    fa_views(bases, lengths, ..) = attention, copy
}
of_regions! {
    /// Return every block of every attention region, region by region, of shape (n, 3): address, length, device.
    ///
    /// Arguments and errors are as for `fa_views`.
    fa_descriptors(bases, lengths, ..) = attention, expand
}
of_regions! {
    /// Return one view for each part of each state region. Errors are as for `fa_views`.
    ///
    /// Args:
    ///     bases: address of each region.
    ///     parts: offset and length in bytes of each part of a block, the same in all regions.
    ///     strides: bytes from one block to the next, for each region.
    ///     counts: blocks of each region.
    ///     devices: device of each region; None for 0.
    ///     out: as for `fa_views`.
    ssm_views(bases, parts, ..) = state, copy
}
of_regions! {
    /// Return every block of every part of every state region, of shape (n, 3): address, length, device.
    ///
    /// Arguments and errors are as for `ssm_views`.
    ssm_descriptors(bases, parts, ..) = state, expand
}

/// Return the descriptors that views of shape (n, 5) stand for, of shape (sum of counts, 3).
///
/// Args:
///     views: rows of address, length in bytes, device, stride in bytes, count.
///     out: a uint64 array of shape (n, 3), filled from its front; None for a new array.
///
/// Raises:
///     RequestError: an array has another form; `out` is read-only, or too short.
///     AddressOverflowError: a view leaves the address space, or there are more than 2**31 - 1 entries.
#[pyfunction]
#[pyo3(signature = (views, *, out = None))]
pub(crate) fn expand_views<'py>(
    py: Python<'py>,
    views: &Bound<'_, PyAny>,
    out: Given<'_, 'py>,
) -> PyResult<Bound<'py, PyArray2<u64>>> {
    let views = views.extract::<PyReadonlyArray2<'_, u64>>();
    let Some(array) = views.as_ref().ok().map(|views| views.as_array()).filter(|array| array.ncols() == 5) else {
        return Err(type_error(py, "views", "", "expected a uint64 array of shape (n, 5)"));
    };
    let list: Vec<View> = array.rows().into_iter().map(|row| [row[0], row[1], row[2], row[3], row[4]]).collect();
    expand(py, list, out)
}

/// Checking up to this many rows takes less time than releasing the interpreter.
const FEW_ROWS: usize = 1024;

/// Check rows before a call of NIXL, which accepts any array with the right number of bytes and lets addresses wrap.
///
/// Args:
///     what: a name of the rows for the error message.
///     rows: address, length in bytes, device; with five columns also stride in bytes and count.
///     columns: 3 or 5.
///
/// Returns:
///     The number of descriptors that the rows stand for.
///
/// Raises:
///     RequestError: not a C-contiguous uint64 array of shape (n, columns); or a length, stride or count of 0.
///     AddressOverflowError: a row leaves the address space, or there are more than 2**31 - 1 entries.
#[pyfunction]
#[pyo3(signature = (what, rows, columns = 3))]
pub(crate) fn check_rows(py: Python<'_>, what: &str, rows: &Bound<'_, PyAny>, columns: usize) -> PyResult<u64> {
    let array = rows.extract::<PyReadonlyArray2<'_, u64>>();
    let array = array.as_ref().ok().filter(|array| array.is_c_contiguous() && array.shape()[1] == columns);
    let Some(Ok(numbers)) = array.map(|array| array.as_slice()) else {
        let expected = format!("expected a C-contiguous uint64 array of shape (n, {columns})");
        return Err(type_error(py, what, "", &expected));
    };
    let rows = numbers.chunks_exact(columns).map(|row| match *row {
        [address, length, device, stride, count] => [address, length, device, stride, count],
        _ => [row[0], row[1], row[2], 1, 1],
    });
    let check = || views::check_views(&format!("{what}: row"), rows);
    if numbers.len() > FEW_ROWS * columns { py.detach(check) } else { check() }.or_raise(py)
}

/// Local and remote rows to read, and ranges to permute after they arrive.
type PermutedRows<'py> = (Bound<'py, PyArray2<u64>>, Bound<'py, PyArray2<u64>>, Bound<'py, PyArray2<u64>>);

/// Read rows in the order of the source where that needs fewer rows, and return the ranges to permute after arrival.
///
/// Args:
///     local: shape (n, 3), of one source, sorted by address, as in `Read.local`.
///     remote: shape (n, 3), as in `Read.remote`.
///     local_bounds: sorted addresses at which registered memory begins or ends; no row crosses such an address.
///     remote_bounds: the same addresses of the source.
///     permute_bytes: how many bytes may be permuted to save a row.
///
/// Returns:
///     Local and remote rows, each of shape (m, 3), and the ranges to permute, of shape (k, 5): address, device,
///     blocks, heads, bytes of a head in a block. Such a range arrives as ``blocks x heads`` and must become
///     ``heads x blocks``.
///
/// Raises:
///     RequestError: arrays of another type or shape, or of unequal length.
#[pyfunction]
#[pyo3(signature = (local, remote, local_bounds, remote_bounds, permute_bytes))]
pub(crate) fn permuted_rows<'py>(
    py: Python<'py>,
    local: &Bound<'_, PyAny>,
    remote: &Bound<'_, PyAny>,
    local_bounds: &Bound<'_, PyAny>,
    remote_bounds: &Bound<'_, PyAny>,
    permute_bytes: &Bound<'_, PyAny>,
) -> PyResult<PermutedRows<'py>> {
    let (local, remote) = (read_rows("local", local)?, read_rows("remote", remote)?);
    let bounds = (read_u64s("local_bounds", local_bounds)?, read_u64s("remote_bounds", remote_bounds)?);
    let permute_bytes = read_u64("permute_bytes", permute_bytes)?;
    let found =
        py.detach(|| permute::permuted_rows(&local, &remote, (&bounds.0, &bounds.1), permute_bytes)).or_raise(py)?;
    Ok((rows(py, found.local)?, rows(py, found.remote)?, rows(py, found.permutes)?))
}
