//! A controller's data directory: openraft's log in sled, the replicated state in memory, and the
//! state's snapshots as files.
//!
//! ```text
//!   openraft ── append, vote, truncate, purge ──▶ LogStore ── jobs ──▶ writer thread ──▶ sled, fdatasync
//!            ── apply, snapshot, install ───────▶ StateMachineStore ──▶ snapshots/*.snapshot
//!                                                      └─ StateReader ──▶ readers of the state
//! ```
//!
//! Acknowledged writes are durable: an append, a vote or a truncation is acknowledged after
//! `fdatasync`, a snapshot after its file and folder are synced. Entries are purged only after a
//! snapshot that covers them is durable. All stored bytes have a checksum and a format version.
//! Damaged, missing or unknown files are refused with an [`Error`] that names the next step;
//! nothing is skipped and nothing is repaired. After a failed write or sync the log halts.
//!
//! A lack of descriptors or disk space is not a failure. The log keeps the files that it needs open
//! and some disk space reserved, and waits when the reserve is used up. A snapshot is retried
//! later.
//!
//! The last commit position is written with the next sync after it, so it may lag after a crash;
//! openraft then learns the rest from its group.
//!
//! Only this crate names sled.

mod config;
mod data_dir;
mod digests;
mod error;
mod frame;
mod fs;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod log;
mod log_reserve;
mod machine;
mod machine_store;
mod raft_ids;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod snapshot;
mod store;
#[cfg(test)]
mod tests;

pub use config::{ClusterConfig, Entry, TypeConfig};
pub use data_dir::{DataDir, DirectoryOwner, mark_diverged};
pub use digests::{DIGESTS_KEPT, RecentDigests, StateDigest};
pub use error::Error;
pub use log::disk::{DiskHealth, DiskStall, LogDisk, SYNC_SLOW};
pub use log::record::ENTRY_BYTES_MAX;
pub use log::{LogReader, LogStore};
pub use machine::StateMachine;
pub use machine_store::{AppliedState, SnapshotBuilder, StateMachineStore, StateReader};
pub use raft_ids::{GroupMember, LogId, RaftId, SnapshotMeta, StorageError, StoredMembership, Vote};
pub use snapshot::SnapshotFile;
pub use snapshot::directory::SnapshotReceiver;
pub use store::{RaftStore, open};
