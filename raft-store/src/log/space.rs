//! Space for the log on a disk that others fill. sled never writes again after a failed write, so
//! no write of sled may fail for lack of space: the file system reserves space ahead of the write.
//!
//! ```text
//!   sled's file │ entries │◀─ reserved blocks behind the end of the file ─▶│
//!                          a job waits until `left` is enough
//! ```
//!
//! The blocks belong to the file and lie behind its end (`fallocate` with `FALLOC_FL_KEEP_SIZE`),
//! so that no other process can take them between the check and the write. sled may truncate its
//! file, which frees the blocks: the log then reserves blocks again before the next write.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FallocateFlags, StatVfs};
use rustix::io::Errno;
use tokio::time::Instant;

use super::record;
use crate::log_reserve::reserve_bytes;

/// The unit in which the blocks of a file are counted, in bytes.
const BLOCK_BYTES: u64 = 512;
/// Pause before another request after the file system refused blocks.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Maximum number of bytes that sled writes for each byte of a value: see
/// [`super::tables::WINDOW_BYTES`].
const WRITTEN_PER_BYTE: u64 = 5;
/// Maximum number of bytes that sled writes for a job besides its values: a few rewritten leaves of
/// 16 parts, and data moved out of segments that sled reuses.
const JOB_BYTES: u64 = 1 << 20;
const _: () = assert!(16 * record::PART_BYTES as u64 * WRITTEN_PER_BYTE < JOB_BYTES);

/// Returns the space that must be left before values of this size are written, up to the next sync.
pub(super) fn needed(value_bytes: usize) -> u64 {
    JOB_BYTES.saturating_add((value_bytes as u64).saturating_mul(WRITTEN_PER_BYTE))
}

/// The space that the log can still write to. Tests implement the trait to have a full disk.
pub(crate) trait LogSpace: Debug + Send {
    /// Returns the number of bytes that can be written before a write may fail for lack of space.
    /// Reserves space for the log if less than `needed` is reserved.
    fn left(&mut self, needed: u64) -> io::Result<u64>;

    /// Returns the number of bytes below which clients must not grow the log.
    fn low(&self) -> u64;
}

/// Reserved blocks of sled's file behind its end.
#[derive(Debug)]
pub(crate) struct ReservedBlocks {
    file: File,
    /// Bytes to reserve.
    wanted: u64,
    refused: Option<RefusedBlocks>,
}

/// A request for blocks that the file system refused.
#[derive(Debug, Clone, Copy)]
struct RefusedBlocks {
    at: Instant,
    /// Whether every later request will be refused too.
    for_good: bool,
}

impl ReservedBlocks {
    /// Reserves blocks for the log in `log_dir`, as many as the file system grants.
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
                "the disk has too little space for the log's reserve: free space on the disk"
            );
        } else {
            tracing::info!(held, path = %path.display(), "disk space is reserved for the log");
        }
        Ok(blocks)
    }

    /// Returns the bytes of blocks behind the end of the file. If the file has holes, the result is
    /// too small.
    fn held(&self) -> io::Result<u64> {
        let metadata = rustix::fs::fstat(&self.file)?;
        let [blocks, size] = [metadata.st_blocks, metadata.st_size].map(|it| u64::try_from(it).unwrap_or(0));
        Ok(blocks.saturating_mul(BLOCK_BYTES).saturating_sub(size))
    }

    /// Requests the missing blocks, as many as the file system grants.
    fn take(&mut self) -> io::Result<()> {
        if self.refused.is_some_and(|refused| refused.for_good || refused.at.elapsed() < ASK_AGAIN) {
            return Ok(());
        }
        let held = self.held()?;
        let more = self.wanted.saturating_sub(held).min(available(&self.file)? / 2);
        let size = u64::try_from(rustix::fs::fstat(&self.file)?.st_size).unwrap_or(0);
        let length = size.saturating_add(held).saturating_add(more);
        // From the beginning of the file, so that holes are filled too.
        let taken = match length {
            0 => Ok(()),
            length => rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, length),
        };
        let refused = |for_good| Some(RefusedBlocks { at: Instant::now(), for_good });
        self.refused = match taken {
            Ok(()) if held + more >= self.low() => None,
            Ok(()) | Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::INTR) => refused(false),
            // Other errors mean that reserving is not supported. Only the free space is then known.
            Err(error) => {
                tracing::warn!(%error, "this file system cannot reserve disk space for the log: check that nothing else fills the disk");
                refused(true)
            }
        };
        Ok(())
    }
}

impl LogSpace for ReservedBlocks {
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

/// Returns the bytes of the file system that an unprivileged process can still use.
fn available(file: &File) -> io::Result<u64> {
    let StatVfs { f_bavail, f_frsize, .. } = rustix::fs::fstatvfs(file)?;
    Ok(f_bavail.saturating_mul(f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_behind_the_end_are_reserved_again_after_the_file_is_truncated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        std::fs::write(&path, vec![1; 100_000]).unwrap();
        let mut blocks = ReservedBlocks::open(dir.path()).unwrap();
        if blocks.refused.is_some() {
            eprintln!("skipped: this file system cannot reserve space, or has none");
            return;
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 100_000, "the length of the file is unchanged");
        assert!(blocks.held().unwrap() >= blocks.low());
        File::options().write(true).open(&path).unwrap().set_len(4_096).unwrap();
        assert!(blocks.held().unwrap() < blocks.low(), "a truncation frees the blocks");
        assert!(blocks.left(1).unwrap() >= blocks.low());
        assert!(blocks.held().unwrap() >= blocks.low());
    }
}
