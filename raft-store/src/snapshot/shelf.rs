//! The folder of snapshots: the newest one, durably, and no others.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::file::SnapshotFile;
use super::format::{Checked, Encoding, WriteState};
use crate::config::{LogId, SnapshotMeta};
use crate::error::Error;
use crate::fs::{self, Fs, FsFile, TEMPORARY};
use crate::log::space::reserve_bytes;

const ENDING: &str = ".snapshot";

/// Where snapshots are kept.
pub(crate) struct Shelf {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    /// What is on the shelf. Held while a snapshot is put there, so that one that is built and one
    /// that is installed at the same time do not remove each other.
    newest: Mutex<Option<SnapshotMeta>>,
    received: AtomicU64,
}

/// The newest snapshot as found at start, checked.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) checked: Checked,
    pub(crate) file: SnapshotFile,
}

impl Shelf {
    /// Opens or makes the folder and reads the newest snapshot. What a crash left half-written is
    /// removed.
    ///
    /// # Errors
    /// [`Error::Damaged`] or [`Error::UnknownFormat`] for the newest snapshot. An older one that a
    /// crash left beside it is no substitute: the log no longer has what lies between.
    pub(crate) fn open(fs: Arc<dyn Fs>, dir: PathBuf) -> Result<(Self, Option<Found>), Error> {
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

    /// Keeps a snapshot instead of the one before it. Durable on return. A snapshot that is no newer
    /// than the one there is dropped: the log may already begin behind the newer. After a failure the
    /// same snapshot may be put again.
    pub(crate) fn put(&self, meta: &SnapshotMeta, state: &WriteState<'_>) -> Result<(), Error> {
        let encoding = Encoding::of(meta, state)?;
        self.place(meta, |file| encoding.write_to(file))
    }

    /// The same with a snapshot that was received and checked.
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

    /// The newest snapshot, open.
    pub(crate) fn newest(&self) -> Result<Option<(SnapshotMeta, SnapshotFile)>, Error> {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(meta) = &*newest else { return Ok(None) };
        let path = self.dir.join(name(meta));
        let file = self.fs.open(&path).map_err(Error::io("opening", &path))?;
        Ok(Some((meta.clone(), SnapshotFile::kept(path, file))))
    }

    /// An empty file to receive a snapshot into.
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

/// Makes the files that snapshots are received into. Unlike openraft's own way, which halts the node
/// where no file can be made, this one refuses a single snapshot: its sender tries again.
#[derive(Clone)]
pub struct SnapshotReceiver(Arc<Shelf>);

impl SnapshotReceiver {
    pub(crate) fn new(shelf: Arc<Shelf>) -> Self {
        Self(shelf)
    }

    /// Makes an empty file. Blocks.
    ///
    /// # Errors
    /// [`Error::Io`], also when no descriptor or no space is left.
    pub fn begin(&self) -> Result<SnapshotFile, Error> {
        self.0.fs.refill();
        self.0.receive()
    }

    /// Checks that the disk has space beside what the log may come to need. Blocks.
    ///
    /// # Errors
    /// [`Error::NoSpace`] or [`Error::Io`].
    pub fn check_space(&self) -> Result<(), Error> {
        let disk = rustix::fs::statvfs(&self.0.dir).map_err(|error| error.into());
        let disk = disk.map_err(Error::io("looking at the space of", &self.0.dir))?;
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

/// Makes the folder and clears it of what is half-written; the newest snapshot's name.
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
            newest = Some(name); // Names sort as their indexes do.
        }
    }
    // A rename whose sync the power cut short is seen here, and must not vanish once it was.
    fs.sync_dir(dir)?;
    Ok(newest)
}

fn read(fs: &dyn Fs, path: PathBuf) -> Result<Found, Error> {
    let file = fs.open(&path).map_err(Error::io("opening", &path))?;
    let file = SnapshotFile::kept(path.clone(), file);
    let checked = file.check()?;
    let holds = name(&checked.meta);
    if path.file_name().and_then(|name| name.to_str()) != Some(&holds) {
        return Err(Error::Damaged { what: file.what(), flaw: format!("it holds {holds}") });
    }
    Ok(Found { checked, file })
}

fn name(meta: &SnapshotMeta) -> String {
    format!("{}{ENDING}", id(meta.last_log_id))
}

/// A snapshot's id, `<index, 20 digits>-<term>`: the same log gives the same state and the
/// same bytes, so its position says it all. Ids sort as their indexes do.
pub(crate) fn id(last: Option<LogId>) -> String {
    let last = last.unwrap_or_default();
    format!("{:020}-{}", last.index, last.leader_id.term)
}
