//! openraft's log in sled.
//!
//! | module | job |
//! |---|---|
//! | [`record`] | the encoding of an entry in sled |
//! | [`tables`] | opening, checking and reading |
//! | [`recent`] | the newest entries in memory |
//! | [`writer`] | the writer thread, and the durability of its writes |
//! | [`sync_marker`] | detection of a log that lost acknowledged syncs |
//! | [`disk`] | durations of syncs, and an injected stall |
//! | `simulated` | a writer without a thread, in simulated time |
//! | [`space`] | disk space reserved for the log on a disk that others fill |

pub(crate) mod disk;
pub(crate) mod recent;
pub(crate) mod record;
#[cfg(any(test, feature = "sim"))]
pub(crate) mod simulated;
pub(crate) mod space;
pub(crate) mod sync_marker;
pub(crate) mod tables;
pub(crate) mod writer;

use std::fmt::Debug;
use std::ops::{Bound, RangeBounds};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;

use millrace_cluster_state::packed;
use openraft::storage::{LogFlushed, LogState, RaftLogStorage};
use openraft::{OptionalSend, RaftLogReader};
use tokio::sync::{mpsc, oneshot, watch};

use self::disk::LogDisk;
use self::recent::RecentEntries;
use self::space::{LogSpace, ReservedBlocks};
use self::sync_marker::SyncMarker;
use self::tables::{LogBounds, LogTables, MetaKey, MetaRecord};
use self::writer::{DbFile, DurableCallback, JOBS_MAX, LogJob, LogWriter, SyncPoint, SyncState};
use crate::config::{Entry, TypeConfig};
use crate::data_dir::DataDir;
use crate::error::{Error, RaftOperation};
use crate::machine::StateMachine;
use crate::raft_ids::{LogId, StorageError, Vote};

/// Maximum size of a read for replication, in bytes, passed by at most its last entry. With the
/// largest entry, the read stays below gRPC's default limit of 4 MiB.
const READ_BYTES_MAX: usize = 2 << 20;

const LOG_DIR: &str = "log";

/// Whether the data directory is new or must have a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpectedLog {
    /// The directory is new: nothing was acknowledged in it.
    Nothing,
    /// The directory must have a log.
    Log,
}

/// openraft's log storage, for a single data directory.
pub struct LogStore<M: StateMachine> {
    reader: LogReader<M>,
    /// The last log index that a durable snapshot covers; `None` if there is no snapshot.
    covered: watch::Receiver<Option<u64>>,
    writer: WriterHandle,
    disk: LogDisk,
    /// Dropped last, so that the directory is unlocked only after the writer has ended.
    _dir: Option<Arc<DataDir>>,
}

/// Reads the log, while the [`LogStore`] writes it.
pub struct LogReader<M: StateMachine> {
    tables: LogTables,
    recent: RecentEntries<M>,
    /// Read by replication tasks while the writer thread changes a few words at a time.
    bounds: Arc<RwLock<LogBounds>>,
    /// A reader keeps sled open, and therefore the directory locked.
    dir: Option<Arc<DataDir>>,
}

impl<M: StateMachine> Clone for LogReader<M> {
    fn clone(&self) -> Self {
        Self {
            tables: self.tables.clone(),
            recent: self.recent.clone(),
            bounds: Arc::clone(&self.bounds),
            dir: self.dir.clone(),
        }
    }
}

/// The file and the space that the log is written to.
pub(crate) struct LogBacking {
    pub(crate) sync_point: Box<dyn SyncPoint>,
    /// `None` if the space is not checked.
    pub(crate) space: Option<Box<dyn LogSpace>>,
}

/// The way in which jobs are carried out.
enum WriterHandle {
    Thread(WriterThread),
    /// In simulated time, on the task that submits the job.
    #[cfg(any(test, feature = "sim"))]
    InTurn(Box<simulated::InlineWriter>),
}

/// The writer thread. Dropping this value waits until all submitted jobs are written.
struct WriterThread {
    jobs: Option<mpsc::Sender<LogJob>>,
    thread: Option<JoinHandle<()>>,
    disk: LogDisk,
}

impl WriterThread {
    fn start(mut writer: LogWriter, log_dir: &Path) -> Result<Self, Error> {
        writer.begin()?;
        let (jobs, queue) = mpsc::channel(JOBS_MAX);
        let disk = writer.disk();
        let thread = std::thread::Builder::new()
            .name("raft-log".to_owned())
            .spawn(move || writer.run(queue))
            .map_err(Error::io("starting the writer of", log_dir))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), disk })
    }

    async fn give(&self, job: LogJob) -> Result<(), Error> {
        let jobs = self.jobs.as_ref().ok_or_else(writer_gone)?;
        jobs.send(job).await.map_err(|_| writer_gone())
    }
}

impl Drop for WriterThread {
    fn drop(&mut self) {
        self.jobs = None;
        // A job that waits for space would block the join below.
        self.disk.give_up_waiting();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the log's writer thread panicked");
        }
    }
}

impl<M: StateMachine> LogStore<M> {
    /// Opens and checks the log of a data directory. Blocks.
    pub(crate) fn open(
        dir: &Path,
        expect: ExpectedLog,
        covered: watch::Receiver<Option<u64>>,
    ) -> Result<Self, Error> {
        Self::open_with(dir, expect, covered, |log_dir| {
            let space = ReservedBlocks::open(log_dir).map_err(Error::io("reserving space for", log_dir))?;
            Ok(LogBacking { sync_point: Box::new(DbFile::open(log_dir)?), space: Some(Box::new(space)) })
        })
    }

    /// Like [`Self::open`], with the caller's sync and space.
    pub(crate) fn open_with(
        dir: &Path,
        expect: ExpectedLog,
        covered: watch::Receiver<Option<u64>>,
        backing: impl FnOnce(&Path) -> Result<LogBacking, Error>,
    ) -> Result<Self, Error> {
        Self::open_writing(dir, expect, covered, backing, |writer, log_dir| {
            WriterThread::start(writer, log_dir).map(WriterHandle::Thread)
        })
    }

    /// Like [`Self::open`], with simulated time and power.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn open_simulated(
        dir: &Path,
        expect: ExpectedLog,
        covered: watch::Receiver<Option<u64>>,
        disk: Box<dyn simulated::SimDisk>,
    ) -> Result<Self, Error> {
        let disk = simulated::SharedDisk::new(disk);
        let backing = |log_dir: &Path| Ok(LogBacking { sync_point: disk.sync_point(log_dir), space: None });
        Self::open_writing(dir, expect, covered, backing, |writer, _| {
            simulated::InlineWriter::start(writer, disk.clone()).map(|it| WriterHandle::InTurn(Box::new(it)))
        })
    }

    fn open_writing(
        dir: &Path,
        expect: ExpectedLog,
        covered: watch::Receiver<Option<u64>>,
        backing: impl FnOnce(&Path) -> Result<LogBacking, Error>,
        start: impl FnOnce(LogWriter, &Path) -> Result<WriterHandle, Error>,
    ) -> Result<Self, Error> {
        let log_dir = dir.join(LOG_DIR);
        if expect == ExpectedLog::Log && !log_dir.join("db").exists() {
            return Err(missing_log());
        }
        let tables = LogTables::open(&log_dir)?;
        let synced = tables.read_meta(MetaKey::Sync)?.unwrap_or(0);
        let (witness, remembered) = SyncMarker::open(&dir.join("log.witness"))?;
        if synced < remembered {
            let flaw = format!("it ends with sync {synced}, but sync {remembered} was durable");
            return Err(Error::Damaged { what: "the log".to_owned(), flaw });
        }
        let bounds = tables.check()?;
        match expect {
            ExpectedLog::Log if synced == 0 => return Err(missing_log()),
            // A crash between the first sync and the identity leaves a log in which nothing was
            // written.
            ExpectedLog::Nothing
                if bounds.last.is_some() || tables.read_meta::<Vote>(MetaKey::Vote)?.is_some() =>
            {
                return Err(missing_identity("there is a log"));
            }
            _ => {}
        }
        let bounds = Arc::new(RwLock::new(bounds));
        let LogBacking { sync_point, space } = backing(&log_dir)?;
        let disk = LogDisk::new(space);
        let syncing = SyncState { synced, witness, point: sync_point, disk: disk.clone() };
        let writer = LogWriter::new(tables.clone(), Arc::clone(&bounds), &log_dir, syncing)?;
        let writer = start(writer, &log_dir)?;
        Ok(Self {
            reader: LogReader { tables, recent: RecentEntries::default(), bounds, dir: None },
            covered,
            writer,
            disk,
            _dir: None,
        })
    }

    /// Keeps the directory locked while the log or one of its readers is open.
    pub(crate) fn keep_locked(&mut self, dir: DataDir) {
        self.reader.dir = Some(Arc::new(dir));
        self._dir = self.reader.dir.clone();
    }

    #[must_use]
    pub fn disk(&self) -> LogDisk {
        self.disk.clone()
    }

    /// Returns the position of the last entry.
    #[must_use]
    pub fn last(&self) -> Option<LogId> {
        self.reader.bounds().last
    }

    /// Returns the last position that was purged.
    pub(crate) fn purged(&self) -> Option<LogId> {
        self.reader.bounds().purged
    }

    #[cfg(test)]
    pub(crate) fn vote(&self) -> Result<Option<Vote>, Error> {
        self.reader.tables.read_meta(MetaKey::Vote)
    }

    #[cfg(test)]
    pub(crate) fn read_all(&self) -> Result<Vec<Entry<M>>, Error> {
        self.reader.read(0, u64::MAX, usize::MAX)
    }

    async fn give(&self, job: LogJob) -> Result<(), Error> {
        match &self.writer {
            WriterHandle::Thread(writer) => writer.give(job).await,
            #[cfg(any(test, feature = "sim"))]
            WriterHandle::InTurn(writer) => {
                writer.carry_out(job).await;
                Ok(())
            }
        }
    }

    /// Submits a job and waits until it is carried out.
    async fn carry_out(&self, job: impl FnOnce(DurableCallback) -> LogJob) -> Result<(), Error> {
        let (answer, answered) = answer();
        self.give(job(answer)).await?;
        answered.await.unwrap_or_else(|_| Err(writer_gone()))
    }

    async fn append_entries(
        &self,
        entries: Vec<Entry<M>>,
        flushed: LogFlushed<TypeConfig<M>>,
    ) -> Result<(), Error> {
        let Some(last) = entries.last().map(|entry| entry.log_id) else {
            flushed.log_io_completed(Ok(()));
            return Ok(());
        };
        let mut before = self.reader.bounds().last.map(|last| last.index);
        let mut encoded = Vec::with_capacity(entries.len());
        let mut sizes = Vec::with_capacity(entries.len());
        for entry in &entries {
            let index = entry.log_id.index;
            // Only a gap is refused: openraft's suite appends after a purge of later entries, which
            // is harmless.
            if let Some(last) = before.filter(|&before| index > before + 1) {
                return Err(Error::Hole { last, next: index });
            }
            let body = rmp_serde::to_vec_named(entry).map_err(|error| Error::Encode {
                what: format!("log entry {index}"),
                reason: error.to_string(),
            })?;
            sizes.push(body.len());
            encoded.push(record::encode(index, &body)?);
            before = before.max(Some(index));
        }
        let durable: DurableCallback =
            Box::new(|result| flushed.log_io_completed(result.map_err(std::io::Error::other)));
        self.carry_out(|readable| LogJob::Append { entries: encoded, last, readable, durable }).await?;
        self.reader.recent.append(entries.into_iter().zip(sizes));
        Ok(())
    }

    async fn truncate_from(&self, from: u64) -> Result<(), Error> {
        let bounds = self.reader.bounds();
        let last = match from.checked_sub(1) {
            Some(before) if before >= bounds.first_index() => self.reader.tables.position(before)?,
            _ => bounds.purged,
        };
        self.reader.recent.truncate(from);
        self.carry_out(|durable| LogJob::Truncate { from, last, durable }).await
    }

    /// Waits until a durable snapshot covers `upto`, then purges the entries.
    ///
    /// openraft requests the purge right after it requests the installation of a snapshot, without
    /// waiting for the installation. If the purge became durable first, a crash would leave neither
    /// entries nor a snapshot, and openraft would start from an empty state.
    async fn purge_upto(&self, upto: LogId) -> Result<(), Error> {
        let mut covered = self.covered.clone();
        if covered.wait_for(|covered| covered.is_some_and(|index| index >= upto.index)).await.is_err() {
            return Err(Error::Halted(
                "the snapshot store was closed before a snapshot covered the purge".into(),
            ));
        }
        let record = MetaRecord::encode(MetaKey::Purged, &upto)?;
        self.carry_out(|durable| LogJob::Purge { upto, record, durable }).await
    }

    async fn write_committed(&self, committed: Option<LogId>) -> Result<(), Error> {
        let Some(committed) = committed else { return Ok(()) };
        let record = MetaRecord::encode(MetaKey::Committed, &committed)?;
        self.reader.bounds.write().unwrap_or_else(PoisonError::into_inner).committed = Some(committed);
        self.give(LogJob::Committed { record }).await
    }
}

fn missing_log() -> Error {
    Error::Missing { what: "the log".to_owned(), because: "the directory has an identity".to_owned() }
}

pub(crate) fn missing_identity(because: &str) -> Error {
    Error::Missing { what: "the identity file".to_owned(), because: because.to_owned() }
}

fn writer_gone() -> Error {
    Error::Halted("the log's writer thread is gone".into())
}

fn answer() -> (DurableCallback, oneshot::Receiver<Result<(), Error>>) {
    let (sender, receiver) = oneshot::channel();
    let answer = move |result| {
        if let Err(unheard) = sender.send(result) {
            tracing::debug!(?unheard, "the result of a write was dropped");
        }
    };
    (Box::new(answer), receiver)
}

impl<M: StateMachine> LogReader<M> {
    fn bounds(&self) -> LogBounds {
        self.bounds.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the entries in `from..to` that are present, up to the entry that passes `bytes_max`.
    fn read(&self, from: u64, to: u64, bytes_max: usize) -> Result<Vec<Entry<M>>, Error> {
        loop {
            let bounds = self.bounds();
            let from = from.max(bounds.first_index());
            let to = to.min(bounds.end_index());
            if let Some(entries) = self.recent.read(from, to, bytes_max) {
                return Ok(entries);
            }
            match self.read_within(from, to, bytes_max) {
                // Entries were removed during the read, so read again.
                Err(_) if self.bounds().removals != bounds.removals => {}
                result => return result,
            }
        }
    }

    fn read_within(&self, from: u64, to: u64, bytes_max: usize) -> Result<Vec<Entry<M>>, Error> {
        let mut entries: Vec<Entry<M>> = Vec::new();
        let mut bytes = 0;
        for record in self.tables.records(from, to) {
            let (index, body) = record?;
            if let Some(missing) =
                entries.last().map(|last| last.log_id.index + 1).filter(|&next| next != index)
            {
                let flaw = format!("entry {missing} is missing");
                return Err(Error::Damaged { what: "the log".to_owned(), flaw });
            }
            let entry = packed::from_slice(&body)
                .map_err(|error| Error::UnknownCommand { index, reason: error.to_string() })?;
            entries.push(entry);
            bytes += body.len();
            if bytes >= bytes_max {
                break;
            }
        }
        Ok(entries)
    }
}

impl<M: StateMachine> RaftLogReader<TypeConfig<M>> for LogReader<M> {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry<M>>, StorageError> {
        let from = match range.start_bound() {
            Bound::Included(&from) => from,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let to = match range.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&to) => to,
            Bound::Unbounded => u64::MAX,
        };
        self.read(from, to, usize::MAX).map_err(|error| error.into_storage(RaftOperation::ReadLog))
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry<M>>, StorageError> {
        self.read(start, end, READ_BYTES_MAX).map_err(|error| error.into_storage(RaftOperation::ReadLog))
    }
}

impl<M: StateMachine> RaftLogReader<TypeConfig<M>> for LogStore<M> {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry<M>>, StorageError> {
        self.reader.try_get_log_entries(range).await
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry<M>>, StorageError> {
        self.reader.limited_get_log_entries(start, end).await
    }
}

impl<M: StateMachine> RaftLogStorage<TypeConfig<M>> for LogStore<M> {
    type LogReader = LogReader<M>;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig<M>>, StorageError> {
        let LogBounds { purged, last, .. } = self.reader.bounds();
        Ok(LogState { last_purged_log_id: purged, last_log_id: last })
    }

    async fn get_log_reader(&mut self) -> LogReader<M> {
        self.reader.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), StorageError> {
        let saved = match MetaRecord::encode(MetaKey::Vote, vote) {
            Ok(record) => self.carry_out(|durable| LogJob::Vote { record, durable }).await,
            Err(error) => Err(error),
        };
        saved.map_err(|error| error.into_storage(RaftOperation::WriteVote))
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, StorageError> {
        self.reader
            .tables
            .read_meta(MetaKey::Vote)
            .map_err(|error| error.into_storage(RaftOperation::ReadVote))
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), StorageError> {
        self.write_committed(committed).await.map_err(|error| error.into_storage(RaftOperation::WriteLog))
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, StorageError> {
        Ok(self.reader.bounds().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: LogFlushed<TypeConfig<M>>) -> Result<(), StorageError>
    where
        I: IntoIterator<Item = Entry<M>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries = entries.into_iter().collect();
        self.append_entries(entries, callback)
            .await
            .map_err(|error| error.into_storage(RaftOperation::WriteLog))
    }

    async fn truncate(&mut self, log_id: LogId) -> Result<(), StorageError> {
        self.truncate_from(log_id.index).await.map_err(|error| error.into_storage(RaftOperation::WriteLog))
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), StorageError> {
        self.purge_upto(log_id).await.map_err(|error| error.into_storage(RaftOperation::WriteLog))
    }
}
