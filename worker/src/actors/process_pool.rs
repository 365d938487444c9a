//! The process pool actor: the processes of one program, and the requests for the program.
//!
//! In: requests from the Function, events from the processes. Out: calls to the processes, ends of
//! requests to the Function, which answers the requests. At most [`millrace_gpu::process_pool::WAITING_MAX`]
//! requests wait. Above that, a request is answered with `QUEUE_FULL`. The actor ends after it was
//! stopped, because its function is gone, and all its processes have ended.

mod log;
mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::Core as _;
use millrace_core::ids::RequestKey;
use millrace_gpu::lifecycle::START_TIMEOUT;
use millrace_gpu::process_pool::{self, Action, Event, KillReason, ProcessSlot};
use millrace_proto::executor::tensor::Contents as Sent;
use millrace_proto::function as wire;
use millrace_proto::trace::{self, FinishedSpan, KeyValue};
use millrace_types::{Incarnation, Reason, Timestamp};

use self::process::{Process, ProcessName};
use crate::actor_runtime::{ActorBehaviour, AddressSlot};
use crate::install::FunctionConfig;
use crate::messages::process_pool::{Message, ProcessEvent, ProcessReply};
use crate::messages::request_update::{ProgramOutputs, RequestUpdate};
use crate::messages::work::SharedWork;
use crate::object_handle::TransferRequester;
use crate::objects::sealed;
use crate::process_port::connection::OfferError;
use crate::programs::health::ProcessHealth;
use crate::programs::reporter::HealthReporter;
use crate::programs::{HostedProgram, outputs};
use crate::request::RunOutputs;
use crate::tensors::PackedTensors;

/// A request that waits or runs.
struct PooledRequest {
    work: SharedWork,
    began: Timestamp,
    attempt: u32,
}

/// The process pool actor.
pub(crate) struct ProcessPoolActor {
    name: Rc<str>,
    program: Arc<HostedProgram>,
    core: process_pool::ProcessPool,
    processes: BTreeMap<ProcessSlot, Process>,
    entries: BTreeMap<RequestKey, PooledRequest>,
    /// The exit status of the process that ended last, as text for people.
    last_end: String,
    /// The reason of each kill, until the end of the killed process is reported.
    killed: BTreeMap<ProcessSlot, String>,
    /// The reason why the call that is being handled could not be sent.
    unsent: Option<String>,
    reporter: HealthReporter,
    /// The function's deadline, for requests without an objective of their own.
    deadline: Option<Duration>,
    /// The actor's own address, to which the processes report.
    own: AddressSlot<Message>,
}

impl ProcessPoolActor {
    pub(crate) fn new(
        config: &FunctionConfig,
        program: Arc<HostedProgram>,
        processes: u32,
        seed: u64,
        own: AddressSlot<Message>,
    ) -> Self {
        let core = process_pool::ProcessPool::new(processes, own.epoch(), seed);
        let key = &config.key;
        let reporter = program.programs().reporter(key);
        Self {
            name: key.to_string().into(),
            program,
            core,
            processes: BTreeMap::new(),
            entries: BTreeMap::new(),
            last_end: String::new(),
            killed: BTreeMap::new(),
            unsent: None,
            reporter,
            deadline: config.slo.map(|slo| slo.deadline),
            own,
        }
    }

    fn step(&mut self, now: Timestamp, event: Event) {
        let mut actions = Vec::new();
        self.core.on_event(now, event, &mut actions);
        for action in actions {
            match action {
                Action::Spawn { place, incarnation } => self.spawn(place, incarnation),
                Action::Kill { place, why } => self.kill(place, why),
                Action::Forget { key } => drop(self.entries.remove(&key)),
                Action::Run { place, key, attempt } => self.run(now, place, key, attempt),
                Action::Fail { key, reason, may_have_executed } => {
                    let Some(entry) = self.entries.remove(&key) else { continue };
                    let detail = self.explain(reason);
                    entry.work.home.post(RequestUpdate::Failed { key, reason, may_have_executed, detail });
                }
            }
        }
        self.report();
    }

    /// Kills a process. The end of the process is reported as an event.
    fn kill(&mut self, place: ProcessSlot, why: KillReason) {
        let Some(process) = self.processes.get(&place) else { return };
        process.kill();
        let why = match why {
            KillReason::Silent => {
                format!("killed: the process did not report that it is ready within {START_TIMEOUT:?}")
            }
            KillReason::Abandoned => {
                format!(
                    "killed: the process still ran {:?} after its request was abandoned",
                    process_pool::GRACE
                )
            }
            KillReason::Stop => return,
        };
        self.last_end.clone_from(&why);
        self.killed.insert(place, why);
    }

    /// Reports the program's health and restarts, if they changed.
    fn report(&mut self) {
        self.reporter.count(self.core.restarts());
        let health = match self.core.health() {
            process_pool::ProgramHealth::Starting => ProcessHealth::Starting,
            process_pool::ProgramHealth::Up => ProcessHealth::Up,
            process_pool::ProgramHealth::Failing => ProcessHealth::Failing(self.broken()),
        };
        if let ProcessHealth::Failing(why) = &health
            && !matches!(self.reporter.last(), ProcessHealth::Failing(_))
        {
            tracing::warn!(function = %self.name, why, "a program is not ready");
        }
        self.reporter.tell(health);
    }

    fn broken(&self) -> String {
        let end = &self.last_end;
        format!(
            "the program does not start ({end}): the worker keeps trying; see the program's output with 'millrace logs'"
        )
    }

    fn explain(&self, reason: Reason) -> Option<String> {
        let name = &self.name;
        let end = &self.last_end;
        match reason {
            Reason::FunctionNotReady => Some(format!("{name}: {}", self.broken())),
            Reason::ExecutorLost => Some(format!(
                "the process died while running {name}, which is not idempotent ({end}): check whether the request took effect"
            )),
            Reason::Quarantined => Some(format!(
                "the request was running in two processes of {name} when they died ({end}): it is not run again"
            )),
            Reason::QueueFull => {
                self.unsent.as_ref().map(|why| format!("{name} did not get the request: {why}"))
            }
            _ => None,
        }
    }

    fn spawn(&mut self, place: ProcessSlot, incarnation: Incarnation) {
        let name = ProcessName { function: Rc::clone(&self.name), place, incarnation };
        match self.own.mailbox().map(|own| (Process::start(&self.program, name, own.clone()), own)) {
            Some((Ok(process), _)) => {
                self.processes.insert(place, process);
            }
            Some((Err(error), own)) => {
                let heard = ProcessEvent::Exited { status: error.to_string() };
                own.post(Message::Process { place, incarnation, heard });
            }
            // The actor's address is published before the actor runs, so this does not happen.
            None => {}
        }
    }

    fn run(&mut self, now: Timestamp, place: ProcessSlot, key: RequestKey, attempt: u32) {
        let (Some(entry), Some(process)) = (self.entries.get_mut(&key), self.processes.get(&place)) else {
            return;
        };
        entry.began = now;
        entry.attempt = attempt;
        entry.work.home.post(RequestUpdate::Dispatched(key));
        let left = timeout_end(&entry.work).since(now);
        let sent = call(&entry.work, left).map_err(OfferError::OutOfResources);
        match sent.and_then(|(call, descriptors)| {
            process.call(call, descriptors, asker(&entry.work, self.deadline))
        }) {
            Ok(()) => {}
            Err(error @ OfferError::OutOfResources(_)) => {
                let heard = ProcessEvent::Unsent { call: key.0, why: error.to_string() };
                // The event is posted, not handled here, because the core is in the middle of a step.
                self.own.post(Message::Process { place, incarnation: process.incarnation, heard });
            }
            Err(error) => {
                tracing::error!(
                    function = %self.name,
                    %error,
                    "cannot send a call to a function's process: the process is killed"
                );
                process.kill();
            }
        }
    }

    fn returned(
        &mut self,
        now: Timestamp,
        place: ProcessSlot,
        incarnation: Incarnation,
        call: u64,
        answer: ProcessReply,
    ) {
        let key = RequestKey(call);
        // The stored objects that no output of the answer uses. Used objects are removed below.
        let mut unwanted = match &answer {
            ProcessReply::Outputs { stored, .. } => stored.clone(),
            ProcessReply::Failed(_) => BTreeSet::new(),
        };
        if self.core.running(place, incarnation) != Some(key) {
            self.program.programs().objects().let_go(&unwanted);
            return;
        }
        if let Some(PooledRequest { work, began, attempt }) = self.entries.remove(&key) {
            let ran = now.since(began);
            trace::record_finished(
                &work.span,
                "process",
                FinishedSpan { ago: Duration::ZERO, took: ran },
                || vec![KeyValue::new("millrace.process", i64::from(place.0))],
            );
            let outputs = match answer {
                ProcessReply::Failed(message) => Err(message),
                ProcessReply::Outputs { outputs, descriptors, stored } => {
                    let programs = self.program.programs();
                    outputs::read(
                        outputs,
                        &descriptors,
                        &self.program.declared.outputs,
                        &work.invocation.outputs,
                        &stored,
                        programs.objects(),
                        programs.output_max(),
                    )
                }
            };
            let marks = outputs.iter().flat_map(|answered| answered.marks.values());
            for object in marks.filter_map(|mark| mark.object.as_ref()) {
                unwanted.remove(object);
            }
            work.home.post(match outputs {
                Ok(outputs::CheckedOutputs { packed, marks }) => {
                    let PackedTensors { tensors, descriptors, objects } = packed;
                    let outputs = RunOutputs { tensors, descriptors, objects, ..RunOutputs::default() };
                    let computed = ProgramOutputs { outputs, marks, began, ran, attempts: attempt };
                    RequestUpdate::Computed { key, computed }
                }
                Err(message) => RequestUpdate::Failed {
                    key,
                    reason: Reason::ModelFailed,
                    may_have_executed: true,
                    detail: Some(format!("{}: {message}", self.name)),
                },
            });
        }
        if !unwanted.is_empty() {
            self.program.programs().objects().let_go(&unwanted);
        }
        self.step(now, Event::Returned { place, incarnation, key });
    }

    fn process(&mut self, now: Timestamp, place: ProcessSlot, incarnation: Incarnation, heard: ProcessEvent) {
        match heard {
            ProcessEvent::Ready => self.step(now, Event::Ready { place, incarnation }),
            ProcessEvent::Returned { call, answer } => self.returned(now, place, incarnation, call, answer),
            ProcessEvent::Unsent { call, why } => {
                tracing::warn!(
                    function = %self.name,
                    process = place.0,
                    why,
                    "cannot send a call to a function's process"
                );
                self.unsent = Some(why);
                self.step(now, Event::Unsent { place, incarnation, key: RequestKey(call) });
                self.unsent = None;
            }
            ProcessEvent::Exited { status } => {
                self.ended(place, incarnation, status);
                self.step(now, Event::Exited { place, incarnation });
            }
            ProcessEvent::GivenUp { status } => {
                self.ended(place, incarnation, status);
                self.step(now, Event::ResourceExhausted { place, incarnation });
            }
        }
    }

    fn ended(&mut self, place: ProcessSlot, incarnation: Incarnation, status: String) {
        let status = self.killed.remove(&place).unwrap_or(status);
        tracing::info!(function = %self.name, process = place.0, %incarnation, status, "a function's process ended");
        self.last_end = status;
    }
}

/// Returns the time at which a request's timeout ends.
fn timeout_end(work: &SharedWork) -> Timestamp {
    work.accepted + work.invocation.timeout
}

/// Returns the request as the requester of its data's transfers.
fn asker(work: &SharedWork, deadline: Option<Duration>) -> Arc<TransferRequester> {
    Arc::new(TransferRequester {
        revision: work.invocation.revision.clone(),
        came: work.accepted,
        objective: work.invocation.objective.or(deadline),
    })
}

/// Returns a request as a call in the function protocol, with descriptors.
fn call(work: &SharedWork, left: Duration) -> io::Result<(wire::Call, Vec<OwnedFd>)> {
    let invocation = &work.invocation;
    // Large inputs were sealed when they were gathered. Small inputs that do not fit into the message were
    // not, so all are sealed here.
    let descriptors = invocation.descriptors.iter().map(|fd| sealed(fd)?.try_clone());
    let descriptors = descriptors.collect::<io::Result<_>>()?;
    let size = |place: u32| {
        let fd = invocation.descriptors.get(place as usize)?;
        u64::try_from(rustix::fs::fstat(fd).ok()?.st_size).ok()
    };
    let input = |tensor: &millrace_proto::executor::Tensor| {
        let (contents, bytes) = match &tensor.contents {
            Some(Sent::Inline(data)) => {
                (Some(wire::tensor::Contents::Inline(data.clone())), data.len() as u64)
            }
            Some(Sent::ContentsFd(place)) => {
                (Some(wire::tensor::Contents::ContentsFd(*place)), size(*place).unwrap_or(0))
            }
            // The inputs of programs are copied from GPUs to the host before (`InputReader::Process`), so these
            // contents do not occur here.
            Some(Sent::Object(_) | Sent::KeptBytes(_)) | None => (None, 0),
        };
        wire::Tensor {
            name: tensor.name.clone(),
            datatype: tensor.datatype.clone(),
            shape: tensor.shape.clone(),
            contents,
            bytes,
            response: false,
        }
    };
    let call = wire::Call {
        call: work.key.0,
        request_id: invocation.request_id.to_string(),
        inputs: invocation.inputs.iter().map(input).collect(),
        outputs: invocation.outputs.clone(),
        timeout_ns: u64::try_from(left.as_nanos()).unwrap_or(u64::MAX),
    };
    Ok((call, descriptors))
}

impl ActorBehaviour for ProcessPoolActor {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Start => self.step(now, Event::Start),
            Message::Enqueue { work, attempts } => {
                let key = work.key;
                let deadline = timeout_end(&work);
                self.entries.insert(key, PooledRequest { work, began: now, attempt: 0 });
                self.step(now, Event::Enqueue { key, attempts, deadline });
            }
            Message::Withdraw(key) => self.step(now, Event::Withdraw { key }),
            Message::FunctionReset => {
                for key in self.entries.keys().copied().collect::<Vec<_>>() {
                    self.step(now, Event::Withdraw { key });
                }
            }
            Message::Process { place, incarnation, heard } => self.process(now, place, incarnation, heard),
            Message::Stop => {
                self.reporter.withdraw();
                self.step(now, Event::Stop);
            }
        }
    }

    fn tick(&mut self, now: Timestamp) {
        self.step(now, Event::Tick);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.core.next_wake()
    }

    // The actor holds its own address for its processes, so it would never end by losing its last address.
    fn is_over(&self) -> bool {
        self.core.is_over()
    }
}
