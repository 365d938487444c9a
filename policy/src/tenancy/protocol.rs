//! What the gate is told besides what the dispatcher is.

use std::hash::{Hash, Hasher};

use millrace_types::tenancy::Quota;

use crate::dispatch;
use crate::ids::{FunctionIndex, TenantIndex};

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// What concerns the queue.
    Dispatch(dispatch::Event),
    /// What a tenant may use from now on. What it has more of at work stays there until it ends.
    Quota {
        /// Who.
        tenant: TenantIndex,
        /// The caps.
        quota: Quota,
    },
    /// Whose a function is. Said of functions whose tenant has caps; of others nobody need know.
    Owner {
        /// Which.
        function: FunctionIndex,
        /// Whose; `None` once the function or the caps are gone.
        tenant: Option<TenantIndex>,
    },
}

impl From<dispatch::Event> for Event {
    fn from(event: dispatch::Event) -> Self {
        Self::Dispatch(event)
    }
}

/// An event of the queue's hashes as it does alone: a node without caps is known to do the same as
/// one without a gate (`policy::trace`).
impl Hash for Event {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Dispatch(event) => event.hash(state),
            Self::Quota { tenant, quota } => ("quota", tenant, quota).hash(state),
            Self::Owner { function, tenant } => ("owner", function, tenant).hash(state),
        }
    }
}
