//! The file operations that durability rests on, behind a seam: [`Disk`] is the machine's, and the
//! tests have one that loses at a power cut whatever was not synced.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

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
/// that name before: written beside, synced, renamed, and the directory synced.
pub(crate) fn write_durably(fs: &dyn Fs, dir: &Path, name: &str, parts: &[&[u8]]) -> io::Result<()> {
    let temporary = dir.join(format!("{name}{TEMPORARY}"));
    let mut file = fs.create(&temporary)?;
    for part in parts {
        file.append(part)?;
    }
    file.sync()?;
    drop(file);
    fs.rename(&temporary, &dir.join(name))?;
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

/// The machine's own file system.
pub(crate) struct Disk;

impl Fs for Disk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(Box::new(DiskFile { file, size: 0 }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn FsFile>> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        Ok(Box::new(DiskFile { file, size }))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir)? {
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
        File::open(dir)?.sync_all()
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
