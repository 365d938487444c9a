//! What to tell a request that failed before the node's queue, at the gate that keeps its tenant within
//! its caps.

use millrace_policy::tenancy::Tenancy;
use millrace_types::Reason;

use crate::actors::work::Work;

/// What happened and what the caller can do, where the gate is the cause.
pub(super) fn explain(gate: &Tenancy, reason: Reason, work: &Work) -> Option<String> {
    if !gate.owned(work.function) {
        return None;
    }
    let name = &work.invocation.revision;
    let tenant = &name.function.tenant;
    match reason {
        // What the gate let in always has a place in the queue.
        Reason::QueueFull => Some(format!(
            "as many requests of tenant {tenant} wait for its caps as may wait here: try again soon, or see its caps with 'millrace get tenants'"
        )),
        Reason::NoGpuMemory if gate.over_memory_share(work.function, work.model) => Some(format!(
            "{name} needs more GPU memory than tenant {tenant} may use of this worker: its memory share is shown by 'millrace get tenants'"
        )),
        _ => None,
    }
}
