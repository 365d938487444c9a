//! What the router is told of each worker that is ready for a revision: telemetry says how soon it
//! would be done.

use std::sync::Arc;

use millrace_policy::router::{self, Candidate, Held, Request};
use millrace_types::{BytesPerSec, Digest};

use super::catalog::Candidates;
use crate::fleet::{Load, Worker};

/// How fast a model is taken to come onto a GPU: PCIe 3.0 ×16 in practice. Workers do not say, and
/// only how it compares with a run matters here.
const HOST_RATE: BytesPerSec = BytesPerSec::gb(12);

/// The worker for a request, among those that are ready for it and not `excluded`. While no GPU
/// serves anywhere, one that is about to.
pub(super) fn choose(
    candidates: &Candidates,
    request: &Request,
    excluded: impl Fn(&Worker) -> bool,
) -> Option<Arc<Worker>> {
    let digest = candidates.digest;
    let able = || candidates.workers.iter().filter(|worker| !excluded(worker));
    let serving = able().map(|worker| worker.with_load(|load| candidate(worker, load, digest)));
    let soon = || {
        able().map(|worker| {
            worker.with_load(|load| {
                let candidate = candidate(worker, load, digest);
                Candidate { gpus_up: load.gpus_coming, gpus_idle: 0, ..candidate }
            })
        })
    };
    router::choose(serving, request).or_else(|| router::choose(soon(), request)).cloned()
}

fn candidate<'a>(worker: &'a Arc<Worker>, load: &Load, digest: Digest) -> Candidate<&'a Arc<Worker>> {
    Candidate {
        worker,
        gpus_up: load.gpus_up,
        gpus_idle: load.gpus_idle,
        queued: load.queued,
        unseen: worker.unseen(),
        held: load.held.get(&digest).copied().unwrap_or(Held::InHost),
        host_rate: HOST_RATE,
    }
}
