//! Requests from their arrival to the bill, through the worker's state machines.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_cluster_state::{CommandEffect, CommandRefusal, StateCommand};
use millrace_core::Core as _;
use millrace_core::attempts::Idempotence;
use millrace_core::ids::{FunctionIndex, RequestKey};
use millrace_nodes::checkpoint::{self, Event, WorkerCheckpoint};
use millrace_scheduling::admission::{self, Admission};
use millrace_scheduling::residence::IdleResidenceMeter;
use millrace_types::{Epoch, FunctionKey, GpuIndex, SyncBatch, Timestamp, Usage};
use proptest::prelude::*;

use crate::group::{Group, NODES, named, node};

fn function() -> FunctionKey {
    named("f")
}

/// A worker: the state machines that serve and count requests, and report the counts.
struct Worker {
    admission: Admission,
    residence: IdleResidenceMeter,
    core: WorkerCheckpoint,
    /// The part of the counts that `core` has received.
    looked: Usage,
    /// The highest epoch of the worker's registrations.
    seen: Epoch,
    held: BTreeSet<u64>,
}

const FUNCTION: FunctionIndex = FunctionIndex(0);
const GPU: GpuIndex = GpuIndex(0);

impl Worker {
    fn new(now: Timestamp, seen: Epoch) -> Self {
        let config = admission::Config { in_flight_max: 64, deadline: None, idempotent: Idempotence::Yes };
        let mut residence = IdleResidenceMeter::default();
        residence.hosted(now, FUNCTION, &function());
        let core = WorkerCheckpoint::new(checkpoint::Config::default());
        Self {
            admission: Admission::new(config),
            residence,
            core,
            looked: Usage::NONE,
            seen,
            held: BTreeSet::new(),
        }
    }

    fn holds(&self, key: u64) -> bool {
        self.held.contains(&key)
    }

    fn counted(&self, now: Timestamp) -> Usage {
        let score = self.admission.score();
        let idle = self.residence.idle(now).map(|(_, idle)| idle.as_millis()).sum::<u128>();
        Usage {
            gpu_ns: score.billed_ms * 1_000_000,
            requests: score.completed,
            idle_ms: u64::try_from(idle).unwrap(),
        }
    }
}

/// The requests, the workers and the controller group. A request is retried at another worker when
/// its worker is lost.
struct World {
    group: Group,
    workers: Vec<Worker>,
    now: Timestamp,
    /// Answered requests. Each is in the set once, however many attempts it took.
    answered: BTreeSet<u64>,
    owed: Usage,
    lose_batch: bool,
    lose_answer: bool,
}

#[derive(Debug, Clone)]
enum Step {
    /// A request arrives at a worker, and is dispatched to its GPU at once.
    Start(usize, u64),
    /// The request's run ends after this many microseconds; the run may have ended before.
    Complete(usize, u64, u64),
    /// The request's executor dies, and its next run is another attempt.
    Crash(usize, u64),
    Cancel(usize, u64),
    /// The worker dies with its unreported counts. Its requests are sent to the other worker.
    Die(usize),
    Look(usize),
    Wait(u16),
    LoseBatch,
    LoseAnswer,
    NodeLost(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let at = 0..NODES;
    let key = 0u64..40;
    prop_oneof![
        12 => (at.clone(), key.clone()).prop_map(|(at, key)| Step::Start(at, key)),
        12 => (at.clone(), key.clone(), 0u64..9_000).prop_map(|(at, key, us)| Step::Complete(at, key, us)),
        2 => (at.clone(), key.clone()).prop_map(|(at, key)| Step::Crash(at, key)),
        1 => (at.clone(), key).prop_map(|(at, key)| Step::Cancel(at, key)),
        1 => at.clone().prop_map(Step::Die),
        6 => at.clone().prop_map(Step::Look),
        8 => (1u16..1_500).prop_map(Step::Wait),
        1 => Just(Step::LoseBatch),
        1 => Just(Step::LoseAnswer),
        1 => at.prop_map(Step::NodeLost),
    ]
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            group: Group::new(&["f"]),
            workers: (0..NODES).map(|_| Worker::new(Timestamp::ZERO, Epoch(0))).collect(),
            now: Timestamp::ZERO,
            answered: BTreeSet::new(),
            owed: Usage::NONE,
            lose_batch: false,
            lose_answer: false,
        };
        (0..NODES).for_each(|at| world.register(at));
        world
    }

    fn register(&mut self, at: usize) {
        let epoch = self.group.register(at, self.workers[at].seen);
        self.workers[at].seen = epoch;
        self.tell(at, Event::Registered { epoch });
    }

    fn tell(&mut self, at: usize, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut actions = Vec::new();
            self.workers[at].core.on_event(self.now, event, &mut actions);
            for action in actions {
                let checkpoint::Action::Send(batch) = action;
                if std::mem::take(&mut self.lose_batch) {
                    continue;
                }
                let answer = self.commit(at, &batch);
                if std::mem::take(&mut self.lose_answer) {
                    continue;
                }
                match answer {
                    Some(answer) => events.push(answer),
                    None => self.register(at),
                }
            }
        }
    }

    /// Commits a batch and returns the answer; `None` if the batch's registration has ended.
    fn commit(&mut self, at: usize, batch: &SyncBatch) -> Option<Event> {
        let SyncBatch { epoch, seq, .. } = *batch;
        Some(match self.group.propose(StateCommand::SyncNode { node: node(at), batch: batch.clone() }) {
            Ok(CommandEffect::Synced { seq }) => Event::Acknowledged { epoch, seq },
            Ok(CommandEffect::SyncRepeated { last }) => Event::Acknowledged { epoch, seq: last },
            Ok(CommandEffect::ResyncWanted { last }) => Event::ResyncWanted { epoch, seq, last },
            Err(CommandRefusal::Fenced { .. }) => return None,
            other => panic!("{other:?}"),
        })
    }

    fn serve(&mut self, at: usize, event: admission::Event) -> Vec<admission::Action> {
        let mut actions = Vec::new();
        self.workers[at].admission.on_event(self.now, event, &mut actions);
        actions
    }

    /// Sends a request to a worker, unless the request has an answer or is at a worker.
    fn start(&mut self, at: usize, key: u64) {
        let request = RequestKey(key);
        let held = self.answered.contains(&key) || self.workers.iter().any(|it| it.holds(key));
        if !held {
            let timeout = Duration::from_secs(3_600);
            let accepted = self.now;
            let attempts_left = 3;
            let counted = false;
            self.serve(
                at,
                admission::Event::Arrive { key: request, accepted, timeout, attempts_left, counted },
            );
            self.serve(at, admission::Event::Dispatched { key: request });
            self.workers[at].residence.began(self.now, FUNCTION, GPU, request);
            self.workers[at].held.insert(key);
        }
    }

    fn complete(&mut self, at: usize, key: u64, us: u64) {
        let ran = Duration::from_micros(us);
        let request = RequestKey(key);
        let actions = self.serve(at, admission::Event::Completed { key: request, billed: ran });
        self.workers[at].residence.ended(self.now, GPU, request);
        self.workers[at].held.remove(&key);
        for action in actions {
            if let admission::Action::Answer { key: RequestKey(key) } = action {
                assert!(self.answered.insert(key), "answered once");
                // An answer costs the started milliseconds of its attempt.
                self.owed.gpu_ns += us.div_ceil(1_000) * 1_000_000;
                self.owed.requests += 1;
            }
        }
    }

    fn look(&mut self, at: usize) {
        let counted = self.workers[at].counted(self.now);
        let usage = counted.since(std::mem::replace(&mut self.workers[at].looked, counted));
        if usage != Usage::NONE {
            self.tell(at, Event::Used { function: function(), usage });
        }
    }

    fn wait(&mut self, ms: u64) {
        let idle = |world: &Self| world.workers.iter().map(|it| it.counted(world.now).idle_ms).sum::<u64>();
        let before = idle(self);
        self.now = self.now + Duration::from_millis(ms);
        self.owed.idle_ms += idle(self) - before;
        (0..NODES).for_each(|at| self.tell(at, Event::Tick));
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Start(at, key) => self.start(at, key),
            Step::Complete(at, key, us) => self.complete(at, key, us),
            Step::Crash(at, key) => {
                // The run and its cost are lost, and another run begins.
                self.workers[at].residence.ended(self.now, GPU, RequestKey(key));
                if self.workers[at].holds(key) {
                    self.workers[at].residence.began(self.now, FUNCTION, GPU, RequestKey(key));
                }
            }
            Step::Cancel(at, key) => {
                self.serve(at, admission::Event::Cancel { key: RequestKey(key) });
                self.workers[at].held.remove(&key);
            }
            Step::Die(at) => {
                let seen = self.workers[at].seen;
                let other = (at + 1) % NODES;
                let orphans = std::mem::replace(&mut self.workers[at], Worker::new(self.now, seen)).held;
                self.register(at);
                orphans.into_iter().for_each(|key| self.start(other, key));
            }
            Step::Look(at) => self.look(at),
            Step::Wait(ms) => self.wait(u64::from(ms)),
            Step::LoseBatch => self.lose_batch = true,
            Step::LoseAnswer => self.lose_answer = true,
            Step::NodeLost(at) => self.group.lose(at),
        }
    }

    fn settle(&mut self) {
        self.lose_batch = false;
        self.lose_answer = false;
        for _ in 0..4 {
            self.wait(2_000);
            (0..NODES).for_each(|at| self.look(at));
        }
        // No time passes from here on, so the worker has nothing more to report.
        for at in 0..NODES {
            self.tell(at, Event::Flush);
            self.tell(at, Event::Tick);
            assert!(self.workers[at].core.is_settled());
        }
    }
}

proptest! {
    /// The charge never exceeds the cost of the answered attempts and the idle time, and never
    /// shrinks. The charge equals that cost if no unreported count was lost.
    #[test]
    fn answered_attempts_and_idle_time_are_charged_once(
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut world = World::new();
        let mut before = Usage::NONE;
        for step in &steps {
            world.step(step);
            let charged = world.group.charged();
            prop_assert_eq!(charged.merge(world.owed), world.owed, "never more");
            prop_assert_eq!(charged.merge(before), charged, "never less");
            before = charged;
        }
        world.settle();
        let charged = world.group.charged();
        prop_assert_eq!(charged.merge(world.owed), world.owed);
        let loses = |step: &Step| {
            matches!(step, Step::Die(_) | Step::LoseBatch | Step::LoseAnswer | Step::NodeLost(_))
        };
        if !steps.iter().any(loses) {
            prop_assert_eq!(charged, world.owed);
        }
    }
}
