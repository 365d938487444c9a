//! A writer without a thread, on a disk with simulated time and power.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::writer::{LogJob, LogWriter, SyncPoint};
use crate::error::Error;

pub trait SimDisk: Send {
    /// Returns the duration of the next write.
    fn write_time(&mut self) -> Duration;

    /// Makes the bytes written to sled's file at `db` durable.
    ///
    /// # Errors
    /// An error if the power is off; the store then halts, as at any failed sync.
    fn sync(&mut self, db: &Path) -> io::Result<()>;
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
