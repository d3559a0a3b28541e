// SPDX-License-Identifier: Apache-2.0
//! Block ids in the order of vLLM's lists: arrays in, arrays out, and nothing copied that need not be.
use std::rc::Rc;

use kvhma_core::Error;
use kvhma_core::lowlevel::block_ids::{self, BlockIds};
use kvhma_core::lowlevel::id_order::IdOrder;
use kvhma_core::lowlevel::ids::{Clip, clips};
use kvhma_core::lowlevel::out::Out;
use numpy::{IntoPyArray, PyArray1, PyUntypedArray};
use pyo3::Borrowed;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::block_tables::{Ids, Table};
use crate::convert::{collect, items, read_item, read_u64, read_u64s};
use crate::error::{OrRaise, raise};
use crate::output::{column_into, part};

/// The id that stands for "no block", or None.
pub(crate) struct NullBlock(pub(crate) Option<i64>);

impl<'py> FromPyObject<'_, 'py> for NullBlock {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if value.is_none() { Ok(Self(None)) } else { read_item("null_block", &value).map(|id| Self(Some(id))) }
    }
}

fn read_clips(groups: usize, keep: &Bound<'_, PyAny>, speculative: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Clip>> {
    let speculative = match speculative {
        None => vec![None; groups],
        Some(list) => items("speculative", list)?
            .iter()
            .map(|item| if item.is_none() { Ok(None) } else { read_u64("speculative", item).map(Some) })
            .collect::<PyResult<_>>()?,
    };
    clips(groups, &read_u64s("keep", keep)?, &speculative).or_raise(keep.py())
}

/// Select the blocks of each group that move, by vLLM's static rule.
///
/// Args:
///     block_ids: logical block ids of each group; null blocks at the front are removed.
///     keep: number of trailing blocks to select of each group, 0 for all (see `window_blocks`).
///     speculative: for a state group, the number of slots after the slot with the state, which alone is selected; None
///         for other groups.
///     null_block: the id that stands for "no block", or None.
///
/// Returns:
///     For each group the selected ids, in their order: of an array a view of it, of a list an int32 array. Of a list
///     only the selected entries are read, and null blocks at the front if the first selected one would be one.
///
/// Raises:
///     RequestError: lists of different length or of the wrong type.
///     BlockIdError: a selected id of a list does not fit int32.
#[pyfunction]
#[pyo3(signature = (block_ids, keep, *, speculative = None, null_block = NullBlock(Some(0))), text_signature = "(block_ids, keep, *, speculative=None, null_block=0)")]
pub(crate) fn clip_blocks<'py>(
    py: Python<'py>,
    block_ids: &Bound<'py, PyAny>,
    keep: &Bound<'_, PyAny>,
    speculative: Option<&Bound<'_, PyAny>>,
    null_block: NullBlock,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let groups = items("block_ids", block_ids)?;
    let clips = read_clips(groups.len(), keep, speculative)?;
    let select = |(index, (group, clip)): (usize, (&Bound<'py, PyAny>, Clip))| {
        let ids = Ids::read_clipped("block_ids", group, clip, null_block.0)?;
        let array = group.cast::<PyUntypedArray>().ok();
        let entries = array.and_then(|_| ids.get().map(|(entries, _)| entries));
        if let Some(entries) = entries {
            drop(ids);
            return part(group, entries);
        }
        let read = || ids.get().map(|(_, ids)| vec![ids]);
        let copy = |ids: &[BlockIds<'_>], out: &mut Out<'_, i32>| block_ids::expand_blocks(index, ids[0], 1, out);
        column_into(py, None, read, copy).map(|(ids, ())| ids.into_any())
    };
    groups.iter().zip(clips).enumerate().map(select).collect()
}

/// Return the kernel block ids of logical block ids: ``id`` becomes ``id * ratio .. (id + 1) * ratio``.
///
/// Args:
///     block_ids: logical block ids.
///     ratio: kernel blocks in a logical block.
///     out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.
///
/// Returns:
///     Shape (len(block_ids) * ratio,): a new array, or a view of `out`.
///
/// Raises:
///     BlockIdError: an id is negative or its kernel ids do not fit int32.
///     AddressOverflowError: there are more than 2**31 - 1 kernel ids.
///     RequestError: `out` is no writable C-contiguous int32 array, is too short, or overlaps `block_ids`.
#[pyfunction]
#[pyo3(signature = (block_ids, ratio, *, out = None))]
pub(crate) fn expand_blocks<'py>(
    py: Python<'py>,
    block_ids: &Bound<'py, PyAny>,
    ratio: &Bound<'_, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray1<i32>>> {
    let ids = Ids::read("block_ids", block_ids)?;
    let ratio = read_u64("ratio", ratio)?;
    let read = || ids.get().map(|(_, ids)| vec![ids]);
    let (kernel, ()) = column_into(py, out, read, |ids, out| block_ids::expand_blocks(0, ids[0], ratio, out))?;
    Ok(kernel)
}

/// Return ids into a flat list of views: for each view the ids of its groups, shifted by the start of the view.
///
/// These are vLLM 0.32's ids if all attention regions come first and the parts of the state regions follow. For many
/// requests, `DescriptorOrder` reads the views once.
///
/// Args:
///     block_ids: block ids of each group, at the granularity of the views.
///     view_counts: entries of each view.
///     view_groups: the group, or the groups, whose blocks each view has.
///     out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.
///
/// Returns:
///     The ids, view after view: a new array, or a view of `out`.
///
/// Raises:
///     BlockIdError: an id is outside one of the views.
///     RequestError: a group does not exist, or lists differ in length; `out` is no writable C-contiguous int32 array,
///         is too short, or overlaps `block_ids`.
///     AddressOverflowError: the views have more than 2**31 - 1 entries, or there are as many ids.
#[pyfunction]
#[pyo3(signature = (block_ids, view_counts, view_groups, *, out = None))]
pub(crate) fn descriptor_ids<'py>(
    py: Python<'py>,
    block_ids: &Bound<'py, PyAny>,
    view_counts: &Bound<'_, PyAny>,
    view_groups: &Bound<'_, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray1<i32>>> {
    let groups = items("block_ids", block_ids)?;
    let ids = collect(groups.iter().map(|group| Ids::read("block_ids", group)))?;
    let order = read_order(&vec![1; ids.len()], view_counts, view_groups)?;
    Ok(column_into(py, out, || tables(&ids), |tables, out| order.write(tables, out))?.0)
}

fn read_order(ratios: &[u64], view_counts: &Bound<'_, PyAny>, view_groups: &Bound<'_, PyAny>) -> PyResult<IdOrder> {
    let counts = read_u64s("view_counts", view_counts)?;
    let one = |value: &Bound<'_, PyAny>| {
        read_u64("view_groups", value).map(|group| usize::try_from(group).unwrap_or(usize::MAX))
    };
    let items = items("view_groups", view_groups)?;
    let mut members: Vec<Rc<[usize]>> = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        members.push(match item.cast::<PyTuple>() {
            // Most lists repeat one tuple, which cannot change.
            Ok(_) if index > 0 && item.is(&items[index - 1]) => Rc::clone(&members[index - 1]),
            Ok(several) => several.iter().map(|group| one(&group)).collect::<PyResult<_>>()?,
            Err(_) => Rc::new([one(item)?]),
        });
    }
    IdOrder::new(ratios, &counts, &members).or_raise(view_counts.py())
}

/// The ids of requests in one list of descriptors: which views the list has, and which blocks move.
///
/// It does what `clip_blocks`, `expand_blocks` and `descriptor_ids` do one after the other, in one call for a request
/// or for a batch, and reads the views once. A block that a table lists twice has its ids twice, as in vLLM.
///
/// Args:
///     keep: for each group, number of trailing blocks to select, 0 for all (see `window_blocks`).
///     view_counts: entries of each view.
///     view_groups: the group, or the groups, whose blocks each view has.
///     speculative: for a state group, the number of slots after the slot with the state, which alone is selected; None
///         for other groups.
///     ratios: for each group, kernel blocks in a logical block, if views number kernel blocks; None for 1.
///     null_block: the id that stands for "no block", or None.
///
/// Raises:
///     RequestError: lists of different length or of the wrong type; a group does not exist; a ratio is 0.
///     AddressOverflowError: the views have more than 2**31 - 1 entries.
#[pyclass(frozen, module = "kvhma._kvhma")]
pub(crate) struct DescriptorOrder {
    clips: Vec<Clip>,
    null_block: Option<i64>,
    order: IdOrder,
}

type IdsAndOffsets<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i64>>);

#[pymethods]
impl DescriptorOrder {
    #[new]
    #[pyo3(signature = (keep, view_counts, view_groups, *, speculative = None, ratios = None, null_block = NullBlock(Some(0))), text_signature = "(keep, view_counts, view_groups, *, speculative=None, ratios=None, null_block=0)")]
    fn new(
        keep: &Bound<'_, PyAny>,
        view_counts: &Bound<'_, PyAny>,
        view_groups: &Bound<'_, PyAny>,
        speculative: Option<&Bound<'_, PyAny>>,
        ratios: Option<&Bound<'_, PyAny>>,
        null_block: NullBlock,
    ) -> PyResult<Self> {
        let clips = read_clips(items("keep", keep)?.len(), keep, speculative)?;
        let ratios = ratios.map_or_else(|| Ok(vec![1; clips.len()]), |list| read_u64s("ratios", list))?;
        if ratios.len() != clips.len() {
            return Err(raise(keep.py(), &Error::count("ratios", ratios.len(), clips.len())));
        }
        Ok(Self { order: read_order(&ratios, view_counts, view_groups)?, clips, null_block: null_block.0 })
    }

    /// Return the ids of one request.
    ///
    /// Args:
    ///     block_ids: the block table of each group, logical block ids.
    ///     out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.
    ///
    /// Returns:
    ///     The ids, view after view: a new array, or a view of `out`.
    ///
    /// Raises:
    ///     BlockIdError: an id is outside one of the views.
    ///     RequestError: another number of groups, or a table of the wrong type; `out` is no writable C-contiguous
    ///         int32 array, is too short, or overlaps `block_ids`.
    ///     AddressOverflowError: there are more than 2**31 - 1 ids.
    #[pyo3(signature = (block_ids, *, out = None))]
    fn ids<'py>(
        &self,
        py: Python<'py>,
        block_ids: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let groups = items("block_ids", block_ids)?;
        self.check_groups(py, "block_ids", groups.len())?;
        let read = |(group, &clip)| Ids::read_clipped("block_ids", group, clip, self.null_block);
        let ids = collect(groups.iter().zip(&self.clips).map(read))?;
        Ok(column_into(py, out, || tables(&ids), |tables, out| self.order.write(tables, out))?.0)
    }

    /// Return the ids of several requests, one after the other, and where those of each begin.
    ///
    /// Args:
    ///     block_tables: for each group an array of integers of shape (requests, columns), as vLLM's workers have. Rows
    ///         of int32 or int64 are read in place; of another type or in Fortran order, they are copied as int64.
    ///     num_blocks: for each group the number of entries of each row.
    ///     out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.
    ///
    /// Returns:
    ///     The ids, and int64 offsets of shape (requests + 1,): request ``r`` has ``ids[offsets[r]:offsets[r + 1]]``.
    ///
    /// Raises:
    ///     BlockIdError: an id is outside one of the views; the values of `out` are then undefined.
    ///     RequestError: as for `ids`; or a row has fewer columns than entries.
    ///     AddressOverflowError: there are more than 2**31 - 1 ids.
    #[pyo3(signature = (block_tables, num_blocks, *, out = None))]
    fn batch_ids<'py>(
        &self,
        py: Python<'py>,
        block_tables: &Bound<'py, PyAny>,
        num_blocks: &Bound<'_, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<IdsAndOffsets<'py>> {
        let (groups, lengths) = (items("block_tables", block_tables)?, items("num_blocks", num_blocks)?);
        self.check_groups(py, "block_tables", groups.len())?;
        self.check_groups(py, "num_blocks", lengths.len())?;
        let tables = groups.iter().zip(&lengths).map(|(table, lengths)| Table::read(table, lengths));
        let tables = tables.collect::<PyResult<Vec<_>>>()?;
        let requests = tables.first().map_or(0, Table::requests);
        if let Some(other) = tables.iter().find(|table| table.requests() != requests) {
            return Err(raise(py, &Error::count("requests of block_tables", other.requests(), requests)));
        }
        let read = || {
            let rows = tables.iter().zip(&self.clips).map(|(table, &clip)| table.rows(clip, self.null_block));
            let groups = rows.collect::<Option<Vec<_>>>()?;
            Some((0..requests).flat_map(|request| groups.iter().map(move |rows| rows[request])).collect())
        };
        let (ids, offsets) = column_into(py, out, read, |rows, out| self.order.write(rows, out))?;
        Ok((ids, offsets.into_pyarray(py)))
    }
}

impl DescriptorOrder {
    fn check_groups(&self, py: Python<'_>, what: &'static str, found: usize) -> PyResult<()> {
        if found == self.clips.len() { Ok(()) } else { Err(raise(py, &Error::count(what, found, self.clips.len()))) }
    }
}

/// The ids of each table.
fn tables<'a>(ids: &'a [Ids<'_>]) -> Option<Vec<BlockIds<'a>>> {
    collect(ids.iter().map(|ids| ids.get().map(|(_, ids)| ids).ok_or(()))).ok()
}
