//! The thread that writes the log, and its jobs.
//!
//! ```text
//!   LogStore ── LogJob ──▶ [queue of JOBS_MAX] ──▶ carry out each ──▶ one sync ──▶ acknowledge each
//! ```
//!
//! Jobs are carried out in order. Waiting jobs share a sync: sled's flush (which on Linux is only
//! `sync_file_range`: sled#1452) and then `fdatasync` on a descriptor of the store's own. No job is
//! acknowledged before the sync. After the first failure nothing more is written and every job
//! fails with the same error. The bytes that a failed write or sync left on the disk are unknown,
//! and a second `fsync` that succeeds would prove nothing.
//!
//! A job that grows the log is written only once the disk has space for all bytes that sled writes
//! for the job (see [`super::space`]). Until then the job waits, as on a hanging disk: sled never
//! writes again after a failed write.
//!
//! Purged entries are deleted here too, a few at a time: while no job waits, and after every few
//! appends even if jobs wait. The log of a leader that is never idle therefore does not grow.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustix::fs::{RawDir, SeekFrom};
use tokio::sync::mpsc::{self, error::TryRecvError};

use super::disk::LogDisk;
use super::record::{self, SledPair};
use super::space;
use super::sync_marker::SyncMarker;
use super::tables::{LogBounds, LogTables, MetaKey, MetaRecord, WINDOW_BYTES};
use crate::error::Error;
use crate::raft_ids::LogId;

/// Maximum number of waiting jobs. openraft waits for each append, so there are at most a handful.
pub(crate) const JOBS_MAX: usize = 64;

/// Number of sled's keys deleted at a time, which bounds the delay of a waiting job. The number of
/// parts of the largest entry is enough to keep up with a leader that is never idle. sled rewrites
/// a leaf of 16 values every 10 changes, so it writes no more for the deletes than for the appends.
const DELETES_AT_A_TIME: usize = record::ENTRY_BYTES_MAX / record::PART_BYTES;

/// Pause between two checks of the space on a full disk.
const SPACE_PAUSE: Duration = Duration::from_millis(100);

/// Called once, when the write is durable or has failed for good.
pub(crate) type DurableCallback = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// A write to the log.
pub(crate) enum LogJob {
    /// Appends entries. `readable` is called before the entries are durable.
    Append { entries: Vec<Vec<SledPair>>, last: LogId, readable: DurableCallback, durable: DurableCallback },
    /// Writes the vote to the `meta` tree.
    Vote { record: MetaRecord, durable: DurableCallback },
    /// Writes the commit position, which becomes durable with the next sync of another job.
    Committed { record: MetaRecord },
    /// Removes the entries from an index on. Afterwards `last` is the last position.
    Truncate { from: u64, last: Option<LogId>, durable: DurableCallback },
    /// Purges the entries up to a position. They are deleted later.
    Purge { upto: LogId, record: MetaRecord, durable: DurableCallback },
}

/// Makes sled's writes durable. Tests implement the trait to record the states that a power cut
/// would leave.
pub(crate) trait SyncPoint: Send {
    /// Returns once all bytes written to sled's file are durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// A second descriptor of sled's file. A sync applies to the inode, whichever descriptor it uses.
pub(crate) struct DbFile(File);

impl DbFile {
    pub(crate) fn open(log_dir: &Path) -> Result<Self, Error> {
        let path = log_dir.join("db");
        let file = File::options().read(true).write(true).open(&path).map_err(Error::io("opening", &path))?;
        Ok(Self(file))
    }
}

impl SyncPoint for DbFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// The parts that make writes durable.
pub(crate) struct SyncState {
    /// The number of the last sync.
    pub(crate) synced: u64,
    pub(crate) witness: SyncMarker,
    pub(crate) point: Box<dyn SyncPoint>,
    pub(crate) disk: LogDisk,
}

pub(crate) struct LogWriter {
    tables: LogTables,
    /// Shared with the readers; changes when a write becomes visible.
    bounds: Arc<RwLock<LogBounds>>,
    syncing: SyncState,
    log_dir: PathBuf,
    blobs: BlobDir,
    halted: Option<Arc<str>>,
    /// Purged entries below this index may still be on disk. 0 if there are none.
    doomed_below: u64,
    /// Keys appended since the last delete.
    undeleted: usize,
    /// Bytes of values passed to sled since the last sync. sled may not have written them yet.
    unsynced: usize,
}

impl LogWriter {
    pub(crate) fn new(
        tables: LogTables,
        bounds: Arc<RwLock<LogBounds>>,
        log_dir: &Path,
        syncing: SyncState,
    ) -> Result<Self, Error> {
        let doomed_below = bounds.read().unwrap_or_else(PoisonError::into_inner).first_index();
        let blobs = BlobDir::open(log_dir)?;
        let log_dir = log_dir.to_owned();
        Ok(Self {
            tables,
            bounds,
            syncing,
            log_dir,
            blobs,
            halted: None,
            doomed_below,
            undeleted: 0,
            unsynced: 0,
        })
    }

    /// Returns the disk under the log.
    pub(crate) fn disk(&self) -> LogDisk {
        self.syncing.disk.clone()
    }

    /// Runs the first sync, so that recovered entries or a new log are durable before any job.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        self.sync_all()
    }

    /// Carries out jobs until every sender is dropped, then makes the rest durable.
    pub(crate) fn run(mut self, mut jobs: mpsc::Receiver<LogJob>) {
        while let Some(first) = self.next_job(&mut jobs) {
            let mut waiting = Vec::new();
            self.carry_out(first, &mut waiting);
            while let Ok(job) = jobs.try_recv() {
                self.carry_out(job, &mut waiting);
            }
            if waiting.is_empty() {
                continue;
            }
            self.sync();
            for durable in waiting {
                durable(self.health());
            }
            // This delete delays the next job, so it is limited to as many keys as were appended.
            if self.doomed_below > 0 && self.undeleted >= DELETES_AT_A_TIME && self.has_space() {
                self.write(Self::delete_some);
            }
        }
        self.sync();
    }

    /// Carries out a single job to completion, like [`Self::run`] for waiting jobs.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn run_one(&mut self, job: LogJob) {
        let mut waiting = Vec::new();
        self.carry_out(job, &mut waiting);
        if !waiting.is_empty() {
            self.sync();
        }
        for durable in waiting {
            durable(self.health());
        }
        while self.doomed_below > 0 && self.halted.is_none() {
            self.write(Self::delete_some);
        }
    }

    /// Returns the next job. Deletes purged entries while there is none.
    fn next_job(&mut self, jobs: &mut mpsc::Receiver<LogJob>) -> Option<LogJob> {
        loop {
            // A delete needs space too, so a full disk defers deletes; the next job waits for
            // space.
            if self.doomed_below == 0 || self.halted.is_some() || !self.has_space() {
                return jobs.blocking_recv();
            }
            match jobs.try_recv() {
                Ok(job) => return Some(job),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => self.write(Self::delete_some),
            }
        }
    }

    fn carry_out(&mut self, job: LogJob, waiting: &mut Vec<DurableCallback>) {
        match job {
            LogJob::Append { entries, last, readable, durable } => {
                let bytes = entries.iter().flatten().map(|(_, value)| value.len()).sum();
                self.write(|writer| writer.wait_for_space(bytes));
                self.write(|writer| writer.append(entries, last));
                readable(self.health());
                waiting.push(durable);
            }
            LogJob::Vote { record, durable } => {
                self.write(|writer| writer.wait_for_space(0));
                self.write(|writer| writer.tables.write_meta(MetaKey::Vote, &record));
                waiting.push(durable);
            }
            LogJob::Committed { record } => {
                self.write(|writer| writer.tables.write_meta(MetaKey::Committed, &record))
            }
            LogJob::Truncate { from, last, durable } => {
                self.write(|writer| writer.wait_for_space(0));
                self.write(|writer| writer.truncate(from, last));
                waiting.push(durable);
            }
            LogJob::Purge { upto, record, durable } => {
                self.write(|writer| writer.wait_for_space(0));
                self.write(|writer| writer.tables.write_meta(MetaKey::Purged, &record));
                // The marker is durable before any entry is deleted.
                self.sync();
                self.write(|writer| {
                    writer.purge(upto);
                    Ok(())
                });
                durable(self.health());
            }
        }
    }

    /// Runs a write unless an earlier write failed.
    fn write(&mut self, write: impl FnOnce(&mut Self) -> Result<(), Error>) {
        if self.halted.is_none()
            && let Err(error) = write(self)
        {
            self.halt(&error);
        }
    }

    fn halt(&mut self, error: &Error) {
        tracing::error!(%error, "the log halts after a failed write");
        self.halted = Some(error.to_string().into());
    }

    fn health(&self) -> Result<(), Error> {
        self.halted.as_ref().map_or(Ok(()), |reason| Err(Error::Halted(Arc::clone(reason))))
    }

    /// Waits until the disk has space for values of this size.
    fn wait_for_space(&mut self, value_bytes: usize) -> Result<(), Error> {
        self.unsynced += value_bytes;
        let needed = space::needed(self.unsynced);
        let mut waits = false;
        loop {
            let left = self.space_left(needed)?;
            if left >= needed {
                return Ok(());
            }
            if !waits {
                tracing::error!(left, needed, path = %self.log_dir.display(), "the disk is full, so that the log waits: free space on the disk");
                // The job now waits for the disk, so the wait counts as a pending sync.
                self.syncing.disk.wait_begins();
                waits = true;
            }
            if !self.syncing.disk.wait_for_space(SPACE_PAUSE) {
                let source = io::Error::from(rustix::io::Errno::NOSPC);
                return Err(Error::Io { doing: "writing", path: self.log_dir.clone(), source });
            }
        }
    }

    /// Returns whether a job without values could be written now.
    fn has_space(&self) -> bool {
        // An error is reported by the next job.
        let needed = space::needed(self.unsynced);
        self.space_left(needed).is_ok_and(|left| left >= needed)
    }

    fn space_left(&self, needed: u64) -> Result<u64, Error> {
        let left = self.syncing.disk.space_left(needed);
        left.map_err(Error::io("reading the free space of", &self.log_dir))
    }

    /// Appends entries in order. After a crash each entry is complete or missing, and none is
    /// present without the entries before it.
    fn append(&mut self, entries: Vec<Vec<SledPair>>, last: LogId) -> Result<(), Error> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        self.undeleted += entries.iter().map(Vec::len).sum::<usize>();
        for entry in entries {
            let more: usize = entry.iter().map(|(_, value)| value.len()).sum();
            if bytes + more > WINDOW_BYTES && !batch.is_empty() {
                self.insert(std::mem::take(&mut batch))?;
                self.sync_all()?;
                bytes = 0;
            }
            bytes += more;
            batch.extend(entry);
        }
        self.insert(batch)?;
        self.change_bounds(|bounds| bounds.last = bounds.last.max(Some(last)));
        Ok(())
    }

    fn insert(&mut self, pairs: Vec<SledPair>) -> Result<(), Error> {
        let writing = || self.tables.failed("writing the log");
        match <[SledPair; 1]>::try_from(pairs) {
            // A single value is atomic by itself; a batch costs sled two more writes.
            Ok([(key, value)]) => self.tables.logs.insert(key, value).map(drop).map_err(writing()),
            Err(pairs) => {
                let mut batch = sled::Batch::default();
                for (key, value) in pairs {
                    batch.insert(key, value);
                }
                self.tables.logs.apply_batch(batch).map_err(writing())
            }
        }
    }

    /// Truncates the log from the back, by whole entries, so that a crash leaves neither a hole nor
    /// part of an entry.
    fn truncate(&mut self, from: u64, last: Option<LogId>) -> Result<(), Error> {
        // Hide the entries before deleting them: a reader would mistake vanishing entries for
        // damage.
        self.change_bounds(|bounds| {
            bounds.last = last;
            bounds.removals += 1;
        });
        loop {
            let keys = self.last_keys(from)?;
            if keys.is_empty() {
                return Ok(());
            }
            let mut batch = sled::Batch::default();
            for key in keys {
                batch.remove(key);
            }
            self.tables.logs.apply_batch(batch).map_err(self.tables.failed("truncating the log"))?;
            self.sync_all()?;
        }
    }

    /// Returns the keys of the last entries from `from` on: about as many as are deleted at a time.
    fn last_keys(&self, from: u64) -> Result<Vec<sled::IVec>, Error> {
        let mut keys = Vec::new();
        for key in self.tables.logs.range(record::key(from)..).keys().rev() {
            let key = key.map_err(self.tables.failed("truncating the log"))?;
            let begins_an_entry = record::is_head(&key);
            keys.push(key);
            if begins_an_entry && keys.len() >= DELETES_AT_A_TIME {
                break;
            }
        }
        Ok(keys)
    }

    fn purge(&mut self, upto: LogId) {
        self.change_bounds(|bounds| {
            bounds.purged = Some(upto);
            bounds.last = bounds.last.max(Some(upto));
            bounds.removals += 1;
        });
        self.doomed_below = upto.index + 1;
    }

    fn change_bounds(&self, change: impl FnOnce(&mut LogBounds)) {
        // Plain assignments cannot panic half-way, so a poisoned lock holds a consistent value.
        change(&mut self.bounds.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Deletes a few purged entries, which are already invisible. Syncs each time, so that sled
    /// never writes much between two syncs.
    fn delete_some(&mut self) -> Result<(), Error> {
        let deleting = || self.tables.failed("deleting purged entries");
        let purged = self.tables.logs.range(..record::key(self.doomed_below)).keys();
        let some: Vec<_> = purged.take(DELETES_AT_A_TIME).collect::<Result<_, _>>().map_err(deleting())?;
        for key in &some {
            self.tables.logs.remove(key).map_err(deleting())?;
        }
        if some.len() < DELETES_AT_A_TIME {
            self.doomed_below = 0;
        }
        self.undeleted = 0;
        self.sync_all()
    }

    fn sync(&mut self) {
        self.write(Self::sync_all);
    }

    fn sync_all(&mut self) -> Result<(), Error> {
        self.syncing.disk.begin();
        let synced = self.sync_next();
        self.syncing.disk.end();
        synced
    }

    fn sync_next(&mut self) -> Result<(), Error> {
        let number = self.syncing.synced + 1;
        self.tables.write_meta(MetaKey::Sync, &MetaRecord::encode(MetaKey::Sync, &number)?)?;
        self.tables.db.flush().map_err(self.tables.failed("flushing the log"))?;
        self.syncing.point.sync().map_err(Error::io("syncing", &self.log_dir.join("db")))?;
        self.refuse_blobs()?;
        self.unsynced = 0;
        self.syncing.synced = number;
        self.syncing.witness.store(number)
    }

    /// Fails if sled moved a value to a file of its own, because sled never syncs such files.
    /// [`record`] splits entries so that sled does not; if sled does it anyway, nothing may be
    /// acknowledged.
    fn refuse_blobs(&self) -> Result<(), Error> {
        if self.blobs.is_empty().map_err(Error::io("reading", &self.log_dir.join("blobs")))? {
            return Ok(());
        }
        Err(Error::Damaged { what: "the log".to_owned(), flaw: "a value left sled's synced file".to_owned() })
    }
}

/// Size of the buffer for names read from the folder, in bytes: enough for `.`, `..` and one more.
const NAMES_BYTES: usize = 1024;

/// The folder to which sled moves large values. Kept open, because the check at each sync must not
/// need a descriptor: clients' connections may hold all of them.
struct BlobDir(File);

impl BlobDir {
    fn open(log_dir: &Path) -> Result<Self, Error> {
        let path = log_dir.join("blobs");
        File::open(&path).map(Self).map_err(Error::io("opening", &path))
    }

    /// Returns whether the folder is empty now.
    fn is_empty(&self) -> io::Result<bool> {
        // Rewinds the descriptor, whose position is behind the last name after the previous check.
        rustix::fs::seek(&self.0, SeekFrom::Start(0))?;
        let mut buffer = [MaybeUninit::uninit(); NAMES_BYTES];
        let mut names = RawDir::new(&self.0, &mut buffer);
        while let Some(entry) = names.next() {
            if ![c".", c".."].contains(&entry?.file_name()) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_in_a_file_of_its_own_is_detected_at_each_check() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("blobs")).unwrap();
        let blobs = BlobDir::open(dir.path()).unwrap();
        assert!(blobs.is_empty().unwrap());
        let value = dir.path().join("blobs").join("0".repeat(200));
        std::fs::write(&value, b"a value").unwrap();
        assert!(!blobs.is_empty().unwrap());
        std::fs::remove_file(value).unwrap();
        assert!(blobs.is_empty().unwrap());
    }
}
