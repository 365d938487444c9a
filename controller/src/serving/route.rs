//! What the router is told of each worker that is ready for a revision: telemetry says how soon it
//! would be done.

use std::sync::Arc;

use millrace_policy::router::{self, Candidate, HOST_RATE, Held, RUN_GUESS, Request, Runs};
use millrace_types::{Bytes, Digest};

use super::catalog::Candidates;
use crate::fleet::{Load, Worker};

/// The worker for a request, among those that are ready for it and not `excluded`, where `runs` is what
/// its runs took, and `missing` says what of its inputs one would have to fetch. While no GPU serves anywhere, one that is about
/// to.
pub(super) fn choose(
    candidates: &Candidates,
    request: &Request,
    runs: &Runs,
    missing: impl Fn(&Worker) -> Bytes,
    excluded: impl Fn(&Worker) -> bool,
) -> Option<Arc<Worker>> {
    let digest = candidates.digest;
    let able = candidates.workers.iter().filter(|worker| !excluded(worker));
    let known = able.map(|worker| worker.with_load(|load| candidate(worker, load, digest)));
    let known = known.map(|candidate| {
        let (run, missing) = (runs.estimate(&candidate.worker.machine), missing(candidate.worker));
        Candidate { run, missing, ..candidate }
    });
    router::choose(known, request).cloned()
}

fn candidate<'a>(worker: &'a Arc<Worker>, load: &Load, digest: Digest) -> Candidate<&'a Arc<Worker>> {
    Candidate {
        missing: Bytes::ZERO,
        run: RUN_GUESS,
        worker,
        gpus_up: load.gpus_up,
        gpus_idle: load.gpus_idle,
        gpus_coming: load.gpus_coming,
        queued: load.queued,
        unseen: worker.unseen(),
        held: load.held.get(&digest).copied().unwrap_or(Held::InHost),
        host_rate: HOST_RATE,
    }
}
