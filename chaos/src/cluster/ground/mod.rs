//! Where the processes of a cluster run, and what each place lets a harness do.
//!
//! | ground | a process is | its network is | takes |
//! |---|---|---|---|
//! | processes | a child of the harness | loopback | nothing |
//! | namespaces | a child of the harness | a network namespace of its own, on a bridge | root, `ip`, `nft`, `nsenter` |
//! | compose | a container of a project of its own | the project's networks | root, a Docker Engine, a compose tool |
//!
//! What is made on the machine carries the harness's pid in its name ([`owner`]): a harness that was
//! killed leaves it behind, and the next one removes it.

mod compose;
mod namespaces;
mod owner;
mod tools;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::ValueEnum;

pub(super) use self::compose::{Compose, Container};
pub(super) use self::namespaces::Namespaces;
pub use self::namespaces::Switch;
use super::ports::Ports;

/// What the name of everything begins with that a harness makes on a machine.
const PREFIX: &str = "millrace-chaos-";

/// Where the processes of a cluster run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Ground {
    /// Processes on loopback.
    #[default]
    Processes,
    /// Processes with a network namespace each.
    Namespaces,
    /// The containers of `deploy/compose`.
    Compose,
}

impl Ground {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Processes, Self::Namespaces, Self::Compose];

    /// As the command line has it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Processes => "processes",
            Self::Namespaces => "namespaces",
            Self::Compose => "compose",
        }
    }

    /// Where proxies are that everybody reaches.
    pub(super) fn proxies(self) -> Ipv4Addr {
        match self {
            Self::Namespaces => namespaces::HARNESS,
            Self::Processes | Self::Compose => Ipv4Addr::LOCALHOST,
        }
    }
}

/// What a ground takes to be made.
#[derive(Debug, Clone)]
pub struct Terrain {
    /// Which.
    pub ground: Ground,
    /// The folder of `compose.yaml`; `None` where it was not found.
    pub deploy: Option<PathBuf>,
}

impl Terrain {
    /// Whether this machine has what it takes. Of namespaces only [`Switch::enter`] can tell.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.ground {
            Ground::Compose => compose::check(self.deploy.as_deref()).map(drop),
            Ground::Processes | Ground::Namespaces => Ok(()),
        }
    }
}

/// The ground of one cluster. What was made for it goes when it is dropped.
pub(super) enum Site {
    Loopback(Ports),
    Namespaces(Namespaces),
    Compose(Compose),
}

/// Where one process lives.
#[derive(Debug, Clone)]
pub(super) struct House {
    /// What stands before a program so that it runs there.
    pub(super) prefix: Vec<String>,
    /// What a process is told besides, which listens there.
    pub(super) words: Vec<String>,
    /// Where a controller listens for clients.
    pub(super) client: SocketAddr,
    /// Where it listens for the others.
    pub(super) internal: SocketAddr,
}

impl Site {
    /// Nothing is started yet.
    pub(super) fn begin(terrain: &Terrain, program: &Path, root: &Path) -> anyhow::Result<Self> {
        Ok(match terrain.ground {
            Ground::Processes => Self::Loopback(Ports::new()),
            Ground::Namespaces => Self::Namespaces(Namespaces::new()),
            Ground::Compose => Self::Compose(Compose::begin(terrain.deploy.as_deref(), program, root)?),
        })
    }

    /// A place for one more process; for those that are no containers.
    pub(super) fn house(&mut self, name: &str) -> anyhow::Result<House> {
        match self {
            Self::Loopback(ports) => {
                let (client, internal) = (ports.free()?, ports.free()?);
                Ok(House { prefix: Vec::new(), words: Vec::new(), client, internal })
            }
            Self::Namespaces(namespaces) => namespaces.house(name),
            Self::Compose(_) => anyhow::bail!("{name} is a container, and has its place"),
        }
    }
}
