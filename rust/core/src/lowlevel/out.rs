// SPDX-License-Identifier: Apache-2.0
//! Where results are written.
use crate::bytes::rows::{Advise, NO_ADVICE, reserve};
use crate::error::{Error, Result};

/// Memory for a result: new memory, or the front of memory that the caller has.
#[derive(Debug)]
pub enum Out<'a, T> {
    /// New memory, filled so far, and what receives its addresses.
    New(Vec<T>, Advise),
    /// The caller's memory, and how much of it is filled.
    Given(&'a mut [T], usize),
}

impl<T: Copy> Out<'_, T> {
    /// New memory.
    pub fn new(advise: Advise) -> Self {
        Self::New(Vec::new(), advise)
    }

    /// Makes room for so many more entries. Fails if the caller's memory has less room, or if there is no memory.
    pub fn reserve(&mut self, count: usize) -> Result<()> {
        match self {
            Self::New(all, advise) => reserve(all, count, *advise).ok_or_else(|| no_memory(count))?,
            Self::Given(all, filled) if all.len() - *filled < count => {
                let expected = format!("the result has {} entries or more", filled.saturating_add(count));
                return Err(Error::value("", "out", all.len() as i128, expected));
            }
            Self::Given(..) => {}
        }
        Ok(())
    }

    /// Appends values, for which there is room.
    pub fn extend(&mut self, values: impl ExactSizeIterator<Item = T>) {
        match self {
            Self::New(all, _) => all.extend(values),
            Self::Given(all, filled) => {
                let end = *filled + values.len();
                for (to, value) in all[*filled..end].iter_mut().zip(values) {
                    *to = value;
                }
                *filled = end;
            }
        }
    }

    /// Appends the values of arrays, for which there is room.
    pub fn extend_arrays<const N: usize>(&mut self, arrays: impl ExactSizeIterator<Item = [T; N]>) {
        match self {
            Self::New(all, _) => all.extend(arrays.flatten()),
            Self::Given(all, filled) => {
                let end = *filled + N * arrays.len();
                for (to, values) in all[*filled..end].chunks_exact_mut(N).zip(arrays) {
                    to.copy_from_slice(&values);
                }
                *filled = end;
            }
        }
    }

    /// How many entries are filled.
    pub fn len(&self) -> usize {
        match self {
            Self::New(all, _) => all.len(),
            Self::Given(_, filled) => *filled,
        }
    }

    /// Whether no entry is filled.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The new memory; None if the caller's was filled.
    pub fn into_new(self) -> Option<Vec<T>> {
        match self {
            Self::New(all, _) => Some(all),
            Self::Given(..) => None,
        }
    }
}

fn no_memory(count: usize) -> Error {
    let reason = "there is no memory for them";
    let text = format!("the result has {count} entries: {reason}");
    Error::argument("no-memory", "entries", ((count as i128).into(), "fewer".into()), reason, text)
}

impl<T: Copy> Default for Out<'_, T> {
    fn default() -> Self {
        Self::new(NO_ADVICE)
    }
}
