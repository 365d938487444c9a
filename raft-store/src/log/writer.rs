//! The one thread that writes the log, and what it is told.
//!
//! ```text
//!   LogStore ── Job ──▶ [queue of JOBS_MAX] ──▶ carry out each ──▶ one sync ──▶ answer each
//! ```
//!
//! Jobs are carried out in order. Those that were waiting share one sync: sled's flush (which on
//! Linux is `sync_file_range`, no more: sled#1452) and then `fdatasync` on a descriptor of our own.
//! Nothing is answered before it. After the first failure nothing more is written and every job is
//! answered with that failure: what a failed write or sync left on the disk is not known, and a
//! second `fsync` that succeeds would prove nothing.
//!
//! A job that grows the log is written only once the disk has space for all that sled writes for it
//! (see [`super::space`]). Until then the job waits, as on a disk that hangs: sled never writes again
//! after a write that failed.
//!
//! What is purged is deleted here too, a few entries at a time: while no job waits, and behind every
//! few appends however many do, so that the log of a leader that never rests does not grow.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustix::fs::{RawDir, SeekFrom};
use tokio::sync::mpsc::{self, error::TryRecvError};

use super::disk::LogDisk;
use super::record::{self, Pair};
use super::space;
use super::tables::{Bounds, Meta, MetaRecord, Tables, WINDOW_BYTES};
use super::witness::Witness;
use crate::config::LogId;
use crate::error::Error;

/// Jobs that may wait. openraft waits for each append, so that a handful is the most there is.
pub(crate) const JOBS_MAX: usize = 64;

/// sled's keys deleted at a time: what a job may have to wait for. As many as the parts of the
/// largest entry, so that deleting keeps up with a leader that never rests; and sled, which rewrites
/// a leaf of 16 values every 10 changes, writes no more for them than for what is appended.
const DELETES_AT_A_TIME: usize = record::ENTRY_BYTES_MAX / record::PART_BYTES;

/// How long between two looks whether a full disk has space again.
const SPACE_PAUSE: Duration = Duration::from_millis(100);

/// Told once what was asked for is durable, or never will be.
pub(crate) type Durable = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Something to write.
pub(crate) enum Job {
    /// Appends entries. `readable` is told before they are durable.
    Append { entries: Vec<Vec<Pair>>, last: LogId, readable: Durable, durable: Durable },
    /// Writes a value of the `meta` tree.
    Vote { record: MetaRecord, durable: Durable },
    /// Writes the commit position, to be durable with the next sync of anything else.
    Committed { record: MetaRecord },
    /// Removes the entries from an index on, after which `last` is the last.
    Truncate { from: u64, last: Option<LogId>, durable: Durable },
    /// Gives up the entries up to a position. They are deleted later.
    Purge { upto: LogId, record: MetaRecord, durable: Durable },
}

/// Makes what sled wrote durable: the seam at which tests record what a power cut would leave.
pub(crate) trait SyncPoint: Send {
    /// Returns once everything written to sled's file is durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// A second descriptor of sled's file. A sync is the inode's, not the descriptor's.
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

/// What makes writes durable.
pub(crate) struct Syncing {
    /// The number of the last sync.
    pub(crate) synced: u64,
    pub(crate) witness: Witness,
    pub(crate) point: Box<dyn SyncPoint>,
    pub(crate) disk: LogDisk,
}

pub(crate) struct Writer {
    tables: Tables,
    /// Shared with the readers: it changes when a write becomes visible.
    bounds: Arc<RwLock<Bounds>>,
    syncing: Syncing,
    log_dir: PathBuf,
    blobs: BlobDir,
    halted: Option<Arc<str>>,
    /// Entries below this index are purged and may still be on disk. 0 when none are.
    doomed_below: u64,
    /// Keys appended since any were deleted.
    undeleted: usize,
    /// Bytes of values given to sled since the last sync: sled may not have written them yet.
    unsynced: usize,
}

impl Writer {
    pub(crate) fn new(
        tables: Tables,
        bounds: Arc<RwLock<Bounds>>,
        log_dir: &Path,
        syncing: Syncing,
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

    /// The disk that it writes to.
    pub(crate) fn disk(&self) -> LogDisk {
        self.syncing.disk.clone()
    }

    /// The first sync: what was recovered, or that there is a log now, is durable before any job.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        self.sync_all()
    }

    /// Works until every sender is gone, then makes what is left durable.
    pub(crate) fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
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
            // Whoever waits for the next job waits for this as well: as much is deleted as came.
            if self.doomed_below > 0 && self.undeleted >= DELETES_AT_A_TIME && self.has_space() {
                self.write(Self::delete_some);
            }
        }
        self.sync();
    }

    /// Carries out one job, wholly. What [`Self::run`] does for those that wait.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn run_one(&mut self, job: Job) {
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

    /// The next job; deletes what is purged while there is none.
    fn next_job(&mut self, jobs: &mut mpsc::Receiver<Job>) -> Option<Job> {
        loop {
            // A full disk has no space to delete in: the next job waits for some.
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

    fn carry_out(&mut self, job: Job, waiting: &mut Vec<Durable>) {
        match job {
            Job::Append { entries, last, readable, durable } => {
                let bytes = entries.iter().flatten().map(|(_, value)| value.len()).sum();
                self.write(|writer| writer.wait_for_space(bytes));
                self.write(|writer| writer.append(entries, last));
                readable(self.health());
                waiting.push(durable);
            }
            Job::Vote { record, durable } => {
                self.write(|writer| writer.wait_for_space(0));
                self.write(|writer| writer.tables.write_meta(Meta::Vote, &record));
                waiting.push(durable);
            }
            Job::Committed { record } => {
                self.write(|writer| writer.tables.write_meta(Meta::Committed, &record))
            }
            Job::Truncate { from, last, durable } => {
                self.write(|writer| writer.wait_for_space(0));
                self.write(|writer| writer.truncate(from, last));
                waiting.push(durable);
            }
            Job::Purge { upto, record, durable } => {
                self.write(|writer| writer.wait_for_space(0));
                self.write(|writer| writer.tables.write_meta(Meta::Purged, &record));
                // The marker is durable before anything is deleted.
                self.sync();
                self.write(|writer| {
                    writer.purge(upto);
                    Ok(())
                });
                durable(self.health());
            }
        }
    }

    /// Writes unless an earlier write failed.
    fn write(&mut self, write: impl FnOnce(&mut Self) -> Result<(), Error>) {
        if self.halted.is_none()
            && let Err(error) = write(self)
        {
            self.halt(&error);
        }
    }

    fn halt(&mut self, error: &Error) {
        tracing::error!(%error, "the log halts");
        self.halted = Some(error.to_string().into());
    }

    fn health(&self) -> Result<(), Error> {
        self.halted.as_ref().map_or(Ok(()), |reason| Err(Error::Halted(Arc::clone(reason))))
    }

    /// Waits until the disk has space for values of so many bytes.
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
                tracing::error!(left, needed, path = %self.log_dir.display(), "the disk is full: the log waits for space");
                // Whoever waits for this job waits for the disk: it hangs.
                self.syncing.disk.wait_begins();
                waits = true;
            }
            if !self.syncing.disk.wait_for_space(SPACE_PAUSE) {
                let source = io::Error::from(rustix::io::Errno::NOSPC);
                return Err(Error::Io { doing: "writing", path: self.log_dir.clone(), source });
            }
        }
    }

    /// Whether a job without values could be written now.
    fn has_space(&self) -> bool {
        // A failure shows at the next job.
        let needed = space::needed(self.unsynced);
        self.space_left(needed).is_ok_and(|left| left >= needed)
    }

    fn space_left(&self, needed: u64) -> Result<u64, Error> {
        let left = self.syncing.disk.space_left(needed);
        left.map_err(Error::io("looking at the space of", &self.log_dir))
    }

    /// Each entry wholly or not at all, and none without those before it.
    fn append(&mut self, entries: Vec<Vec<Pair>>, last: LogId) -> Result<(), Error> {
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

    fn insert(&mut self, pairs: Vec<Pair>) -> Result<(), Error> {
        let writing = || self.tables.failed("writing the log");
        match <[Pair; 1]>::try_from(pairs) {
            // One value is atomic by itself; a batch costs sled two more writes.
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

    /// From the back and by whole entries, so that a crash leaves neither a hole nor half an entry.
    fn truncate(&mut self, from: u64, last: Option<LogId>) -> Result<(), Error> {
        // Out of sight first: a reader takes what vanishes under it for damage otherwise.
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

    /// The keys of the last entries at or behind `from`: about as many as are deleted at a time.
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

    fn change_bounds(&self, change: impl FnOnce(&mut Bounds)) {
        // Plain assignments cannot panic half-way, so a poisoned lock holds a whole value.
        change(&mut self.bounds.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Deletes a few of the purged entries, which are out of sight already. Synced each time, so
    /// that sled never writes much between two syncs.
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
        self.tables.write_meta(Meta::Sync, &MetaRecord::encode(Meta::Sync, &number)?)?;
        self.tables.db.flush().map_err(self.tables.failed("flushing the log"))?;
        self.syncing.point.sync().map_err(Error::io("syncing", &self.log_dir.join("db")))?;
        self.refuse_blobs()?;
        self.unsynced = 0;
        self.syncing.synced = number;
        self.syncing.witness.remember(number)
    }

    /// sled never syncs what it moves to files of their own. [`record`] cuts entries so that it
    /// does not; should it ever, nothing more may be acknowledged.
    fn refuse_blobs(&self) -> Result<(), Error> {
        if self.blobs.is_empty().map_err(Error::io("reading", &self.log_dir.join("blobs")))? {
            return Ok(());
        }
        Err(Error::Damaged { what: "the log".to_owned(), flaw: "a value left sled's synced file".to_owned() })
    }
}

/// Bytes of names read from the folder at a time: enough for `.`, `..` and one more.
const NAMES_BYTES: usize = 1024;

/// The folder to which sled moves large values. Kept open: a look at each sync must not need a
/// descriptor, which clients' connections may have taken.
struct BlobDir(File);

impl BlobDir {
    fn open(log_dir: &Path) -> Result<Self, Error> {
        let path = log_dir.join("blobs");
        File::open(&path).map(Self).map_err(Error::io("opening", &path))
    }

    /// Whether nothing is in it now.
    fn is_empty(&self) -> io::Result<bool> {
        // The descriptor's own position, which is behind the last name since the look before.
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
    fn a_value_of_its_own_is_seen_whenever_it_comes() {
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
