//! Pieces of an emulated GPU's physical memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::api::MemoryExtent;
use crate::error::Error;
use crate::map::page;

/// A piece of an emulated GPU's memory.
#[derive(Debug, Clone)]
pub struct Chunk {
    pub(super) file: Arc<OwnedFd>,
    pub(super) extent: MemoryExtent,
}

/// Checks that an extent is of whole pages and within `memory` bytes.
pub(super) fn check_extent(extent: MemoryExtent, memory: u64) -> Result<(), Error> {
    let MemoryExtent { offset, bytes } = extent;
    let problem = if !offset.is_multiple_of(page()) || !bytes.is_multiple_of(page()) {
        "not whole pages"
    } else if bytes == 0 {
        "empty"
    } else if offset.checked_add(bytes).is_none_or(|end| end > memory) {
        "past the end of the device's memory"
    } else {
        return Ok(());
    };
    Err(Error::BadExtent { offset, bytes, problem })
}
