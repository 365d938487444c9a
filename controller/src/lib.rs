//! The control plane of a cluster: the Raft node, the model files, the admin API, the workers'
//! streams, and what the front door serves from.
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
//! Only what must survive is in Raft: functions, artifacts, nodes, placements and what workers
//! checkpoint. Streams, telemetry and requests are in memory here and gone with the process.

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

pub use artifacts::{SharedPlace, SharedPlaceError};
pub use config::{ControllerConfig, JoinAs, Limits, Start};
pub use connector::{ConnectError, Connector, Tcp, Transport};
pub use inspection::{Inspection, InspectorCommand, serve_inspection};
pub use millrace_cluster_state::ControllerId;
pub use raft::bootstrap::Error as RaftError;
pub use raft::runtime::RaftRuntime;
pub use server::{Controller, start};

/// Why a controller did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address that others can reach, without saying that this is meant.
    #[error(
        "listening at {address} would serve anyone who can reach it, without encryption or authentication: listen on 127.0.0.1, or add --insecure if that is meant"
    )]
    Exposed {
        /// The address.
        address: SocketAddr,
    },
    /// An address that cannot be listened at.
    #[error("cannot listen at {address}: {source}; choose another port, or port 0 for a free one")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The model files' directory cannot be used.
    #[error("cannot use the model files in {}: {reason}", data_dir.display())]
    Artifacts {
        /// The data directory.
        data_dir: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The object store for model files cannot be used as it is configured.
    #[error("cannot keep model files in {place}: {reason}; see the AWS_ variables of this process")]
    ObjectStore {
        /// Where.
        place: SharedPlace,
        /// What is wrong.
        reason: String,
    },
    /// The replicated state cannot be served from this data directory.
    #[error(transparent)]
    Raft(#[from] RaftError),
}

/// Why a controller that served cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum HaltError {
    /// Its log or its snapshots failed, so that it takes no part in its group any more. Nothing that
    /// it acknowledged is lost.
    #[error("raft has halted: {reason}")]
    Raft {
        /// What failed.
        reason: String,
    },
    /// A majority of the controllers has another state: its own is corrupt, and so may its snapshots be.
    #[error(
        "the state of {id} differs from that of a majority after log entry {index}, so that its memory, its disk or its build corrupted it: replace this controller: keep its data directory for inspection, 'millrace cluster remove {}', and start one with an empty directory and another id", id.0
    )]
    Diverged {
        /// Which controller.
        id: ControllerId,
        /// The first entry after which the difference was found.
        index: u64,
    },
    /// Workers and other controllers cannot reach it any more.
    #[error("{address} is not served any more, where workers and other controllers connect: see the log")]
    Internal {
        /// Where it listened.
        address: SocketAddr,
    },
}
