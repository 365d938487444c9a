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
