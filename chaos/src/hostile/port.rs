//! The ports of a cluster that attackers know.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use anyhow::Context as _;

/// The kind of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortKind {
    /// A controller's port for clients: HTTP/1 and HTTP/2, REST and gRPC.
    Client,
    /// A controller's port for its peers and workers: gRPC.
    Internal,
    /// A worker's port for controllers and other workers: gRPC.
    Worker,
}

/// A port of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerPort {
    /// The kind of the port.
    pub kind: PortKind,
    /// The address of the listening process, never of a proxy.
    pub address: SocketAddr,
}

impl PortKind {
    fn word(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Internal => "internal",
            Self::Worker => "worker",
        }
    }
}

impl fmt::Display for ServerPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind.word(), self.address)
    }
}

impl FromStr for ServerPort {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (word, address) =
            text.split_once('=').with_context(|| format!("{text:?} is not a port: write KIND=ADDRESS"))?;
        let kinds = [PortKind::Client, PortKind::Internal, PortKind::Worker];
        let kind = kinds.into_iter().find(|kind| kind.word() == word);
        let kind =
            kind.with_context(|| format!("unknown kind of port {word:?}: write client, internal or worker"))?;
        Ok(Self { kind, address: address.parse().with_context(|| format!("{address:?} is not an address"))? })
    }
}
