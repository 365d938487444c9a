//! The control plane of a cluster: the Raft node, the model files, the admin API, the workers' streams,
//! and the gateway's backend.
//!
//! ```text
//!            admin API          inference                     workers :7070
//!  :8080 ───────┬───────────────────┬──────────                ───┬────────
//!               ▼                   ▼ gateway::Backend            ▼
//!        ┌── admin ──┐        ┌── serving ──┐              ┌──  fleet  ──┐
//!        │ checks    │        │ catalog     │─ where ready ▶ streams     │
//!        │ views     │        │ dispatch    │─ Invoke ─────▶ telemetry   │
//!        └──┬─────┬──┘        └──────┬──────┘              └──┬───────┬──┘
//!           ▼     ▼ propose          ▼ read                   ▼       ▼ fetch
//!     artifacts  raft::Replica ◀─────┴────────────────────────┘   artifacts
//!                     ▲                                   │
//!                     └──────────────  leader  ◀──────────┘ signs of life, what is ready
//!                       leases, placements, what each node serves
//! ```
//!
//! Raft holds only the state that must survive a restart: functions, artifacts, nodes, placements, and
//! the checkpoints of workers. Streams, telemetry and requests live in this process's memory and end
//! with the process.

mod activity;
mod admin;
mod artifacts;
pub mod clock;
pub mod config;
pub mod connector;
mod events;
mod everyone;
mod faults;
#[cfg(test)]
mod fixtures;
mod fleet;
mod inspection;
mod leader;
mod meters;
mod pace;
mod passed;
mod preset;
mod raft;
mod server;
mod serving;
#[cfg(feature = "sim")]
pub mod sim;
mod traces;

use std::net::SocketAddr;
use std::path::PathBuf;

pub use artifacts::{ObjectStoreUrl, SharedPlaceError};
pub use config::{ClusterStart, ControllerConfig, ControllerLimits, JoinAs};
pub use connector::{ConnectError, Connector, Tcp, Transport};
pub use inspection::{Inspection, InspectorCommand, serve_inspection};
pub use millrace_cluster_state::ControllerId;
pub use raft::bootstrap::Error as RaftError;
pub use raft::runtime::RaftRuntime;
pub use server::{RunningController, start};

/// Error of a controller that did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is reachable from other machines, and the configuration does not say `insecure`.
    #[error(
        "listening at {address} would serve anyone who can reach it, without encryption or authentication: listen on 127.0.0.1, or add --insecure if that is meant"
    )]
    Exposed { address: SocketAddr },
    /// The controller cannot listen at the address.
    #[error("cannot listen at {address}: {source}; choose another port, or port 0 for a free one")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// The directory of model files cannot be opened.
    #[error("cannot use the model files in {}: {reason}", data_dir.display())]
    Artifacts { data_dir: PathBuf, reason: String },
    /// The object store for model files cannot be used as configured.
    #[error("cannot keep model files in {place}: {reason}; see the AWS_ variables of this process")]
    ObjectStore {
        /// The configured object store.
        place: ObjectStoreUrl,
        reason: String,
    },
    /// The replicated state cannot be served from this data directory.
    #[error(transparent)]
    Raft(#[from] RaftError),
}

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
        "the state of {id} differs from that of a majority after log entry {index}, so that its memory, its disk or its build corrupted it: replace this controller: keep its data directory for inspection, 'millrace cluster remove {}', and start one with an empty directory and another id", id.0
    )]
    Diverged {
        id: ControllerId,
        /// The index of the first log entry after which the states differed.
        index: u64,
    },
    /// The internal port is closed, so workers and other controllers cannot reach this controller.
    #[error("the internal port at {address} has stopped serving workers and other controllers: see the log")]
    Internal { address: SocketAddr },
}
