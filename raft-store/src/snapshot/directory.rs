//! The snapshot directory, which holds only the newest snapshot, durably.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::file::SnapshotFile;
use super::format::{SnapshotEncoder, SnapshotLayout, WriteState};
use crate::error::Error;
use crate::fs::{self, Fs, FsFile, TEMPORARY};
use crate::log_reserve::reserve_bytes;
use crate::raft_ids::{LogId, SnapshotMeta};

const ENDING: &str = ".snapshot";

/// The snapshot directory.
pub(crate) struct SnapshotDir {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    /// The newest snapshot in the directory. Locked while a snapshot is stored, so that a built and
    /// an installed snapshot do not remove each other.
    newest: Mutex<Option<SnapshotMeta>>,
    received: AtomicU64,
}

/// The newest snapshot at start, checked.
#[derive(Debug)]
pub(crate) struct StoredSnapshot {
    pub(crate) checked: SnapshotLayout,
    pub(crate) file: SnapshotFile,
}

impl SnapshotDir {
    /// Opens or creates the folder and reads the newest snapshot. Removes incomplete files of a
    /// crash.
    ///
    /// # Errors
    /// [`Error::Damaged`] or [`Error::UnknownFormat`] for the newest snapshot. An older snapshot
    /// that a crash left cannot replace it, because the log no longer has the entries in between.
    pub(crate) fn open(fs: Arc<dyn Fs>, dir: PathBuf) -> Result<(Self, Option<StoredSnapshot>), Error> {
        let found = prepare(&*fs, &dir).map_err(Error::io("opening the snapshots in", &dir))?;
        let found = match found {
            Some(name) => Some(read(&*fs, dir.join(name))?),
            None => None,
        };
        let newest = Mutex::new(found.as_ref().map(|found| found.checked.meta.clone()));
        let shelf = Self { fs, dir, newest, received: AtomicU64::new(0) };
        if let Some(found) = &found {
            shelf.remove_others(&name(&found.checked.meta)).map_err(Error::io("tidying", &shelf.dir))?;
        }
        Ok((shelf, found))
    }

    /// Stores a snapshot in place of the previous one. Durable on return. A snapshot that is not
    /// newer than the stored one is dropped, because the log may already begin after the stored
    /// one. After a failure the same snapshot may be stored again.
    pub(crate) fn put(&self, meta: &SnapshotMeta, state: &WriteState<'_>) -> Result<(), Error> {
        let encoding = SnapshotEncoder::of(meta, state)?;
        self.place(meta, |file| encoding.write_to(file))
    }

    /// Stores a received and checked snapshot, like [`Self::put`].
    pub(crate) fn put_received(&self, meta: &SnapshotMeta, received: &SnapshotFile) -> Result<(), Error> {
        self.place(meta, |file| received.copy_to(file))
    }

    fn place(
        &self,
        meta: &SnapshotMeta,
        write: impl FnOnce(&mut dyn FsFile) -> io::Result<()>,
    ) -> Result<(), Error> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.as_ref().is_some_and(|newest| newest.last_log_id >= meta.last_log_id) {
            return Ok(());
        }
        let name = name(meta);
        fs::write_durably(&*self.fs, &self.dir, &name, write)
            .map_err(Error::io("writing", &self.dir.join(&name)))?;
        *newest = Some(meta.clone());
        let tidied = self.remove_others(&name).map_err(Error::io("tidying", &self.dir));
        self.fs.refill();
        tidied
    }

    /// Opens the newest snapshot.
    pub(crate) fn newest(&self) -> Result<Option<(SnapshotMeta, SnapshotFile)>, Error> {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(meta) = &*newest else { return Ok(None) };
        let path = self.dir.join(name(meta));
        let file = self.fs.open(&path).map_err(Error::io("opening", &path))?;
        Ok(Some((meta.clone(), SnapshotFile::kept(path, file))))
    }

    /// Creates an empty file for a received snapshot.
    pub(crate) fn receive(&self) -> Result<SnapshotFile, Error> {
        let number = self.received.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("received-{number}{TEMPORARY}"));
        let file = self.fs.create(&path).map_err(Error::io("making", &path))?;
        Ok(SnapshotFile::receiving(path, file, Arc::clone(&self.fs)))
    }

    fn remove_others(&self, keep: &str) -> io::Result<()> {
        for name in self.fs.list(&self.dir)? {
            if name.ends_with(ENDING) && name != keep {
                self.fs.remove(&self.dir.join(name))?;
            }
        }
        Ok(())
    }
}

/// Creates the files for received snapshots. openraft's own way halts the node if no file can be
/// created. This way refuses a single snapshot, and the sender retries.
#[derive(Clone)]
pub struct SnapshotReceiver(Arc<SnapshotDir>);

impl SnapshotReceiver {
    pub(crate) fn new(shelf: Arc<SnapshotDir>) -> Self {
        Self(shelf)
    }

    /// Creates an empty file. Blocks.
    ///
    /// # Errors
    /// [`Error::Io`], also if no descriptor or space is left.
    pub fn begin(&self) -> Result<SnapshotFile, Error> {
        self.0.fs.refill();
        self.0.receive()
    }

    /// Checks that the disk has space beside the log's reserve. Blocks.
    ///
    /// # Errors
    /// [`Error::NoSpace`] or [`Error::Io`].
    pub fn check_space(&self) -> Result<(), Error> {
        let disk = rustix::fs::statvfs(&self.0.dir).map_err(|error| error.into());
        let disk = disk.map_err(Error::io("reading the free space of", &self.0.dir))?;
        let available = disk.f_bavail.saturating_mul(disk.f_frsize);
        let kept = reserve_bytes(disk.f_blocks.saturating_mul(disk.f_frsize));
        match available < kept {
            true => Err(Error::NoSpace { path: self.0.dir.clone(), available, kept }),
            false => Ok(()),
        }
    }
}

impl std::fmt::Debug for SnapshotReceiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SnapshotReceiver").field(&self.0.dir).finish()
    }
}

/// Creates the folder and removes incomplete files. Returns the name of the newest snapshot.
fn prepare(fs: &dyn Fs, dir: &Path) -> io::Result<Option<String>> {
    fs.create_dir(dir)?;
    if let Some(parent) = dir.parent() {
        fs.sync_dir(parent)?;
    }
    let mut newest = None;
    for name in fs.list(dir)? {
        if name.ends_with(TEMPORARY) {
            fs.remove(&dir.join(name))?;
        } else if name.ends_with(ENDING) {
            newest = Some(name); // Names sort like their indexes.
        }
    }
    // Makes visible files durable: a power cut may have interrupted the sync of a rename, and a
    // file that was read once must not vanish.
    fs.sync_dir(dir)?;
    Ok(newest)
}

fn read(fs: &dyn Fs, path: PathBuf) -> Result<StoredSnapshot, Error> {
    let file = fs.open(&path).map_err(Error::io("opening", &path))?;
    let file = SnapshotFile::kept(path.clone(), file);
    let checked = file.check()?;
    let holds = name(&checked.meta);
    if path.file_name().and_then(|name| name.to_str()) != Some(&holds) {
        return Err(Error::Damaged { what: file.what(), flaw: format!("its contents are those of {holds}") });
    }
    Ok(StoredSnapshot { checked, file })
}

fn name(meta: &SnapshotMeta) -> String {
    format!("{}{ENDING}", id(meta.last_log_id))
}

/// Returns a snapshot's id, `<index, 20 digits>-<term>`. The same log gives the same state and the
/// same bytes, so the position identifies the snapshot. Ids sort like their indexes.
pub(crate) fn id(last: Option<LogId>) -> String {
    let last = last.unwrap_or_default();
    format!("{:020}-{}", last.index, last.leader_id.term)
}
