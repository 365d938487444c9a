//! The units of GPU memory: the block of a GPU, and the chunk of transfers.
//!
//! A GPU gives its memory out in blocks. On a real GPU a block is a handle of the driver, and each
//! handle costs the same time to map and to unmap, whatever its size: 27 us and 18 us on an NVIDIA
//! H100. So 512 MiB of handles of 2 MiB take 12 ms, longer than the 9.8 ms of their copy, while
//! handles of 16 MiB take 1.2 ms. A mapping always covers a whole handle, so no extent is smaller
//! than a block.
//!
//! Transfers do not depend on the block. They are cut into chunks of [`CHUNK`] on every GPU, so a
//! batch occupies a link for the same time, and a block holds a whole number of chunks.

use std::num::NonZeroU32;

use millrace_types::Bytes;

/// The chunk in which weights and objects travel (D12, T09), and the smallest block.
pub const CHUNK: Bytes = Bytes::mib(2);

/// Returns the number of chunks that hold `size`. The last chunk is short.
#[must_use]
pub fn chunks_for(size: Bytes) -> u32 {
    u32::try_from(size.0.div_ceil(CHUNK.0)).unwrap_or(u32::MAX)
}

/// The block of a GPU: the unit in which the GPU's memory is given out. A multiple of [`CHUNK`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockSize {
    chunks: NonZeroU32,
}

/// The reason why a size is no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a block of {} bytes is no multiple of {} bytes: give whole chunks", .0.0, CHUNK.0)]
pub struct BlockSizeError(pub Bytes);

impl Default for BlockSize {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl BlockSize {
    /// The block of emulated and simulated GPUs: a single chunk.
    pub const DEFAULT: Self = Self { chunks: NonZeroU32::MIN };

    /// Returns a block of `bytes`.
    ///
    /// # Errors
    /// [`BlockSizeError`] if `bytes` is zero or no multiple of [`CHUNK`].
    pub fn new(bytes: Bytes) -> Result<Self, BlockSizeError> {
        let chunks = u32::try_from(bytes.0 / CHUNK.0).ok().and_then(NonZeroU32::new);
        let chunks = chunks.filter(|_| bytes.0.is_multiple_of(CHUNK.0));
        Ok(Self { chunks: chunks.ok_or(BlockSizeError(bytes))? })
    }

    /// Returns the size of a single block.
    #[must_use]
    pub const fn get(self) -> Bytes {
        Bytes(CHUNK.0 * self.chunks.get() as u64)
    }

    /// Returns the number of blocks that hold `size`.
    #[must_use]
    pub fn blocks_for(self, size: Bytes) -> u32 {
        u32::try_from(size.0.div_ceil(self.get().0)).unwrap_or(u32::MAX)
    }

    /// Returns the number of whole blocks in `memory`.
    #[must_use]
    pub fn blocks_in(self, memory: Bytes) -> u32 {
        u32::try_from(memory.0 / self.get().0).unwrap_or(u32::MAX)
    }

    /// Returns the size of a number of blocks.
    #[must_use]
    pub fn bytes(self, blocks: u32) -> Bytes {
        Bytes(self.get().0.saturating_mul(blocks.into()))
    }

    /// Returns the size of the blocks that hold `size`.
    #[must_use]
    pub fn round_up(self, size: Bytes) -> Bytes {
        self.bytes(self.blocks_for(size))
    }

    /// Returns the size of the whole blocks in `memory`.
    #[must_use]
    pub fn round_down(self, memory: Bytes) -> Bytes {
        self.bytes(self.blocks_in(memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_to_blocks_of_each_unit() {
        for mib in [2, 16, 64] {
            let unit = BlockSize::new(Bytes::mib(mib)).unwrap();
            let one = unit.get().0;
            assert_eq!(one, mib << 20);
            for (size, held, whole) in
                [(0, 0, 0), (1, 1, 0), (one - 1, 1, 0), (one, 1, 1), (one + 1, 2, 1), (2 * one, 2, 2)]
            {
                let size = Bytes(size);
                assert_eq!((unit.blocks_for(size), unit.blocks_in(size)), (held, whole), "{mib}: {size}");
                assert_eq!(unit.round_up(size), unit.bytes(held));
                assert_eq!(unit.round_down(size), unit.bytes(whole));
            }
        }
    }

    #[test]
    fn chunks_do_not_depend_on_the_block() {
        for (size, chunks) in [(0, 0), (1, 1), (CHUNK.0, 1), (CHUNK.0 + 1, 2)] {
            assert_eq!(chunks_for(Bytes(size)), chunks);
        }
        assert_eq!(BlockSize::default().get(), CHUNK);
    }

    #[test]
    fn a_block_is_a_whole_number_of_chunks() {
        for bytes in [0, 1, CHUNK.0 - 1, CHUNK.0 + 4096, u64::MAX] {
            assert_eq!(BlockSize::new(Bytes(bytes)), Err(BlockSizeError(Bytes(bytes))));
        }
        assert_eq!(
            BlockSizeError(Bytes::mib(3)).to_string(),
            "a block of 3145728 bytes is no multiple of 2097152 bytes: give whole chunks"
        );
    }
}
