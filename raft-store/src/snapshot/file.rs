//! An open snapshot: what openraft hands to the network, and what the network fills.

use std::fmt;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;

use super::format::{self, Checked};
use crate::error::Error;
use crate::fs::{Fs, FsFile};

/// A snapshot's file, open. Its contents stay readable after a newer snapshot took its place.
///
/// To send one: [`Self::read_at`] up to [`Self::size`]. To receive one: take it from
/// `begin_receiving_snapshot`, [`Self::append`] what comes, and [`Self::verify`] before
/// `install_full_snapshot`, because openraft halts the node on a snapshot that does not install.
/// One that was being received is deleted when dropped.
pub struct SnapshotFile {
    path: PathBuf,
    file: Box<dyn FsFile>,
    received_on: Option<Arc<dyn Fs>>,
}

impl SnapshotFile {
    pub(super) fn kept(path: PathBuf, file: Box<dyn FsFile>) -> Self {
        Self { path, file, received_on: None }
    }

    pub(super) fn receiving(path: PathBuf, file: Box<dyn FsFile>, fs: Arc<dyn Fs>) -> Self {
        Self { path, file, received_on: Some(fs) }
    }

    /// Its length in bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    /// Reads at an offset; 0 bytes at the end.
    ///
    /// # Errors
    /// The system's.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(offset, into)
    }

    /// Adds received bytes at the end.
    ///
    /// # Errors
    /// The system's.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.append(bytes)
    }

    /// Checks all of it against its checksum. Reads the whole file: not for an async thread.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::UnknownFormat`] or [`Error::Io`].
    pub fn verify(&self) -> Result<(), Error> {
        self.check().map(drop)
    }

    /// Checks all of the file, and says what is in it.
    pub(crate) fn check(&self) -> Result<Checked, Error> {
        let checked = format::check(&*self.file).map_err(Error::io("reading", &self.path))?;
        checked.map_err(|flaw| Error::flaw(self.what(), flaw))
    }

    /// The machine's state, a piece at a time.
    pub(crate) fn state(&self, checked: &Checked) -> impl Read {
        checked.state(&*self.file)
    }

    pub(super) fn copy_to(&self, to: &mut dyn FsFile) -> io::Result<()> {
        format::copy(&*self.file, to)
    }

    pub(crate) fn what(&self) -> String {
        format!("snapshot {}", self.path.display())
    }
}

impl Drop for SnapshotFile {
    fn drop(&mut self) {
        if let Some(fs) = &self.received_on
            && let Err(error) = fs.remove(&self.path)
        {
            // Removed at the next start.
            tracing::warn!(%error, path = %self.path.display(), "a received snapshot stays behind");
        }
    }
}

impl fmt::Debug for SnapshotFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SnapshotFile").field(&self.path).finish()
    }
}
