//! The store of model artifacts on this worker's disk, named by their SHA-256.
//!
//! A file gets its name only when the file is complete: a file is written to `<hex>.tmp-<n>`, checked
//! against its digest, fsynced and renamed, and the folder is fsynced. Every read checks the digest
//! again, and deletes a file that fails, so a read returns the artifact or nothing. All functions block:
//! call them off the actor thread.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_types::digest::Hasher;
use millrace_types::{Bytes, Digest};

/// The reason why an artifact could not be stored or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The received bytes have another digest than the requested artifact.
    #[error("the received artifact has the digest {found}, not {expected}")]
    Mismatch {
        /// The digest of the requested artifact.
        expected: Digest,
        /// The digest of the received bytes.
        found: Digest,
    },
    /// The artifact has more bytes than announced.
    #[error("the received artifact is larger than the announced {announced}")]
    TooLong {
        /// The size in the desired state.
        announced: Bytes,
    },
    /// The file system refused an operation, most often because the disk is full.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// The folder of artifacts. Clones share the folder.
#[derive(Debug, Clone)]
pub struct ModelFileStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    next_tmp: AtomicU64,
}

impl ModelFileStore {
    /// Opens the folder or creates a missing folder, and removes half-written files of a crash.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(dir: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(at(dir))?;
        let store = Self(Arc::new(Inner { dir: dir.to_owned(), next_tmp: AtomicU64::new(0) }));
        for name in store.names()? {
            if name.contains(".tmp-") {
                remove(&dir.join(name))?;
            }
        }
        Ok(store)
    }

    /// Returns the artifact's bytes after a check of their digest. Returns `None` if the artifact is
    /// missing or damaged. A damaged file is deleted and has to be fetched again. A file that is larger
    /// than announced counts as damaged and is not read, because host memory was reserved for the
    /// announced size.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(&self, digest: Digest, announced: Bytes) -> Result<Option<Vec<u8>>, Error> {
        let path = self.path(digest);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(at(&path)(error)),
        };
        let found = file.metadata().map_err(at(&path))?.len();
        if found <= announced.get() {
            let mut bytes = Vec::new();
            // Reserved fallibly: memory that is missing now may be free at the next try.
            bytes
                .try_reserve_exact(usize::try_from(found).unwrap_or(usize::MAX))
                .map_err(|_| at(&path)(io::ErrorKind::OutOfMemory.into()))?;
            // `take` bounds the read. A file that grows meanwhile fails the check of its digest.
            (&mut file).take(found).read_to_end(&mut bytes).map_err(at(&path))?;
            if Digest::of(&bytes) == digest {
                return Ok(Some(bytes));
            }
        }
        tracing::warn!(
            path = %path.display(),
            bytes = found,
            "an artifact on the disk is damaged: it is deleted and fetched again"
        );
        remove(&path)?;
        Ok(None)
    }

    /// Begins to write an artifact of at most `announced` bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(&self, digest: Digest, announced: Bytes) -> Result<ModelFileWriter, Error> {
        let number = self.0.next_tmp.fetch_add(1, Ordering::Relaxed);
        let tmp = self.0.dir.join(format!("{}.tmp-{number}", digest.hex()));
        let file = File::create_new(&tmp).map_err(at(&tmp))?;
        Ok(ModelFileWriter {
            file,
            tmp,
            path: self.path(digest),
            dir: self.0.dir.clone(),
            expected: digest,
            hasher: Hasher::default(),
            announced,
            left: announced.get(),
        })
    }

    /// Deletes every artifact for which `keep` returns false.
    ///
    /// # Errors
    /// [`Error::Io`] for the first artifact that cannot be deleted. Later artifacts stay.
    pub fn retain(&self, keep: impl Fn(Digest) -> bool) -> Result<(), Error> {
        for name in self.names()? {
            let digest = format!("sha256:{name}").parse::<Digest>();
            if digest.is_ok_and(|digest| !keep(digest)) {
                remove(&self.0.dir.join(name))?;
            }
        }
        Ok(())
    }

    /// Deletes an artifact, if it exists.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove(&self, digest: Digest) -> Result<(), Error> {
        remove(&self.path(digest))
    }

    fn path(&self, digest: Digest) -> PathBuf {
        self.0.dir.join(digest.hex())
    }

    fn names(&self) -> Result<Vec<String>, Error> {
        let dir = &self.0.dir;
        let mut names = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(at(dir))? {
            // The store creates only UTF-8 names, so other files belong to someone else.
            if let Ok(name) = entry.map_err(at(dir))?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }
}

/// An artifact that is being written. A writer that is dropped before [`ModelFileWriter::commit`] deletes its file.
#[derive(Debug)]
pub struct ModelFileWriter {
    file: File,
    tmp: PathBuf,
    path: PathBuf,
    dir: PathBuf,
    expected: Digest,
    hasher: Hasher,
    announced: Bytes,
    left: u64,
}

impl ModelFileWriter {
    /// Appends bytes.
    ///
    /// # Errors
    /// [`Error::TooLong`] beyond the announced size, [`Error::Io`].
    pub fn write(&mut self, chunk: &[u8]) -> Result<(), Error> {
        self.left =
            self.left.checked_sub(chunk.len() as u64).ok_or(Error::TooLong { announced: self.announced })?;
        self.hasher.update(chunk);
        self.file.write_all(chunk).map_err(at(&self.tmp))
    }

    /// Checks the digest and renames the file to its final name, durably.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the bytes have another digest, [`Error::Io`].
    pub fn commit(self) -> Result<(), Error> {
        let found = self.hasher.clone().finish();
        if found != self.expected {
            return Err(Error::Mismatch { expected: self.expected, found });
        }
        self.file.sync_all().map_err(at(&self.tmp))?;
        std::fs::rename(&self.tmp, &self.path).map_err(at(&self.path))?;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(at(&self.dir))
    }
}

impl Drop for ModelFileWriter {
    fn drop(&mut self) {
        // After a commit the temporary file no longer exists, and `remove` does nothing.
        if let Err(error) = remove(&self.tmp) {
            tracing::warn!(%error, "cannot delete a half-written artifact: the next start deletes it");
        }
    }
}

fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path)(error)),
        _ => Ok(()),
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    |source| Error::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, ModelFileStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = ModelFileStore::open(dir.path()).unwrap();
        (dir, store)
    }

    fn put(store: &ModelFileStore, bytes: &[u8]) -> Digest {
        let digest = Digest::of(bytes);
        let mut writer = store.create(digest, Bytes(bytes.len() as u64)).unwrap();
        bytes.chunks(3).for_each(|chunk| writer.write(chunk).unwrap());
        writer.commit().unwrap();
        digest
    }

    #[test]
    fn a_committed_artifact_is_readable_after_a_restart() {
        let (dir, store) = store();
        let digest = put(&store, b"a model");
        assert_eq!(store.names().unwrap(), [digest.hex()]);
        let again = ModelFileStore::open(dir.path()).unwrap();
        assert_eq!(again.read(digest, Bytes(7)).unwrap().as_deref(), Some(&b"a model"[..]));
    }

    #[test]
    fn bytes_of_another_digest_leave_nothing() {
        let (_dir, store) = store();
        let mut writer = store.create(Digest::of(b"good"), Bytes(10)).unwrap();
        writer.write(b"evil").unwrap();
        assert!(matches!(writer.commit(), Err(Error::Mismatch { .. })));
        assert_eq!(store.names().unwrap(), [""; 0]);
        assert!(store.read(Digest::of(b"good"), Bytes(4)).unwrap().is_none());
    }

    #[test]
    fn an_abandoned_or_overlong_write_leaves_nothing() {
        let (_dir, store) = store();
        let mut writer = store.create(Digest::of(b"good"), Bytes(4)).unwrap();
        writer.write(b"goo").unwrap();
        assert!(matches!(writer.write(b"do"), Err(Error::TooLong { .. })));
        drop(writer);
        assert_eq!(store.names().unwrap(), [""; 0]);
    }

    #[test]
    fn a_damaged_file_is_deleted_when_read() {
        let (_dir, store) = store();
        let digest = put(&store, b"a model");
        std::fs::write(store.path(digest), b"a mode!").unwrap();
        assert!(store.read(digest, Bytes(7)).unwrap().is_none());
        assert!(!store.path(digest).exists());
    }

    #[test]
    fn a_file_larger_than_announced_is_damaged_and_not_read() {
        let (_dir, store) = store();
        let digest = put(&store, b"a model");
        // The file is sparse, and larger than any memory.
        File::options().write(true).open(store.path(digest)).unwrap().set_len(1 << 42).unwrap();
        assert!(store.read(digest, Bytes(7)).unwrap().is_none());
        assert!(!store.path(digest).exists());
    }

    #[test]
    fn opening_deletes_the_half_written_files_of_a_crash() {
        let (dir, store) = store();
        let digest = put(&store, b"a model");
        std::fs::write(dir.path().join("abc.tmp-7"), b"half").unwrap();
        assert_eq!(ModelFileStore::open(dir.path()).unwrap().names().unwrap(), [digest.hex()]);
    }

    #[test]
    fn retain_deletes_only_artifacts_that_are_not_kept() {
        let (_dir, store) = store();
        let a = put(&store, b"a");
        let b = put(&store, b"b");
        store.retain(|digest| digest == a).unwrap();
        assert!(store.path(a).exists() && !store.path(b).exists());
    }
}
