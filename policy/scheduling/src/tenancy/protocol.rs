//! Events of the tenant gate, in addition to those of the dispatcher.

use std::hash::{Hash, Hasher};

use millrace_types::tenancy::Quota;

use crate::dispatch;
use millrace_core::ids::{FunctionIndex, TenantIndex};

/// Input of the gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An event for the queue behind the gate.
    Dispatch(dispatch::Event),
    /// A tenant has new caps. Requests that exceed lower caps stay until they end.
    Quota { tenant: TenantIndex, quota: Quota },
    /// A function has a new owner. Sent only for functions of tenants with caps.
    Owner {
        function: FunctionIndex,
        /// Tenant that owns the function; `None` once the function or the caps are removed.
        tenant: Option<TenantIndex>,
    },
}

impl From<dispatch::Event> for Event {
    fn from(event: dispatch::Event) -> Self {
        Self::Dispatch(event)
    }
}

/// Events for the queue hash without any wrapper, so that a node without caps has the same event
/// trace as a node without a gate (`core::trace`).
impl Hash for Event {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Dispatch(event) => event.hash(state),
            Self::Quota { tenant, quota } => ("quota", tenant, quota).hash(state),
            Self::Owner { function, tenant } => ("owner", function, tenant).hash(state),
        }
    }
}
