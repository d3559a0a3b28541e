// SPDX-License-Identifier: Apache-2.0
//! Views: regular cuts of regions, many descriptors in one row.
use super::out::Out;
use crate::bytes::rows::{Descriptor, View};
use crate::error::{Error, Result};

/// Appends the `(address, length, device)` rows of views, view after view. Fails if an address overflows.
pub fn expand_views(views: &[View], out: &mut Out<'_, Descriptor>) -> Result<()> {
    let total = check_views("view", views.iter().copied())?;
    out.reserve(total as usize)?;
    for &[address, length, device, stride, count] in views {
        // There are fewer entries than 2**31.
        out.extend((0..count as u32).map(|entry| [address + u64::from(entry) * stride, length, device]));
    }
    Ok(())
}

/// Views of attention regions: one for each region, in the order given.
pub fn attention_views(
    bases: &[u64],
    lengths: &[u64],
    strides: &[u64],
    counts: &[u64],
    devices: &[u64],
) -> Result<Vec<View>> {
    let lists = [("lengths", lengths), ("strides", strides), ("counts", counts), ("devices", devices)];
    same_length(bases.len(), &lists)?;
    let views = (0..bases.len()).map(|i| [bases[i], lengths[i], devices[i], strides[i], counts[i]]).collect::<Vec<_>>();
    check_views("view", views.iter().copied())?;
    Ok(views)
}

/// Views of state regions: for each region in turn, one view for each `(offset, length)` of its parts.
pub fn state_views(
    bases: &[u64],
    parts: &[(u64, u64)],
    strides: &[u64],
    counts: &[u64],
    devices: &[u64],
) -> Result<Vec<View>> {
    same_length(bases.len(), &[("strides", strides), ("counts", counts), ("devices", devices)])?;
    let mut views = Vec::with_capacity(bases.len().saturating_mul(parts.len()));
    for region in 0..bases.len() {
        for &(offset, length) in parts {
            let address = bases[region].checked_add(offset).ok_or_else(|| {
                let what = format!("base {:#x} + offset {offset}", bases[region]);
                Error::overflow(&format!("region {region}"), what, 64)
            })?;
            views.push([address, length, devices[region], strides[region], counts[region]]);
        }
    }
    check_views("view", views.iter().copied())?;
    Ok(views)
}

fn same_length(expected: usize, lists: &[(&'static str, &[u64])]) -> Result<()> {
    match lists.iter().find(|(_, list)| list.len() != expected) {
        Some(&(what, list)) => Err(Error::count(what, list.len(), expected)),
        None => Ok(()),
    }
}

/// The number of entries of all views. Fails if a view is empty, has no stride, or leaves the address space; the error
/// names it by `what` and its index.
pub fn check_views(what: &str, views: impl IntoIterator<Item = View>) -> Result<u64> {
    let mut total = 0u64;
    for (index, [address, length, _, stride, count]) in views.into_iter().enumerate() {
        for (field, value) in [("length", length), ("stride", stride), ("count", count)] {
            if value == 0 {
                return Err(Error::value(&format!("{what} {index}"), field, 0, "has to be at least 1".to_owned()));
            }
        }
        let end = (count - 1).checked_mul(stride).and_then(|far| far.checked_add(length)?.checked_add(address));
        if end.is_none() {
            let sum = format!("{address:#x} + ({count} - 1) x {stride} + {length}");
            return Err(Error::overflow(&format!("{what} {index}"), sum, 64));
        }
        // Ids into a list are int32, so a longer list could never be addressed.
        total = total.saturating_add(count);
        if total > i32::MAX as u64 {
            return Err(Error::overflow(&format!("{what} {index}"), format!("{total} descriptors"), 31));
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_a_view_are_a_stride_apart() {
        let mut rows = Out::default();
        assert_eq!(expand_views(&[[100, 8, 1, 16, 2], [500, 4, 0, 4, 1]], &mut rows), Ok(()));
        assert_eq!(rows.into_new(), Some(vec![[100, 8, 1], [116, 8, 1], [500, 4, 0]]));
    }

    #[test]
    fn the_last_entry_has_to_end_in_the_address_space() {
        assert!(check_views("view", [[u64::MAX - 24, 8, 0, 16, 2]]).is_ok());
        assert!(check_views("view", [[u64::MAX - 23, 8, 0, 16, 2]]).is_err());
        assert!(check_views("view", [[0, 0, 0, 16, 2]]).is_err());
    }

    #[test]
    fn each_state_region_has_a_view_of_each_part() {
        let views = state_views(&[1000, 2000], &[(0, 8), (8, 24)], &[32, 64], &[4, 5], &[0, 1]);
        let expected = [[1000, 8, 0, 32, 4], [1008, 24, 0, 32, 4], [2000, 8, 1, 64, 5], [2008, 24, 1, 64, 5]];
        assert_eq!(views, Ok(expected.to_vec()));
        assert!(attention_views(&[0], &[8], &[8, 8], &[1], &[0]).is_err());
    }
}
