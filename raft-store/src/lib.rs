//! A controller's data directory: openraft's log in sled, the replicated state in memory, and the
//! state's snapshots as files.
//!
//! ```text
//!   openraft ── append, vote, truncate, purge ──▶ LogStore ── jobs ──▶ writer thread ──▶ sled, fdatasync
//!            ── apply, snapshot, install ───────▶ MachineStore ──▶ snapshots/*.snapshot
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
mod machine;
mod machine_store;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod snapshot;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;

pub use config::{
    Entry, GroupMember, LogId, RaftId, SnapshotMeta, StorageError, StoredMembership, TypeConfig, Vote,
};
pub use data_dir::{DataDir, DirectoryOwner, mark_diverged};
pub use digests::{DIGESTS_KEPT, RecentDigests, StateDigest};
pub use error::Error;
pub use log::disk::{DiskHealth, DiskStall, LogDisk, SYNC_SLOW};
pub use log::record::ENTRY_BYTES_MAX;
pub use log::{LogReader, LogStore};
pub use machine::StateMachine;
pub use machine_store::{AppliedState, SnapshotBuilder, StateMachineStore, StateReader};
pub use snapshot::SnapshotFile;
pub use snapshot::directory::SnapshotReceiver;

use crate::fs::DiskFs;
use crate::log::ExpectedLog;

/// The type configuration of the controllers' Raft group.
pub type ClusterConfig = TypeConfig<millrace_cluster_state::State>;

/// The two halves that `openraft::Raft::new` takes. Both are closed when the Raft node with them is
/// shut down; the directory's lock is released with the log.
pub struct RaftStore<M> {
    pub log: LogStore<M>,
    /// The state machine. Take a [`StateMachineStore::reader`] before openraft takes the state machine.
    pub machine: StateMachineStore<M>,
}

/// Opens a data directory for the member that `identity` names. A new directory becomes that
/// member's. Blocks, because the log and the snapshot are read completely.
///
/// # Errors
/// [`Error::OtherIdentity`] if the directory belongs to another member; [`Error::Damaged`],
/// [`Error::Missing`], [`Error::UnknownFormat`], [`Error::UnknownCommand`] or [`Error::BadState`]
/// if its contents cannot be trusted or read; [`Error::Io`] and [`Error::Sled`].
pub fn open<M: StateMachine>(dir: DataDir, identity: &DirectoryOwner) -> Result<RaftStore<M>, Error> {
    open_with(dir, identity, LogStore::open)
}

/// Like [`open`], with a log that the caller opens.
fn open_with<M: StateMachine>(
    mut dir: DataDir,
    identity: &DirectoryOwner,
    open_log: impl FnOnce(&Path, ExpectedLog, watch::Receiver<Option<u64>>) -> Result<LogStore<M>, Error>,
) -> Result<RaftStore<M>, Error> {
    let expect = match dir.identity() {
        Some(found) if found != identity => {
            return Err(Error::OtherIdentity {
                path: dir.path().to_owned(),
                found: found.to_string(),
                wanted: identity.to_string(),
            });
        }
        Some(_) => ExpectedLog::Log,
        None => ExpectedLog::Nothing,
    };
    let machine = StateMachineStore::open(Arc::new(DiskFs::with_spares()), dir.path().join("snapshots"))?;
    let mut log = open_log(dir.path(), expect, machine.covered())?;
    if expect == ExpectedLog::Nothing && machine.last().is_some() {
        return Err(log::missing_identity("there is a snapshot"));
    }
    let covered = machine.last().map(|last| last.index);
    let purged = log.purged().map(|last| last.index);
    if purged > covered {
        return Err(Error::Missing {
            what: "a snapshot".to_owned(),
            because: format!("the log begins behind entry {}", purged.unwrap_or_default()),
        });
    }
    if expect == ExpectedLog::Nothing {
        // The identity is written last, so that every directory with an identity has a log.
        dir.set_owner(identity)?;
    }
    log.keep_locked(dir);
    Ok(RaftStore { log, machine })
}
