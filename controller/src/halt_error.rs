//! The error that ends a running controller.

use std::net::SocketAddr;

use millrace_cluster_state::ControllerId;

/// Error after which a running controller cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum HaltError {
    /// The controller's log or snapshots failed, so the controller no longer takes part in the group.
    /// No acknowledged write is lost.
    #[error("raft has halted: {reason}")]
    Raft { reason: String },
    /// A majority of the controllers has a different state: this controller's state is corrupt, and the
    /// snapshots may be too.
    #[error(
        "the state of {id} differs from that of a majority after log entry {index}: its memory, its disk or its build corrupted the state. Keep its data directory for inspection, 'millrace cluster remove {}', and start a controller with a new id and an empty directory", id.0
    )]
    Diverged {
        id: ControllerId,
        /// The index of the newest compared log entry after which the states differed; they may differ since
        /// an earlier entry.
        index: u64,
    },
    /// The internal port is closed, so workers and other controllers cannot reach this controller.
    #[error("the internal port at {address} has stopped serving workers and other controllers: see the log")]
    Internal { address: SocketAddr },
}
