//! The messages for requests that failed at the tenancy gate: the gate in front of the node's queue that
//! keeps each tenant within its caps.

use millrace_scheduling::tenancy::TenantGate;
use millrace_types::Reason;

use crate::messages::work::RequestWork;

/// Returns the error message if the gate caused the failure: the cause, and the caller's next step.
pub(super) fn explain(gate: &TenantGate, reason: Reason, work: &RequestWork) -> Option<String> {
    if !gate.has_capped_owner(work.function) {
        return None;
    }
    let name = &work.invocation.revision;
    let tenant = &name.function.tenant;
    match reason {
        // The cause is the gate, never the queue: the queue always has a slot for a request that the gate
        // has let in.
        Reason::QueueFull => Some(format!(
            "the queue of requests over the caps of tenant {tenant} is full on this worker: try again soon, or see the caps with 'millrace get tenants'"
        )),
        Reason::NoGpuMemory if gate.over_memory_share(work.function, work.model) => Some(format!(
            "{name} needs more GPU memory than tenant {tenant} may use on this worker: see the tenant's memory share with 'millrace get tenants'"
        )),
        _ => None,
    }
}
