//! The physical memory of a GPU: all of it is taken at the start, in handles of a block each, so that
//! no later call asks the driver for memory (T12). The arena is an address range under which every
//! handle stays mapped, at the offset of its extent: copies go there, whether or not a region shows
//! the same memory.

use millrace_types::Bytes;

use super::driver::{AddressRange, Context, MemoryHandle};
use crate::api::MemoryExtent;
use crate::error::{DriverError, Error};

/// Bytes of a handle, and the unit of all extents. Mapping a handle takes as long whatever its size is
/// (27 µs on an H100), so that smaller handles would make mapping slower than copying.
pub const BLOCK: Bytes = Bytes::mib(16);
const BLOCK_BYTES: u64 = BLOCK.get();

/// The memory of a GPU.
#[derive(Debug)]
pub(super) struct Pool {
    /// Before the handles, because its mappings go first.
    arena: AddressRange,
    handles: Vec<MemoryHandle>,
    context: Context,
}

/// A part of a GPU's memory, which was checked.
#[derive(Debug, Clone, Copy)]
pub struct CudaChunk {
    pub(super) extent: MemoryExtent,
}

impl Pool {
    /// Takes `bytes` of the GPU's memory, in whole blocks.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if not all of it is free.
    pub(super) fn take(context: &Context, bytes: Bytes) -> Result<Self, Error> {
        let blocks = bytes.get() / BLOCK_BYTES;
        if blocks == 0 {
            return Err(Error::OutOfMemory(format!("{bytes} are less than a block of {BLOCK}")));
        }
        let mut arena = AddressRange::reserve(blocks * BLOCK_BYTES, 0)?;
        let mut handles = Vec::new();
        for at in 0..blocks {
            let handle = MemoryHandle::create(context.gpu(), BLOCK_BYTES).map_err(|error| {
                let taken = Bytes(at * BLOCK_BYTES);
                match error.into() {
                    Error::OutOfMemory(_) => Error::OutOfMemory(format!(
                        "only {taken} of the GPU are free, and {bytes} were asked for: another process uses \
                         the GPU, or --gpu-memory is too large"
                    )),
                    error => error,
                }
            })?;
            arena.map(at * BLOCK_BYTES, &handle)?;
            handles.push(handle);
        }
        arena.open(0, blocks * BLOCK_BYTES, context.gpu())?;
        Ok(Self { arena, handles, context: context.clone() })
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn bytes(&self) -> Bytes {
        Bytes(self.handles.len() as u64 * BLOCK_BYTES)
    }

    /// Returns the address of an offset in the GPU's memory.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.arena.base() + offset
    }

    /// Checks that an extent is of whole blocks and within the memory.
    pub(super) fn check(&self, extent: MemoryExtent) -> Result<(), Error> {
        let MemoryExtent { offset, bytes } = extent;
        let problem = if !offset.is_multiple_of(BLOCK_BYTES) || !bytes.is_multiple_of(BLOCK_BYTES) {
            "not whole blocks of 16 MiB"
        } else if bytes == 0 {
            "empty"
        } else if offset.checked_add(bytes).is_none_or(|end| end > self.bytes().get()) {
            "past the end of the device's memory"
        } else {
            return Ok(());
        };
        Err(Error::BadExtent { offset, bytes, problem })
    }

    /// Maps an extent into a range, without access.
    pub(super) fn map_into(
        &self,
        range: &mut AddressRange,
        at: u64,
        extent: MemoryExtent,
    ) -> Result<(), DriverError> {
        let first = extent.offset / BLOCK_BYTES;
        for block in 0..extent.bytes / BLOCK_BYTES {
            // The extent was checked, so the handle exists.
            range.map(at + block * BLOCK_BYTES, &self.handles[(first + block) as usize])?;
        }
        Ok(())
    }
}
