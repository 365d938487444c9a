//! The router's input about each worker that is ready for a revision, from telemetry.

use std::sync::Arc;
use std::time::Duration;

use millrace_nodes::router::{
    self, MachineRunTimes, MeasuredLoads, ModelResidency, RUN_GUESS, RouteRequest, WorkerCandidate,
};
use millrace_types::{Bytes, Digest};

use super::catalog::Candidates;
use crate::fleet::{AttachedWorker, WorkerLoad};

/// Returns the worker for a request, among the candidates that are not `excluded`. `runs` has the
/// durations of the revision's runs, and `missing` gives the input bytes that a worker would have to
/// fetch. While no GPU serves on any candidate, the router picks a worker with a starting GPU.
pub(super) fn choose(
    candidates: &Candidates,
    runs: &MachineRunTimes,
    missing: impl Fn(&AttachedWorker) -> Bytes,
    excluded: impl Fn(&AttachedWorker) -> bool,
) -> Option<Arc<AttachedWorker>> {
    let Candidates { digest, request, .. } = *candidates;
    let able = || candidates.workers.iter().filter(|worker| !excluded(worker));
    // A worker that never loaded the model is expected to take as long as the slowest that did.
    let measured = able().filter_map(|worker| worker.with_load(|load| load.loads.get(&digest).copied()));
    let load = measured.max().unwrap_or_else(|| {
        let mut all = MeasuredLoads::default();
        for worker in able() {
            worker.with_load(|load| all.add(load.measured.weights, load.measured.loads));
        }
        request.assumed_load(all)
    });
    let known = able().map(|worker| worker.with_load(|it| candidate(worker, it, digest, &request, load)));
    let known = known.map(|candidate| {
        let run = runs.estimate(&candidate.worker.machine);
        let missing = missing(candidate.worker);
        WorkerCandidate { run, missing, ..candidate }
    });
    router::choose(known).cloned()
}

fn candidate<'a>(
    worker: &'a Arc<AttachedWorker>,
    load: &WorkerLoad,
    digest: Digest,
    request: &RouteRequest,
    expected: Duration,
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
        assigned: load.assigned,
        waiting: load.waiting,
        load: load.loads.get(&digest).copied().unwrap_or(expected),
        has_room: load.room >= request.memory,
    }
}
