//! Stores of simulated machines: a write takes simulated time, and the power may be cut at a sync.
//!
//! The store itself is the real one: sled, its file, and the checks at start. Only the writer
//! thread is missing, because a simulation cannot control its timing. Each job instead runs to
//! completion on the task that submits it, so that the same seed writes the same bytes at the same
//! simulated time. sled's own threads move bytes within a flush, which ends before the job does;
//! nothing else depends on those threads.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::data_dir::{DataDir, DirectoryOwner};
use crate::error::Error;
use crate::log::LogStore;
use crate::log::writer::{LogJob, LogWriter, SyncPoint};
use crate::machine::StateMachine;
use crate::{RaftStore, open_with};

/// The unit that a disk writes completely or not at all, in bytes.
const SECTOR_BYTES: usize = 512;

pub trait SimDisk: Send {
    /// Returns the duration of the next write.
    fn write_time(&mut self) -> Duration;

    /// Makes the bytes written to sled's file at `db` durable.
    ///
    /// # Errors
    /// An error if the power is off; the store then halts, as at any failed sync.
    fn sync(&mut self, db: &Path) -> io::Result<()>;
}

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

/// A disk that the writer and the submitting tasks share.
#[derive(Clone)]
pub(crate) struct SharedDisk(Arc<Mutex<Box<dyn SimDisk>>>);

impl SharedDisk {
    pub(crate) fn new(disk: Box<dyn SimDisk>) -> Self {
        Self(Arc::new(Mutex::new(disk)))
    }

    pub(crate) fn sync_point(&self, log_dir: &Path) -> Box<dyn SyncPoint> {
        Box::new(SimSyncPoint { disk: self.clone(), db: log_dir.join("db") })
    }

    fn write_time(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_time()
    }
}

struct SimSyncPoint {
    disk: SharedDisk,
    db: PathBuf,
}

impl SyncPoint for SimSyncPoint {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.0.lock().unwrap_or_else(PoisonError::into_inner).sync(&self.db)
    }
}

/// A writer without a thread.
pub(crate) struct InlineWriter {
    /// Locked by one job at a time, in order of submission.
    writer: tokio::sync::Mutex<LogWriter>,
    disk: SharedDisk,
}

impl InlineWriter {
    pub(crate) fn start(mut writer: LogWriter, disk: SharedDisk) -> Result<Self, Error> {
        writer.begin()?;
        Ok(Self { writer: tokio::sync::Mutex::new(writer), disk })
    }

    /// Carries a job out after the disk's write time.
    pub(crate) async fn carry_out(&self, job: LogJob) {
        let mut writer = self.writer.lock().await;
        let health = writer.disk();
        health.wait_begins();
        tokio::time::sleep(self.disk.write_time()).await;
        writer.run_one(job);
        // Not every job syncs, so a wait may still be open here.
        health.forget();
    }
}
