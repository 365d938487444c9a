//! An open snapshot, which the network layer sends or fills.

use std::fmt;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Arc;

use super::format::{self, SnapshotLayout};
use crate::error::Error;
use crate::fs::{Fs, FsFile};

/// The open file of a snapshot. Its contents stay readable after a newer snapshot replaced it.
///
/// To send a snapshot, call [`Self::read_at`] up to [`Self::size`]. To receive a snapshot, take the
/// file from `begin_receiving_snapshot`, [`Self::append`] the received bytes, and call
/// [`Self::verify`] before `install_full_snapshot`, because openraft halts the node if a snapshot
/// cannot be installed. The file of a received snapshot is deleted when this value is dropped.
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

    /// Returns the length in bytes.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    /// Reads at an offset. Returns the number of bytes, 0 at the end.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(offset, into)
    }

    /// Appends received bytes.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.append(bytes)
    }

    /// Checks the whole file against its checksum. Reads the whole file, so do not call it on an
    /// async thread.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::UnknownFormat`] or [`Error::Io`].
    pub fn verify(&self) -> Result<(), Error> {
        self.check().map(drop)
    }

    /// Checks the whole file, and returns its metadata and the position of the state.
    pub(crate) fn check(&self) -> Result<SnapshotLayout, Error> {
        let checked = format::check(&*self.file).map_err(Error::io("reading", &self.path))?;
        checked.map_err(|flaw| Error::flaw(self.what(), flaw))
    }

    /// Returns a reader of the machine's state, which reads in pieces.
    pub(crate) fn state(&self, checked: &SnapshotLayout) -> impl Read {
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
            // The next start removes the file.
            tracing::warn!(%error, path = %self.path.display(), "cannot remove a received snapshot: the next start removes it");
        }
    }
}

impl fmt::Debug for SnapshotFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SnapshotFile").field(&self.path).finish()
    }
}
