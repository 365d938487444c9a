//! The error of a controller that did not start.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::config::ObjectStoreUrl;
use crate::raft::Error as RaftError;

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
