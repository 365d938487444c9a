//! What the router is told of each worker: the candidates are those that are ready for the
//! revision, and telemetry says how soon each would be done.

use std::sync::Arc;

use millrace_policy::router::{self, Candidate, Held};
use millrace_types::{BytesPerSec, Digest, RevisionKey};

use crate::fleet::{Fleet, Load, Worker};

/// How fast a model is taken to come onto a GPU: PCIe 3.0 ×16 in practice. Workers do not say, and
/// only how it compares with a run matters here.
const HOST_RATE: BytesPerSec = BytesPerSec::gb(12);

/// What is asked of a worker.
#[derive(Debug, Clone)]
pub(super) struct Demand {
    pub(super) key: RevisionKey,
    /// Its model; `None` when the function is gone since.
    pub(super) digest: Option<Digest>,
    pub(super) request: router::Request,
}

/// The worker for a request, among those that are ready for it and not `excluded`. While no GPU
/// serves anywhere, one that is about to.
pub(super) fn choose(
    fleet: &Fleet,
    demand: &Demand,
    excluded: impl Fn(&Worker) -> bool,
) -> Option<Arc<Worker>> {
    let workers = fleet.workers();
    let able = || workers.values().filter(|worker| worker.is_ready(&demand.key) && !excluded(worker));
    let serving = able().map(|worker| candidate(worker, &worker.load(), demand.digest));
    let soon = || {
        able().map(|worker| {
            let load = worker.load();
            let candidate = candidate(worker, &load, demand.digest);
            Candidate { gpus_up: load.gpus_coming, gpus_idle: 0, ..candidate }
        })
    };
    router::choose(serving, &demand.request).or_else(|| router::choose(soon(), &demand.request)).cloned()
}

fn candidate<'a>(worker: &'a Arc<Worker>, load: &Load, digest: Option<Digest>) -> Candidate<&'a Arc<Worker>> {
    Candidate {
        worker,
        gpus_up: load.gpus_up,
        gpus_idle: load.gpus_idle,
        queued: load.queued,
        unseen: worker.unseen(),
        held: digest.and_then(|digest| load.held.get(&digest).copied()).unwrap_or(Held::InHost),
        host_rate: HOST_RATE,
    }
}
