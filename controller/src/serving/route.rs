//! What the router is told of each worker.

use std::sync::Arc;

use millrace_types::RevisionKey;

use crate::fleet::{Fleet, Worker};

/// The worker for a request, among those that are ready for it and not `excluded`.
pub(super) fn choose(
    fleet: &Fleet,
    key: &RevisionKey,
    excluded: impl Fn(&Worker) -> bool,
) -> Option<Arc<Worker>> {
    let workers = fleet.workers();
    let candidates = workers.values().filter(|worker| worker.is_ready(key) && !excluded(worker));
    candidates.min_by_key(|worker| worker.in_flight()).cloned()
}
