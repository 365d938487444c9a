//! Model files on disk. All functions block, so callers run on blocking threads.
//!
//! `<data>/artifacts/<64 hex digits>` is a complete file with this SHA-256. `incoming/` holds
//! unfinished uploads, and is emptied at start. `<64 hex digits>.damaged` is the former only copy of a
//! file, found damaged. No other names exist, so no file is ever partial.
//!
//! A part of the disk stays free. A file that would exceed this limit is refused at the announcement,
//! and again during the transfer, because other writers may fill the disk meanwhile.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::StatVfs;

use millrace_types::digest::Hasher;
use millrace_types::{Bytes, Digest, Failure, Reason};

const INCOMING: &str = "incoming";
const DAMAGED: &str = ".damaged";

/// Error of a file operation, or of bytes that do not match the announced size or digest.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{doing} {}: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "the received bytes have digest {actual}, not {claimed}: the file changed or was damaged in transit; upload the model again"
    )]
    Digest { claimed: Digest, actual: Digest },
    #[error("received {received} of {claimed} bytes: the upload ended early; upload the model again")]
    Short { received: u64, claimed: u64 },
    #[error("received more than the {claimed} announced bytes: announce the file's size")]
    Long { claimed: u64 },
    #[error(
        "{} has {} free of {}, and a model file of {bytes} must leave {}: free space on that disk, or delete functions; unused files are removed after an hour",
        dir.display(),
        space.available,
        space.total,
        space.floor()
    )]
    Full { dir: PathBuf, space: Space, bytes: Bytes },
    #[error("artifact {digest} on this controller's disk is damaged: upload the model again")]
    Damaged { digest: Digest },
    #[error("artifact {digest} is not on this controller's disk")]
    Missing { digest: Digest },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let reason = match &error {
            Error::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => Reason::StorageFull,
            Error::Full { .. } => Reason::StorageFull,
            Error::Io { .. } => Reason::Internal,
            Error::Digest { .. } | Error::Damaged { .. } => Reason::DigestMismatch,
            Error::Short { .. } | Error::Long { .. } => Reason::MalformedRequest,
            Error::Missing { .. } => Reason::ArtifactNotFound,
        };
        Failure::new(reason, error.to_string())
    }
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { doing, path, source }
}

/// The space of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space {
    total: Bytes,
    available: Bytes,
}

/// The divisor of the disk size that gives the space that model files leave free, for snapshots and
/// other files.
const FREE_PART: u64 = 10;
/// The maximum space that model files leave free: the expected size of the replicated state.
const FREE_MAX: Bytes = Bytes(1 << 30);
/// Bytes of a file between two checks of the space.
const LOOK_EVERY: u64 = 8 << 20;

impl Space {
    /// Returns the space of the disk of a directory.
    fn of(dir: &Path) -> io::Result<Self> {
        let StatVfs { f_blocks, f_bavail, f_frsize, .. } = rustix::fs::statvfs(dir)?;
        let bytes = |blocks: u64| Bytes(blocks.saturating_mul(f_frsize));
        Ok(Self { total: bytes(f_blocks), available: bytes(f_bavail) })
    }

    /// Returns the space that must stay free. The log's reserve is already in use, or is not larger
    /// than this.
    fn floor(self) -> Bytes {
        Bytes(self.total.get() / FREE_PART).min(FREE_MAX)
    }

    fn takes(self, bytes: u64) -> bool {
        self.available.get().saturating_sub(bytes) >= self.floor().get()
    }
}

/// The disk of a directory.
#[derive(Debug, Clone)]
struct Disk {
    dir: PathBuf,
    /// The function that measures the space; tests replace it to simulate a full disk.
    look: fn(&Path) -> io::Result<Space>,
}

impl Disk {
    /// Refuses `more` further bytes of a file of `bytes` if too little space would stay free.
    fn check_space(&self, bytes: Bytes, more: u64) -> Result<(), Error> {
        let space = (self.look)(&self.dir).map_err(io_error("cannot measure the space of", &self.dir))?;
        if space.takes(more) {
            return Ok(());
        }
        Err(Error::Full { dir: self.dir.clone(), space, bytes })
    }
}

/// The files of one data directory.
#[derive(Debug)]
pub(crate) struct ArtifactStore {
    dir: PathBuf,
    next_incoming: AtomicU64,
    disk: Disk,
}

impl ArtifactStore {
    /// Opens `<data>/artifacts`, and removes the remains of unfinished uploads.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, Error> {
        Self::open_on(data_dir, Space::of)
    }

    fn open_on(data_dir: &Path, look: fn(&Path) -> io::Result<Space>) -> Result<Self, Error> {
        let dir = data_dir.join("artifacts");
        let incoming = dir.join(INCOMING);
        if incoming.exists() {
            fs::remove_dir_all(&incoming).map_err(io_error("cannot empty", &incoming))?;
        }
        fs::create_dir_all(&incoming).map_err(io_error("cannot create", &incoming))?;
        let disk = Disk { dir: dir.clone(), look };
        let store = Self { dir, next_incoming: AtomicU64::new(0), disk };
        store.sync_dir()?;
        Ok(store)
    }

    fn path(&self, digest: Digest) -> PathBuf {
        self.dir.join(digest.hex())
    }

    fn sync_dir(&self) -> Result<(), Error> {
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(io_error("cannot sync", &self.dir))
    }

    /// Starts to receive a file with this digest and size.
    pub(crate) fn begin(&self, digest: Digest, bytes: Bytes) -> Result<ArtifactWriter, Error> {
        self.disk.check_space(bytes, bytes.get())?;
        let number = self.next_incoming.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(INCOMING).join(format!("{}.{number}", digest.hex()));
        let file = File::options().write(true).create_new(true).open(&path);
        let file = file.map_err(io_error("cannot create", &path))?;
        let hasher = Hasher::default();
        let disk = self.disk.clone();
        Ok(ArtifactWriter {
            file,
            path: Temporary(path),
            hasher,
            digest,
            bytes,
            received: 0,
            looked_at: 0,
            disk,
        })
    }

    /// Renames a finished upload to its final name, durably.
    pub(crate) fn publish(&self, verified: &Verified) -> Result<(), Error> {
        let from = &verified.path.0;
        let to = self.path(verified.digest);
        fs::rename(from, &to).map_err(io_error("cannot rename", from))?;
        self.sync_dir()
    }

    /// Removes a file and the damaged copy, durably. A missing file counts as removed.
    pub(crate) fn remove(&self, digest: Digest) -> Result<(), Error> {
        for path in [self.path(digest), self.aside(digest)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(io_error("cannot remove", &path)(error));
                }
                _ => {}
            }
        }
        self.sync_dir()
    }

    /// Renames a damaged file, so that a sound file can take its place.
    pub(crate) fn set_aside(&self, digest: Digest) -> Result<(), Error> {
        let path = self.path(digest);
        fs::rename(&path, self.aside(digest)).map_err(io_error("cannot rename", &path))?;
        self.sync_dir()
    }

    fn aside(&self, digest: Digest) -> PathBuf {
        self.dir.join(format!("{}{DAMAGED}", digest.hex()))
    }

    /// Whether a file with this digest and size exists.
    pub(crate) fn has(&self, digest: Digest, bytes: Bytes) -> bool {
        fs::metadata(self.path(digest)).is_ok_and(|metadata| metadata.len() == bytes.get())
    }

    /// Returns every file, including damaged files that were set aside.
    pub(crate) fn list(&self) -> Result<Vec<ListedFile>, Error> {
        let cannot = || io_error("cannot list", &self.dir);
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(cannot())? {
            let entry = entry.map_err(cannot())?;
            let name = entry.file_name();
            let hex = name.to_str().map(|name| name.strip_suffix(DAMAGED).unwrap_or(name));
            let digest = hex.and_then(|hex| format!("sha256:{hex}").parse().ok());
            if let Some(digest) = digest {
                let metadata = entry.metadata().map_err(cannot())?;
                let written = metadata.modified().map_err(cannot())?;
                files.push(ListedFile { digest, bytes: metadata.len(), written });
            }
        }
        files.sort_unstable_by_key(|file: &ListedFile| file.digest);
        Ok(files)
    }

    /// Opens a file for reading.
    pub(crate) fn open_file(&self, digest: Digest) -> Result<ArtifactReader, Error> {
        let path = self.path(digest);
        let file = File::open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::Missing { digest },
            _ => io_error("cannot open", &path)(error),
        })?;
        Ok(ArtifactReader { file, path, hasher: Hasher::default(), digest })
    }
}

/// A file in a listing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListedFile {
    pub(crate) digest: Digest,
    pub(crate) bytes: u64,
    /// The time of the last write.
    pub(crate) written: SystemTime,
}

/// A file that is removed on drop unless renamed before.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            // The next start empties the directory, so a warning suffices.
            tracing::warn!(path = %self.0.display(), %error, "cannot remove an unfinished upload");
        }
    }
}

/// An upload in progress. Dropping the value removes the file.
#[derive(Debug)]
pub(crate) struct ArtifactWriter {
    file: File,
    path: Temporary,
    hasher: Hasher,
    digest: Digest,
    bytes: Bytes,
    received: u64,
    /// The received bytes at the last check of the space.
    looked_at: u64,
    disk: Disk,
}

impl ArtifactWriter {
    /// Writes the next bytes.
    pub(crate) fn write(&mut self, chunk: &[u8]) -> Result<(), Error> {
        self.received += chunk.len() as u64;
        if self.received > self.bytes.get() {
            return Err(Error::Long { claimed: self.bytes.get() });
        }
        if self.received - self.looked_at >= LOOK_EVERY {
            self.looked_at = self.received;
            self.disk.check_space(self.bytes, chunk.len() as u64)?;
        }
        self.hasher.update(chunk);
        self.file.write_all(chunk).map_err(io_error("cannot write", &self.path.0))
    }

    /// Verifies the received bytes and makes the file durable.
    pub(crate) fn finish(self) -> Result<Verified, Error> {
        if self.received < self.bytes.get() {
            return Err(Error::Short { received: self.received, claimed: self.bytes.get() });
        }
        let actual = self.hasher.finish();
        if actual != self.digest {
            return Err(Error::Digest { claimed: self.digest, actual });
        }
        self.file.sync_all().map_err(io_error("cannot sync", &self.path.0))?;
        Ok(Verified { path: self.path, digest: self.digest, bytes: self.bytes })
    }
}

/// A complete, durable and verified upload. Dropping the value before publication removes the file.
#[derive(Debug)]
pub(crate) struct Verified {
    path: Temporary,
    digest: Digest,
    bytes: Bytes,
}

impl Verified {
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Opens the file for reading from the beginning.
    pub(crate) fn open(&self) -> Result<File, Error> {
        File::open(&self.path.0).map_err(io_error("cannot open", &self.path.0))
    }
}

/// A file being read. The last read verifies the digest of the whole file.
#[derive(Debug)]
pub(crate) struct ArtifactReader {
    file: File,
    path: PathBuf,
    hasher: Hasher,
    digest: Digest,
}

impl ArtifactReader {
    /// Returns the next bytes, at most `most`; `None` at the end of a sound file.
    pub(crate) fn read(&mut self, most: usize) -> Result<Option<Vec<u8>>, Error> {
        let mut chunk = Vec::with_capacity(most);
        let read = (&self.file).take(most as u64).read_to_end(&mut chunk);
        if read.map_err(io_error("cannot read", &self.path))? > 0 {
            self.hasher.update(&chunk);
            return Ok(Some(chunk));
        }
        if self.hasher.clone().finish() == self.digest {
            Ok(None)
        } else {
            Err(Error::Damaged { digest: self.digest })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: &[u8] = b"a model file";

    fn store() -> (tempfile::TempDir, ArtifactStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = ArtifactStore::open(dir.path()).unwrap();
        (dir, store)
    }

    fn files(dir: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for sub in [dir.join("artifacts"), dir.join("artifacts").join(INCOMING)] {
            for entry in fs::read_dir(sub).unwrap() {
                let entry = entry.unwrap();
                if entry.metadata().unwrap().is_file() {
                    found.push(entry.file_name().into_string().unwrap());
                }
            }
        }
        found
    }

    fn receive(store: &ArtifactStore, digest: Digest, claimed: u64, bytes: &[u8]) -> Result<Verified, Error> {
        let mut incoming = store.begin(digest, Bytes(claimed))?;
        incoming.write(bytes)?;
        incoming.finish()
    }

    fn read_all(store: &ArtifactStore, digest: Digest) -> Result<Vec<u8>, Error> {
        let mut file = store.open_file(digest)?;
        let mut all = Vec::new();
        while let Some(chunk) = file.read(5)? {
            all.extend(chunk);
        }
        Ok(all)
    }

    #[test]
    fn a_published_file_is_stored_under_its_digest_only() {
        let (dir, store) = store();
        let digest = Digest::of(BYTES);
        let verified = receive(&store, digest, BYTES.len() as u64, BYTES).unwrap();
        assert!(!store.has(digest, Bytes(BYTES.len() as u64)), "before the file is published");
        store.publish(&verified).unwrap();
        drop(verified);
        assert_eq!(files(dir.path()), vec![digest.hex()]);
        assert_eq!(read_all(&store, digest).unwrap(), BYTES);
        store.remove(digest).unwrap();
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn a_refused_upload_leaves_no_file() {
        let (dir, store) = store();
        let digest = Digest::of(BYTES);
        let len = BYTES.len() as u64;
        assert!(matches!(receive(&store, Digest::of(b"x"), len, BYTES), Err(Error::Digest { .. })));
        assert!(matches!(receive(&store, digest, len + 1, BYTES), Err(Error::Short { .. })));
        assert!(matches!(receive(&store, digest, len - 1, BYTES), Err(Error::Long { .. })));
        drop(store.begin(digest, Bytes(len)).unwrap());
        drop(receive(&store, digest, len, BYTES).unwrap());
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn a_tenth_of_the_disk_but_at_most_a_gibibyte_stays_free() {
        let space = |available| Space { total: Bytes(1_000), available: Bytes(available) };
        assert!(space(500).takes(400));
        assert!(!space(500).takes(401));
        assert!(!space(99).takes(0));
        let large = Space { total: Bytes::gib(10_000), available: Bytes::gib(100) };
        assert_eq!(large.floor(), Bytes::gib(1));
    }

    #[test]
    fn a_disk_that_fills_during_an_upload_refuses_the_rest() {
        /// Returns a nearly full disk once an upload has begun.
        fn fills(dir: &Path) -> io::Result<Space> {
            let begun = fs::read_dir(dir.join(INCOMING))?.count() > 0;
            let available = if begun { Bytes::mib(512) } else { Bytes::gib(9) };
            Ok(Space { total: Bytes::gib(20), available })
        }
        let dir = tempfile::tempdir().unwrap();
        let store = ArtifactStore::open_on(dir.path(), fills).unwrap();
        let announced = store.begin(Digest::of(BYTES), Bytes::mib(8_704)).unwrap_err().to_string();
        assert!(announced.contains("has 9.0 GiB free of 20.0 GiB"), "{announced}");
        assert!(announced.contains("a model file of 8.5 GiB must leave 1.0 GiB: free space"), "{announced}");

        let mut incoming = store.begin(Digest::of(BYTES), Bytes::gib(1)).unwrap();
        let chunk = vec![0; 1 << 20];
        let refused = (0..64).find_map(|_| incoming.write(&chunk).err()).unwrap();
        let failure = Failure::from(refused);
        assert_eq!((failure.reason, failure.retryable), (Reason::StorageFull, true));
        drop(incoming);
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn the_next_start_removes_an_upload_interrupted_by_a_crash() {
        let (dir, store) = store();
        let incoming = store.begin(Digest::of(BYTES), Bytes(1)).unwrap();
        std::mem::forget(incoming);
        assert_eq!(files(dir.path()).len(), 1);
        ArtifactStore::open(dir.path()).unwrap();
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn a_damaged_file_is_detected_when_read() {
        let (dir, store) = store();
        let digest = Digest::of(BYTES);
        store.publish(&receive(&store, digest, BYTES.len() as u64, BYTES).unwrap()).unwrap();
        fs::write(dir.path().join("artifacts").join(digest.hex()), b"a model fLle").unwrap();
        assert!(matches!(read_all(&store, digest), Err(Error::Damaged { .. })));
        assert!(matches!(read_all(&store, Digest::of(b"x")), Err(Error::Missing { .. })));
        store.set_aside(digest).unwrap();
        assert!(!store.has(digest, Bytes(BYTES.len() as u64)), "a sound file may be uploaded");
        assert_eq!(store.list().unwrap().len(), 1, "the damaged file is collected with its record");
        store.remove(digest).unwrap();
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }
}
