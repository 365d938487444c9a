//! Space for the log on a disk that others fill. sled never writes again after a write that failed, so
//! that no write of sled's may fail for want of space: the file system promises space ahead of it.
//!
//! ```text
//!   sled's file │ entries │◀─ held: blocks behind the end of the file ─▶│
//!                          a job is written once `left` is enough for it; until then it waits
//! ```
//!
//! The blocks belong to the file and lie behind its end (`fallocate` with `FALLOC_FL_KEEP_SIZE`), so
//! that nothing else can take them between a look and the write. sled may cut its file short, which
//! gives the blocks back: the log takes them again before the next write.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FallocateFlags, StatVfs};
use rustix::io::Errno;
use tokio::time::Instant;

use super::record;

/// Bytes kept for the log ahead of its end.
const LOG_RESERVE_BYTES: u64 = 256 << 20;
/// Of a small file system the log keeps at most one part in so many.
const LOG_RESERVE_PART: u64 = 10;
/// Blocks of a file are counted in units of so many bytes.
const BLOCK_BYTES: u64 = 512;
/// How long after blocks were refused they are asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Bytes that sled writes for each byte of a value, at most: see [`super::tables::WINDOW_BYTES`].
const WRITTEN_PER_BYTE: u64 = 5;
/// Bytes that sled writes for any job beside its values, at most: a few rewritten leaves of 16 parts,
/// and what it moves out of segments to use them again.
const JOB_BYTES: u64 = 1 << 20;
const _: () = assert!(16 * record::PART_BYTES as u64 * WRITTEN_PER_BYTE < JOB_BYTES);

/// The space that must be left before values of so many bytes are written, down to the next sync.
pub(super) fn needed(value_bytes: usize) -> u64 {
    JOB_BYTES.saturating_add((value_bytes as u64).saturating_mul(WRITTEN_PER_BYTE))
}

/// The space that the log may still write to: the seam at which tests have a disk that is full.
pub(crate) trait LogSpace: Debug + Send {
    /// Bytes that can be written before a write may fail for want of space. Takes space for the log
    /// where less than `needed` is kept for it.
    fn left(&mut self, needed: u64) -> io::Result<u64>;

    /// Bytes below which the log should grow no further for clients.
    fn low(&self) -> u64;
}

/// Blocks of sled's file behind its end.
#[derive(Debug)]
pub(crate) struct HeldBlocks {
    file: File,
    /// Bytes to hold.
    wanted: u64,
    refused: Option<Refused>,
}

/// A request for blocks that the file system refused.
#[derive(Debug, Clone, Copy)]
struct Refused {
    at: Instant,
    /// Whether another request may succeed.
    for_good: bool,
}

impl HeldBlocks {
    /// Takes blocks for the log in `log_dir`, as many as its file system allows.
    pub(crate) fn open(log_dir: &Path) -> io::Result<Self> {
        let path = log_dir.join("db");
        let file = File::options().read(true).write(true).open(&path)?;
        let disk = rustix::fs::fstatvfs(&file)?;
        let wanted = reserve_bytes(disk.f_blocks.saturating_mul(disk.f_frsize));
        let mut blocks = Self { file, wanted, refused: None };
        blocks.take()?;
        let held = blocks.held()?;
        if held < blocks.low() {
            tracing::warn!(
                held,
                wanted,
                path = %path.display(),
                "the disk has too little space to keep a reserve for the log: free space on it"
            );
        } else {
            tracing::info!(held, path = %path.display(), "a reserve of disk space is kept for the log");
        }
        Ok(blocks)
    }

    /// Bytes of blocks that the file has behind its end. Fewer than there are where it has holes.
    fn held(&self) -> io::Result<u64> {
        let metadata = rustix::fs::fstat(&self.file)?;
        let [blocks, size] = [metadata.st_blocks, metadata.st_size].map(|it| u64::try_from(it).unwrap_or(0));
        Ok(blocks.saturating_mul(BLOCK_BYTES).saturating_sub(size))
    }

    /// Asks for the blocks that are missing, and leaves the file system as much as it takes.
    fn take(&mut self) -> io::Result<()> {
        if self.refused.is_some_and(|refused| refused.for_good || refused.at.elapsed() < ASK_AGAIN) {
            return Ok(());
        }
        let held = self.held()?;
        let more = self.wanted.saturating_sub(held).min(available(&self.file)? / 2);
        let size = u64::try_from(rustix::fs::fstat(&self.file)?.st_size).unwrap_or(0);
        let length = size.saturating_add(held).saturating_add(more);
        // From the beginning, so that holes are filled too.
        let taken = match length {
            0 => Ok(()),
            length => rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, length),
        };
        let refused = |for_good| Some(Refused { at: Instant::now(), for_good });
        self.refused = match taken {
            Ok(()) if held + more >= self.low() => None,
            Ok(()) | Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::INTR) => refused(false),
            // What is available is all that is known then.
            Err(error) => {
                tracing::warn!(%error, "this file system keeps no disk space for the log: see that nothing else fills the disk");
                refused(true)
            }
        };
        Ok(())
    }
}

impl LogSpace for HeldBlocks {
    fn left(&mut self, needed: u64) -> io::Result<u64> {
        let held = self.held()?;
        if held >= self.low().max(needed) {
            return Ok(held);
        }
        self.take()?;
        Ok(self.held()?.saturating_add(available(&self.file)?))
    }

    fn low(&self) -> u64 {
        self.wanted / 2
    }
}

/// Bytes that the log of a file system of that size keeps ahead of its end.
pub(crate) fn reserve_bytes(file_system_bytes: u64) -> u64 {
    LOG_RESERVE_BYTES.min(file_system_bytes / LOG_RESERVE_PART)
}

/// Bytes that a process without privileges may still take of the file system.
fn available(file: &File) -> io::Result<u64> {
    let StatVfs { f_bavail, f_frsize, .. } = rustix::fs::fstatvfs(file)?;
    Ok(f_bavail.saturating_mul(f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_a_tenth_of_a_small_file_system_at_most() {
        assert_eq!(reserve_bytes(1 << 40), LOG_RESERVE_BYTES);
        assert_eq!(reserve_bytes(100 << 20), 10 << 20);
        assert_eq!(reserve_bytes(0), 0);
    }

    #[test]
    fn blocks_behind_the_end_are_held_and_taken_again_after_the_file_was_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        std::fs::write(&path, vec![1; 100_000]).unwrap();
        let mut blocks = HeldBlocks::open(dir.path()).unwrap();
        if blocks.refused.is_some() {
            eprintln!("skipped: this file system promises no space, or has none");
            return;
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 100_000, "the file is as long as before");
        assert!(blocks.held().unwrap() >= blocks.low());
        File::options().write(true).open(&path).unwrap().set_len(4_096).unwrap();
        assert!(blocks.held().unwrap() < blocks.low(), "a cut gives the blocks back");
        assert!(blocks.left(1).unwrap() >= blocks.low());
        assert!(blocks.held().unwrap() >= blocks.low());
    }
}
