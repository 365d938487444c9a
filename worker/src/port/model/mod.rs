//! An executor process as a model: what it would say and when, without a process. Pure; driven by
//! [`super::modelled`] in virtual time, or by a bare heap of events.
//!
//! Four ordered streams, as in the real one: control is immediate; copies to the GPU and those to the host
//! take their time at the rate they are given, within their windows; runs take theirs, beginning with the
//! first bytes that arrive and ending no sooner than their tail after the last. What other GPUs forward
//! comes beside the GPU's own copies, one copy at a time by each way: as a GPU would, and not as an emulated
//! one does. One word is said at a time.

mod copies;
mod protocol;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};

use self::copies::{Copies, Ways};
pub use self::protocol::{CopyOrder, CopyRefusal, Of, Order, Way, Word};
use crate::clock::{Sleeper, own_microsecond};

/// How a modelled executor behaves.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// From start to ready.
    pub start: Duration,
    /// Where each program has a process of its own (L05): how long after it was loaded the first run
    /// can begin. Copies do not wait for it.
    pub process_start: Duration,
    /// The rate of its copies in each direction, where the links they cross have more.
    pub copy_rate: BytesPerSec,
    /// Every how many copies one fails; `None` for never.
    pub copy_fails_every: Option<u64>,
    /// Its place among those who wake in one moment ([`Sleeper::shuffled`]).
    pub ties: u64,
    /// What each model's program does when it runs, by the model's name.
    pub runs: BTreeMap<String, RunModel>,
}

/// What running a program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunModel {
    /// How long it computes.
    pub takes: Duration,
    /// How much longer for each request beyond the first that runs with it.
    pub by_member: Duration,
    /// How much of that is left when the last weights arrive, at least. All of it: nothing overlaps.
    pub tail: Duration,
    /// How long after the program was given memory it can begin: where each model has a process of
    /// its own, that process's start (L05, T14).
    pub start: Duration,
    /// How much of its outputs stays on the GPU, where that is asked for. Nothing: they are answered.
    pub keeps: Bytes,
    /// How it ends.
    pub end: RunEnd,
}

impl RunModel {
    /// A run that ends with outputs, overlaps its load but for a quarter, takes no longer for several
    /// requests, and leaves nothing on the GPU.
    #[must_use]
    pub fn new(takes: Duration) -> Self {
        let (by_member, start) = (Duration::ZERO, Duration::ZERO);
        Self { takes, by_member, tail: takes / 4, start, keeps: Bytes::ZERO, end: RunEnd::Done }
    }

    /// The same of so many requests that run as one.
    fn of(self, members: u32) -> Self {
        Self { takes: self.takes + self.by_member * members.saturating_sub(1), ..self }
    }
}

/// How a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// With outputs.
    Done,
    /// The model fails on its input.
    Fails,
    /// The process dies of it.
    Aborts,
}

#[derive(Debug)]
struct RunJob {
    run: u64,
    program: u64,
    generation: u64,
    members: u32,
    keeps: bool,
    begun: Option<Timestamp>,
    ends: Option<Timestamp>,
}

#[derive(Debug)]
struct Program {
    weights: Bytes,
    run: RunModel,
    /// When its process is up.
    ready: Timestamp,
    generation: Option<u64>,
    mapped: Timestamp,
    loaded: Bytes,
}

impl Program {
    /// When a run can begin, if the weights do not keep it.
    fn begins(&self) -> Timestamp {
        self.ready.max(self.mapped + self.run.start)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Absent,
    Starting(Timestamp),
    Alive,
}

/// One modelled executor.
#[derive(Debug)]
pub struct Model {
    behaviour: Behaviour,
    sleeper: Sleeper,
    life: Life,
    programs: BTreeMap<u64, Program>,
    objects: BTreeSet<u64>,
    copies_out: BTreeSet<u64>,
    copies: Ways,
    /// When it notices that a copy began or ended, where it has not yet.
    notices: Option<Timestamp>,
    runs: VecDeque<RunJob>,
    copied: u64,
    /// What is to be said, and not before when.
    words: VecDeque<(Timestamp, Word)>,
    /// When it can next say something.
    speaks: Timestamp,
}

impl Model {
    /// No process yet.
    #[must_use]
    pub fn new(gpu: GpuIndex, behaviour: Behaviour) -> Self {
        let sleeper = Sleeper::port(gpu).shuffled(behaviour.ties);
        Self {
            copies: Ways::new(behaviour.copy_rate),
            notices: None,
            behaviour,
            sleeper,
            life: Life::Absent,
            programs: BTreeMap::new(),
            objects: BTreeSet::new(),
            copies_out: BTreeSet::new(),
            runs: VecDeque::new(),
            copied: 0,
            words: VecDeque::new(),
            speaks: Timestamp::ZERO,
        }
    }

    /// Starts a process.
    pub fn start(&mut self, now: Timestamp) {
        self.life = Life::Starting(self.own(now + self.behaviour.start));
    }

    /// Ends it: what it had said is still heard, then its end.
    pub fn kill(&mut self, now: Timestamp) {
        self.advance(now);
        self.speaks = self.after(now);
        self.end();
    }

    fn end(&mut self) {
        if self.life != Life::Absent {
            self.life = Life::Absent;
            self.programs.clear();
            self.objects.clear();
            self.copies_out.clear();
            self.copies.clear();
            self.runs.clear();
            self.say(Word::Exited);
        }
    }

    /// Does as told.
    pub fn order(&mut self, now: Timestamp, order: Order) {
        if self.life != Life::Alive {
            return;
        }
        self.advance(now);
        self.speaks = self.after(now);
        match order {
            Order::Load { program, name, weights } => {
                let Some(&run) = self.behaviour.runs.get(&name) else {
                    panic!("the scenario says nothing of model {name:?}");
                };
                let (generation, mapped, loaded) = (None, now, Bytes::ZERO);
                let ready = now + self.behaviour.process_start;
                self.programs.insert(program, Program { weights, run, ready, generation, mapped, loaded });
                self.say(Word::Loaded { program });
            }
            Order::Unload { program } => {
                self.programs.remove(&program);
            }
            Order::Map { program, generation } => {
                if let Some(program) = self.programs.get_mut(&program) {
                    (program.generation, program.loaded) = (Some(generation), Bytes::ZERO);
                    program.mapped = now;
                }
            }
            Order::Unmap { program, generation } => {
                let mapped = |program: &&mut Program| program.generation == Some(generation);
                if let Some(program) = self.programs.get_mut(&program).filter(mapped) {
                    program.generation = None;
                }
            }
            Order::Copy(order) => self.copies.of_mut(order.way()).push(now, order),
            Order::Revoke { transfer, batch } => self.revoke(transfer, batch),
            Order::Run { run, program, generation, members, keeps } => {
                let (begun, ends) = (None, None);
                self.runs.push_back(RunJob { run, program, generation, members, keeps, begun, ends });
            }
            Order::Cancel { run } => self.cancel(run),
            Order::Place { object } => {
                self.objects.insert(object);
                self.say(Word::Placed { object });
            }
            Order::Free { object } => {
                self.objects.remove(&object);
            }
            Order::CopyOut { copy, granted: true } => {
                self.copies_out.insert(copy);
            }
            Order::CopyOut { copy, granted: false } => self.say(Word::CopiedOut { copy }),
            Order::EndCopyOut { copy } => {
                self.copies_out.remove(&copy);
            }
        }
        self.settle(now);
    }

    /// When it has something to do.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        let life = if let Life::Starting(at) = self.life { Some(at) } else { None };
        let word = self.words.front().map(|&(at, _)| at);
        let copy = self.next_copy().map(|at| self.own(at));
        let run = self.runs.front().and_then(|job| job.ends.or_else(|| self.begins(job)));
        [life, word, copy, self.notices, run].into_iter().flatten().min()
    }

    /// Does what is due, and says at most one word.
    pub fn wake(&mut self, now: Timestamp) -> Option<Word> {
        self.speaks = now;
        if matches!(self.life, Life::Starting(at) if at <= now) {
            self.life = Life::Alive;
            self.say(Word::Ready);
        }
        self.settle(now);
        let word = self.words.pop_front_if(|(at, _)| *at <= now)?.1;
        let later = self.after(now);
        if let Some((at, _)) = self.words.front_mut() {
            *at = (*at).max(later);
        }
        Some(word)
    }

    /// The copy under way on a way, if any.
    #[must_use]
    pub fn copying(&self, way: Way) -> Option<&CopyOrder> {
        self.copies.of(way)?.under_way()
    }

    /// The ways by which others forward, or once did, to this GPU and from it.
    pub fn forwarded(&self) -> impl Iterator<Item = Way> {
        self.copies.each().map(|(way, _)| way).filter(|way| matches!(way, Way::Forwarded(..)))
    }

    /// When a copy next begins or ends, as long as its rate stays: to the nanosecond, whenever the
    /// process notices.
    #[must_use]
    pub fn next_copy(&self) -> Option<Timestamp> {
        self.next_one_way().map(|(at, _)| at)
    }

    /// The same, and on which way.
    fn next_one_way(&self) -> Option<(Timestamp, Way)> {
        self.copies.each().filter_map(|(way, copies)| Some((copies.next()?, way))).min()
    }

    /// Lets the copy under way on a way go on at another rate, at most its own.
    pub fn set_copy_rate(&mut self, now: Timestamp, way: Way, rate: BytesPerSec) {
        let rate = rate.min(self.behaviour.copy_rate);
        self.copies.of_mut(way).set_rate(now, rate);
    }

    /// Lets copies begin and end that do so by now, each at its own moment. What comes of it is said
    /// when the process wakes.
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

    fn begin_copy(&mut self, at: Timestamp, way: Way) {
        let Some(order) = self.copies.of(way).and_then(Copies::waiting) else { return };
        let CopyOrder { transfer, batch, of, not_after, .. } = *order;
        let mapped = match of {
            Of::Program { program, generation } => {
                self.programs.get(&program).is_some_and(|p| p.generation == Some(generation))
            }
            Of::Object(object) => self.objects.contains(&object),
            Of::CopyOut(copy) => self.copies_out.contains(&copy),
        };
        if mapped && at <= not_after {
            self.copies.of_mut(way).begin(at);
        } else {
            self.copies.of_mut(way).refuse();
            let why = if mapped { CopyRefusal::NotBegun } else { CopyRefusal::NotMapped };
            self.say_of(at, Word::CopyFailed { transfer, batch, why });
        }
    }

    fn end_copy(&mut self, at: Timestamp, order: CopyOrder, started: Timestamp) {
        let CopyOrder { transfer, batch, of, size, .. } = order;
        self.copied += 1;
        if self.behaviour.copy_fails_every.is_some_and(|every| self.copied.is_multiple_of(every)) {
            self.say_of(at, Word::CopyFailed { transfer, batch, why: CopyRefusal::Device });
            // A run that waits for these bytes waits in vain.
            let waits = |job: &RunJob| matches!(of, Of::Program { program, .. } if job.program == program);
            if let Some(place) = self.runs.iter().position(|job| waits(job) && job.ends.is_none()) {
                let run = self.runs[place].run;
                self.runs.remove(place);
                self.say_of(at, Word::RunNotThere { run });
            }
            return;
        }
        if let Of::Program { program, generation } = of
            && let Some(program) = self.programs.get_mut(&program)
            && program.generation == Some(generation)
        {
            program.loaded += size;
        }
        self.say_of(at, Word::CopyDone { transfer, batch, started, finished: at, size });
    }

    /// When a run that only waits for its program's process can begin.
    fn begins(&self, job: &RunJob) -> Option<Timestamp> {
        let program = self.programs.get(&job.program)?;
        let some = program.loaded > Bytes::ZERO || program.loaded >= program.weights;
        (job.begun.is_none() && some).then(|| self.own(program.begins()))
    }

    fn own(&self, at: Timestamp) -> Timestamp {
        own_microsecond(at, self.sleeper)
    }

    /// The first moment of its own after this one: a process answers later than it is told.
    fn after(&self, now: Timestamp) -> Timestamp {
        self.own(Timestamp(now.0 + 1))
    }

    fn say(&mut self, word: Word) {
        self.words.push_back((self.speaks, word));
    }

    /// Says what happened at some moment, when it notices.
    fn say_of(&mut self, at: Timestamp, word: Word) {
        self.words.push_back((self.own(at).max(self.speaks), word));
    }

    fn revoke(&mut self, transfer: u64, batch: u64) {
        if self.copies.revoke(transfer, batch) {
            self.say(Word::CopyFailed { transfer, batch, why: CopyRefusal::NotBegun });
        }
    }

    fn cancel(&mut self, run: u64) {
        if let Some(place) = self.runs.iter().position(|job| job.run == run && job.begun.is_none()) {
            self.runs.remove(place);
            self.say(Word::RunCancelled { run });
        }
    }

    /// Lets copies and runs begin and end that can.
    fn settle(&mut self, now: Timestamp) {
        self.advance(now);
        self.notices = None;
        while self.settle_run(now) {}
    }

    fn settle_run(&mut self, now: Timestamp) -> bool {
        let Some(job) = self.runs.front() else { return false };
        let (run, members, keeps, begun, ends) = (job.run, job.members, job.keeps, job.begun, job.ends);
        let Some(program) = self.programs.get(&job.program).filter(|p| p.generation == Some(job.generation))
        else {
            self.runs.pop_front();
            self.say(Word::RunNotThere { run });
            return true;
        };
        let (model, complete) = (program.run.of(members), program.loaded >= program.weights);
        let started = now >= program.begins();
        match (begun, ends) {
            (None, _) if started && (complete || program.loaded > Bytes::ZERO) => {
                self.runs[0].begun = Some(now);
            }
            (Some(begun), None) if complete => {
                let ends = (begun + model.takes).max(now + model.tail);
                self.runs[0].ends = Some(self.own(ends));
            }
            (Some(begun), Some(ends)) if ends <= now => {
                self.runs.pop_front();
                self.end_run(run, (begun, ends), model, keeps);
            }
            _ => return false,
        }
        true
    }

    fn end_run(
        &mut self,
        run: u64,
        (started, finished): (Timestamp, Timestamp),
        model: RunModel,
        keeps: bool,
    ) {
        match model.end {
            RunEnd::Done => {
                let waited = finished.since(started).saturating_sub(model.takes);
                let kept = Some(model.keeps).filter(|&bytes| keeps && bytes > Bytes::ZERO);
                self.say(Word::RunDone { run, started, finished, waited, kept });
            }
            RunEnd::Fails => self.say(Word::RunFailed { run }),
            RunEnd::Aborts => self.end(),
        }
    }
}
