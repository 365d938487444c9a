//! One attached worker as others see it: how to call it, what it last reported, and whether it is
//! still there.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_proto::worker as wire;
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_types::{Epoch, NodeName, Revision, RevisionKey};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::load::{Load, Unseen};
use crate::connector::Transport;

/// How far a worker is with one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Phase {
    Preparing,
    Ready,
    Failed(String),
}

/// An attached worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) name: NodeName,
    pub(crate) instance: String,
    pub(crate) epoch: Epoch,
    pub(crate) client: WorkerClient<Transport>,
    /// Cancelled as soon as its stream ends.
    pub(crate) lost: CancellationToken,
    statuses: watch::Sender<Arc<BTreeMap<RevisionKey, Phase>>>,
    telemetry: watch::Sender<Option<Arc<wire::Telemetry>>>,
    load: watch::Sender<Arc<Load>>,
    unseen: Unseen,
}

impl Worker {
    pub(crate) fn new(
        name: NodeName,
        instance: String,
        epoch: Epoch,
        gpus: u32,
        client: WorkerClient<Transport>,
    ) -> Self {
        Self {
            name,
            instance,
            epoch,
            client,
            lost: CancellationToken::new(),
            statuses: watch::Sender::default(),
            telemetry: watch::Sender::default(),
            load: watch::Sender::new(Arc::new(Load::unknown(gpus))),
            unseen: Unseen::default(),
        }
    }

    /// How far it is with a revision; `None` when it never mentioned it.
    pub(crate) fn phase(&self, key: &RevisionKey) -> Option<Phase> {
        self.statuses.borrow().get(key).cloned()
    }

    pub(crate) fn is_ready(&self, key: &RevisionKey) -> bool {
        matches!(self.statuses.borrow().get(key), Some(Phase::Ready))
    }

    /// What it last reported of its GPUs and queue; `None` before it did.
    pub(crate) fn telemetry(&self) -> Option<Arc<wire::Telemetry>> {
        self.telemetry.borrow().clone()
    }

    /// What routing reads of its last report.
    pub(crate) fn load(&self) -> Arc<Load> {
        self.load.borrow().clone()
    }

    /// Requests of this controller that its last report cannot have counted.
    pub(crate) fn unseen(&self) -> u32 {
        self.unseen.count()
    }

    /// Counts a request as sent until the guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> InFlight {
        InFlight { after: self.unseen.sent(), worker: self.clone() }
    }

    /// Takes a report; one that carries another epoch, or is older than the last, is ignored.
    pub(super) fn report(&self, telemetry: wire::Telemetry) {
        if telemetry.epoch != self.epoch.0 {
            return;
        }
        let load = Arc::new(Load::of(&telemetry));
        let newer = self.telemetry.send_if_modified(|last| {
            let newer = last.as_ref().is_none_or(|last| last.seq < telemetry.seq);
            if newer {
                *last = Some(Arc::new(telemetry));
            }
            newer
        });
        if newer {
            self.load.send_replace(load);
            self.unseen.reported();
        }
    }

    /// Takes the statuses of all its functions. Says whether anything changed.
    pub(super) fn report_functions(&self, statuses: wire::FunctionStatuses) -> bool {
        let statuses: BTreeMap<_, _> = statuses.functions.into_iter().filter_map(read_status).collect();
        self.statuses.send_if_modified(|known| {
            let changed = **known != statuses;
            if changed {
                *known = Arc::new(statuses);
            }
            changed
        })
    }
}

/// A status that cannot be read is no status: the function is not routed there.
fn read_status(status: wire::FunctionStatus) -> Option<(RevisionKey, Phase)> {
    let function = millrace_proto::convert::function_key(&status.tenant, &status.name).ok()?;
    let key = RevisionKey { function, revision: Revision::new(status.revision)? };
    let phase = match status.phase() {
        wire::FunctionPhase::Unspecified => return None,
        wire::FunctionPhase::Preparing => Phase::Preparing,
        wire::FunctionPhase::Ready => Phase::Ready,
        wire::FunctionPhase::Failed => Phase::Failed(status.message),
    };
    Some((key, phase))
}

/// One request in flight at a worker.
#[derive(Debug)]
pub(crate) struct InFlight {
    worker: Arc<Worker>,
    /// The report it was sent after.
    after: u64,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.worker.unseen.answered(self.after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connector::{Connector as _, Tcp, client};

    fn worker() -> Worker {
        let name = NodeName::new("n1").unwrap();
        let transport = Tcp.connect(&name, "127.0.0.1:1").unwrap();
        Worker::new(name, "i".into(), Epoch(3), 1, client(transport))
    }

    fn status(phase: wire::FunctionPhase, revision: u64) -> wire::FunctionStatus {
        wire::FunctionStatus {
            tenant: "default".into(),
            name: "f".into(),
            revision,
            phase: phase.into(),
            message: "why".into(),
        }
    }

    #[tokio::test]
    async fn telemetry_of_another_epoch_or_out_of_order_is_ignored() {
        let worker = worker();
        let report = |epoch, seq, queued| {
            worker.report(wire::Telemetry { epoch, seq, queued, ..Default::default() });
            worker.telemetry().map(|it| it.queued)
        };
        assert_eq!(report(2, 9, 1), None);
        assert_eq!(report(3, 5, 2), Some(2));
        assert_eq!(report(3, 4, 3), Some(2));
        assert_eq!(report(3, 6, 4), Some(4));
    }

    #[tokio::test]
    async fn statuses_replace_each_other_and_unreadable_ones_do_not_count() {
        let worker = worker();
        let key = |revision| RevisionKey {
            function: millrace_proto::convert::function_key("default", "f").unwrap(),
            revision: Revision::new(revision).unwrap(),
        };
        let report = |functions| worker.report_functions(wire::FunctionStatuses { functions });
        assert!(report(vec![
            status(wire::FunctionPhase::Ready, 1),
            status(wire::FunctionPhase::Ready, 0),
            status(wire::FunctionPhase::Unspecified, 3),
        ]));
        assert!(worker.is_ready(&key(1)));
        assert_eq!(worker.phase(&key(3)), None);
        assert!(!report(vec![status(wire::FunctionPhase::Ready, 1)]), "the same again");
        assert!(report(vec![status(wire::FunctionPhase::Failed, 2)]));
        assert_eq!(worker.phase(&key(1)), None);
        assert_eq!(worker.phase(&key(2)), Some(Phase::Failed("why".into())));
    }
}
