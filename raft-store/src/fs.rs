//! The file operations that durability rests on, behind a seam: [`Disk`] is the machine's, and the
//! tests have one that loses at a power cut whatever was not synced.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

/// A file system, as far as snapshots and the identity file need one.
pub(crate) trait Fs: Send + Sync {
    /// Makes a directory and those above it. Not durable until the parent is synced.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes or empties a file.
    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>>;
    /// Opens a file for reading.
    fn open(&self, path: &Path) -> io::Result<Box<dyn FsFile>>;
    /// The names in a directory, sorted.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Renames a file over whatever has the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes the creations, renames and removals in a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Takes spare descriptors again for those that were given up. Called between operations.
    fn refill(&self) {}
}

/// An open file.
pub(crate) trait FsFile: Send + Sync {
    /// Writes at the end.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Reads at an offset; 0 at the end.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize>;
    /// The length in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Makes the contents durable. The name is durable once the directory is synced.
    fn sync(&mut self) -> io::Result<()>;
}

/// Writes a file so that after a power cut either all of it is there under its name, or what had
/// that name before: written beside, synced, renamed, and the directory synced. A file that could
/// not be written whole is removed: on a full disk the space of a half is needed for other files.
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
            // The next start removes the file.
            tracing::debug!(error = %left, path = %temporary.display(), "a half-written file stays");
        }
        return Err(error);
    }
    fs.sync_dir(dir)
}

/// The ending of files that are being written. Whatever has it at start is left over from a crash.
pub(crate) const TEMPORARY: &str = ".tmp";

/// All of a file.
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

/// Whether an operation failed for want of descriptors or of space: the same operation succeeds
/// once another file is closed or deleted, and nothing is known to be damaged.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    is_out_of_descriptors(error) || matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT))
}

/// Whether the process or the machine has no descriptor left.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Descriptors kept for storage alone: as many as a snapshot that is built, one that is received and
/// one that is sent have open at a time, twice.
const SPARE_DESCRIPTORS: usize = 8;

/// Open descriptors that storage gives up one at a time when the process has no other left. Clients'
/// connections may take all descriptors but these.
#[derive(Debug, Default)]
struct SpareDescriptors(Mutex<Vec<File>>);

impl SpareDescriptors {
    /// Opens, with a spare descriptor if there is no other.
    fn open<T>(&self, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
        loop {
            match open() {
                Err(error) if is_out_of_descriptors(&error) && self.release() => {}
                opened => return opened,
            }
        }
    }

    /// Gives one up, if there is one.
    fn release(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().is_some()
    }

    /// Takes as many as there are to be, or as many as are free now.
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
pub(crate) struct Disk {
    /// None before the first refill: opening a data directory needs none.
    spares: SpareDescriptors,
}

impl Disk {
    /// A file system whose operations succeed while clients hold every other descriptor.
    pub(crate) fn with_spares() -> Self {
        let disk = Self::default();
        disk.spares.refill();
        disk
    }
}

impl Fs for Disk {
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
            // A name that is not UTF-8 is none of ours.
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
