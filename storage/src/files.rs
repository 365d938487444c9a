//! Model files on disk, named by their SHA-256. All functions block, so callers run on blocking threads.
//!
//! `<folder>/<64 hex digits>` is a complete file with this SHA-256. `incoming/` holds unfinished files,
//! and is emptied at start. `<64 hex digits>.damaged` is the former only copy of a file, found damaged.
//! No file with another name is read, so no file is ever partial.
//!
//! A part of the disk stays free ([`space`](crate::space)). A file that would exceed this limit is
//! refused at the announcement, and again during the transfer, because other writers may fill the disk
//! meanwhile.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use millrace_types::digest::Hasher;
use millrace_types::{Bytes, Digest};

use crate::disk::Disk;
use crate::error::{Error, io_error};
use crate::space::Space;

const INCOMING: &str = "incoming";
const DAMAGED: &str = ".damaged";
/// The part of a name that workers of earlier builds gave to unfinished files.
const UNFINISHED: &str = ".tmp-";
/// Bytes of a file between two checks of the space.
const LOOK_EVERY: u64 = 8 << 20;

/// The files of one folder. Clones share the folder.
#[derive(Debug, Clone)]
pub struct FileStore {
    dir: PathBuf,
    next_incoming: Arc<AtomicU64>,
    disk: Disk,
}

impl FileStore {
    /// Opens the folder or creates a missing folder, and removes the remains of unfinished files.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(dir: &Path) -> Result<Self, Error> {
        Self::open_on(dir, Space::of)
    }

    fn open_on(dir: &Path, look: fn(&Path) -> io::Result<Space>) -> Result<Self, Error> {
        let dir = dir.to_owned();
        let incoming = dir.join(INCOMING);
        if incoming.exists() {
            fs::remove_dir_all(&incoming).map_err(io_error("cannot empty", &incoming))?;
        }
        fs::create_dir_all(&incoming).map_err(io_error("cannot create", &incoming))?;
        let disk = Disk::new(dir.clone(), look);
        let store = Self { dir, next_incoming: Arc::default(), disk };
        for entry in store.entries()? {
            if entry.file_name().to_string_lossy().contains(UNFINISHED) {
                remove(&entry.path())?;
            }
        }
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
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Io`].
    pub fn begin(&self, digest: Digest, bytes: Bytes) -> Result<FileWriter, Error> {
        self.disk.check_space(bytes, bytes.get())?;
        let number = self.next_incoming.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(INCOMING).join(format!("{}.{number}", digest.hex()));
        let file = File::options().write(true).create_new(true).open(&path);
        let file = file.map_err(io_error("cannot create", &path))?;
        let hasher = Hasher::default();
        let disk = self.disk.clone();
        Ok(FileWriter { file, path: Temporary(path), hasher, digest, bytes, received: 0, looked_at: 0, disk })
    }

    /// Renames a verified file to its final name, durably.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn publish(&self, verified: &VerifiedFile) -> Result<(), Error> {
        let from = &verified.path.0;
        let to = self.path(verified.digest);
        fs::rename(from, &to).map_err(io_error("cannot rename", from))?;
        self.sync_dir()
    }

    /// Removes a file and the damaged copy, durably. A missing file counts as removed.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove(&self, digest: Digest) -> Result<(), Error> {
        for path in [self.path(digest), self.aside(digest)] {
            remove(&path)?;
        }
        self.sync_dir()
    }

    /// Renames a damaged file, so that a sound file can take its place.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn set_aside(&self, digest: Digest) -> Result<(), Error> {
        let path = self.path(digest);
        fs::rename(&path, self.aside(digest)).map_err(io_error("cannot rename", &path))?;
        self.sync_dir()
    }

    fn aside(&self, digest: Digest) -> PathBuf {
        self.dir.join(format!("{}{DAMAGED}", digest.hex()))
    }

    /// Whether a file with this digest and size exists.
    pub fn has(&self, digest: Digest, bytes: Bytes) -> bool {
        fs::metadata(self.path(digest)).is_ok_and(|metadata| metadata.len() == bytes.get())
    }

    /// Returns every file, including damaged files that were set aside.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn list(&self) -> Result<Vec<ListedFile>, Error> {
        let cannot = || io_error("cannot list", &self.dir);
        let mut files = Vec::new();
        for entry in self.entries()? {
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

    fn entries(&self) -> Result<Vec<fs::DirEntry>, Error> {
        let cannot = || io_error("cannot list", &self.dir);
        let entries = fs::read_dir(&self.dir).map_err(cannot())?;
        entries.collect::<Result<_, _>>().map_err(cannot())
    }

    /// Removes every file for which `keep` returns false.
    ///
    /// # Errors
    /// [`Error::Io`] for the first file that cannot be removed. Later files stay.
    pub fn retain(&self, keep: impl Fn(Digest) -> bool) -> Result<(), Error> {
        for file in self.list()? {
            if !keep(file.digest) {
                self.remove(file.digest)?;
            }
        }
        Ok(())
    }

    /// Reads a whole file into memory, after a check of the digest. Returns `None` if the file is
    /// missing or damaged. A damaged file is removed and has to be fetched again. A file that is larger
    /// than announced counts as damaged and is not read, because memory was reserved for the announced
    /// size.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read_all(&self, digest: Digest, announced: Bytes) -> Result<Option<Vec<u8>>, Error> {
        let path = self.path(digest);
        let cannot = || io_error("cannot read", &path);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(cannot()(error)),
        };
        let found = file.metadata().map_err(cannot())?.len();
        if found <= announced.get() {
            let mut bytes = Vec::new();
            // Reserved fallibly: memory that is missing now may be free at the next try.
            bytes
                .try_reserve_exact(usize::try_from(found).unwrap_or(usize::MAX))
                .map_err(|_| cannot()(io::ErrorKind::OutOfMemory.into()))?;
            // `take` bounds the read. A file that grows meanwhile fails the check of its digest.
            (&mut file).take(found).read_to_end(&mut bytes).map_err(cannot())?;
            if Digest::of(&bytes) == digest {
                return Ok(Some(bytes));
            }
        }
        tracing::warn!(path = %path.display(), bytes = found, "a damaged model file is removed and fetched again");
        remove(&path)?;
        Ok(None)
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Io`].
    pub fn open_file(&self, digest: Digest) -> Result<FileReader, Error> {
        let path = self.path(digest);
        let file = File::open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::Missing { digest },
            _ => io_error("cannot open", &path)(error),
        })?;
        Ok(FileReader { file, path, hasher: Hasher::default(), digest })
    }
}

/// A file in a listing.
#[derive(Debug, Clone, Copy)]
pub struct ListedFile {
    pub digest: Digest,
    pub bytes: u64,
    /// The time of the last write.
    pub written: SystemTime,
}

/// A file that is removed on drop unless renamed before.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            // The next start empties the directory, so a warning suffices.
            tracing::warn!(%error, "cannot remove an unfinished file");
        }
    }
}

/// A file that is being received. Dropping the value removes the file.
#[derive(Debug)]
pub struct FileWriter {
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

impl FileWriter {
    /// Writes the next bytes.
    ///
    /// # Errors
    /// [`Error::Long`], [`Error::Full`], [`Error::Io`].
    pub fn write(&mut self, chunk: &[u8]) -> Result<(), Error> {
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

    /// Verifies the received bytes and makes the file durable. The file must be as long as announced.
    ///
    /// # Errors
    /// [`Error::Short`], [`Error::Digest`], [`Error::Io`].
    pub fn finish(self) -> Result<VerifiedFile, Error> {
        if self.received < self.bytes.get() {
            return Err(Error::Short { received: self.received, claimed: self.bytes.get() });
        }
        self.finish_within()
    }

    /// Verifies the received bytes and makes the file durable. The file may be shorter than announced.
    ///
    /// # Errors
    /// [`Error::Digest`], [`Error::Io`].
    pub fn finish_within(self) -> Result<VerifiedFile, Error> {
        let actual = self.hasher.finish();
        if actual != self.digest {
            return Err(Error::Digest { claimed: self.digest, actual });
        }
        self.file.sync_all().map_err(io_error("cannot sync", &self.path.0))?;
        Ok(VerifiedFile { path: self.path, digest: self.digest, bytes: Bytes(self.received) })
    }
}

/// A complete, durable and verified file. Dropping the value before publication removes the file.
#[derive(Debug)]
pub struct VerifiedFile {
    path: Temporary,
    digest: Digest,
    bytes: Bytes,
}

impl VerifiedFile {
    pub fn digest(&self) -> Digest {
        self.digest
    }

    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Opens the file for reading from the beginning.
    pub fn open(&self) -> Result<File, Error> {
        File::open(&self.path.0).map_err(io_error("cannot open", &self.path.0))
    }
}

/// A file being read. The last read verifies the digest of the whole file.
#[derive(Debug)]
pub struct FileReader {
    file: File,
    path: PathBuf,
    hasher: Hasher,
    digest: Digest,
}

impl FileReader {
    /// Returns the next bytes, at most `most`; `None` at the end of a sound file.
    ///
    /// # Errors
    /// [`Error::Damaged`] at the end of a file with another digest; [`Error::Io`].
    pub fn read(&mut self, most: usize) -> Result<Option<Vec<u8>>, Error> {
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

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("cannot remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{Failure, Reason};

    use super::*;

    const BYTES: &[u8] = b"a model file";

    fn store() -> (tempfile::TempDir, FileStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        (dir, store)
    }

    fn files(dir: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for sub in [dir.to_owned(), dir.join(INCOMING)] {
            for entry in fs::read_dir(sub).unwrap() {
                let entry = entry.unwrap();
                if entry.metadata().unwrap().is_file() {
                    found.push(entry.file_name().into_string().unwrap());
                }
            }
        }
        found
    }

    fn receive(store: &FileStore, digest: Digest, claimed: u64, bytes: &[u8]) -> Result<VerifiedFile, Error> {
        let mut incoming = store.begin(digest, Bytes(claimed))?;
        incoming.write(bytes)?;
        incoming.finish()
    }

    fn read_all(store: &FileStore, digest: Digest) -> Result<Vec<u8>, Error> {
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
    fn a_disk_that_fills_during_an_upload_refuses_the_rest() {
        /// Returns a nearly full disk once an upload has begun.
        fn fills(dir: &Path) -> io::Result<Space> {
            let begun = fs::read_dir(dir.join(INCOMING))?.count() > 0;
            let available = if begun { Bytes::mib(512) } else { Bytes::gib(9) };
            Ok(Space { total: Bytes::gib(20), available })
        }
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open_on(dir.path(), fills).unwrap();
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
        FileStore::open(dir.path()).unwrap();
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn a_damaged_file_is_detected_when_read() {
        let (dir, store) = store();
        let digest = Digest::of(BYTES);
        store.publish(&receive(&store, digest, BYTES.len() as u64, BYTES).unwrap()).unwrap();
        fs::write(dir.path().join(digest.hex()), b"a model fLle").unwrap();
        assert!(matches!(read_all(&store, digest), Err(Error::Damaged { .. })));
        assert!(matches!(read_all(&store, Digest::of(b"x")), Err(Error::Missing { .. })));
        store.set_aside(digest).unwrap();
        assert!(!store.has(digest, Bytes(BYTES.len() as u64)), "a sound file may be uploaded");
        assert_eq!(store.list().unwrap().len(), 1, "the damaged file is collected with its record");
        store.remove(digest).unwrap();
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn a_damaged_or_larger_file_is_removed_and_not_returned() {
        let (dir, store) = store();
        let digest = Digest::of(BYTES);
        let len = Bytes(BYTES.len() as u64);
        let put = || store.publish(&receive(&store, digest, len.get(), BYTES).unwrap()).unwrap();
        put();
        assert_eq!(store.read_all(digest, len).unwrap().as_deref(), Some(BYTES));
        fs::write(dir.path().join(digest.hex()), b"a model fLle").unwrap();
        assert!(store.read_all(digest, len).unwrap().is_none());
        assert_eq!(files(dir.path()), Vec::<String>::new());
        put();
        // The file is sparse, and larger than any memory.
        File::options().write(true).open(dir.path().join(digest.hex())).unwrap().set_len(1 << 42).unwrap();
        assert!(store.read_all(digest, len).unwrap().is_none());
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn a_receiver_may_accept_a_file_that_is_shorter_than_announced() {
        let (dir, store) = store();
        let digest = Digest::of(BYTES);
        let mut short = store.begin(digest, Bytes::mib(1)).unwrap();
        short.write(BYTES).unwrap();
        let verified = short.finish_within().unwrap();
        assert_eq!(verified.bytes(), Bytes(BYTES.len() as u64));
        store.publish(&verified).unwrap();
        assert_eq!(files(dir.path()), [digest.hex()]);
    }

    #[test]
    fn retain_removes_only_files_that_are_not_kept() {
        let (dir, store) = store();
        let put = |bytes: &[u8]| {
            let digest = Digest::of(bytes);
            store.publish(&receive(&store, digest, bytes.len() as u64, bytes).unwrap()).unwrap();
            digest
        };
        let kept = put(b"a");
        put(b"b");
        store.retain(|digest| digest == kept).unwrap();
        assert_eq!(files(dir.path()), [kept.hex()]);
    }

    #[test]
    fn unfinished_files_of_an_earlier_worker_are_removed() {
        let (dir, _) = store();
        fs::write(dir.path().join(format!("{}.tmp-7", Digest::of(BYTES).hex())), b"half").unwrap();
        FileStore::open(dir.path()).unwrap();
        assert_eq!(files(dir.path()), Vec::<String>::new());
    }
}
