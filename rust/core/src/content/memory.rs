// SPDX-License-Identifier: Apache-2.0
//! Where the summed bytes are.

/// Where the bytes of regions are read from.
pub trait ContentMemory: Sync {
    /// Bytes of a region; the range must be within it.
    fn bytes(&self, region: usize, offset: u64, length: u64) -> &[u8];
}
