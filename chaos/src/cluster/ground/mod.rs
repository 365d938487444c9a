//! The grounds on which a cluster's processes run, and their requirements.
//!
//! | ground | process | network | requires |
//! |---|---|---|---|
//! | processes | a child of the harness | loopback | nothing |
//! | namespaces | a child of the harness | its own network namespace, on a bridge | root, `ip`, `nft`, `nsenter` |
//! | compose | a container of a separate project | the project's networks | root, a Docker Engine, a compose tool |
//!
//! Every resource on the machine carries the harness's pid in its name ([`owner`]). A harness that
//! is killed leaves its resources behind, and the next harness removes them.

pub(super) mod compose;
mod namespaces;
mod owner;
pub(super) mod placement;
mod tools;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use self::compose::Compose;
pub use self::namespaces::HarnessNamespace;
use self::namespaces::Namespaces;
use self::placement::ProcessPlacement;
use super::ports::PortAllocator;

/// The place where the processes of a cluster run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Ground {
    /// Processes run on loopback.
    #[default]
    Processes,
    /// Each process runs in its own network namespace.
    Namespaces,
    /// Processes run in the containers of `deploy/compose`.
    Compose,
}

impl Ground {
    /// All grounds.
    pub const ALL: [Self; 3] = [Self::Processes, Self::Namespaces, Self::Compose];

    /// Returns the name of the ground on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Processes => "processes",
            Self::Namespaces => "namespaces",
            Self::Compose => "compose",
        }
    }

    /// Returns the address of the proxies, which every process reaches.
    pub(super) fn proxies(self) -> Ipv4Addr {
        match self {
            Self::Namespaces => namespaces::HARNESS,
            Self::Processes | Self::Compose => Ipv4Addr::LOCALHOST,
        }
    }
}

/// A ground with its parameters.
#[derive(Debug, Clone)]
pub struct GroundConfig {
    pub kind: Ground,
    /// The folder of `compose.yaml`; `None` if the folder was not found.
    pub deploy: Option<PathBuf>,
}

impl GroundConfig {
    /// Checks the requirements of the ground on this machine. The requirements of namespaces are
    /// checked by [`HarnessNamespace::enter`] alone.
    ///
    /// # Errors
    /// The missing requirement, with the next step.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.kind {
            Ground::Compose => compose::check(self.deploy.as_deref()).map(drop),
            Ground::Processes | Ground::Namespaces => Ok(()),
        }
    }
}

/// The ground of a cluster. Its resources are removed when the value is dropped.
pub(super) enum RunningGround {
    Loopback(PortAllocator),
    Namespaces(Namespaces),
    Compose(Compose),
}

impl RunningGround {
    /// Prepares a ground without processes.
    pub(super) fn begin(config: &GroundConfig, program: &Path, root: &Path) -> anyhow::Result<Self> {
        Ok(match config.kind {
            Ground::Processes => Self::Loopback(PortAllocator::new()),
            Ground::Namespaces => Self::Namespaces(Namespaces::new()),
            Ground::Compose => Self::Compose(Compose::begin(config.deploy.as_deref(), program, root)?),
        })
    }

    /// Returns the place of a further process, on a ground without containers.
    pub(super) fn house(&mut self, name: &str) -> anyhow::Result<ProcessPlacement> {
        match self {
            Self::Loopback(ports) => {
                let client = ports.free()?;
                let internal = ports.free()?;
                Ok(ProcessPlacement { prefix: Vec::new(), words: Vec::new(), client, internal })
            }
            Self::Namespaces(namespaces) => namespaces.house(name),
            Self::Compose(_) => anyhow::bail!("{name} is a container, and already has a place"),
        }
    }
}
