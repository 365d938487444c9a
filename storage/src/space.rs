//! The space of a disk, and the part that stays free.

use std::io;
use std::path::Path;

use millrace_types::Bytes;
use rustix::fs::StatVfs;

/// The space of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// The size of the disk.
    pub total: Bytes,
    /// The space that this process may still use.
    pub available: Bytes,
}

/// The divisor of the disk size that gives the space that model files leave free, for snapshots and
/// other files.
const FREE_PART: u64 = 10;
/// The maximum space that model files leave free: the expected size of the replicated state.
const FREE_MAX: Bytes = Bytes(1 << 30);

impl Space {
    /// Returns the space of the disk of a directory.
    pub(crate) fn of(dir: &Path) -> io::Result<Self> {
        let StatVfs { f_blocks, f_bavail, f_frsize, .. } = rustix::fs::statvfs(dir)?;
        let bytes = |blocks: u64| Bytes(blocks.saturating_mul(f_frsize));
        Ok(Self { total: bytes(f_blocks), available: bytes(f_bavail) })
    }

    /// Returns the space that must stay free. The log's reserve needs no extra part: its blocks are no
    /// longer available once reserved, and the reserve is never larger than this.
    pub(crate) fn floor(self) -> Bytes {
        Bytes(self.total.get() / FREE_PART).min(FREE_MAX)
    }

    pub(crate) fn takes(self, bytes: u64) -> bool {
        self.available.get().saturating_sub(bytes) >= self.floor().get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_disk_but_at_most_a_gibibyte_stays_free() {
        let space = |available| Space { total: Bytes(1_000), available: Bytes(available) };
        assert!(space(500).takes(400));
        assert!(!space(500).takes(401));
        assert!(!space(99).takes(0));
        let large = Space { total: Bytes::gib(10_000), available: Bytes::gib(100) };
        assert_eq!(large.floor(), Bytes::gib(1));
    }
}
