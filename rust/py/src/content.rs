// SPDX-License-Identifier: Apache-2.0
//! Sums over the content of blocks, in arrays or in place.
use kvhma_core::{ContentMemory, ContentRequest, ContentSums, Error, Geometry, Memory};
use numpy::{PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::convert::{read_spans, read_u64, read_u64s, type_name};
use crate::error::{OrRaise, raise, type_error};
use crate::geometry::read_geometry;
use crate::plan::Plan;

/// The fields of `kvhma.digests.LayerSums`.
type SumsArguments = (&'static str, u64, u64, u64, Vec<u64>, Option<(u64, u64, Vec<u64>)>, Vec<u64>);

/// Regions as slices.
struct Arrays<'a>(Vec<&'a [u8]>);

impl ContentMemory for Arrays<'_> {
    fn bytes(&self, region: usize, offset: u64, length: u64) -> &[u8] {
        &self.0[region][offset as usize..(offset + length) as usize]
    }
}

/// Regions at the addresses of the geometry.
struct Mapped(Vec<u64>);

impl ContentMemory for Mapped {
    #[allow(unsafe_code, reason = "the bytes of a region that the caller says are memory of this process")]
    fn bytes(&self, region: usize, offset: u64, length: u64) -> &[u8] {
        // SAFETY: the geometry's check has proved that a block's bytes are within their region. A caller without arrays
        // guarantees that the regions are mapped, and that no thread writes to the request's blocks during the call.
        unsafe { std::slice::from_raw_parts((self.0[region] + offset) as *const u8, length as usize) }
    }
}

/// Sum the content of a request's blocks; the sums do not depend on the layout. `kvhma.digests` has the definition.
///
/// Args:
///     of: geometry of a rank, or the plan that the rank reads with.
///     num_tokens: tokens that the blocks hold.
///     spans: blocks of each group.
///     seed: the seed of the keys of coordinates.
///     first_tokens: for each group the first token that counts; None to count all needed tokens.
///     cp_tp_size: number of neighbouring tensor-parallel ranks that share the tokens of context-parallel groups.
///     memory: the bytes of each region; None to read the regions in place, which must be host memory.
///
/// Returns:
///     For each kind of layers: kind, window or chunk, first needed token, first counted token, sums, repeated, extents
///     of the heads. With heads that may repeat, ``repeated`` has the rank's number, the number of ranks, and their
///     sums.
///
/// Raises:
///     GeometryError: a shard is not an equal share, or the regions are not host memory.
///     RequestError: spans or numbers do not fit.
///     BlockIdError: a group has no block with such an id.
#[pyfunction]
#[pyo3(signature = (of, num_tokens, spans, seed, *, first_tokens = None, cp_tp_size = 1, memory = None))]
#[allow(clippy::too_many_arguments, reason = "Python's keywords, of which kvhma.digests has a class")]
pub(crate) fn content_sums(
    py: Python<'_>,
    of: &Bound<'_, PyAny>,
    num_tokens: &Bound<'_, PyAny>,
    spans: &Bound<'_, PyAny>,
    seed: &Bound<'_, PyAny>,
    first_tokens: Option<&Bound<'_, PyAny>>,
    cp_tp_size: u64,
    memory: Option<Vec<PyReadonlyArray1<'_, u8>>>,
) -> PyResult<Vec<SumsArguments>> {
    let (num_tokens, seed) = (read_u64("num_tokens", num_tokens)?, read_u64("seed", seed)?);
    let spans = read_spans("spans", spans)?;
    let first_tokens = first_tokens.map(|firsts| read_u64s("first_tokens", firsts)).transpose()?;
    let request = ContentRequest { num_tokens, spans: &spans, first_tokens: first_tokens.as_deref(), seed, cp_tp_size };
    let plan = of.cast::<Plan>().ok();
    let checked = if plan.is_none() { Some(read_geometry("of", of)?) } else { None };
    let plan = plan.map(|plan| &plan.get().core);
    let geometry = checked.as_ref().map(|checked| &*checked.get().geometry);
    let Some(regions) = plan.map(kvhma_core::Plan::local).or(geometry) else {
        return Err(type_error(py, "of", &type_name(of), "is not a Geometry or a Plan"));
    };
    let arrays = memory.as_ref().map(|arrays| slices(py, regions, arrays)).transpose()?;
    let mapped = Mapped(regions.regions().iter().map(|region| region.base).collect());
    if arrays.is_none() && regions.regions().iter().any(|region| region.memory != Memory::Dram) {
        let expected = "DRAM, or memory given as arrays".to_owned();
        return Err(raise(py, &Error::geometry("regions", "memory", "VRAM".into(), expected)));
    }
    let found = py.detach(|| {
        let memory: &dyn ContentMemory = arrays.as_ref().map_or(&mapped, |arrays| arrays);
        match (plan, geometry) {
            (Some(plan), _) => plan.content_sums(&request, memory),
            (None, Some(geometry)) => geometry.content_sums(&request, memory),
            (None, None) => Ok(Vec::new()),
        }
    });
    Ok(found.or_raise(py)?.into_iter().map(arguments).collect())
}

/// Return the keys of the first indices of an axis, which are the factors of sums of repeated heads.
#[pyfunction]
pub(crate) fn content_keys(seed: u64, axis: &str, count: u64) -> Vec<u64> {
    kvhma_core::index_keys(seed, axis, count)
}

/// The regions' bytes, with the sizes in the geometry.
fn slices<'a>(py: Python<'_>, of: &Geometry, arrays: &'a [PyReadonlyArray1<'_, u8>]) -> PyResult<Arrays<'a>> {
    let regions = of.regions();
    if arrays.len() != regions.len() {
        let reason = format!("has {} arrays, expected {}", arrays.len(), regions.len());
        return Err(type_error(py, "memory", "", &reason));
    }
    let slices = arrays.iter().zip(regions).map(|(array, region)| match array.as_slice() {
        Ok(slice) if slice.len() as u64 == region.bytes => Ok(slice),
        _ => {
            let reason = format!("has an array of {}, expected {} bytes, C-contiguous", array.len(), region.bytes);
            Err(type_error(py, "memory", "", &reason))
        }
    });
    Ok(Arrays(slices.collect::<PyResult<_>>()?))
}

fn arguments(sums: ContentSums) -> SumsArguments {
    let ContentSums { kind, limit, first_token, from_token, sums, repeated, heads } = sums;
    let repeated = repeated.map(|repeated| (repeated.place, repeated.places, repeated.sums));
    (kind, limit, first_token, from_token, sums, repeated, heads)
}
