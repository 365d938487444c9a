//! The hash of event traces and decision texts. The hash is our own (FNV-1a over words), because the
//! standard library's may change between releases. The hash distinguishes runs, but does not resist
//! adversaries.

use std::hash::Hasher;

/// FNV-1a with 64-bit words instead of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fnv(pub(crate) u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(Self::OFFSET)
    }
}

impl Fnv {
    pub(crate) const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;

    fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(Self::PRIME).rotate_left(23);
    }
}

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, n: u8) {
        self.word(n.into());
    }
    fn write_u32(&mut self, n: u32) {
        self.word(n.into());
    }
    fn write_u64(&mut self, n: u64) {
        self.word(n);
    }
    fn write_usize(&mut self, n: usize) {
        self.word(n as u64);
    }
    fn write_isize(&mut self, n: isize) {
        // The derived `Hash` writes the discriminants of enum variants as `isize`.
        self.word(n as u64);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}
