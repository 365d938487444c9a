//! The environment of Raft that a simulation replaces: the network and the disk of the log. Both real
//! and simulated controllers take time from tokio.

use std::fmt::Debug;

use millrace_cluster_state::State;
use millrace_raft_store::{DataDir, DirectoryOwner, Error, RaftStore};
use tonic::transport::{Channel, Endpoint};

/// The network and the disk of one controller.
pub trait RaftEnvironment: Debug + Send + Sync + 'static {
    /// Returns a channel that connects at the first use.
    fn dial(&self, endpoint: &Endpoint) -> Channel;

    /// Opens the member `identity` in a data directory. Blocks.
    ///
    /// # Errors
    /// The same as [`millrace_raft_store::open`].
    fn open(&self, dir: DataDir, identity: &DirectoryOwner) -> Result<RaftStore<State>, Error>;
}

/// The snapshot policy, in log entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotSchedule {
    /// Entries between two snapshots. A follower that is twice as far behind receives a snapshot.
    pub every: u64,
    /// Entries kept before a snapshot, for followers that lag a little.
    pub kept: u64,
    /// Entries purged at a time.
    pub purged_at_once: u64,
}

/// The divisor of the entries between two snapshots that gives the entries kept before a snapshot.
const KEPT_SHARE: u64 = 10;
/// Entries purged at a time.
const PURGE_BATCH: u64 = 256;

impl SnapshotSchedule {
    /// Returns the production policy with a snapshot every `entries` entries.
    #[must_use]
    pub fn every(entries: u64) -> Self {
        Self { every: entries, kept: entries / KEPT_SHARE, purged_at_once: PURGE_BATCH }
    }
}

/// The real network and disk of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HostEnvironment;

impl RaftEnvironment for HostEnvironment {
    fn dial(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_lazy()
    }

    fn open(&self, dir: DataDir, identity: &DirectoryOwner) -> Result<RaftStore<State>, Error> {
        millrace_raft_store::open(dir, identity)
    }
}
