//! The error of a Raft node that did not start.

use std::path::PathBuf;

use millrace_cluster_state::ControllerId;
use millrace_types::Failure;

use super::timing::{JOIN_TIMEOUT, LEADING_TIMEOUT};

/// Error of a Raft node that did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The data directory was refused.
    #[error(transparent)]
    Store(#[from] millrace_raft_store::Error),
    /// The task that opens the data directory panicked or was cancelled.
    #[error("opening the data directory did not finish: {0}")]
    Interrupted(#[from] tokio::task::JoinError),
    /// Raft refused to start, or halted.
    #[error("raft did not start: {0}")]
    Raft(String),
    /// Raft runs, but did not elect this controller in time.
    #[error("raft did not elect a leader within {LEADING_TIMEOUT:?}: {0}")]
    NoLeader(String),
    /// The commands that initialize the cluster failed.
    #[error("the cluster could not be initialized: {}", .0.message)]
    Init(Failure),
    /// The data directory is empty, and the configuration allows neither to begin nor to join a
    /// cluster.
    #[error(
        "{} is empty: bootstrap a cluster, or join one; a controller that lost its directory must be removed from its group and join with a new id", .0.display()
    )]
    Empty(PathBuf),
    /// The data directory belongs to a controller that never joined a group.
    #[error("controller {} never joined its group: start it with the address of another controller to join", .0.0)]
    NeverJoined(ControllerId),
    /// The group refused this controller.
    #[error("the group refused this controller: {}", .0.message)]
    Refused(Failure),
    /// Some of the other controllers did not report an empty data directory in time.
    #[error(
        "no cluster was begun: within {JOIN_TIMEOUT:?} not all of {} reported an empty data directory: {reason}: start all of them, and replace a controller that is gone for good", with.join(", ")
    )]
    NotFounded {
        /// The addresses of the other controllers.
        with: Vec<String>,
        /// The last failure.
        reason: String,
    },
    /// No controller accepted this controller in time.
    #[error("no controller of {} accepted this controller within {JOIN_TIMEOUT:?}: {reason}", at.join(", "))]
    NotJoined {
        /// The addresses of the asked controllers.
        at: Vec<String>,
        /// The last failure.
        reason: String,
    },
}
