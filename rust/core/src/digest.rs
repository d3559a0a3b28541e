// SPDX-License-Identifier: Apache-2.0
//! A prompt's identity in 128 bits.

/// A digest of a header and of token ids, fed piece by piece.
///
/// It is BLAKE3 over the header's length (u64), the header, and the ids (i32), all little-endian. It does not depend on
/// the pieces or the machine.
#[derive(Debug)]
pub struct TokenDigest {
    hasher: blake3::Hasher,
    bytes: Vec<u8>,
}

impl TokenDigest {
    /// Starts with the header. Its length comes first, to separate it from the ids.
    pub fn new(header: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(header.len() as u64).to_le_bytes());
        hasher.update(header);
        Self { hasher, bytes: Vec::new() }
    }

    /// Adds the next ids. Pieces of a few thousand ids are fastest.
    pub fn push(&mut self, tokens: &[i32]) {
        self.bytes.resize(tokens.len() * 4, 0);
        for (bytes, token) in self.bytes.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        self.hasher.update(&self.bytes);
    }

    /// The first 128 bits of the hash: enough that no two prompts collide, by chance or by search.
    pub fn finish(&self) -> [u8; 16] {
        let mut digest = [0; 16];
        digest.copy_from_slice(&self.hasher.finalize().as_bytes()[..16]);
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_blake3_of_the_documented_bytes() {
        // The hash of no bytes at all is in BLAKE3's own test vectors.
        assert_eq!(&blake3::hash(b"").to_hex()[..32], "af1349b9f5f9a1a6a0404dea36dcc949");
        let mut digest = TokenDigest::new(b"ab");
        digest.push(&[1, -2]);
        let bytes = b"\x02\0\0\0\0\0\0\0ab\x01\0\0\0\xfe\xff\xff\xff";
        assert_eq!(digest.finish(), blake3::hash(bytes).as_bytes()[..16]);
    }

    #[test]
    fn how_ids_are_cut_changes_nothing() {
        let tokens: Vec<i32> = (0..100_000).collect();
        let mut whole = TokenDigest::new(b"");
        whole.push(&tokens);
        let mut cut = TokenDigest::new(b"");
        tokens.chunks(777).for_each(|piece| cut.push(piece));
        assert_eq!(whole.finish(), cut.finish());
    }

    #[test]
    fn header_and_ids_are_kept_apart() {
        let mut one = TokenDigest::new(b"1234");
        one.push(&[]);
        let mut other = TokenDigest::new(b"");
        other.push(&[i32::from_le_bytes(*b"1234")]);
        assert_ne!(one.finish(), other.finish());
    }
}
