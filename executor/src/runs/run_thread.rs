//! The run thread of a seat: runs programs, one run after another. If all weights of a program are loaded,
//! the program runs as a whole. Otherwise the program runs launch by launch, and each launch waits for its
//! own reads (T08). If the GPU is shared, the program runs launch by launch too, unless the run is short
//! and its token has no end; and each launch waits for a token.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_device::{Event as _, Stream as _, monotonic_now};
use millrace_engine::{DeviceEvent, Engine, LaunchArg, Queue as _};
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{LaunchTimes, Run, RunDone};
use millrace_slices::gate::{LaunchPermit, WHOLE_RUN_MAX};
use millrace_types::{SmShare, Timestamp, UnitSet};

use crate::memory::executor_state::ExecutorState;
use crate::memory::mapping::MappingUse;
use crate::memory::objects::ObjectTable;
use crate::programs::launch_plan::{PlannedLaunch, Slot};
use crate::programs::loaded_program::LoadedProgram;
use crate::queue::WorkQueue;
use crate::runs::batch::{self, RunInput, RunInputs};
use crate::runs::gate::LaunchGate;
use crate::runs::response::{RequestedOutputs, RunResponse};
use crate::runs::run_error::{RunError, failed};
use crate::socket::conversions::{DeclaredTensor, FrameDescriptors};
use crate::socket::events::EventSender;

/// Most runs that wait behind the running one. A worker sends fewer runs ahead, so more runs indicate
/// a fault of the worker.
pub const RUNS_QUEUED_MAX: usize = 64;

/// A run that is queued or executing.
#[derive(Debug)]
pub(crate) struct QueuedRun<E: Engine> {
    pub(crate) run: u64,
    program: Arc<LoadedProgram<E>>,
    generation: u64,
    inputs: RunInputs<E>,
    asked: RequestedOutputs,
    told: TimeReporting,
    sms: RunSms,
}

/// The SMs of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunSms {
    /// The whole GPU, which the run has to itself.
    All,
    /// The SMs of the seat's tokens.
    OfTokens,
}

/// Whether the response reports the times of the launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimeReporting {
    Nothing,
    Launches,
}

/// Most launches of a run with reported times, because a trace is read by people.
const LAUNCHES_TOLD_MAX: usize = 256;

impl<E: Engine> QueuedRun<E> {
    /// Creates a run of a loaded program.
    pub(crate) fn new(
        message: Run,
        program: Arc<LoadedProgram<E>>,
        objects: &ObjectTable<E>,
        mut descriptors: FrameDescriptors,
    ) -> Result<Self, RunError> {
        let inputs = batch::inputs(message.inputs, message.members, objects, &mut descriptors)?;
        let Run { run, generation, outputs, kept, times, tokens, .. } = message;
        let told = if times { TimeReporting::Launches } else { TimeReporting::Nothing };
        let asked = RequestedOutputs { outputs, kept, rows: inputs.rows };
        let sms = if tokens.is_some() { RunSms::OfTokens } else { RunSms::All };
        Ok(Self { run, program, generation, inputs, asked, told, sms })
    }

    /// Whether the run waits for nothing and is likely to be quick, because an earlier run of the
    /// program with as much input was quick.
    pub(crate) fn is_quick(&self) -> bool {
        if self.sms == RunSms::OfTokens {
            return false;
        }
        let quick = self.program.quick_inputs.load(Ordering::Relaxed);
        let reads = &self.program.plan.whole.spec.reads;
        inline_bytes(&self.inputs.tensors).is_some_and(|bytes| bytes < quick)
            && matches!(self.program.mapping.use_loaded(self.generation, reads), Ok(Some(_)))
    }
}

/// Carries out the runs of a queue until the queue is closed.
pub(crate) fn serve<E: Engine>(
    shared: &ExecutorState<E>,
    queue: &WorkQueue<QueuedRun<E>>,
    gate: &LaunchGate,
    mut launches: E::Queue,
) {
    while let Some(job) = queue.pop() {
        carry_out_and_report(shared, gate, job, &mut launches);
    }
}

/// Carries out a run, and reports the outcome.
pub(crate) fn carry_out_and_report<E: Engine>(
    shared: &ExecutorState<E>,
    gate: &LaunchGate,
    job: QueuedRun<E>,
    launches: &mut E::Queue,
) {
    if shared.abort_on_run.load(Ordering::Relaxed) {
        tracing::warn!("aborting: this fault was injected");
        std::process::abort();
    }
    let run = job.run;
    let sent = carry_out(shared, gate, job, launches).and_then(|(done, descriptors)| {
        let sent = shared.events.send_with(Event::RunDone(done), descriptors);
        // Dropped, because the worker will not learn of the outputs.
        Ok(sent.inspect_err(|_| shared.kept.remove(run))?)
    });
    if let Err(error) = sent {
        if let RunError::Engine(error) = &error {
            shared.events.report_loss(error);
        }
        shared.events.send(failed(run, error.kind(), error));
    }
}

fn carry_out<E: Engine>(
    shared: &ExecutorState<E>,
    gate: &LaunchGate,
    job: QueuedRun<E>,
    launches: &mut E::Queue,
) -> Result<(RunDone, Vec<OwnedFd>), RunError> {
    let QueuedRun { run, program, generation, inputs, asked, told, sms } = job;
    let gate = match sms {
        RunSms::All => None,
        RunSms::OfTokens => Some(RunGate { gate, events: &shared.events }),
    };
    let wanted = asked.wanted(run, &program.outputs, &shared.kept)?;
    // Declared before all values, so that the uses are dropped after them.
    let RunInputs { tensors: inputs, uses: _uses, .. } = inputs;
    let began = monotonic_now();
    let bytes = inline_bytes(&inputs);
    let inputs = upload::<E>(&program.inputs, inputs, launches)?;
    let mut running = RunInProgress {
        program: &program,
        generation,
        launches,
        gate,
        held: Duration::ZERO,
        issued: Vec::new(),
        times: RunTimes::start(told),
    };
    let values = running.run(inputs);
    let finished = running.finish();
    let times = running.times;
    let mut values = values?;
    finished?;
    let mut answer = RunResponse::<E>::new();
    for index in wanted {
        answer.add(&asked, &shared.kept, &program.outputs[index], &mut values[index], launches)?;
    }
    let (outputs, descriptors) = answer.keep(run, &shared.kept);
    program.record_compute_time(times.computed);
    if gate.is_none() {
        program.record_run_time(bytes, monotonic_now().since(began));
    }
    let held = gate.and_then(|it| it.gate.held());
    let done = RunDone {
        run,
        outputs,
        started_ns: times.started.as_nanos(),
        finished_ns: times.finished.as_nanos(),
        waited_ns: nanos(times.waited),
        launches: times.launches,
        launch_times: times.each,
        token_wait_ns: nanos(times.held),
        sm_ns: nanos(times.sm),
        token: held.map(|(token, _)| token.0),
        token_busy_ns: held.map_or(0, |(_, busy)| nanos(busy)),
    };
    Ok((done, descriptors))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the number of input bytes if all inputs arrived inline; other inputs are too large for a
/// quick run.
fn inline_bytes<E: Engine>(inputs: &HashMap<String, RunInput<E>>) -> Option<usize> {
    inputs.values().map(RunInput::inline_bytes).sum()
}

/// Moves the inputs to the device, in the declared order.
fn upload<E: Engine>(
    declared: &[DeclaredTensor],
    mut inputs: HashMap<String, RunInput<E>>,
    launches: &mut E::Queue,
) -> Result<Vec<Option<E::Value>>, RunError> {
    let mut values = Vec::with_capacity(declared.len());
    for DeclaredTensor { name, datatype } in declared {
        let tensor = inputs.remove(name).ok_or_else(|| RunError::InputMissing(name.clone()))?;
        if tensor.datatype != *datatype {
            let found = tensor.datatype.to_string();
            let due = datatype.to_string();
            return Err(RunError::InputType { name: name.clone(), found, due });
        }
        tensor.check_loaded().map_err(|error| RunError::Object(name.clone(), error))?;
        values.push(Some(tensor.value(launches)?));
    }
    match inputs.into_keys().min() {
        Some(name) => Err(RunError::InputUnknown(name)),
        None => Ok(values),
    }
}

/// The times of a run and its launches.
#[derive(Debug)]
struct RunTimes {
    started: Timestamp,
    finished: Timestamp,
    waited: Duration,
    /// The wait for tokens.
    held: Duration,
    /// Device time of all launches.
    computed: Duration,
    /// Device time of each launch, times the launch's share of the SMs.
    sm: Duration,
    launches: u32,
    told: TimeReporting,
    each: Vec<LaunchTimes>,
}

impl RunTimes {
    fn start(told: TimeReporting) -> Self {
        let now = monotonic_now();
        let zero = Duration::ZERO;
        Self {
            started: now,
            finished: now,
            waited: zero,
            held: zero,
            computed: zero,
            sm: zero,
            launches: 0,
            told,
            each: Vec::new(),
        }
    }

    /// Records a finished launch.
    fn launched(&mut self, IssuedTimes { waited, held, started, on }: IssuedTimes, finished: Timestamp) {
        let took = finished.since(started);
        self.held += held;
        self.computed += took;
        self.sm += on.map_or(took, |on| took * u32::from(on.units()) / u32::from(on.whole()));
        if self.told == TimeReporting::Launches && self.each.len() < LAUNCHES_TOLD_MAX {
            self.each.push(LaunchTimes {
                launch: self.launches,
                waited_ns: nanos(waited),
                started_ns: started.as_nanos(),
                finished_ns: finished.as_nanos(),
                token_wait_ns: nanos(held),
                sm_units: on.map_or(0, |on| u32::from(on.units())),
            });
        }
        self.waited += waited;
        self.finished = finished;
        self.launches += 1;
    }
}

/// The times at which a launch was issued.
#[derive(Debug, Clone, Copy)]
struct IssuedTimes {
    /// The wait for the launch's weights before the start.
    waited: Duration,
    /// The wait for a token before the start.
    held: Duration,
    started: Timestamp,
    /// The SMs of the launch's token.
    on: Option<SmShare>,
}

/// The gate of a run on a shared GPU.
#[derive(Debug, Clone, Copy)]
struct RunGate<'a> {
    gate: &'a LaunchGate,
    events: &'a EventSender,
}

/// A launch that was issued, and may still be running.
struct IssuedLaunch<E: Engine> {
    /// Keeps the launch's weights mapped until the launch has finished.
    _using: MappingUse<E>,
    event: DeviceEvent<E>,
    times: IssuedTimes,
}

/// A run while the launches execute.
struct RunInProgress<'a, E: Engine> {
    program: &'a LoadedProgram<E>,
    generation: u64,
    launches: &'a mut E::Queue,
    /// `None` if the run has the whole GPU.
    gate: Option<RunGate<'a>>,
    /// The wait for a token that turned out to be too short for a whole run. The first launch has the token.
    held: Duration,
    issued: Vec<IssuedLaunch<E>>,
    times: RunTimes,
}

impl<E: Engine> RunInProgress<'_, E> {
    /// Runs the model on these inputs. Returns the outputs in the declared order.
    fn run(&mut self, mut slots: Vec<Option<E::Value>>) -> Result<Vec<Option<E::Value>>, RunError> {
        let program = self.program;
        if let Some(values) = self.run_whole(&mut slots)? {
            return Ok(values.into_iter().map(Some).collect());
        }
        slots.resize_with(program.plan.slots, || None);
        for (step, kernel) in program.plan.steps.iter().zip(&program.kernels) {
            self.step(step, kernel, &mut slots)?;
        }
        Ok(program.plan.outputs.iter().map(|&slot| slots[slot].take()).collect())
    }

    /// Runs the model as a single launch, if all its weights are loaded and the run's token allows it.
    fn run_whole(&mut self, slots: &mut [Option<E::Value>]) -> Result<Option<Vec<E::Value>>, RunError> {
        let program = self.program;
        let plan = &program.plan.whole;
        let Some(mapping) = program.mapping.use_loaded(self.generation, &plan.spec.reads)? else {
            return Ok(None);
        };
        let before = monotonic_now();
        let permit = match self.gate {
            Some(_) if program.compute_time().is_none_or(|time| time > WHOLE_RUN_MAX) => return Ok(None),
            Some(gate) => Some(gate.gate.enter(gate.events)),
            None => None,
        };
        let started = if permit.is_some() { monotonic_now() } else { before };
        let held = started.since(before);
        if permit.is_some_and(|permit| !permit.open) {
            self.held = held;
            return Ok(None);
        }
        let on = permit.map(|permit| permit.on);
        let times = IssuedTimes { waited: Duration::ZERO, held, started, on };
        self.launch_permitted(plan, &program.whole, slots, mapping, permit, times).map(Some)
    }

    /// Launches under a permit, if the run needs one, and then waits for the end of the launch.
    fn launch_permitted(
        &mut self,
        step: &PlannedLaunch,
        kernel: &E::Kernel,
        slots: &mut [Option<E::Value>],
        mapping: MappingUse<E>,
        permit: Option<LaunchPermit>,
        times: IssuedTimes,
    ) -> Result<Vec<E::Value>, RunError> {
        let Some((gate, permit)) = self.gate.zip(permit) else {
            return self.launch(step, kernel, slots, mapping, times);
        };
        self.launches.stream().restrict(permit.on)?;
        let launched = self.launch(step, kernel, slots, mapping, times);
        let finished = self.finish();
        self.launches.stream().restrict(SmShare::Block(UnitSet::ALL))?;
        gate.gate.leave(permit, monotonic_now().since(times.started), gate.events);
        finished.and(launched)
    }

    /// Issues a launch that begins as soon as the weights that the launch reads are loaded.
    fn step(
        &mut self,
        step: &PlannedLaunch,
        kernel: &E::Kernel,
        slots: &mut [Option<E::Value>],
    ) -> Result<(), RunError> {
        let before = monotonic_now();
        let mapping = &self.program.mapping;
        if let Some(gate) = self.gate
            && mapping.use_loaded(self.generation, &step.spec.reads)?.is_none()
        {
            gate.gate.rest(gate.events);
        }
        let mapping = mapping.wait_issued(self.generation, &step.spec.reads, self.launches.stream())?;
        let loaded = monotonic_now();
        let permit = self.gate.map(|gate| gate.gate.enter(gate.events));
        let started = if permit.is_some() { monotonic_now() } else { loaded };
        let on = permit.map(|permit| permit.on);
        let held = std::mem::take(&mut self.held) + started.since(loaded);
        let times = IssuedTimes { waited: loaded.since(before), held, started, on };
        let values = self.launch_permitted(step, kernel, slots, mapping, permit, times)?;
        for (&slot, value) in step.writes.iter().zip(values) {
            slots[slot] = Some(value);
        }
        Ok(())
    }

    fn launch(
        &mut self,
        step: &PlannedLaunch,
        kernel: &E::Kernel,
        slots: &mut [Option<E::Value>],
        mapping: MappingUse<E>,
        times: IssuedTimes,
    ) -> Result<Vec<E::Value>, RunError> {
        let given: Vec<_> = step.args.iter().map(|arg| arg.last.then(|| slots[arg.slot].take())).collect();
        let missing = |index: usize| RunError::ValueMissing(step.spec.args[index].clone());
        let lent = |slot: Slot| slots[slot].as_ref().map(LaunchArg::Lend);
        let args = step.args.iter().zip(given).enumerate().map(|(index, (arg, given))| {
            let arg = given.map_or_else(|| lent(arg.slot), |value| value.map(LaunchArg::Give));
            arg.ok_or_else(|| missing(index))
        });
        let args = args.collect::<Result<Vec<_>, _>>()?;
        let values = self.launches.launch(&self.program.module, kernel, args)?;
        let event = self.launches.stream().record()?;
        self.issued.push(IssuedLaunch { _using: mapping, event, times });
        Ok(values)
    }

    /// Waits until all launches have finished, and then lets their weights go. Without this wait, the
    /// weights of a launch that still runs could be unmapped.
    fn finish(&mut self) -> Result<(), RunError> {
        let mut outcome = Ok(());
        for IssuedLaunch { event, times, .. } in &self.issued {
            match event.wait() {
                Ok(finished) => self.times.launched(*times, finished),
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
        }
        self.issued.clear();
        outcome
    }
}
