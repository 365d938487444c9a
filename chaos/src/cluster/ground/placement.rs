//! The place of a process on a ground.

use std::net::SocketAddr;

/// The place of a process on a ground.
#[derive(Debug, Clone)]
pub(in crate::cluster) struct ProcessPlacement {
    /// The words before a program that is to run in this place.
    pub(in crate::cluster) prefix: Vec<String>,
    /// Further arguments of a process that listens in this place.
    pub(in crate::cluster) words: Vec<String>,
    /// The address at which a controller listens for clients.
    pub(in crate::cluster) client: SocketAddr,
    /// The address at which the process listens for other processes.
    pub(in crate::cluster) internal: SocketAddr,
}
