//! The Function actor, one per function revision that this worker hosts. The actor admits requests, answers
//! each request exactly once, and counts the SLO counts and the billed time.
//!
//! In: requests from the service, their ends from the Node and the GPUs. Out: requests to the Node, or to
//! the process pool of a program (`ProcessPool`), and answers to the callers. The worker's permits and the
//! function's own limit bound the requests. A request over the limit is answered with `QUEUE_FULL`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use millrace_core::ids::{FunctionIndex, RequestKey};
use millrace_gpu::GpuTimes;
use millrace_proto::trace::{self, KeyValue};
use millrace_scheduling::admission::{Action, Admission, Event, FunctionTotals};
use millrace_types::{Failure, GpuIndex, Reason, RevisionKey, Timestamp};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::actor_runtime::{ActorBehaviour, AddressSlot};
use crate::messages::function::{Message, NewRequest};
use crate::messages::request_update::{ProgramOutputs, RequestUpdate};
use crate::messages::work::SharedWork;
use crate::messages::{node, process_pool};
use crate::node_state::{SloCountReports, slo_counts};
use crate::request::{AttemptOutcome, AttemptTimes, RunOutputs};
use crate::snapshot::{FunctionSnapshot, SnapshotPart, SnapshotSender};
use crate::traced_core::TracedCore;

/// The backend that runs a function's requests.
pub(crate) enum RunBackend {
    /// The GPUs, through the node's queue.
    Gpus,
    /// The function's own processes: the function is a program.
    ProcessPool(AddressSlot<process_pool::Message>),
}

/// The caller that waits for a request's answer.
struct WaitingCaller {
    work: SharedWork,
    answer: oneshot::Sender<Result<AttemptOutcome, Failure>>,
    _permit: OwnedSemaphorePermit,
}

/// The data that came with the message being handled, and that an action consumes.
enum FunctionPayload {
    Nothing,
    Outputs { outputs: RunOutputs, spent: GpuTimes, gpu: GpuIndex, attempts: u32 },
    Computed(ProgramOutputs),
    Detail(Option<String>),
}

/// The Function actor.
pub(crate) struct FunctionActor {
    index: FunctionIndex,
    key: RevisionKey,
    admission: TracedCore<Admission>,
    callers: BTreeMap<RequestKey, WaitingCaller>,
    /// The score that earlier actors of this function had reached.
    earlier_score: FunctionTotals,
    /// The score of this actor and earlier actors together, kept outside the actor so that a panic loses
    /// nothing.
    score: Rc<Cell<FunctionTotals>>,
    slo_reports: Rc<Cell<SloCountReports>>,
    node: AddressSlot<node::Message>,
    below: RunBackend,
}

impl FunctionActor {
    pub(crate) fn new(
        index: FunctionIndex,
        key: RevisionKey,
        admission: TracedCore<Admission>,
        score: Rc<Cell<FunctionTotals>>,
        told: Rc<Cell<SloCountReports>>,
        node: AddressSlot<node::Message>,
        below: RunBackend,
    ) -> Self {
        let before = score.get();
        Self {
            index,
            key,
            admission,
            callers: BTreeMap::new(),
            earlier_score: before,
            score,
            slo_reports: told,
            node,
            below,
        }
    }

    fn invoke(&mut self, now: Timestamp, NewRequest { work, answer, permit }: NewRequest) {
        let event = Event::Arrive {
            key: work.key,
            accepted: work.accepted,
            timeout: work.invocation.timeout,
            attempts_left: work.invocation.attempts_left,
            counted: work.invocation.counted,
        };
        self.callers.insert(work.key, WaitingCaller { work, answer, _permit: permit });
        self.step(now, event, FunctionPayload::Nothing);
    }

    fn update(&mut self, now: Timestamp, update: RequestUpdate) {
        match update {
            RequestUpdate::Dispatched(key) => {
                self.step(now, Event::Dispatched { key }, FunctionPayload::Nothing);
            }
            RequestUpdate::Completed { key, outputs, spent, gpu, attempts } => {
                // Each request of a batch is billed for its share of the rows.
                let billed = outputs.share.map_or(spent.billed, |share| share.of(spent.billed));
                let carried = FunctionPayload::Outputs { outputs, spent, gpu, attempts };
                self.step(now, Event::Completed { key, billed }, carried);
            }
            RequestUpdate::Computed { key, computed } => {
                // A program used no GPU, so no GPU time is billed.
                let event = Event::Completed { key, billed: Duration::ZERO };
                self.step(now, event, FunctionPayload::Computed(computed));
            }
            RequestUpdate::Failed { key, reason, may_have_executed, detail } => {
                let event = Event::Failed { key, reason, may_have_executed };
                self.step(now, event, FunctionPayload::Detail(detail));
            }
        }
    }

    fn step(&mut self, now: Timestamp, event: Event, mut carried: FunctionPayload) {
        let actions = self.admission.step(now, event);
        let score = self.earlier_score.plus(self.admission.core.score());
        let before = self.score.replace(score);
        if self.slo_reports.get() == SloCountReports::Yes && slo_counts(&before) != slo_counts(&score) {
            self.node
                .post(node::Message::SloCountsChanged { function: self.index, counts: slo_counts(&score) });
        }
        for &action in &actions {
            match action {
                Action::Enqueue { key, attempts } => {
                    if let Some(caller) = self.callers.get(&key) {
                        let work = SharedWork::clone(&caller.work);
                        match &self.below {
                            RunBackend::Gpus => self.node.post(node::Message::Enqueue { work, attempts }),
                            RunBackend::ProcessPool(pool) => {
                                pool.post(process_pool::Message::Enqueue { work, attempts })
                            }
                        }
                        if !caller.work.invocation.next.is_empty() {
                            self.node.post(node::Message::PrewarmHints(SharedWork::clone(&caller.work)));
                        }
                    }
                }
                Action::Answer { key } => {
                    self.answer(now, key, std::mem::replace(&mut carried, FunctionPayload::Nothing))
                }
                Action::Fail { key, reason, may_have_executed } => {
                    let detail =
                        if let FunctionPayload::Detail(detail) = &mut carried { detail.take() } else { None };
                    self.fail(key, reason, may_have_executed, detail);
                }
                Action::Withdraw { key } => {
                    self.callers.remove(&key);
                    match &self.below {
                        RunBackend::Gpus => self.node.post(node::Message::Withdraw(key)),
                        RunBackend::ProcessPool(pool) => pool.post(process_pool::Message::Withdraw(key)),
                    }
                }
                Action::Retired => self.node.post(node::Message::Retired(self.index)),
            }
        }
        self.admission.done(actions);
    }

    fn answer(&mut self, now: Timestamp, key: RequestKey, carried: FunctionPayload) {
        let Some(caller) = self.callers.remove(&key) else { return };
        let accepted = caller.work.accepted;
        let cold = caller.work.invocation.cold;
        let total = now.since(accepted);
        let queue = |turn: Timestamp| turn.since(accepted).saturating_sub(cold);
        let completion = match carried {
            FunctionPayload::Outputs { outputs, spent, gpu, attempts } => {
                let split = AttemptTimes {
                    cold,
                    queue: queue(spent.turn),
                    swap: spent.swap,
                    run: spent.ran,
                    token: spent.held,
                    total,
                    swapped: spent.swapped,
                };
                let marks = BTreeMap::new();
                AttemptOutcome { outputs, split, marks, gpu: Some(gpu), on: spent.on, attempts }
            }
            FunctionPayload::Computed(ProgramOutputs { outputs, marks, began, ran, attempts }) => {
                let split =
                    AttemptTimes { cold, queue: queue(began), run: ran, total, ..AttemptTimes::default() };
                AttemptOutcome { outputs, split, marks, gpu: None, on: None, attempts }
            }
            FunctionPayload::Nothing | FunctionPayload::Detail(_) => return,
        };
        let AttemptOutcome { split, gpu, attempts, .. } = &completion;
        trace::add_attributes(&caller.work.span, || {
            let ms = |name, span: Duration| KeyValue::new(name, span.as_secs_f64() * 1e3);
            vec![
                ms("millrace.queue_ms", split.queue),
                ms("millrace.swap_ms", split.swap),
                ms("millrace.run_ms", split.run),
            ]
        });
        tracing::debug!(parent: &caller.work.span, ?split, gpu = gpu.map(|gpu| gpu.0), attempts, "answered");
        send(caller.answer, Ok(completion));
    }

    fn fail(&mut self, key: RequestKey, reason: Reason, may_have_executed: bool, detail: Option<String>) {
        let Some(caller) = self.callers.remove(&key) else { return };
        let message = detail.unwrap_or_else(|| explain(reason, &caller.work));
        tracing::debug!(parent: &caller.work.span, %reason, message, "refused");
        send(caller.answer, Err(Failure { may_have_executed, ..Failure::new(reason, message) }));
    }

    fn report(&self, parts: &SnapshotSender) {
        let part = SnapshotPart::Function(FunctionSnapshot {
            key: self.key.clone(),
            in_flight: u32::try_from(self.admission.core.in_flight()).unwrap_or(u32::MAX),
            score: self.score.get(),
        });
        // The reader of the snapshot may have given up.
        parts.send(part).unwrap_or_default();
    }
}

/// Sends the answer to the caller. The answer is dropped if the caller has just gone away.
fn send(answer: oneshot::Sender<Result<AttemptOutcome, Failure>>, result: Result<AttemptOutcome, Failure>) {
    drop(answer.send(result));
}

/// Returns the error message for a reason that came without a detail: the cause, and the caller's next
/// step.
fn explain(reason: Reason, work: &SharedWork) -> String {
    let name = &work.invocation.revision;
    match reason {
        Reason::QueueFull => format!("{name} is at its limit of requests in flight: try again soon"),
        Reason::TimedOut => {
            format!("{name} did not answer within {:?}: allow more time", work.invocation.timeout)
        }
        Reason::Quarantined => {
            format!("the request was running in two executors of {name} when they died: it is not run again")
        }
        Reason::AttemptsExhausted => format!("every attempt to run {name} failed: try again later"),
        Reason::ExecutorLost => {
            format!(
                "the executor died while running {name}, which is not idempotent: check whether the request took effect"
            )
        }
        Reason::NoGpuMemory => format!("{name} fits no GPU of this worker"),
        Reason::FunctionNotReady => {
            format!("{name} is being removed from this worker: send to another worker")
        }
        Reason::ShuttingDown => "the worker is shutting down: send to another worker".to_owned(),
        Reason::Internal => "the worker lost track of the request: see the worker's log".to_owned(),
        other => format!("{name}: {other}"),
    }
}

impl ActorBehaviour for FunctionActor {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Invoke(arrival) => self.invoke(now, arrival),
            Message::Cancel(key) => self.step(now, Event::Cancel { key }, FunctionPayload::Nothing),
            Message::Update(update) => self.update(now, update),
            Message::NodeLost(reason) => self.step(now, Event::NodeLost { reason }, FunctionPayload::Nothing),
            Message::Retire => self.step(now, Event::Retire, FunctionPayload::Nothing),
            Message::Report { parts } => self.report(&parts),
        }
    }

    fn tick(&mut self, now: Timestamp) {
        self.step(now, Event::Tick, FunctionPayload::Nothing);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.admission.next_wake()
    }
}
