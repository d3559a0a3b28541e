// SPDX-License-Identifier: Apache-2.0
//! How many requests hold each block of a pool.

use crate::error::{Error, Result};

/// Counts the requests that hold each block. A block that several requests hold counts once.
#[derive(Debug, Default, Clone)]
pub struct BlockUsers {
    users: Vec<u32>,
    used: usize,
}

impl BlockUsers {
    /// How many blocks at least one request holds.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Adds a request's blocks. A repeated id counts once.
    ///
    /// # Errors
    /// An id is negative or has more than 31 bits; then no block is added.
    pub fn add(&mut self, ids: &[i64]) -> Result<()> {
        if let Some(&wrong) = ids.iter().find(|&&id| !(0..1 << 31).contains(&id)) {
            return Err(Error::value("", "block id", wrong, "expected 0..2**31".to_owned()));
        }
        let end = ids.iter().max().map_or(0, |&highest| highest as usize + 1);
        if end > self.users.len() {
            self.users.resize(end, 0);
        }
        for &id in ids {
            let users = &mut self.users[id as usize];
            self.used += usize::from(*users == 0);
            *users += 1;
        }
        Ok(())
    }

    /// Removes a request's blocks, ignoring blocks that were not added.
    pub fn remove(&mut self, ids: &[i64]) {
        for &id in ids {
            if let Some(users @ 1..) = usize::try_from(id).ok().and_then(|id| self.users.get_mut(id)) {
                *users -= 1;
                self.used -= usize::from(*users == 0);
            }
        }
    }

    /// Whether no other request holds any of a request's blocks.
    pub fn has_own(&self, ids: &[i64]) -> bool {
        ids.iter().any(|&id| usize::try_from(id).is_ok_and(|id| self.users.get(id) == Some(&1)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_block_counts_once(requests in prop::collection::vec(prop::collection::hash_set(0i64..30, 0..10), 0..8)) {
            let ids = |one: &HashSet<i64>| one.iter().copied().collect::<Vec<_>>();
            let mut users = BlockUsers::default();
            for one in &requests {
                prop_assert_eq!(users.add(&ids(one)), Ok(()));
            }
            for (index, one) in requests.iter().enumerate() {
                let others: HashSet<i64> = requests[index + 1..].iter().flatten().copied().collect();
                prop_assert_eq!(users.used(), others.union(one).count());
                prop_assert_eq!(users.has_own(&ids(one)), !one.is_subset(&others));
                users.remove(&ids(one));
            }
            prop_assert_eq!(users.used(), 0);
        }
    }

    #[test]
    fn a_wrong_id_changes_nothing() {
        let mut users = BlockUsers::default();
        assert!(users.add(&[1, -1]).is_err() && users.add(&[1, 1 << 31]).is_err());
        users.remove(&[1, -1, i64::MAX]);
        assert_eq!((users.used(), users.has_own(&[1, -1, i64::MAX])), (0, false));
    }
}
