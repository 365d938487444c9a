//! The name of a controller or worker, for orders and for the timeline.

use std::fmt;

use crate::proxy::LinkParty;

/// A controller or a worker, running or not.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClusterProcess {
    /// A controller, by id.
    Controller(u64),
    /// A worker, by name.
    Worker(String),
}

impl fmt::Display for ClusterProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Controller(id) => write!(f, "controller {id}"),
            Self::Worker(name) => f.write_str(name),
        }
    }
}

impl ClusterProcess {
    /// Returns the name of the process on the ground and in the log.
    pub(super) fn service(&self) -> String {
        match self {
            Self::Controller(id) => format!("controller-{id}"),
            Self::Worker(name) => name.clone(),
        }
    }

    /// Returns the process's name in the proxies' rules.
    #[must_use]
    pub fn party(&self) -> LinkParty {
        match self {
            Self::Controller(id) => LinkParty::Controller(*id),
            Self::Worker(name) => LinkParty::Worker(name.clone()),
        }
    }
}
