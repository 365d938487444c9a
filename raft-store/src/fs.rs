//! The file operations that durability depends on, behind a trait. [`DiskFs`] is the machine's file
//! system. Tests use a file system that loses unsynced data at a power cut.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

/// A file system with the operations that snapshots and the identity file need.
pub(crate) trait Fs: Send + Sync {
    /// Creates a directory and its parents. Durable only after the parent is synced.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file, or truncates an existing one.
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>>;
    fn open(&self, path: &Path) -> io::Result<Box<dyn FsFile>>;
    /// Returns the names in a directory, sorted.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Renames a file, and replaces a file with the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes the creations, renames and removals in a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Opens new spare descriptors in place of those that were used. Called between operations.
    fn refill(&self) {}
}

pub(crate) trait FsFile: Send + Sync {
    /// Writes at the end of the file.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Reads at an offset. Returns the number of bytes, 0 at the end.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize>;
    /// Returns the length in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Makes the contents durable. The name is durable once the directory is synced.
    fn sync(&mut self) -> io::Result<()>;
}

/// Writes a file atomically: after a power cut, either the complete new file or the previous one
/// has the name. The contents are written to a temporary file and synced, the file is renamed, and
/// the directory is synced. An incomplete file is removed, because other files may need its space
/// on a full disk.
pub(crate) fn write_durably(
    fs: &dyn Fs,
    dir: &Path,
    name: &str,
    write: impl FnOnce(&mut dyn FsFile) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = dir.join(format!("{name}{TEMPORARY}"));
    let mut file = fs.create(&temporary)?;
    let written = write(&mut *file).and_then(|()| file.sync());
    drop(file);
    if let Err(error) = written.and_then(|()| fs.rename(&temporary, &dir.join(name))) {
        if let Err(left) = fs.remove(&temporary) {
            tracing::debug!(error = %left, path = %temporary.display(), "cannot remove an incomplete file: the next start removes it");
        }
        return Err(error);
    }
    fs.sync_dir(dir)
}

/// The suffix of files that are being written. A file with the suffix at start is left over from a
/// crash.
pub(crate) const TEMPORARY: &str = ".tmp";

/// Reads a whole file.
pub(crate) fn read_all(file: &dyn FsFile) -> io::Result<Vec<u8>> {
    let size = usize::try_from(file.size()?).map_err(io::Error::other)?;
    let mut bytes = vec![0; size];
    let mut filled = 0;
    while filled < size {
        match file.read_at(filled as u64, &mut bytes[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => filled += more,
        }
    }
    Ok(bytes)
}

/// Returns whether an operation failed for lack of descriptors or space. The same operation
/// succeeds once another file is closed or deleted, and nothing is damaged.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    is_out_of_descriptors(error) || matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT))
}

/// Returns whether the process or the machine is out of descriptors.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Number of descriptors reserved for storage: twice as many as are open at a time while a snapshot
/// is built, another is received and a third is sent.
const SPARE_DESCRIPTORS: usize = 8;

/// Open descriptors that storage closes one at a time when the process is out of descriptors.
/// Clients' connections may use all other descriptors.
#[derive(Debug, Default)]
struct SpareDescriptors(Mutex<Vec<File>>);

impl SpareDescriptors {
    /// Opens a file, with a spare descriptor if no other is free.
    fn open<T>(&self, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
        loop {
            match open() {
                Err(error) if is_out_of_descriptors(&error) && self.release() => {}
                opened => return opened,
            }
        }
    }

    /// Closes a spare descriptor. Returns whether there was one.
    fn release(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().is_some()
    }

    /// Opens spare descriptors up to their number, or as many as are free now.
    fn refill(&self) {
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while spares.len() < SPARE_DESCRIPTORS
            && let Ok(spare) = File::open("/")
        {
            spares.push(spare);
        }
    }
}

/// The machine's own file system.
#[derive(Debug, Default)]
pub(crate) struct DiskFs {
    /// Empty before the first refill, because opening a data directory needs no spare descriptors.
    spares: SpareDescriptors,
}

impl DiskFs {
    /// Creates a file system whose operations succeed even if clients hold all other descriptors.
    pub(crate) fn with_spares() -> Self {
        let disk = Self::default();
        disk.spares.refill();
        disk
    }
}

impl Fs for DiskFs {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = self.spares.open(|| options.open(path))?;
        Ok(Box::new(DiskFile { file, size: 0 }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let file = self.spares.open(|| File::open(path))?;
        let size = file.metadata()?.len();
        Ok(Box::new(DiskFile { file, size }))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in self.spares.open(|| fs::read_dir(dir))? {
            // Skipped: the store's own file names are UTF-8.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.spares.open(|| File::open(dir))?.sync_all()
    }

    fn refill(&self) {
        self.spares.refill();
    }
}

struct DiskFile {
    file: File,
    size: u64,
}

impl FsFile for DiskFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.size)?;
        self.size += bytes.len() as u64;
        Ok(())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}
