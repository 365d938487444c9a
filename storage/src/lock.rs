//! The lock of a directory, which one process at a time holds.

use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";

/// The reason why a directory is not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds the lock.
    #[error("another process holds the lock")]
    Held {
        /// The holder, such as "process 4711".
        holder: String,
    },
    /// The lock file cannot be used.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// The operation that failed, such as "opening".
        doing: &'static str,
        /// The lock file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// A directory that this process has locked, until this value is dropped or the process ends.
#[derive(Debug)]
pub struct DirectoryLock {
    dir: PathBuf,
    file: File,
}

impl DirectoryLock {
    /// Locks an existing directory, and writes the id of this process into the lock file.
    ///
    /// # Errors
    /// [`LockError`].
    pub fn acquire(dir: &Path) -> Result<Self, LockError> {
        let path = dir.join(LOCK);
        let cannot = |doing| {
            let path = path.clone();
            move |source| LockError::Io { doing, path, source }
        };
        let opened = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(cannot("opening"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LockError::Held { holder: holder(&mut file) }),
            Err(TryLockError::Error(source)) => return Err(cannot("locking")(source)),
        }
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(cannot("writing"))?;
        Ok(Self { dir: dir.to_owned(), file })
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Closing the file would not release the lock: a child process that was just forked has the
        // descriptor too.
        if let Err(error) = self.file.unlock() {
            tracing::warn!(%error, path = %self.dir.display(), "the data directory stays locked");
        }
    }
}

/// Describes the process that holds a lock.
fn holder(file: &mut File) -> String {
    let mut holder = String::new();
    // A failed read is ignored, because the process id is only for the message.
    match (file.read_to_string(&mut holder), holder.trim()) {
        (Ok(_), pid) if !pid.is_empty() => format!("process {pid}"),
        _ => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locked_directory_names_its_holder_until_the_lock_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let first = DirectoryLock::acquire(dir.path()).unwrap();
        let refused = DirectoryLock::acquire(dir.path()).unwrap_err();
        let this = format!("process {}", std::process::id());
        assert!(matches!(&refused, LockError::Held { holder } if *holder == this), "{refused:?}");
        drop(first);
        DirectoryLock::acquire(dir.path()).unwrap();
    }
}
