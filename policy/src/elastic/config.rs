//! What a store is: how much of the GPU it may have, how it keeps it, and who leaves first.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use millrace_types::Bytes;

use crate::memory::BLOCK;
use crate::names::{self, UnknownName};

/// The most the store has of a GPU (D26). The paper's 1 GB; its MB and GB are read as binary, as its
/// 2 MB chunks are 2 MiB.
pub const STORE_CAP: Bytes = Bytes::gib(1);
/// What an elastic pool never falls below, for the whole GPU (D24).
pub const POOL_FLOOR: Bytes = Bytes::mib(300);
/// The most that a cap may be: the books hold two bits for each block.
pub const CAP_MAX: Bytes = Bytes::gib(1024);

/// What of the GPU's memory stays allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum PoolPolicy {
    /// What the functions are expected to need (D23 to D25).
    #[default]
    Elastic,
    /// All that was ever needed, in segments, as `PyTorch` does.
    Caching {
        /// How often all free segments are given back; `None`: never.
        reclaim_every: Option<Duration>,
    },
    /// All that was ever needed, in blocks that are stitched together, as `GMLake` does.
    GmLake,
    /// Nothing: each object is allocated and released by the device.
    Unpooled,
}

/// Every pool by name, with the paper's three periods of manual reclamation (§9.2.4).
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

/// By its name; with a period that has none, as `caching`.
impl fmt::Display for PoolPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = names::of(&POOLS, self);
        f.write_str(if name.is_empty() { "caching" } else { name })
    }
}

/// Which object leaves the GPU when there is too little room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum MigrationPolicy {
    /// The one whose first consumer is furthest back in the queue; it comes back when there is room
    /// (D27, D28).
    #[default]
    QueueAware,
    /// The one that was stored or read longest ago. It does not come back: its consumers read it from
    /// the host.
    Lru,
}

/// Every migration policy by name.
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

/// What a store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The most it has of the GPU. Counted in whole blocks, rounded down.
    pub cap: Bytes,
    /// What an elastic pool never falls below. Rounded up, but not above the cap.
    pub floor: Bytes,
    /// What stays allocated.
    pub pool: PoolPolicy,
    /// Who leaves first.
    pub migration: MigrationPolicy,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cap: STORE_CAP,
            floor: POOL_FLOOR,
            pool: PoolPolicy::default(),
            migration: MigrationPolicy::default(),
        }
    }
}

/// Why there can be no such store. Sizes are shown to the byte: rounded, one that is just too large
/// reads like one that may be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The pool could never be as small as that.
    #[error("floor is {} bytes: give at most the cap, {} bytes", .floor.0, .cap.0)]
    FloorAboveCap {
        /// What it is.
        floor: Bytes,
        /// What it may be.
        cap: Bytes,
    },
    /// No GPU has as much.
    #[error("cap is {} bytes: give at most {} bytes", .cap.0, CAP_MAX.0)]
    CapTooLarge {
        /// What it is.
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
        let cap = Bytes(self.cap.0 / BLOCK.0 * BLOCK.0);
        let floor = Bytes(self.floor.0.next_multiple_of(BLOCK.0)).min(cap);
        Ok(Self { cap, floor, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_read_by_the_name_it_is_shown_by() {
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
        let rounded = with(Bytes(BLOCK.0 * 5 + 1), Bytes(BLOCK.0 * 4 + 1)).unwrap();
        assert_eq!((rounded.cap, rounded.floor), (Bytes::mib(10), Bytes::mib(10)));
        assert_eq!(with(Bytes(1), Bytes(1)).unwrap().floor, Bytes::ZERO);
        let refused = |cap, floor| with(cap, floor).unwrap_err().to_string();
        assert_eq!(
            refused(Bytes::mib(4), Bytes::mib(6)),
            "floor is 6291456 bytes: give at most the cap, 4194304 bytes"
        );
        let above = Bytes(CAP_MAX.0 + 1);
        let message = "cap is 1099511627777 bytes: give at most 1099511627776 bytes";
        assert_eq!(refused(above, Bytes::ZERO), message, "a byte more than may be shows");
    }
}
