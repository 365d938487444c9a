//! What is different about a simulated controller, as far as Raft goes: how it reaches the others,
//! and the disk its log is on. Time is tokio's in both.

use std::fmt::Debug;

use millrace_cluster_state::State;
use millrace_raft_store::{DataDir, Error, Identity, Store};
use tonic::transport::{Channel, Endpoint};

/// The network and the disk of one controller.
pub trait World: Debug + Send + Sync + 'static {
    /// A channel that connects at its first use.
    fn dial(&self, endpoint: &Endpoint) -> Channel;

    /// Opens the member that `identity` names in a data directory. Blocks.
    ///
    /// # Errors
    /// As [`millrace_raft_store::open`].
    fn open(&self, dir: DataDir, identity: &Identity) -> Result<Store<State>, Error>;
}

/// When a snapshot is taken, and what is given up behind it. In log entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Snapshots {
    /// Between two snapshots. A follower that is twice as far behind is sent one.
    pub every: u64,
    /// Kept behind a snapshot, for followers that are a little late.
    pub kept: u64,
    /// Given up at a time.
    pub purged_at_once: u64,
}

/// Of the entries between two snapshots, the share that is kept behind one.
const KEPT_SHARE: u64 = 10;
/// Entries given up at a time.
const PURGE_BATCH: u64 = 256;

impl Snapshots {
    /// As a machine's disk allows: after so many entries.
    #[must_use]
    pub fn every(entries: u64) -> Self {
        Self { every: entries, kept: entries / KEPT_SHARE, purged_at_once: PURGE_BATCH }
    }
}

/// The machine's own.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Machine;

impl World for Machine {
    fn dial(&self, endpoint: &Endpoint) -> Channel {
        endpoint.connect_lazy()
    }

    fn open(&self, dir: DataDir, identity: &Identity) -> Result<Store<State>, Error> {
        millrace_raft_store::open(dir, identity)
    }
}
