//! Fan-out of a request to every other controller and every attached worker, for responses that are
//! still useful with a part missing.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join, join_all};
use futures::{FutureExt as _, TryFutureExt as _};
use millrace_types::Failure;
use tonic::{Response, Status};

use crate::fleet::{AttachedWorker, WorkerFleet};
use crate::raft::{PeerClient, Replica, TrafficClass};

/// The timeout of each asked process.
pub(super) const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// The processes to ask. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct PeerFanout {
    pub(crate) replica: Replica,
    pub(crate) fleet: WorkerFleet,
}

/// The answer of one process, or the name of the process with the reason of the failure.
pub(crate) type PeerAnswer<T> = Result<T, String>;

impl PeerFanout {
    /// Asks all processes in parallel.
    pub(crate) async fn ask<T, C, W>(
        &self,
        controller: impl Fn(PeerClient) -> C,
        worker: impl Fn(Arc<AttachedWorker>) -> W,
    ) -> Vec<PeerAnswer<T>>
    where
        C: Future<Output = Result<T, Failure>>,
        W: Future<Output = Result<Response<T>, Status>>,
    {
        let from_controller = |peer: PeerClient| {
            let name = format!("controller {}", peer.id());
            let named = move |failure: Failure| match failure.message.starts_with(&name) {
                true => failure.message,
                false => who(name, failure.message),
            };
            controller(peer).map_err(named)
        };
        let from_worker = |it: Arc<AttachedWorker>| {
            let name = it.name.clone();
            let asked = tokio::time::timeout(ASK_TIMEOUT, worker(it));
            asked.map(move |answer| match answer {
                Ok(answer) => answer.map(Response::into_inner).map_err(|status| who(&name, status.message())),
                Err(_) => Err(who(&name, format!("no answer within {ASK_TIMEOUT:?}"))),
            })
        };
        let controllers = self.replica.others(TrafficClass::Requests).into_iter().map(from_controller);
        let workers = self.fleet.workers();
        let workers = workers.values().cloned().map(from_worker);
        let (mut given, from_workers) = join(join_all(controllers), join_all(workers)).await;
        given.extend(from_workers);
        given
    }
}

fn who(name: impl Display, why: impl Display) -> String {
    format!("{name}: {why}")
}
