//! An attached worker: a client for calls, the last report, and the liveness.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millrace_nodes::lease::NodeRegistration;
use millrace_nodes::router::MachineType;
use millrace_proto::parts::{SetBounds, SetUpdate, TEXT_BYTES_MAX, cut_text};
use millrace_proto::worker as wire;
use millrace_types::node::FUNCTIONS_PER_NODE_MAX;
use millrace_types::policy::GpuSharingName;
use millrace_types::{Epoch, FunctionKey, GpuIndex, NodeName, Revision, RevisionKey, Timestamp};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::gpu_absence::GpuAbsence;
use super::load::{Unseen, WorkerLoad};
use crate::connector::Transport;

/// Consecutive breaks of young streams after which a node is shown as `StreamBreaks`.
const STREAM_BREAKS_MIN: u32 = 2;
/// The age from which a stream counts as stable. Workers count the breaks of younger streams.
const STREAM_HOLDS: Duration = Duration::from_secs(10);

/// The progress of a worker with a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RevisionPhase {
    Preparing,
    Ready,
    Failed(String),
}

/// An attached worker.
pub(crate) struct AttachedWorker {
    pub(crate) name: NodeName,
    /// The worker's hello, which registers the worker again after the worker was declared lost.
    pub(crate) hello: wire::WorkerHello,
    /// The type of the worker's GPUs, by which the durations of runs are estimated.
    pub(crate) machine: MachineType,
    /// The names of the worker's GPUs in answers and traces, and the name without a GPU.
    served_by: BTreeMap<Option<GpuIndex>, Arc<str>>,
    /// The transport of calls to the worker.
    pub(crate) calls: Transport,
    /// Cancelled when the worker's stream ends.
    pub(crate) stream_ended: CancellationToken,
    epoch: watch::Sender<Epoch>,
    /// The beginning of the worker's stream, by the fleet's clock.
    attached_at: Timestamp,
    /// The time of the worker's last message, by the fleet's clock, in nanoseconds.
    heard: AtomicU64,
    /// Whether the state counts the worker as lost, and this controller has heard nothing either.
    presumed_lost: watch::Sender<bool>,
    statuses: watch::Sender<Arc<BTreeMap<RevisionKey, RevisionPhase>>>,
    telemetry: watch::Sender<Option<Arc<wire::Telemetry>>>,
    load: watch::Sender<WorkerLoad>,
    absence: Mutex<GpuAbsence>,
    unseen: Unseen,
}

impl fmt::Debug for AttachedWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachedWorker")
            .field("name", &self.name)
            .field("epoch", &self.epoch())
            .finish_non_exhaustive()
    }
}

impl AttachedWorker {
    pub(crate) fn new(
        name: NodeName,
        hello: wire::WorkerHello,
        epoch: Epoch,
        calls: Transport,
        now: Timestamp,
    ) -> Self {
        let gpus = u32::try_from(hello.gpus.len()).unwrap_or(u32::MAX);
        let machine = MachineType::of(hello.gpus.iter().map(|gpu| gpu.gpu_type.as_str()));
        let gpu = |it: &wire::GpuCapacity| {
            (Some(GpuIndex(it.index)), format!("{name}/{} {}", it.index, it.gpu_type).into())
        };
        let mut served_by: BTreeMap<_, Arc<str>> = hello.gpus.iter().map(gpu).collect();
        served_by.insert(None, name.to_string().into());
        Self {
            name,
            machine,
            served_by,
            hello,
            calls,
            stream_ended: CancellationToken::new(),
            epoch: watch::Sender::new(epoch),
            attached_at: now,
            heard: AtomicU64::new(now.as_nanos()),
            presumed_lost: watch::Sender::default(),
            statuses: watch::Sender::default(),
            telemetry: watch::Sender::default(),
            load: watch::Sender::new(WorkerLoad::unknown(gpus)),
            absence: Mutex::default(),
            unseen: Unseen::default(),
        }
    }

    /// Returns the name of the worker and of a GPU, such as `worker-1/0 V100`.
    pub(crate) fn served_by(&self, gpu: Option<GpuIndex>) -> Arc<str> {
        let known = self.served_by.get(&gpu).or_else(|| self.served_by.get(&None));
        known.cloned().unwrap_or_default()
    }

    /// Returns the epoch of the worker's registration, as far as this controller knows.
    pub(crate) fn epoch(&self) -> Epoch {
        *self.epoch.borrow()
    }

    pub(crate) fn member(&self) -> NodeRegistration {
        NodeRegistration { node: self.name.clone(), epoch: self.epoch() }
    }

    /// Returns a watch of the epoch.
    pub(super) fn epochs(&self) -> watch::Receiver<Epoch> {
        self.epoch.subscribe()
    }

    /// Sets a later epoch after a new registration.
    pub(super) fn adopt(&self, epoch: Epoch) {
        self.epoch.send_if_modified(|known| {
            let later = *known < epoch;
            if later {
                *known = epoch;
            }
            later
        });
    }

    /// Whether both are the same process, possibly on different streams.
    pub(crate) fn is_process_of(&self, other: &Self) -> bool {
        self.name == other.name && self.hello.instance == other.hello.instance
    }

    /// Records a sign of life. Returns whether the worker was presumed lost.
    pub(super) fn sign_of_life(&self, now: Timestamp) -> bool {
        self.heard.fetch_max(now.as_nanos(), Ordering::Relaxed);
        self.presumed_lost.send_if_modified(std::mem::take)
    }

    /// Presumes the worker lost until the next message, although the stream may be open. The worker's
    /// functions do not count as ready meanwhile. Returns whether this is new.
    pub(super) fn presume_lost(&self) -> bool {
        self.presumed_lost.send_if_modified(|lost| !std::mem::replace(lost, true))
    }

    /// Waits until the worker's stream ends, or the worker is presumed lost.
    pub(crate) async fn gone(&self) {
        let mut presumed = self.presumed_lost.subscribe();
        tokio::select! {
            () = self.stream_ended.cancelled() => {}
            // This worker owns the sender, so the wait cannot fail.
            _ = presumed.wait_for(|lost| *lost) => {}
        }
    }

    /// Returns the time of the last message, by the fleet's clock.
    pub(crate) fn heard(&self) -> Timestamp {
        Timestamp(self.heard.load(Ordering::Relaxed))
    }

    /// Returns the progress with a revision; `None` if the worker has not reported the revision.
    pub(crate) fn phase(&self, key: &RevisionKey) -> Option<RevisionPhase> {
        self.statuses.borrow().get(key).cloned()
    }

    pub(crate) fn is_ready(&self, key: &RevisionKey) -> bool {
        !*self.presumed_lost.borrow() && matches!(self.statuses.borrow().get(key), Some(RevisionPhase::Ready))
    }

    /// Whether the worker reports any revision of a function as ready.
    pub(crate) fn holds_ready(&self, key: &FunctionKey) -> bool {
        if *self.presumed_lost.borrow() {
            return false;
        }
        let statuses = self.statuses.borrow();
        let mut of_function = statuses.iter().filter(|(revision, _)| revision.function == *key);
        of_function.any(|(_, phase)| *phase == RevisionPhase::Ready)
    }

    /// Returns the last telemetry; `None` before the first report.
    pub(crate) fn telemetry(&self) -> Option<Arc<wire::Telemetry>> {
        self.telemetry.borrow().clone()
    }

    /// Returns whether the worker shares its GPUs; `None` before the first report.
    pub(crate) fn shares_gpus(&self) -> Option<bool> {
        self.telemetry.borrow().as_ref().map(|telemetry| shares_gpus(telemetry))
    }

    /// Notes which GPUs have no executor by the last report. Returns whether other GPUs count as lost than
    /// before.
    pub(crate) fn note_absent_gpus(&self, now: Timestamp) -> bool {
        let Some(telemetry) = self.telemetry() else { return false };
        self.absence.lock().unwrap_or_else(PoisonError::into_inner).report(now, &telemetry.gpus)
    }

    /// Returns the GPUs that have had no executor for [`LOST_AFTER`](super::gpu_absence::LOST_AFTER).
    pub(crate) fn lost_gpus(&self) -> BTreeSet<GpuIndex> {
        self.absence.lock().unwrap_or_else(PoisonError::into_inner).lost().clone()
    }

    /// Reads the load of the last report.
    pub(crate) fn with_load<T>(&self, read: impl FnOnce(&WorkerLoad) -> T) -> T {
        read(&self.load.borrow())
    }

    /// Returns the requests of this controller that the last report cannot include.
    pub(crate) fn unseen(&self) -> u32 {
        self.unseen.count()
    }

    /// Counts a request as sent until the guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> InFlight {
        InFlight { after: self.unseen.sent(), worker: self.clone() }
    }

    /// Stores a report. A report of an older epoch, or older than the last, is ignored. A later epoch
    /// has not reached this controller's state yet, and is accepted.
    pub(crate) fn report(&self, telemetry: wire::Telemetry) {
        if telemetry.epoch < self.epoch().0 {
            return;
        }
        let load = WorkerLoad::of(&telemetry);
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

    /// Stores statuses of the worker's functions. Returns whether anything changed.
    ///
    /// # Errors
    /// The statuses exceed [`STATUS_BOUNDS`]; the stream must end.
    pub(crate) fn report_functions(
        &self,
        update: SetUpdate<wire::FunctionStatuses>,
    ) -> Result<bool, TooManyStatuses> {
        let SetUpdate { is_whole, items, gone, .. } = update;
        let news = items.into_iter().map(read_status);
        if is_whole {
            let statuses: BTreeMap<_, _> = news.filter_map(|(key, phase)| Some((key?, phase?))).collect();
            let changed = self.statuses.send_if_modified(|known| {
                let changed = **known != statuses;
                if changed {
                    *known = Arc::new(statuses);
                }
                changed
            });
            return Ok(changed);
        }
        let gone = gone.iter().map(|it| (status_key(&it.tenant, &it.function, it.revision), None));
        let mut is_too_many = false;
        let changed = self.statuses.send_if_modified(|known| {
            let known = Arc::make_mut(known);
            let mut changed = false;
            for (key, phase) in gone.chain(news) {
                // A function with a malformed name gets no requests.
                let Some(key) = key else { continue };
                changed |= known.get(&key) != phase.as_ref();
                match phase {
                    Some(phase) => drop(known.insert(key, phase)),
                    None => drop(known.remove(&key)),
                }
                is_too_many = known.len() > STATUS_BOUNDS.items;
                if is_too_many {
                    break;
                }
            }
            changed
        });
        if is_too_many { Err(TooManyStatuses) } else { Ok(changed) }
    }

    /// Returns the number and reason of consecutive breaks of the worker's young streams; `None` once a
    /// stream has held.
    pub(crate) fn stream_break(&self, now: Timestamp) -> Option<&wire::StreamBreak> {
        let breaks = self.hello.stream_break.as_ref()?;
        let held = now.since(self.attached_at) >= STREAM_HOLDS;
        (breaks.times >= STREAM_BREAKS_MIN && !held).then_some(breaks)
    }
}

/// The bounds of a worker's function statuses: two revisions of each function, with a text each.
pub(crate) const STATUS_BOUNDS: SetBounds =
    SetBounds { items: 2 * FUNCTIONS_PER_NODE_MAX, bytes: 2 * FUNCTIONS_PER_NODE_MAX * 2 * TEXT_BYTES_MAX };

/// Error of a worker that reports more revisions than a node may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the worker reports more than {} revisions of functions", STATUS_BOUNDS.items)]
pub(crate) struct TooManyStatuses;

/// Parses a status. A malformed status counts as none, so the function is not routed to this worker.
fn read_status(mut status: wire::FunctionStatus) -> (Option<RevisionKey>, Option<RevisionPhase>) {
    cut_text(&mut status.message);
    let phase = match status.phase() {
        wire::FunctionPhase::Unspecified => None,
        wire::FunctionPhase::Preparing => Some(RevisionPhase::Preparing),
        wire::FunctionPhase::Ready => Some(RevisionPhase::Ready),
        wire::FunctionPhase::Failed => Some(RevisionPhase::Failed(status.message)),
    };
    (status_key(&status.tenant, &status.name, status.revision), phase)
}

fn status_key(tenant: &str, name: &str, revision: u64) -> Option<RevisionKey> {
    let function = millrace_proto::convert::function_key(tenant, name).ok()?;
    Some(RevisionKey { function, revision: Revision::new(revision)? })
}

/// A request in flight at a worker.
pub(crate) struct InFlight {
    worker: Arc<AttachedWorker>,
    /// The number of the last report before the request.
    after: u64,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.worker.unseen.answered(self.after);
    }
}

/// Whether the policy in force on a worker shares GPUs.
fn shares_gpus(telemetry: &wire::Telemetry) -> bool {
    let spec = telemetry.policy.as_ref().and_then(|policy| policy.spec.as_ref());
    let sharing = spec.and_then(|spec| spec.gpu_sharing.parse().ok());
    sharing.is_some_and(|sharing: GpuSharingName| sharing != GpuSharingName::Off)
}

#[cfg(test)]
mod tests {
    use millrace_proto::parts::{PartAssembler, PartSender};

    use super::*;
    use crate::connector::{Connector as _, Tcp};

    fn worker() -> AttachedWorker {
        let name = NodeName::new("n1").unwrap();
        let transport = Tcp.connect(&name, "127.0.0.1:1").unwrap();
        let hello = wire::WorkerHello { gpus: vec![wire::GpuCapacity::default()], ..Default::default() };
        AttachedWorker::new(name, hello, Epoch(3), transport, Timestamp::ZERO)
    }

    /// L04.
    #[tokio::test]
    async fn answers_name_the_worker_and_the_gpu_with_its_type() {
        let name = NodeName::new("n1").unwrap();
        let transport = Tcp.connect(&name, "127.0.0.1:1").unwrap();
        let gpu = wire::GpuCapacity { index: 1, gpu_type: "V100".into(), ..Default::default() };
        let hello = wire::WorkerHello { gpus: vec![gpu], ..Default::default() };
        let worker = AttachedWorker::new(name, hello, Epoch(3), transport, Timestamp::ZERO);
        let named = [Some(GpuIndex(1)), Some(GpuIndex(7)), None].map(|gpu| worker.served_by(gpu).to_string());
        assert_eq!(named, ["n1/1 V100", "n1", "n1"], "a GPU of the worker, an unknown GPU, a program");
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
    async fn telemetry_of_an_older_epoch_or_out_of_order_is_ignored() {
        let worker = worker();
        let report = |epoch, seq, queued| {
            worker.report(wire::Telemetry { epoch, seq, queued, ..Default::default() });
            worker.telemetry().map(|it| it.queued)
        };
        assert_eq!(report(2, 9, 1), None);
        assert_eq!(report(3, 5, 2), Some(2));
        assert_eq!(report(3, 4, 3), Some(2));
        assert_eq!(report(3, 6, 4), Some(4));
        assert_eq!(report(4, 7, 5), Some(5), "the state lags behind the registration");
    }

    #[tokio::test]
    async fn statuses_replace_earlier_ones_and_malformed_ones_do_not_count() {
        let worker = worker();
        let key = |revision| RevisionKey {
            function: millrace_proto::convert::function_key("default", "f").unwrap(),
            revision: Revision::new(revision).unwrap(),
        };
        let mut parts = PartAssembler::default();
        let mut take = |statuses| worker.report_functions(parts.take(statuses).unwrap().unwrap()).unwrap();
        let mut report = |functions| take(wire::FunctionStatuses { functions, ..Default::default() });
        assert!(report(vec![
            status(wire::FunctionPhase::Ready, 1),
            status(wire::FunctionPhase::Ready, 0),
            status(wire::FunctionPhase::Unspecified, 3),
        ]));
        assert!(worker.is_ready(&key(1)));
        assert_eq!(worker.phase(&key(3)), None);
        assert!(!report(vec![status(wire::FunctionPhase::Ready, 1)]), "the same statuses again");
        assert!(report(vec![status(wire::FunctionPhase::Failed, 2)]));
        assert_eq!(worker.phase(&key(1)), None);
        assert_eq!(worker.phase(&key(2)), Some(RevisionPhase::Failed("why".into())));
    }

    #[tokio::test]
    async fn changed_statuses_leave_the_other_statuses_unchanged() {
        let worker = worker();
        let mut sender = PartSender::<wire::FunctionStatuses>::default();
        let mut parts = PartAssembler::default();
        let mut report = |statuses: &[wire::FunctionStatus]| {
            let mut messages = sender.next(&(), &Arc::new(statuses.to_vec()));
            worker.report_functions(parts.take(messages.remove(0)).unwrap().unwrap()).unwrap()
        };
        let phases = || [1, 2, 3].map(|revision| worker.phase(&status_key("", "f", revision).unwrap()));
        let ready = |revision| status(wire::FunctionPhase::Ready, revision);
        assert!(report(&[ready(1), ready(2)]));
        assert_eq!(phases(), [Some(RevisionPhase::Ready), Some(RevisionPhase::Ready), None]);
        assert!(report(&[ready(2), status(wire::FunctionPhase::Preparing, 3)]));
        assert_eq!(phases(), [None, Some(RevisionPhase::Ready), Some(RevisionPhase::Preparing)]);
        assert!(!report(&[ready(2), status(wire::FunctionPhase::Preparing, 3)]), "the same statuses again");
        assert!(report(&[status(wire::FunctionPhase::Unspecified, 2)]));
        assert_eq!(phases(), [None, None, None]);
    }

    #[tokio::test]
    async fn repeated_breaks_of_a_stream_are_shown_until_one_holds() {
        let at = |seconds| Timestamp::ZERO + Duration::from_secs(seconds);
        let broken = |times| {
            let name = NodeName::new("n1").unwrap();
            let transport = Tcp.connect(&name, "127.0.0.1:1").unwrap();
            let stream_break = Some(wire::StreamBreak { times, why: "why".into() });
            let hello = wire::WorkerHello { stream_break, ..Default::default() };
            AttachedWorker::new(name, hello, Epoch(3), transport, at(100))
        };
        assert_eq!(worker().stream_break(at(0)), None);
        assert_eq!(broken(1).stream_break(at(101)), None, "the controller may have been restarted");
        assert_eq!(broken(2).stream_break(at(109)).map(|it| it.why.clone()), Some("why".to_owned()));
        assert_eq!(broken(2).stream_break(at(110)), None);
    }
}
