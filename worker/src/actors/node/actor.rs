//! The state of the Node actor, and the steps of its cores.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::attempts::{AttemptRecord, ReturnReason};
use millrace_core::ids::{FunctionIndex, RequestKey, TransferId};
use millrace_gpu::{ComputeRight, Event as GpuEvent};
use millrace_proto::executor::Fault;
use millrace_proto::trace::{self, FinishedSpan};
use millrace_scheduling::batching::{self, Batcher};
use millrace_scheduling::dispatch;
use millrace_transfers::fabric::{self, LinkScheduler, TransferCargo, WeightsCargo, link as link_core};
use millrace_types::{Digest, GpuIndex, RevisionKey, SloCounts, Timestamp};
use tokio::sync::oneshot;

use super::queued_request::{WaitingEntry, log_lost};
use crate::actors::function_supervisor::FunctionSupervisor;
use crate::actors::{batch, tenancy_errors};
use crate::faults::FaultError;
use crate::messages::request_update::RequestUpdate;
use crate::messages::work::SharedWork;
use crate::messages::{executor, gpu, link};
use crate::node_state::NodeState;
use crate::snapshot::{SnapshotPart, SnapshotScope, SnapshotSender};
use crate::traced_core::TracedCore;

/// Interval at which the load times of models are collected for snapshots.
const LOADS_EVERY: Duration = Duration::from_secs(1);

/// The Node actor.
pub(crate) struct NodeActor {
    pub(super) dispatch: TracedCore<Batcher>,
    pub(super) fabric: TracedCore<LinkScheduler>,
    pub(super) entries: BTreeMap<RequestKey, WaitingEntry>,
    /// The SLO counts that functions reached on other nodes and in earlier registrations of this node.
    /// Filled only under policies that depend on SLO counts.
    pub(super) remote_slo_counts: BTreeMap<FunctionIndex, SloCounts>,
    /// The cargo of each transfer under way, and the GPU that the transfer goes to or leaves.
    pub(super) transfers: BTreeMap<TransferId, (GpuIndex, TransferCargo)>,
    /// The supervisor of the actors of functions.
    pub(super) functions: FunctionSupervisor,
    pub(super) state: Rc<NodeState>,
    /// Load times of models, and the time of their last renewal.
    loads: Arc<BTreeMap<Digest, Duration>>,
    loads_renewed: Option<Timestamp>,
    stopping: Vec<oneshot::Sender<()>>,
    /// GPUs whose executors have not stopped for good.
    pub(super) running_executors: Vec<GpuIndex>,
}

impl NodeActor {
    pub(crate) fn new(
        dispatch: TracedCore<Batcher>,
        fabric: TracedCore<LinkScheduler>,
        state: Rc<NodeState>,
    ) -> Self {
        let alive = state.gpu_indices().collect();
        Self {
            dispatch,
            fabric,
            entries: BTreeMap::new(),
            remote_slo_counts: BTreeMap::new(),
            transfers: BTreeMap::new(),
            functions: FunctionSupervisor::new(Rc::clone(&state)),
            state,
            loads: Arc::default(),
            loads_renewed: None,
            stopping: Vec::new(),
            running_executors: alive,
        }
    }

    pub(super) fn enqueue(&mut self, now: Timestamp, work: SharedWork, attempts: AttemptRecord) {
        let key = work.key;
        let request = dispatch::QueuedRequest {
            key,
            function: work.function,
            model: work.model,
            attempts,
            priority: work.priority,
            inputs: work.invocation.inputs_on_gpus(),
        };
        let batched = self.dispatch.core.batches(work.function);
        let item = batched.then(|| batch::item(&work.invocation)).flatten();
        let waited = work.invocation.cold + work.invocation.behind;
        let took = now.since(work.accepted).saturating_sub(waited);
        trace::record_finished(&work.span, "admission", FinishedSpan { ago: Duration::ZERO, took }, Vec::new);
        let entry = WaitingEntry::new(work, &self.dispatch.core, self.state.directory().queue());
        self.entries.insert(key, entry);
        match item {
            Some(item) => self.dispatch(now, batching::Event::Enqueue { request, item }),
            None => self.dispatch(now, dispatch::Event::Enqueue(request)),
        }
    }

    pub(super) fn dispatch(&mut self, now: Timestamp, event: impl Into<batching::Event>) {
        let actions = self.dispatch.step(now, event.into());
        for &action in &actions {
            match action {
                dispatch::Action::Assign { gpu, seat, key, incarnation, attempt, from, .. } => {
                    let works = self.mark_assigned(key, gpu);
                    let Some(function) = works.first().map(|work| work.function) else { continue };
                    self.state.residence().began(now, function, gpu, key);
                    let trial = works.iter().find_map(|work| work.invocation.trial);
                    let deadline = works.iter().filter_map(|work| self.wanted_by(&work.answered())).min();
                    // No request waits for a trial.
                    let deadline = deadline.filter(|_| trial.is_none());
                    let slice = self.dispatch.core.dispatch().slice_on(seat);
                    let right = match (trial, slice) {
                        (Some(setting), _) => ComputeRight::Trial(setting),
                        (None, Some(slice)) => ComputeRight::Slice(slice),
                        (None, None) => ComputeRight::Free,
                    };
                    self.state.gpu(gpu).post(gpu::Message::Assign {
                        seat,
                        key,
                        works,
                        incarnation,
                        attempt,
                        from,
                        deadline,
                        right,
                    });
                }
                dispatch::Action::Prefetch { gpu, model } => self.tell_gpu(gpu, GpuEvent::Prefetch { model }),
                dispatch::Action::Prewarm { gpu, model } => self.tell_gpu(gpu, GpuEvent::Prewarm { model }),
                dispatch::Action::SetEvictionRank { gpu, model, candidate } => {
                    self.tell_gpu(gpu, GpuEvent::CandidateChanged { model, candidate });
                }
                dispatch::Action::Pin { gpu, model } => {
                    self.tell_gpu(gpu, GpuEvent::Pin { model });
                }
                dispatch::Action::Unpin { gpu, model } => {
                    self.tell_gpu(gpu, GpuEvent::Unpin { model });
                }
                dispatch::Action::SetWarmCopy { gpu, model, kept } => {
                    self.tell_gpu(gpu, GpuEvent::Keep { model, kept });
                }
                dispatch::Action::Recall { gpu, key } => {
                    self.state.gpu(gpu).post(gpu::Message::Recall(key));
                }
                dispatch::Action::Cancel { gpu, key } => {
                    self.state.gpu(gpu).post(gpu::Message::Cancel(key));
                }
                dispatch::Action::Fail { key, reason, may_have_executed } => {
                    let Some(entry) = self.entries.remove(&key) else { continue };
                    let detail = tenancy_errors::explain(self.dispatch.core.tenancy(), reason, &entry.work);
                    let failed = RequestUpdate::Failed { key, reason, may_have_executed, detail };
                    entry.work.home.post(failed);
                }
            }
        }
        self.dispatch.done(actions);
    }

    /// Marks the requests that the queue knows by this key as assigned to a GPU, and returns the
    /// requests. A batch has several requests.
    fn mark_assigned(&mut self, key: RequestKey, gpu: GpuIndex) -> Vec<SharedWork> {
        let mut works = Vec::new();
        for key in self.dispatch.core.members(key) {
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            entry.set_assigned(gpu);
            entry.work.home.post(RequestUpdate::Dispatched(key));
            works.push(Arc::clone(&entry.work));
        }
        works
    }

    /// Tells dispatch that the request or batch of this key has left a GPU.
    pub(super) fn record_departure(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        key: RequestKey,
        event: dispatch::Event,
    ) {
        let members = self.dispatch.core.members(key);
        self.state.residence().ended(now, gpu, key);
        if let dispatch::Event::RequestReturned { why: ReturnReason::Died(progress), .. } = &event {
            let lost = members.iter().filter_map(|key| self.entries.get(key));
            let requests: Vec<_> = lost.map(|entry| entry.work.invocation.request_id.as_str()).collect();
            let requests = requests.join(" ");
            tracing::warn!(
                gpu = gpu.0,
                requests,
                ?progress,
                "the process of a model died with a request: the request runs again if it may be repeated"
            );
        }
        if matches!(event, dispatch::Event::RequestReturned { .. }) {
            // The requests wait again. If dispatch fails them instead, their entries are removed below.
            for key in &members {
                self.entries
                    .get_mut(key)
                    .into_iter()
                    .for_each(|entry| entry.set_waiting(&self.dispatch.core));
            }
        }
        self.dispatch(now, event);
        for key in members {
            if !self.dispatch.core.holds(key) {
                self.entries.remove(&key);
            }
        }
    }

    pub(super) fn tell_gpu(&self, gpu: GpuIndex, event: GpuEvent) {
        self.state.gpu(gpu).post(gpu::Message::Event(event));
    }

    /// Tells dispatch where a request's inputs are now.
    pub(super) fn moved(&mut self, now: Timestamp, key: RequestKey) {
        if let Some(entry) = self.entries.get(&key) {
            let inputs = entry.work.invocation.inputs_on_gpus();
            self.dispatch(now, dispatch::Event::InputsMoved { key, inputs });
        }
    }

    pub(super) fn withdraw(&mut self, now: Timestamp, key: RequestKey) {
        self.dispatch(now, dispatch::Event::Withdraw { key });
        // A request that is on a GPU keeps its entry until its run has ended.
        if !self.dispatch.core.holds(key) {
            self.entries.remove(&key);
        }
    }

    pub(super) fn down(&mut self, now: Timestamp, gpu: GpuIndex, event: dispatch::Event) {
        self.state.residence().lost(now, gpu);
        self.fabric(now, fabric::Event::Down { gpu });
        for link in self.state.links_to(gpu) {
            link.post(link::Message::Event(link_core::Event::Down(gpu)));
        }
        let mut lost: Vec<_> = self.entries.values_mut().filter(|entry| entry.is_on(gpu)).collect();
        log_lost(gpu, lost.iter().map(|entry| &entry.work.invocation.request_id));
        // The requests wait again, except those that dispatch fails when it handles the event.
        lost.iter_mut().for_each(|entry| entry.set_waiting(&self.dispatch.core));
        // The fabric reports no end for the transfers of a GPU that is down.
        self.transfers.retain(|_, (its, _)| *its != gpu);
        self.dispatch(now, event);
        self.forget_dropped();
    }

    /// Removes the entries of withdrawn requests, which dispatch dropped with their GPU.
    fn forget_dropped(&mut self) {
        let dispatch = &self.dispatch.core;
        self.entries.retain(|&key, _| dispatch.holds(key));
    }

    pub(super) fn fabric(&mut self, now: Timestamp, event: fabric::Event) {
        let mut actions = self.fabric.step(now, event);
        let mut arrived = Vec::new();
        for action in actions.drain(..) {
            let (link, event) = match action {
                fabric::Action::Grant { grant } => (grant.link, link_core::Event::Grant(grant)),
                fabric::Action::Revoke { link, gpu, transfer, batch } => {
                    (link, link_core::Event::Revoke { gpu, transfer, batch })
                }
                fabric::Action::Carried { link, direction, size } => {
                    (link, link_core::Event::Carried(direction, size))
                }
                fabric::Action::Arrived { gpu, cargo: TransferCargo::Weights(weights), chunks } => {
                    let WeightsCargo { model, generation, .. } = weights;
                    self.tell_gpu(gpu, GpuEvent::Arrived { model, generation, chunks });
                    continue;
                }
                // A run reads an object only after the whole object has arrived, so parts are not reported.
                fabric::Action::Arrived {
                    cargo: TransferCargo::Object(_) | TransferCargo::ToHost(_),
                    ..
                } => continue,
                fabric::Action::Lock {
                    gpu,
                    transfer,
                    cargo: TransferCargo::Weights(WeightsCargo { model, .. }),
                } => {
                    self.tell_gpu(gpu, GpuEvent::Lock { transfer, model });
                    continue;
                }
                fabric::Action::Lock { gpu, transfer, cargo: TransferCargo::Object(piece) } => {
                    self.state.gpu(gpu).post(gpu::Message::LockObject { transfer, piece });
                    continue;
                }
                // A copy to the host reads this GPU's own memory, so no other GPU has to lock anything.
                fabric::Action::Lock { cargo: TransferCargo::ToHost(_), .. } => continue,
                fabric::Action::Unlock { gpu, transfer } => {
                    self.tell_gpu(gpu, GpuEvent::Unlock { transfer });
                    continue;
                }
                fabric::Action::Ended { gpu, transfer, outcome, from, routes } => {
                    let moved = match self.transfers.remove(&transfer) {
                        Some((_, TransferCargo::Object(_))) => {
                            let came = gpu::Message::ObjectTransferEnded { transfer, outcome, routes };
                            self.state.gpu(gpu).post(came);
                            continue;
                        }
                        Some((_, TransferCargo::ToHost(_))) => {
                            self.state.gpu(gpu).post(gpu::Message::HostTransferEnded { transfer, outcome });
                            continue;
                        }
                        Some((_, TransferCargo::Weights(weights))) => Some((gpu, weights.model, from)),
                        None => None,
                    };
                    arrived.extend(moved.filter(|_| outcome == fabric::TransferOutcome::Complete));
                    self.tell_gpu(gpu, GpuEvent::TransferEnded { transfer, outcome, from });
                    continue;
                }
            };
            self.state.link(link).post(link::Message::Event(event));
        }
        self.fabric.done(actions);
        for (gpu, model, from) in arrived {
            self.dispatch(now, dispatch::Event::ModelLoaded { gpu, model, from });
        }
    }

    /// Returns the time that bringing each model to a GPU adds to a run, as known about a second ago.
    fn loads(&mut self, now: Timestamp) -> Arc<BTreeMap<Digest, Duration>> {
        if self.loads_renewed.is_none_or(|at| now.since(at) >= LOADS_EVERY) {
            self.loads_renewed = Some(now);
            let loads = self.learned().into_iter().filter_map(|(digest, it)| Some((digest, it.swap?)));
            self.loads = Arc::new(loads.collect());
        }
        Arc::clone(&self.loads)
    }

    pub(super) fn report(&mut self, now: Timestamp, look: SnapshotScope, parts: &SnapshotSender) {
        let queued = u32::try_from(self.dispatch.core.queued()).unwrap_or(u32::MAX);
        let stats = self.dispatch.core.dispatch().stats();
        let part = SnapshotPart::Queue {
            queued,
            work: self.dispatch.core.dispatch().work(now),
            loads: self.loads(now),
            stats,
            batches: self.dispatch.core.totals(),
            transfers: self.fabric.core.tally().clone(),
            policy: self.state.in_force(),
        };
        // The reader of the snapshot may have given up.
        parts.send(part).unwrap_or_default();
        self.state.report(look, parts);
    }

    pub(super) fn inject(
        &self,
        gpu: GpuIndex,
        fault: Fault,
        function: Option<RevisionKey>,
    ) -> Result<(), FaultError> {
        if !self.state.gpu_indices().any(|other| other == gpu) {
            return Err(FaultError::NoSuchGpu(gpu));
        }
        let model = match function {
            None => None,
            Some(key) => Some(self.state.model_of(&key).ok_or(FaultError::NoSuchFunction(key))?),
        };
        self.state.gpu(gpu).post(gpu::Message::Inject { fault, model });
        Ok(())
    }

    pub(super) fn shutdown(&mut self, reply: oneshot::Sender<()>) {
        self.stopping.push(reply);
        for gpu in &self.running_executors {
            self.state.executor(*gpu).post(executor::Message::Stop);
        }
        self.end_if_stopped();
    }

    pub(super) fn end_if_stopped(&mut self) {
        if self.running_executors.is_empty() && !self.stopping.is_empty() {
            self.state.end();
            // The callers of the shutdown may have given up.
            self.stopping.drain(..).for_each(|reply| reply.send(()).unwrap_or_default());
        }
    }
}
