//! The size of a batch: the chunks that are granted together.

use std::num::NonZeroU32;

use millrace_memory::CHUNK;
use millrace_types::Bytes;

/// Chunks in a batch (D13).
pub const BATCH_CHUNKS: NonZeroU32 = NonZeroU32::new(5).expect("not zero");
/// The bytes that cross a link without interruption (D12, D13).
pub const BATCH: Bytes = Bytes(CHUNK.0 * BATCH_CHUNKS.get() as u64);
