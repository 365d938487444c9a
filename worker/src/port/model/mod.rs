//! A model of an executor process: a pure state machine that computes the executor's events and their
//! times. [`super::modelled`] drives the model in virtual time, a test with a bare heap of events.
//!
//! The model has ordered streams, as a real executor. Control commands take no time. Copies to the GPU and
//! copies to the host proceed at the rate of the way, within the windows of the grants. A run begins with
//! the first bytes of its weights, and ends no earlier than its tail after the last bytes. The runs of
//! different seats (`seats`) proceed at the same time.
//!
//! Copies that other GPUs forward proceed beside the GPU's own copies, one copy at a time on each way. A
//! real GPU works like this; an emulated GPU does not. The model emits one event at a time.

mod copies;
mod protocol;
mod seats;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millrace_slices::gate::GateEvent;
use millrace_slices::tokens::TokenId;
use millrace_types::{Bytes, BytesPerSec, ComputeCurve, GpuIndex, Permille, Timestamp};

use self::copies::{CopyPaths, CopyQueue};
pub use self::protocol::{CopiedObject, CopyCommand, CopyPath, CopyRefusal, ModelledCommand, ModelledEvent};
pub use self::seats::ModelledTokens;
use self::seats::{ModelledSeat, RunJob, RunSpeed, SharedProgress, SharedWork};
use crate::clock::{Sleeper, own_microsecond};

/// The timing and the faults of a modelled executor.
#[derive(Debug, Clone)]
pub struct ExecutorBehaviour {
    /// The time from the start of the process until `Ready`.
    pub start: Duration,
    /// The time from the load of a program until the first run can begin: the start of the program's own
    /// process in isolation (L05). Copies do not wait for that process.
    pub process_start: Duration,
    /// The upper limit of the rate of copies, in each direction.
    pub copy_rate: BytesPerSec,
    /// The interval of failing copies: the Nth, the 2Nth, and so on. `None` for no failures.
    pub copy_fails_every: Option<u64>,
    /// The seed of this executor's order among the tasks that wake at the same time
    /// ([`Sleeper::permuted`]).
    pub ties: u64,
    /// The run model of each program, by the model's name.
    pub runs: BTreeMap<String, RunModel>,
}

/// The timing and the end of a program's runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunModel {
    /// The duration of a run of one request with resident weights.
    pub takes: Duration,
    /// The additional duration for each further request in the run.
    pub by_member: Duration,
    /// The minimum time between the arrival of the last weights and the end of the run. If the tail equals
    /// `takes`, the run does not overlap the load.
    pub tail: Duration,
    /// The time between the mapping of the program's memory and the begin of the first run: in isolation,
    /// the start of the program's process (L05, T14).
    pub start: Duration,
    /// The size of the outputs that stay on the GPU if the request keeps them. With zero bytes all outputs
    /// are answered.
    pub keeps: Bytes,
    /// The speed on a part of the SMs of a shared GPU.
    pub curve: ComputeCurve,
    /// The part of the GPU's memory bandwidth that the run uses at full speed. Runs at the same time slow
    /// each other if the sum exceeds the whole.
    pub demand: Permille,
    pub end: RunEnd,
}

impl RunModel {
    /// Returns a run that ends with outputs, overlaps three quarters of the computation with the load,
    /// takes no longer for several requests, keeps no outputs on the GPU, and is as fast as its part of the
    /// SMs is large.
    #[must_use]
    pub fn new(takes: Duration) -> Self {
        Self {
            takes,
            by_member: Duration::ZERO,
            tail: takes / 4,
            start: Duration::ZERO,
            keeps: Bytes::ZERO,
            curve: ComputeCurve::PROPORTIONAL,
            demand: Permille::ZERO,
            end: RunEnd::Done,
        }
    }

    /// Returns the model of a run of `members` requests.
    fn of(self, members: u32) -> Self {
        Self { takes: self.takes + self.by_member * members.saturating_sub(1), ..self }
    }
}

/// The end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// The run ends with outputs.
    Done,
    /// The model fails on the input.
    Fails,
    /// The run kills the process.
    Aborts,
}

/// The waits and the SM time of a run.
#[derive(Debug, Clone, Copy, Default)]
struct SharedTimes {
    waited: Duration,
    held: Duration,
    sm: Duration,
    token: Option<(TokenId, Duration)>,
}

#[derive(Debug)]
struct ModelledProgram {
    weights: Bytes,
    run: RunModel,
    /// The time at which the program's process is up.
    ready: Timestamp,
    generation: Option<u64>,
    mapped: Timestamp,
    loaded: Bytes,
}

impl ModelledProgram {
    /// Returns the earliest time at which a run can begin, apart from the wait for weights.
    fn begins(&self) -> Timestamp {
        self.ready.max(self.mapped + self.run.start)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessState {
    Absent,
    Starting(Timestamp),
    Alive,
}

/// A modelled executor.
#[derive(Debug)]
pub struct ModelledExecutor {
    behaviour: ExecutorBehaviour,
    sleeper: Sleeper,
    life: ProcessState,
    programs: BTreeMap<u64, ModelledProgram>,
    objects: BTreeSet<u64>,
    copies_out: BTreeSet<u64>,
    copies: CopyPaths,
    /// The time at which the process notices that a copy began or ended, if the process has not noticed
    /// yet.
    notices: Option<Timestamp>,
    seats: BTreeMap<u32, ModelledSeat>,
    copied: u64,
    /// The pending events, each with its earliest time of emission.
    words: VecDeque<(Timestamp, ModelledEvent)>,
    /// The earliest time at which the next event can be emitted.
    speaks: Timestamp,
}

impl ModelledExecutor {
    /// Returns an executor without a process.
    #[must_use]
    pub fn new(gpu: GpuIndex, behaviour: ExecutorBehaviour) -> Self {
        let sleeper = Sleeper::port(gpu).permuted(behaviour.ties);
        Self {
            copies: CopyPaths::new(behaviour.copy_rate),
            notices: None,
            behaviour,
            sleeper,
            life: ProcessState::Absent,
            programs: BTreeMap::new(),
            objects: BTreeSet::new(),
            copies_out: BTreeSet::new(),
            seats: BTreeMap::new(),
            copied: 0,
            words: VecDeque::new(),
            speaks: Timestamp::ZERO,
        }
    }

    /// Starts the process.
    pub fn start(&mut self, now: Timestamp) {
        self.life = ProcessState::Starting(self.own(now + self.behaviour.start));
    }

    /// Kills the process. Pending events are still emitted, followed by [`ModelledEvent::Exited`].
    pub fn kill(&mut self, now: Timestamp) {
        self.advance(now);
        self.speaks = self.after(now);
        self.end();
    }

    fn end(&mut self) {
        if self.life != ProcessState::Absent {
            self.life = ProcessState::Absent;
            self.programs.clear();
            self.objects.clear();
            self.copies_out.clear();
            self.copies.clear();
            self.seats.clear();
            self.say(ModelledEvent::Exited);
        }
    }

    /// Handles a command. Ignored unless the process is ready.
    pub fn order(&mut self, now: Timestamp, order: ModelledCommand) {
        if self.life != ProcessState::Alive {
            return;
        }
        self.advance(now);
        self.speaks = self.after(now);
        match order {
            ModelledCommand::Load { program, name, weights } => {
                let Some(&run) = self.behaviour.runs.get(&name) else {
                    panic!(
                        "the scenario has no runs of model {name:?}: add the model to `ExecutorBehaviour::runs`"
                    );
                };
                let loaded = ModelledProgram {
                    weights,
                    run,
                    ready: now + self.behaviour.process_start,
                    generation: None,
                    mapped: now,
                    loaded: Bytes::ZERO,
                };
                self.programs.insert(program, loaded);
                self.say(ModelledEvent::Loaded { program });
            }
            ModelledCommand::Unload { program } => {
                self.programs.remove(&program);
            }
            ModelledCommand::Map { program, generation } => {
                if let Some(program) = self.programs.get_mut(&program) {
                    program.generation = Some(generation);
                    program.loaded = Bytes::ZERO;
                    program.mapped = now;
                }
            }
            ModelledCommand::Unmap { program, generation } => {
                let mapped = |program: &&mut ModelledProgram| program.generation == Some(generation);
                if let Some(program) = self.programs.get_mut(&program).filter(mapped) {
                    program.generation = None;
                }
            }
            ModelledCommand::Copy(order) => self.copies.of_mut(order.way()).push(now, order),
            ModelledCommand::Revoke { transfer, batch } => self.revoke(transfer, batch),
            ModelledCommand::Run { run, program, generation, members, keeps, seat, tokens } => {
                let seat = self.seats.entry(seat).or_default();
                if let Some(ModelledTokens { anew: true, first }) = tokens {
                    seat.gate.begin(first);
                }
                let shared = tokens.map(|_| SharedWork::default());
                let begun = None;
                let ends = None;
                seat.runs.push_back(RunJob { run, program, generation, members, keeps, begun, ends, shared });
            }
            ModelledCommand::Grant { seat, token } => {
                if let Some(seat) = self.seats.get_mut(&seat) {
                    seat.gate.grant(token);
                }
            }
            ModelledCommand::Shorten { seat, token, busy } => {
                let event = self.seats.get_mut(&seat).and_then(|seat| seat.gate.shorten(token, busy));
                self.say_token(seat, event);
            }
            ModelledCommand::Withdraw { seat, token } => {
                let event = self.seats.get_mut(&seat).and_then(|seat| seat.gate.withdraw(token));
                self.say_token(seat, event);
            }
            ModelledCommand::Cancel { run } => self.cancel(run),
            ModelledCommand::Place { object } => {
                self.objects.insert(object);
                self.say(ModelledEvent::Placed { object });
            }
            ModelledCommand::Free { object } => {
                self.objects.remove(&object);
            }
            ModelledCommand::CopyOut { copy, granted: true } => {
                self.copies_out.insert(copy);
            }
            ModelledCommand::CopyOut { copy, granted: false } => self.say(ModelledEvent::CopiedOut { copy }),
            ModelledCommand::EndCopyOut { copy } => {
                self.copies_out.remove(&copy);
            }
        }
        self.settle(now);
    }

    /// Returns the time at which [`Self::wake`] has to be called next.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        let life = if let ProcessState::Starting(at) = self.life { Some(at) } else { None };
        let word = self.words.front().map(|&(at, _)| at);
        let copy = self.next_copy().map(|at| self.own(at));
        let heads = self.seats.values().filter_map(|seat| seat.runs.front());
        let run = heads.filter_map(|job| self.next_of(job)).min();
        [life, word, copy, self.notices, run].into_iter().flatten().min()
    }

    /// Carries out all work that is due, and returns at most one event.
    pub fn wake(&mut self, now: Timestamp) -> Option<ModelledEvent> {
        self.speaks = now;
        if matches!(self.life, ProcessState::Starting(at) if at <= now) {
            self.life = ProcessState::Alive;
            self.say(ModelledEvent::Ready);
        }
        self.settle(now);
        let word = self.words.pop_front_if(|(at, _)| *at <= now)?.1;
        let later = self.after(now);
        if let Some((at, _)) = self.words.front_mut() {
            *at = (*at).max(later);
        }
        Some(word)
    }

    /// Returns the copy under way on a way, if any.
    #[must_use]
    pub fn copying(&self, way: CopyPath) -> Option<&CopyCommand> {
        self.copies.of(way)?.under_way()
    }

    /// Returns the ways on which other GPUs have ever forwarded to this GPU or from it.
    pub fn forwarded(&self) -> impl Iterator<Item = CopyPath> {
        self.copies.each().map(|(way, _)| way).filter(|way| matches!(way, CopyPath::Forwarded(..)))
    }

    /// Returns the time at which a copy next begins or ends at the present rates. The time is exact to the
    /// nanosecond, although the process notices the begin or the end only later.
    #[must_use]
    pub fn next_copy(&self) -> Option<Timestamp> {
        self.next_one_way().map(|(at, _)| at)
    }

    /// Returns the time at which a copy next begins or ends, and the way of that copy.
    fn next_one_way(&self) -> Option<(Timestamp, CopyPath)> {
        self.copies.each().filter_map(|(way, copies)| Some((copies.next()?, way))).min()
    }

    /// Sets the rate of the copies on a way. The behaviour's `copy_rate` caps the rate.
    pub fn set_copy_rate(&mut self, now: Timestamp, way: CopyPath, rate: BytesPerSec) {
        let rate = rate.min(self.behaviour.copy_rate);
        self.copies.of_mut(way).set_rate(now, rate);
    }

    /// Begins and ends all copies that are due, each at an exact time. Their events are emitted when
    /// the process wakes.
    pub fn advance(&mut self, now: Timestamp) {
        while let Some((at, way)) = self.next_one_way().filter(|&(at, _)| at <= now) {
            let notices = self.own(at);
            self.notices = Some(self.notices.map_or(notices, |before| before.min(notices)));
            match self.copies.of_mut(way).end() {
                Some((order, started)) => self.end_copy(at, order, started),
                None => self.begin_copy(at, way),
            }
        }
    }

    fn begin_copy(&mut self, at: Timestamp, way: CopyPath) {
        let Some(order) = self.copies.of(way).and_then(CopyQueue::waiting) else { return };
        let CopyCommand { transfer, batch, of, not_after, .. } = *order;
        let mapped = match of {
            CopiedObject::Program { program, generation } => {
                self.programs.get(&program).is_some_and(|p| p.generation == Some(generation))
            }
            CopiedObject::Object(object) => self.objects.contains(&object),
            CopiedObject::CopyOut(copy) => self.copies_out.contains(&copy),
        };
        if mapped && at <= not_after {
            self.copies.of_mut(way).begin(at);
        } else {
            self.copies.of_mut(way).refuse();
            let why = if mapped { CopyRefusal::NotBegun } else { CopyRefusal::NotMapped };
            self.say_of(at, ModelledEvent::CopyFailed { transfer, batch, why });
        }
    }

    fn end_copy(&mut self, at: Timestamp, order: CopyCommand, started: Timestamp) {
        let CopyCommand { transfer, batch, of, size, .. } = order;
        self.copied += 1;
        if self.behaviour.copy_fails_every.is_some_and(|every| self.copied.is_multiple_of(every)) {
            self.say_of(at, ModelledEvent::CopyFailed { transfer, batch, why: CopyRefusal::Device });
            // The bytes are missing for good, so a run that waits for them fails.
            let waits =
                |job: &RunJob| matches!(of, CopiedObject::Program { program, .. } if job.program == program);
            let is_lost = |job: &RunJob| waits(job) && job.ends.is_none();
            let lost = self.seats.values_mut().find_map(|seat| {
                let place = seat.runs.iter().position(is_lost)?;
                seat.runs.remove(place)
            });
            if let Some(RunJob { run, .. }) = lost {
                self.say_of(at, ModelledEvent::RunNotThere { run });
            }
            return;
        }
        if let CopiedObject::Program { program, generation } = of
            && let Some(program) = self.programs.get_mut(&program)
            && program.generation == Some(generation)
        {
            program.loaded += size;
        }
        self.say_of(at, ModelledEvent::CopyDone { transfer, batch, started, finished: at, size });
    }

    /// Returns the time at which a run can begin that waits only for its program's process.
    fn begins(&self, job: &RunJob) -> Option<Timestamp> {
        let program = self.programs.get(&job.program)?;
        let some = program.loaded > Bytes::ZERO || program.loaded >= program.weights;
        (job.begun.is_none() && some).then(|| self.own(program.begins()))
    }

    /// Returns the first time at or after `at` on this executor's own grid of microseconds.
    fn own(&self, at: Timestamp) -> Timestamp {
        own_microsecond(at, self.sleeper)
    }

    /// Returns the first time after `now` on this executor's own grid: a process answers strictly later
    /// than it gets a command.
    fn after(&self, now: Timestamp) -> Timestamp {
        self.own(Timestamp(now.0 + 1))
    }

    fn say(&mut self, word: ModelledEvent) {
        self.words.push_back((self.speaks, word));
    }

    /// Queues an event about something that happened at `at`, to be emitted when the process wakes.
    fn say_of(&mut self, at: Timestamp, word: ModelledEvent) {
        self.words.push_back((self.own(at).max(self.speaks), word));
    }

    fn revoke(&mut self, transfer: u64, batch: u64) {
        if self.copies.revoke(transfer, batch) {
            self.say(ModelledEvent::CopyFailed { transfer, batch, why: CopyRefusal::NotBegun });
        }
    }

    fn cancel(&mut self, run: u64) {
        let is_it = |job: &RunJob| job.run == run && job.begun.is_none();
        let removed = self.seats.values_mut().any(|seat| {
            let place = seat.runs.iter().position(is_it);
            place.is_some_and(|place| seat.runs.remove(place).is_some())
        });
        if removed {
            self.say(ModelledEvent::RunCancelled { run });
        }
    }

    /// Begins and ends all copies and runs that can.
    fn settle(&mut self, now: Timestamp) {
        self.advance(now);
        self.notices = None;
        let mut next = self.seats.keys().next().copied();
        while let Some(seat) = next {
            while self.settle_run(now, seat) {}
            next = self.seats.range(seat + 1..).next().map(|(&seat, _)| seat);
        }
    }

    /// Returns the time at which something happens to the first run of a seat.
    fn next_of(&self, job: &RunJob) -> Option<Timestamp> {
        let launch = job.shared.as_ref().and_then(SharedWork::next);
        launch.or(job.ends).or_else(|| self.begins(job))
    }

    fn say_token(&mut self, seat: u32, event: Option<GateEvent>) {
        if let Some(event) = event {
            self.say(ModelledEvent::Token { seat, event });
        }
    }

    fn settle_run(&mut self, now: Timestamp, seat: u32) -> bool {
        let Some(here) = self.seats.get_mut(&seat) else { return false };
        let Some(job) = here.runs.front_mut() else { return false };
        let &mut RunJob { run, members, keeps, begun, ends, .. } = job;
        let Some(program) = self.programs.get(&job.program).filter(|p| p.generation == Some(job.generation))
        else {
            here.runs.pop_front();
            self.say(ModelledEvent::RunNotThere { run });
            return true;
        };
        let model = program.run.of(members);
        let complete = program.loaded >= program.weights;
        let started = now >= program.begins();
        match (begun, ends) {
            (None, _) if started && (complete || program.loaded > Bytes::ZERO) => {
                job.begun = Some(now);
            }
            (Some(begun), _) if job.shared.is_some() => {
                return self.settle_shared(now, seat, begun, complete, model);
            }
            (Some(begun), None) if complete => {
                let ends = (begun + model.takes).max(now + model.tail);
                job.ends = Some(own_microsecond(ends, self.sleeper));
            }
            (Some(begun), Some(ends)) if ends <= now => {
                here.runs.pop_front();
                let waited = ends.since(begun).saturating_sub(model.takes);
                let alone = SharedTimes { waited, ..SharedTimes::default() };
                self.end_run(run, begun, ends, model, keeps, alone);
            }
            _ => return false,
        }
        true
    }

    /// Moves the first run of a seat of a shared GPU on.
    fn settle_shared(
        &mut self,
        now: Timestamp,
        seat: u32,
        begun: Timestamp,
        complete: bool,
        model: RunModel,
    ) -> bool {
        let sleeper = self.sleeper;
        let heads = self.seats.values().filter_map(|seat| seat.runs.front());
        let others = heads.filter_map(|job| job.shared.as_ref()).map(SharedWork::bandwidth).sum();
        let Some(ModelledSeat { gate, runs }) = self.seats.get_mut(&seat) else { return false };
        let Some(job) = runs.front_mut() else { return false };
        let Some(work) = &mut job.shared else { return false };
        if !complete {
            let event = work.rest(gate);
            self.say_token(seat, event);
            return false;
        }
        let left = model.takes.saturating_sub(now.since(begun)).max(model.tail);
        work.loaded(left, model.takes.saturating_sub(left));
        let speed = RunSpeed { curve: model.curve, demand: model.demand, others };
        let (progress, event) = work.settle(now, gate, speed, |at| own_microsecond(at, sleeper));
        let &mut SharedWork { held, computed, sm, .. } = work;
        let &mut RunJob { run, keeps, .. } = job;
        let token = gate.held();
        if progress == SharedProgress::Ended {
            runs.pop_front();
        }
        self.say_token(seat, event);
        if progress == SharedProgress::Ended {
            let waited = now.since(begun).saturating_sub(computed + held);
            self.end_run(run, begun, now, model, keeps, SharedTimes { waited, held, sm, token });
        }
        progress != SharedProgress::Waits
    }

    fn end_run(
        &mut self,
        run: u64,
        started: Timestamp,
        finished: Timestamp,
        model: RunModel,
        keeps: bool,
        times: SharedTimes,
    ) {
        match model.end {
            RunEnd::Done => {
                let SharedTimes { waited, held, sm, token } = times;
                let kept = Some(model.keeps).filter(|&bytes| keeps && bytes > Bytes::ZERO);
                self.say(ModelledEvent::RunDone { run, started, finished, waited, kept, held, sm, token });
            }
            RunEnd::Fails => self.say(ModelledEvent::RunFailed { run }),
            RunEnd::Aborts => self.end(),
        }
    }
}
