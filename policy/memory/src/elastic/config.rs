//! Configuration of a store: its size, its pool policy and its migration policy.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use millrace_types::Bytes;

use crate::BlockSize;
use millrace_core::names::{self, UnknownName};

/// Default maximum of the store's memory on a GPU (D26): the paper's 1 GB. The paper's MB and GB
/// are read as binary, because its 2 MB chunks are 2 MiB.
pub const STORE_CAP: Bytes = Bytes::gib(1);
/// Default minimum size of an elastic pool, for the whole GPU (D24).
pub const POOL_FLOOR: Bytes = Bytes::mib(300);
/// Largest permitted cap: the block table holds two bits for each block.
pub const CAP_MAX: Bytes = Bytes::gib(1024);

/// The part of the GPU's memory that stays allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PoolPolicy {
    /// The expected need of the functions stays allocated (D23 to D25).
    #[default]
    Elastic,
    /// All memory ever needed stays allocated, in segments, as `PyTorch` does.
    Caching {
        /// Period after which all free segments are released; `None`: never.
        reclaim_every: Option<Duration>,
    },
    /// All memory ever needed stays allocated, in blocks that are stitched together, as `GMLake`
    /// does.
    GmLake,
    /// No memory stays allocated: the device allocates and releases each object.
    Unpooled,
}

/// All pools by name, with the paper's three periods of manual reclamation (§9.2.4).
pub const POOLS: [(&str, PoolPolicy); 7] = [
    ("elastic", PoolPolicy::Elastic),
    ("caching", PoolPolicy::Caching { reclaim_every: None }),
    ("caching-1h", caching(3600)),
    ("caching-10min", caching(600)),
    ("caching-1min", caching(60)),
    ("gmlake", PoolPolicy::GmLake),
    ("none", PoolPolicy::Unpooled),
];

const fn caching(secs: u64) -> PoolPolicy {
    PoolPolicy::Caching { reclaim_every: Some(Duration::from_secs(secs)) }
}

impl FromStr for PoolPolicy {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("store pool", &POOLS, text)
    }
}

/// Writes the pool's name, or `caching` for a period that has no name.
impl fmt::Display for PoolPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = names::of(&POOLS, self);
        f.write_str(if name.is_empty() { "caching" } else { name })
    }
}

/// Choice of the object that leaves the GPU when memory is short.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum MigrationPolicy {
    /// The object whose first consumer is furthest back in the queue leaves, and returns when there
    /// is room (D27, D28).
    #[default]
    QueueAware,
    /// The object stored or read longest ago leaves for good: its consumers read from the host.
    Lru,
}

/// All migration policies by name.
pub const MIGRATIONS: [(&str, MigrationPolicy); 2] =
    [("queue-aware", MigrationPolicy::QueueAware), ("lru", MigrationPolicy::Lru)];

impl FromStr for MigrationPolicy {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("migration policy", &MIGRATIONS, text)
    }
}

impl fmt::Display for MigrationPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(names::of(&MIGRATIONS, self))
    }
}

/// Configuration of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Maximum memory on the GPU, rounded down to whole blocks.
    pub cap: Bytes,
    /// Minimum size of an elastic pool, rounded up to whole blocks, but at most the cap.
    pub floor: Bytes,
    pub pool: PoolPolicy,
    pub migration: MigrationPolicy,
    /// Unit of the GPU's memory.
    pub block: BlockSize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cap: STORE_CAP,
            floor: POOL_FLOOR,
            pool: PoolPolicy::default(),
            migration: MigrationPolicy::default(),
            block: BlockSize::DEFAULT,
        }
    }
}

/// Reason why a configuration is invalid. Sizes are shown to the byte: a rounded size just above
/// its bound would read like a permitted one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The floor is above the cap, so the pool could never be that small.
    #[error("floor is {} bytes: give at most the cap, {} bytes", .floor.0, .cap.0)]
    FloorAboveCap {
        /// Configured floor.
        floor: Bytes,
        /// Configured cap, which bounds the floor.
        cap: Bytes,
    },
    /// The cap is larger than any GPU's memory.
    #[error("cap is {} bytes: give at most {} bytes", .cap.0, CAP_MAX.0)]
    CapTooLarge {
        /// Configured cap.
        cap: Bytes,
    },
}

impl Config {
    /// Checks the sizes and rounds them to blocks.
    pub(super) fn checked(self) -> Result<Self, ConfigError> {
        if self.floor > self.cap {
            return Err(ConfigError::FloorAboveCap { floor: self.floor, cap: self.cap });
        }
        if self.cap > CAP_MAX {
            return Err(ConfigError::CapTooLarge { cap: self.cap });
        }
        let cap = self.block.round_down(self.cap);
        let floor = self.block.round_up(self.floor).min(cap);
        Ok(Self { cap, floor, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_parses_from_its_displayed_name() {
        for (name, pool) in POOLS {
            assert_eq!((name.parse(), pool.to_string()), (Ok(pool), name.to_owned()));
        }
        for (name, migration) in MIGRATIONS {
            assert_eq!((name.parse(), migration.to_string()), (Ok(migration), name.to_owned()));
        }
        assert_eq!(
            "mru".parse::<MigrationPolicy>().unwrap_err().to_string(),
            "migration policy \"mru\" is not known: use one of queue-aware, lru"
        );
    }

    #[test]
    fn sizes_are_checked_and_rounded_to_blocks() {
        let with = |cap, floor| Config { cap, floor, ..Config::default() }.checked();
        let rounded = with(Bytes::mib(10) + Bytes(1), Bytes::mib(8) + Bytes(1)).unwrap();
        assert_eq!((rounded.cap, rounded.floor), (Bytes::mib(10), Bytes::mib(10)));
        let block = BlockSize::new(Bytes::mib(16)).unwrap();
        let large = Config { cap: Bytes::mib(79), floor: Bytes::mib(17), block, ..Config::default() };
        let rounded = large.checked().unwrap();
        assert_eq!((rounded.cap, rounded.floor), (Bytes::mib(64), Bytes::mib(32)));
        assert_eq!(with(Bytes(1), Bytes(1)).unwrap().floor, Bytes::ZERO);
        let refused = |cap, floor| with(cap, floor).unwrap_err().to_string();
        assert_eq!(
            refused(Bytes::mib(4), Bytes::mib(6)),
            "floor is 6291456 bytes: give at most the cap, 4194304 bytes"
        );
        let above = Bytes(CAP_MAX.0 + 1);
        let message = "cap is 1099511627777 bytes: give at most 1099511627776 bytes";
        assert_eq!(refused(above, Bytes::ZERO), message, "the message shows the excess of one byte");
    }
}
