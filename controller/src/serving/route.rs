//! The router's input about each worker that is ready for a revision, from telemetry.

use std::sync::Arc;

use millrace_nodes::router::{
    self, HOST_RATE, MachineRunTimes, ModelResidency, RUN_GUESS, RouteRequest, WorkerCandidate,
};
use millrace_types::{Bytes, Digest};

use super::catalog::Candidates;
use crate::fleet::{AttachedWorker, WorkerLoad};

/// Returns the worker for a request, among the candidates that are not `excluded`. `runs` has the
/// durations of the revision's runs, and `missing` gives the input bytes that a worker would have to
/// fetch. While no GPU serves on any candidate, the router picks a worker with a starting GPU.
pub(super) fn choose(
    candidates: &Candidates,
    request: &RouteRequest,
    runs: &MachineRunTimes,
    missing: impl Fn(&AttachedWorker) -> Bytes,
    excluded: impl Fn(&AttachedWorker) -> bool,
) -> Option<Arc<AttachedWorker>> {
    let digest = candidates.digest;
    let able = candidates.workers.iter().filter(|worker| !excluded(worker));
    let known = able.map(|worker| worker.with_load(|load| candidate(worker, load, digest)));
    let known = known.map(|candidate| {
        let run = runs.estimate(&candidate.worker.machine);
        let missing = missing(candidate.worker);
        WorkerCandidate { run, missing, ..candidate }
    });
    router::choose(known, request).cloned()
}

fn candidate<'a>(
    worker: &'a Arc<AttachedWorker>,
    load: &WorkerLoad,
    digest: Digest,
) -> WorkerCandidate<&'a Arc<AttachedWorker>> {
    WorkerCandidate {
        missing: Bytes::ZERO,
        run: RUN_GUESS,
        worker,
        gpus_up: load.gpus_up,
        gpus_idle: load.gpus_idle,
        gpus_coming: load.gpus_coming,
        queued: load.queued,
        unseen: worker.unseen(),
        held: load.held.get(&digest).copied().unwrap_or(ModelResidency::InHost),
        host_rate: HOST_RATE,
    }
}
