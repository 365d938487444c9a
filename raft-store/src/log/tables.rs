//! The log in sled: opening, checking and reading. Only [`super::writer`] writes.
//!
//! | tree | key | value |
//! |---|---|---|
//! | `logs` | an entry's index | see [`super::record`] |
//! | `meta` | `vote` | this controller's vote |
//! | `meta` | `committed` | the last position known to be committed; may lag |
//! | `meta` | `purged` | the last purged position |
//! | `meta` | `sync` | the number of the sync that made the writes before it durable |

use std::fs::{File, TryLockError};
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;

use millrace_cluster_state::packed;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::record::{self, EntryRecords};
use crate::error::Error;
use crate::frame;
use crate::raft_ids::LogId;

/// Maximum size of sled's cache, in bytes. sled's default is 1 GiB.
const CACHE_BYTES: u64 = 32 << 20;

/// The unit in which sled writes and reuses its file, in bytes. sled may overwrite a segment once
/// the live data of the segment was written elsewhere at least a whole segment ago, because sled
/// then assumes that its own flush was durable. Nothing is lost as long as less than a segment is
/// written between two real syncs: see [`WINDOW_BYTES`]. Fixed for an existing log.
const SEGMENT_BYTES: usize = 8 << 20;

/// Maximum size of the values passed to sled between two syncs, in bytes. sled writes at most 5
/// times as much, because its leaves of 16 values are rewritten every 10 changes and when they
/// split.
pub(crate) const WINDOW_BYTES: usize = 1 << 20;

const _: () = assert!(WINDOW_BYTES * 5 < SEGMENT_BYTES && record::ENTRY_BYTES_MAX <= WINDOW_BYTES);

/// The format of `meta`'s records.
///
/// | format | since | content |
/// |---|---|---|
/// | 1 | 0.1.0 | openraft 0.9's `Vote` and `LogId`, and numbers, in MessagePack with field names |
/// | 2 | 0.1.0 | the same, of a group with a single leader in each term |
const META_FORMAT: u8 = 2;

/// A key of the `meta` tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetaKey {
    Vote,
    Committed,
    Purged,
    Sync,
}

impl MetaKey {
    const ALL: [Self; 4] = [Self::Vote, Self::Committed, Self::Purged, Self::Sync];

    fn key(self) -> &'static [u8] {
        match self {
            Self::Vote => b"vote",
            Self::Committed => b"committed",
            Self::Purged => b"purged",
            Self::Sync => b"sync",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Vote => "the stored vote",
            Self::Committed => "the stored commit position",
            Self::Purged => "the stored purge position",
            Self::Sync => "the stored sync number",
        }
    }
}

/// The beginning and end of the log. `purged <= last` always.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LogBounds {
    /// The last purged position. Entries up to it may still be on disk, invisible.
    pub(crate) purged: Option<LogId>,
    /// The last entry, or `purged` if there is no later entry.
    pub(crate) last: Option<LogId>,
    pub(crate) committed: Option<LogId>,
    /// The number of truncations and purges. A read during which the number changes starts again.
    pub(crate) removals: u64,
}

impl LogBounds {
    /// Returns the first visible index.
    pub(crate) fn first_index(&self) -> u64 {
        self.purged.map_or(0, |purged| purged.index + 1)
    }

    /// Returns the index after the last visible one.
    pub(crate) fn end_index(&self) -> u64 {
        self.last.map_or(0, |last| last.index + 1)
    }
}

#[derive(Clone)]
pub(crate) struct LogTables {
    pub(crate) db: sled::Db,
    pub(crate) logs: sled::Tree,
    meta: sled::Tree,
    /// The path of the store, for messages.
    path: Arc<Path>,
}

impl LogTables {
    /// Opens or creates the log's store. Checks nothing yet.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let opening = |source| Error::sled("opening the log", path, source);
        // sled's own flusher is off: every write and sync is done by the writer thread, in order.
        wait_until_unlocked(&path.join("db"))?;
        remove_half_written(path)?;
        let config = sled::Config::new()
            .path(path)
            .cache_capacity(CACHE_BYTES)
            .segment_size(SEGMENT_BYTES)
            .flush_every_ms(None);
        let db = panics_are_damage(|| config.open().map_err(opening))?;
        let logs = db.open_tree("logs").map_err(opening)?;
        let meta = db.open_tree("meta").map_err(opening)?;
        let tables = Self { db, logs, meta, path: path.into() };
        tables.make_files_durable(path)?;
        Ok(tables)
    }

    /// Returns a function that adds the operation and the path to an error of sled.
    pub(crate) fn failed(&self, doing: &'static str) -> impl FnOnce(sled::Error) -> Error {
        move |source| Error::sled(doing, &self.path, source)
    }

    /// Syncs the small files and the folders of sled, because sled does not sync them when it
    /// creates them.
    fn make_files_durable(&self, path: &Path) -> Result<(), Error> {
        self.db.flush().map_err(self.failed("opening the log"))?;
        let sync = |path: &Path| {
            File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("syncing", path))
        };
        for name in ["db", "conf", "blobs", "."] {
            sync(&path.join(name))?;
        }
        path.parent().map_or(Ok(()), sync)
    }

    /// Reads every record once, and returns the beginning and end of the log.
    ///
    /// # Errors
    /// [`Error::Damaged`] for a damaged record, a position that contradicts its key, or a hole;
    /// [`Error::UnknownFormat`].
    pub(crate) fn check(&self) -> Result<LogBounds, Error> {
        panics_are_damage(|| self.read_through())
    }

    fn read_through(&self) -> Result<LogBounds, Error> {
        let damaged = |flaw: String| Error::Damaged { what: "the log".to_owned(), flaw };
        for key in self.meta.iter().keys() {
            let key = key.map_err(self.failed("reading the log"))?;
            if MetaKey::ALL.iter().all(|meta| meta.key() != &key[..]) {
                return Err(damaged(format!("it has a record {:?}", String::from_utf8_lossy(&key))));
            }
        }
        let purged: Option<LogId> = self.read_meta(MetaKey::Purged)?;
        let committed: Option<LogId> = self.read_meta(MetaKey::Committed)?;
        let mut bounds = LogBounds { purged, last: purged, committed, removals: 0 };
        // Purged entries may be half deleted, so the check begins behind them.
        let first = bounds.first_index();
        for (next, record) in (first..).zip(self.records(first, u64::MAX)) {
            let (index, body) = record?;
            if index != next {
                return Err(damaged(format!("entry {next} is missing")));
            }
            bounds.last = Some(position(index, &body)?);
        }
        Ok(bounds)
    }

    /// Returns the records in `from..to`, in order.
    pub(crate) fn records(
        &self,
        from: u64,
        to: u64,
    ) -> impl Iterator<Item = Result<(u64, Vec<u8>), Error>> + use<> {
        // sled panics on a range that ends before its beginning.
        EntryRecords::new(
            self.logs.range(record::key(from)..record::key(to.max(from))),
            Arc::clone(&self.path),
        )
    }

    /// Returns the position of the entry at `index`, if there is one.
    pub(crate) fn position(&self, index: u64) -> Result<Option<LogId>, Error> {
        match self.records(index, index.saturating_add(1)).next() {
            Some(record) => record.and_then(|(index, body)| position(index, &body)).map(Some),
            None => Ok(None),
        }
    }

    pub(crate) fn read_meta<T: DeserializeOwned>(&self, meta: MetaKey) -> Result<Option<T>, Error> {
        let stored = self.meta.get(meta.key()).map_err(self.failed("reading the log"))?;
        let Some(stored) = stored else { return Ok(None) };
        let body =
            frame::unseal(META_FORMAT, meta.key(), &stored).map_err(|flaw| Error::flaw(meta.what(), flaw))?;
        let value = packed::from_slice(body)
            .map_err(|error| Error::Damaged { what: meta.what().to_owned(), flaw: error.to_string() })?;
        Ok(Some(value))
    }

    /// Writes a value, which is not durable yet.
    pub(crate) fn write_meta(&self, meta: MetaKey, record: &MetaRecord) -> Result<(), Error> {
        self.meta.insert(meta.key(), record.0.as_slice()).map_err(self.failed("writing the log"))?;
        Ok(())
    }
}

/// Waits until sled's threads release sled's file, which they may hold locked for a moment after
/// the last handle is dropped. The caller has the data directory's lock, so only threads of this
/// process can hold the file.
fn wait_until_unlocked(db: &Path) -> Result<(), Error> {
    let file = match File::open(db) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(Error::Io { doing: "opening", path: db.to_owned(), source }),
    };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            tracing::info!(path = %db.display(), "waiting until an earlier handle of the log's file is closed");
            file.lock().map_err(Error::io("locking", db))?;
        }
        Err(TryLockError::Error(source)) => {
            return Err(Error::Io { doing: "locking", path: db.to_owned(), source });
        }
    }
    file.unlock().map_err(Error::io("unlocking", db))
}

/// The suffix of a snapshot that sled is writing. sled writes the recovered contents of its file
/// into the snapshot, so that the next opening reads less.
const HALF_WRITTEN: &str = ".generating";

/// Removes the incomplete snapshot of an opening that was killed or ran out of disk space. sled
/// would take such a file for its newest snapshot, find it damaged, and never open again. Without
/// the file sled uses an older snapshot or none, and only has to read more.
fn remove_half_written(dir: &Path) -> Result<(), Error> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(Error::Io { doing: "reading", path: dir.to_owned(), source }),
    };
    for entry in entries {
        let entry = entry.map_err(Error::io("reading", dir))?;
        if entry.file_name().to_string_lossy().ends_with(HALF_WRITTEN) {
            tracing::info!(path = %entry.path().display(), "removing an incomplete snapshot of an earlier opening");
            std::fs::remove_file(entry.path()).map_err(Error::io("removing", &entry.path()))?;
        }
    }
    Ok(())
}

/// Converts panics into errors: sled panics on some damage instead of returning it. Values that
/// sled touched are not used after a panic.
fn panics_are_damage<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::Damaged { what: "the log".to_owned(), flaw: "sled panicked during the read".to_owned() })
    })
}

/// An encoded value of the `meta` tree.
pub(crate) struct MetaRecord(Vec<u8>);

impl MetaRecord {
    pub(crate) fn encode<T: Serialize>(meta: MetaKey, value: &T) -> Result<Self, Error> {
        let body = rmp_serde::to_vec_named(value)
            .map_err(|error| Error::Encode { what: meta.what().to_owned(), reason: error.to_string() })?;
        Ok(Self(frame::seal(META_FORMAT, meta.key(), &body)))
    }
}

/// The part of an entry that does not depend on the machine.
#[derive(Deserialize)]
struct EntryHeader {
    log_id: LogId,
}

fn position(index: u64, body: &[u8]) -> Result<LogId, Error> {
    let EntryHeader { log_id } = packed::from_slice(body)
        .map_err(|error| Error::UnknownCommand { index, reason: error.to_string() })?;
    if log_id.index == index {
        Ok(log_id)
    } else {
        Err(Error::Damaged {
            what: format!("log entry {index}"),
            flaw: format!("its contents are those of entry {}", log_id.index),
        })
    }
}
