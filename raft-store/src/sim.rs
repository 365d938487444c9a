//! Stores of simulated machines: a write takes simulated time, and the power may be cut at a sync.
//!
//! The store itself is the real one: sled, its file, and the checks at start. Only the writer
//! thread is missing, because a simulation cannot control its timing. Each job instead runs to
//! completion on the task that submits it, so that the same seed writes the same bytes at the same
//! simulated time. sled's own threads move bytes within a flush, which ends before the job does;
//! nothing else depends on those threads.

pub use crate::log::simulated::SimDisk;

use crate::data_dir::{DataDir, DirectoryOwner};
use crate::error::Error;
use crate::log::LogStore;
use crate::machine::StateMachine;
use crate::store::{RaftStore, open_with};

/// The unit that a disk writes completely or not at all, in bytes.
const SECTOR_BYTES: usize = 512;

/// Opens a data directory like [`crate::open`], on a simulated disk. Requires a tokio runtime,
/// whose clock measures the writes.
///
/// # Errors
/// Like [`crate::open`].
pub fn open<M: StateMachine>(
    dir: DataDir,
    identity: &DirectoryOwner,
    disk: Box<dyn SimDisk>,
) -> Result<RaftStore<M>, Error> {
    open_with(dir, identity, |path, expect, covered| LogStore::open_simulated(path, expect, covered, disk))
}

/// Returns a file of `len` bytes as a power cut may leave it. For each sector `kept` decides
/// whether the sector has the bytes written since the last sync or the bytes at that sync.
pub fn torn(synced: &[u8], written: &[u8], len: usize, mut kept: impl FnMut() -> bool) -> Vec<u8> {
    let mut image = written.to_vec();
    image.resize(len, 0);
    for (sector, at) in image.chunks_mut(SECTOR_BYTES).zip((0..).step_by(SECTOR_BYTES)) {
        if !kept() {
            let old = synced.get(at..).unwrap_or_default();
            let len = old.len().min(sector.len());
            sector.fill(0);
            sector[..len].copy_from_slice(&old[..len]);
        }
    }
    image
}
