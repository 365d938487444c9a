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
//! Each module uses only modules of the lines below its own:
//!
//! ```text
//!  server  sim
//!  admin  serving  leader  meters  start_error
//!  events  peers  preset
//!  fleet
//!  artifacts
//!  raft  leadership  connector  faults
//!  config  halt_error  pace  passed
//!  clock
//! ```
//!
//! Raft holds only the state that must survive a restart: functions, artifacts, nodes, placements, and
//! the checkpoints of workers. Streams, telemetry and requests live in this process's memory and end
//! with the process.

mod admin;
mod artifacts;
pub mod clock;
pub mod config;
pub mod connector;
mod events;
mod faults;
#[cfg(test)]
mod fixtures;
mod fleet;
mod halt_error;
mod leader;
mod leadership;
mod meters;
mod pace;
mod passed;
mod peers;
mod preset;
mod profile_trials;
mod raft;
mod server;
mod serving;
#[cfg(feature = "sim")]
pub mod sim;
mod start_error;

pub use artifacts::serve_inspection;
pub use config::{
    ClusterStart, ControllerConfig, ControllerLimits, Inspection, InspectorCommand, JoinAs, ObjectStoreUrl,
    SharedPlaceError,
};
pub use connector::{ConnectError, Connector, Tcp, Transport};
pub use halt_error::HaltError;
pub use millrace_cluster_state::ControllerId;
pub use raft::Error as RaftError;
pub use raft::runtime::RaftRuntime;
pub use server::{RunningController, start};
pub use start_error::StartError;
