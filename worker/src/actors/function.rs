//! The Function actor, one per function revision hosted here: admits requests, answers each exactly
//! once, keeps the score and the bill.
//!
//! In: requests from the service, their ends from the Node and the GPUs. Out: requests to the Node,
//! or to the Crew of a program, answers to whoever waits. Bounded by the worker's permits and by the function's own limit, over
//! which a request is answered `QUEUE_FULL`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_policy::admission::{Action, Admission, Event, Score};
use millrace_policy::gpu::Spent;
use millrace_policy::ids::{FunctionIndex, RequestKey};
use millrace_proto::executor::Tensor;
use millrace_proto::trace::{self, KeyValue};
use millrace_types::{Failure, GpuIndex, Reason, RevisionKey, SloCounts, Timestamp};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::actors::driven::Driven;
use crate::actors::node;
use crate::actors::work::SharedWork;
use crate::handle::Parts;
use crate::objects::Kept;
use crate::port::Descriptor;
use crate::programs::crew;
use crate::request::{Brought, Completion, Mark, Share, Split};
use crate::seams::{Behaviour, Slot};
use crate::snapshot::{FunctionSnapshot, SnapshotPart};

/// A request at the door.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) work: SharedWork,
    /// Where its answer goes.
    pub(crate) answer: oneshot::Sender<Result<Completion, Failure>>,
    /// Its place among the worker's requests, given back with the answer.
    pub(crate) permit: OwnedSemaphorePermit,
}

/// What a run gave.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outputs {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) descriptors: Vec<Descriptor>,
    /// The objects that the tensors name.
    pub(crate) kept: Vec<Arc<Kept>>,
    /// How inputs came.
    pub(crate) brought: Vec<Brought>,
    /// Which rows are whose, where several requests ran as one.
    pub(crate) share: Option<Share>,
}

/// What a process gave.
#[derive(Debug)]
pub(crate) struct Computed {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) kept: Vec<Arc<Kept>>,
    pub(crate) marks: BTreeMap<String, Mark>,
    /// When the process got it.
    pub(crate) began: Timestamp,
    pub(crate) ran: Duration,
    pub(crate) attempts: u32,
}

/// Who carries requests out.
pub(crate) enum Below {
    /// The GPUs, through the node's queue.
    Gpus,
    /// Processes of the function's own.
    Crew(Slot<crew::Message>),
}

/// What a Function actor is told.
pub(crate) enum Message {
    /// A request came.
    Invoke(Arrival),
    /// Its client went away.
    Cancel(RequestKey),
    /// A GPU has it.
    Dispatched(RequestKey),
    /// It has outputs.
    Completed { key: RequestKey, outputs: Outputs, spent: Spent, gpu: GpuIndex, attempts: u32 },
    /// A process gave it outputs.
    Computed { key: RequestKey, computed: Computed },
    /// It has none.
    Failed { key: RequestKey, reason: Reason, may_have_executed: bool, detail: Option<String> },
    /// The node drops everything it has.
    NodeLost(Reason),
    /// Take no more requests.
    Retire,
    /// Tell what the function looks like.
    Report { parts: Parts },
}

/// Who waits for a request.
struct Caller {
    work: SharedWork,
    answer: oneshot::Sender<Result<Completion, Failure>>,
    _permit: OwnedSemaphorePermit,
}

/// What came with the event that is handled.
enum Carried {
    Nothing,
    Outputs { outputs: Outputs, spent: Spent, gpu: GpuIndex, attempts: u32 },
    Computed(Computed),
    Detail(Option<String>),
}

/// Whether the Node is told what a function scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScoresTold {
    /// After each request that counts: the order of its queue depends on it.
    Yes,
    /// Never.
    No,
}

/// What of a score its objective is held against (T17).
pub(crate) fn counts(score: &Score) -> SloCounts {
    SloCounts { m: score.in_time, n: score.scored }
}

/// The actor.
pub(crate) struct Function {
    index: FunctionIndex,
    key: RevisionKey,
    admission: Driven<Admission>,
    callers: BTreeMap<RequestKey, Caller>,
    /// What an actor before this one had counted, and where the whole is kept in case this one
    /// does not live to tell.
    before: Score,
    score: Rc<Cell<Score>>,
    told: Rc<Cell<ScoresTold>>,
    node: Slot<node::Message>,
    below: Below,
}

impl Function {
    pub(crate) fn new(
        index: FunctionIndex,
        key: RevisionKey,
        admission: Driven<Admission>,
        (score, told): (Rc<Cell<Score>>, Rc<Cell<ScoresTold>>),
        node: Slot<node::Message>,
        below: Below,
    ) -> Self {
        let before = score.get();
        Self { index, key, admission, callers: BTreeMap::new(), before, score, told, node, below }
    }

    fn invoke(&mut self, now: Timestamp, Arrival { work, answer, permit }: Arrival) {
        let event = Event::Arrive {
            key: work.key,
            accepted: work.accepted,
            timeout: work.invocation.timeout,
            attempts_left: work.invocation.attempts_left,
            counted: work.invocation.counted,
        };
        self.callers.insert(work.key, Caller { work, answer, _permit: permit });
        self.step(now, event, Carried::Nothing);
    }

    fn step(&mut self, now: Timestamp, event: Event, mut carried: Carried) {
        let actions = self.admission.step(now, event);
        let score = self.before.plus(self.admission.core.score());
        let before = self.score.replace(score);
        if self.told.get() == ScoresTold::Yes && counts(&before) != counts(&score) {
            self.node.post(node::Message::Scored { function: self.index, counts: counts(&score) });
        }
        for &action in &actions {
            match action {
                Action::Enqueue { key, attempts } => {
                    if let Some(caller) = self.callers.get(&key) {
                        let work = SharedWork::clone(&caller.work);
                        match &self.below {
                            Below::Gpus => self.node.post(node::Message::Enqueue { work, attempts }),
                            Below::Crew(crew) => crew.post(crew::Message::Enqueue { work, attempts }),
                        }
                        if !caller.work.invocation.next.is_empty() {
                            self.node.post(node::Message::Next(SharedWork::clone(&caller.work)));
                        }
                    }
                }
                Action::Answer { key } => {
                    self.answer(now, key, std::mem::replace(&mut carried, Carried::Nothing))
                }
                Action::Fail { key, reason, may_have_executed } => {
                    let detail =
                        if let Carried::Detail(detail) = &mut carried { detail.take() } else { None };
                    self.fail(key, reason, may_have_executed, detail);
                }
                Action::Withdraw { key } => {
                    self.callers.remove(&key);
                    match &self.below {
                        Below::Gpus => self.node.post(node::Message::Withdraw(key)),
                        Below::Crew(crew) => crew.post(crew::Message::Withdraw(key)),
                    }
                }
                Action::Retired => self.node.post(node::Message::Retired(self.index)),
            }
        }
        self.admission.done(actions);
    }

    fn answer(&mut self, now: Timestamp, key: RequestKey, carried: Carried) {
        let Some(caller) = self.callers.remove(&key) else { return };
        let (accepted, cold) = (caller.work.accepted, caller.work.invocation.cold);
        let (total, queue) =
            (now.since(accepted), |turn: Timestamp| turn.since(accepted).saturating_sub(cold));
        let completion = match carried {
            Carried::Outputs { outputs, spent, gpu, attempts } => {
                let Outputs { tensors: outputs, descriptors, kept, brought, share } = outputs;
                let (swap, run, swapped) = (spent.swap, spent.ran, spent.swapped);
                let split = Split { cold, queue: queue(spent.turn), swap, run, total, swapped };
                let (marks, gpu) = (BTreeMap::new(), Some(gpu));
                Completion { outputs, descriptors, kept, brought, share, split, marks, gpu, attempts }
            }
            Carried::Computed(Computed {
                tensors: outputs,
                descriptors,
                kept,
                marks,
                began,
                ran,
                attempts,
            }) => {
                let split = Split { cold, queue: queue(began), run: ran, total, ..Split::default() };
                let brought = Vec::new();
                Completion {
                    outputs,
                    descriptors,
                    kept,
                    brought,
                    share: None,
                    split,
                    marks,
                    gpu: None,
                    attempts,
                }
            }
            Carried::Nothing | Carried::Detail(_) => return,
        };
        let Completion { split, gpu, attempts, .. } = &completion;
        trace::add(&caller.work.span, || {
            let ms = |name, span: Duration| KeyValue::new(name, span.as_secs_f64() * 1e3);
            let (queue, swap) = (ms("millrace.queue_ms", split.queue), ms("millrace.swap_ms", split.swap));
            vec![queue, swap, ms("millrace.run_ms", split.run)]
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

    fn report(&self, parts: &Parts) {
        let part = SnapshotPart::Function(FunctionSnapshot {
            key: self.key.clone(),
            in_flight: u32::try_from(self.admission.core.in_flight()).unwrap_or(u32::MAX),
            score: self.score.get(),
        });
        // Whoever asked may have given up.
        parts.send(part).unwrap_or_default();
    }
}

/// Gives the answer to whoever waits. A client that went away at this moment wants none.
fn send(answer: oneshot::Sender<Result<Completion, Failure>>, result: Result<Completion, Failure>) {
    drop(answer.send(result));
}

/// What happened and what the caller can do, for reasons that come without a text of their own.
fn explain(reason: Reason, work: &SharedWork) -> String {
    let name = &work.invocation.revision;
    match reason {
        Reason::QueueFull => format!("{name} has its limit of requests in flight: try again soon"),
        Reason::TimedOut => {
            format!("{name} did not answer within {:?}: allow more time", work.invocation.timeout)
        }
        Reason::Quarantined => {
            format!("the request was running in two executors of {name} as they died: it is not run again")
        }
        Reason::AttemptsExhausted => format!("every attempt to run {name} failed: try again later"),
        Reason::ExecutorLost => {
            format!(
                "the executor died while running {name}, which is not idempotent: see whether it took effect"
            )
        }
        Reason::NoGpuMemory => format!("{name} fits no GPU of this worker"),
        Reason::FunctionNotReady => format!("{name} is going from this worker: ask another"),
        Reason::ShuttingDown => "the worker is shutting down: ask another".to_owned(),
        Reason::Internal => "the worker lost track of the request; its log says why".to_owned(),
        other => format!("{name}: {other}"),
    }
}

impl Behaviour for Function {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Invoke(arrival) => self.invoke(now, arrival),
            Message::Cancel(key) => self.step(now, Event::Cancel { key }, Carried::Nothing),
            Message::Dispatched(key) => self.step(now, Event::Dispatched { key }, Carried::Nothing),
            Message::Completed { key, outputs, spent, gpu, attempts } => {
                // Each pays for its rows.
                let ran = outputs.share.map_or(spent.ran, |share| share.of(spent.ran));
                let carried = Carried::Outputs { outputs, spent, gpu, attempts };
                self.step(now, Event::Completed { key, ran }, carried);
            }
            Message::Computed { key, computed } => {
                // No GPU's time.
                let event = Event::Completed { key, ran: Duration::ZERO };
                self.step(now, event, Carried::Computed(computed));
            }
            Message::Failed { key, reason, may_have_executed, detail } => {
                let event = Event::Failed { key, reason, may_have_executed };
                self.step(now, event, Carried::Detail(detail));
            }
            Message::NodeLost(reason) => self.step(now, Event::NodeLost { reason }, Carried::Nothing),
            Message::Retire => self.step(now, Event::Retire, Carried::Nothing),
            Message::Report { parts } => self.report(&parts),
        }
    }

    fn tick(&mut self, now: Timestamp) {
        self.step(now, Event::Tick, Carried::Nothing);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.admission.next_wake()
    }
}
