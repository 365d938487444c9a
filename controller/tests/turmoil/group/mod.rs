//! One run: a group of controllers, each with a separate host and disk; users and workers; and the
//! faults meanwhile.
//!
//! ```text
//!   people ── admin API ──▶ c1 :8080 ┐         seed ─▶ plan of faults, latencies, disk times,
//!   w0 … w3 ── streams ────────▶ c1  ├─ :7070 ◀──▶ c2, c3      the requests and their times,
//!   late news ── proposals ───▶ c1   │                         snapshots, changes of the group
//!                                    └─ log on a disk with its own power
//! ```
//! The group forms first. Then faults occur for [`ROUGH`]. Then everything is repaired, and all
//! controllers must agree.

mod controller;
mod notes;
mod outside;
mod trouble;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use millrace_cluster_state::ControllerId;
use millrace_controller::sim::MemberView;
use millrace_raft_store::LogId;
use millrace_types::Bytes;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tempfile::TempDir;
use turmoil::Sim;

use self::controller::{Controller, Reader};
use self::notes::{Marks, note_applied, note_fleet, note_snapshot};
pub(crate) use self::outside::{Outside, Regrouping};
use crate::disk::Disk;
use crate::faults::{Fault, Planned, plan};
use crate::history::{History, Seen};
use crate::runs::digest;
use crate::workers::{self, Worker};
use crate::{people, placements_converge};

pub(crate) const CLIENT_PORT: u16 = 8080;
pub(crate) const INTERNAL_PORT: u16 = 7070;
/// A model that fits every worker. Only the name and the size matter.
pub(crate) const MODEL: &[u8] = b"a model";
/// A model that fits no worker.
pub(crate) const LARGE_MODEL: &[u8] = b"a large model";
const MODEL_WEIGHTS: Bytes = Bytes::gib(1);
const LARGE_MODEL_WEIGHTS: Bytes = Bytes::gib(64);
/// Host memory of each worker; [`GPU_MEMORY`] is the memory of the GPU.
pub(crate) const HOST_MEMORY: Bytes = Bytes::gib(16);
pub(crate) const GPU_MEMORY: Bytes = Bytes::gib(80);

/// The duration of the phase with faults.
const ROUGH: Duration = Duration::from_secs(20);
/// The longest time for the group to form, and to agree at the end.
const CALM_MAX: Duration = Duration::from_secs(60);
/// The range of the maximum message latency, in milliseconds; each run draws a value.
const LATENCY_MAX_MS: std::ops::RangeInclusive<u64> = 2..=40;
/// The range of log entries between two snapshots; each run draws a value.
const SNAPSHOT_EVERY: std::ops::Range<u64> = 15..120;
/// The minimum number of entries between two digests of a controller's state. A state that differs
/// stays different, so sparse digests suffice.
const STATES_APART: u64 = 8;
/// Milliseconds between two checks whether the run is settled.
const LOOKS_APART: u32 = 100;
/// Segments in flight on one connection.
const SEGMENTS_MAX: usize = 1 << 16;

pub(crate) fn host(id: u64) -> String {
    format!("c{id}")
}

const PEOPLE: &str = "people";

/// A machine: the part of a controller that outlives the process.
struct Machine {
    id: u64,
    data_dir: PathBuf,
    disk: Disk,
    reader: Reader,
    up: bool,
}

/// Runs the group under a seed.
pub(crate) fn run(seed: u64) -> History {
    let mut rng = StdRng::seed_from_u64(seed);
    // Most groups have three controllers.
    let controllers = if rng.random_ratio(1, 4) { 5 } else { 3 };
    let dirs = scratch();
    let regrouping = rng.random_ratio(1, 2).then(|| regrouping(&mut rng, controllers));
    let snapshot_every = rng.random_range(SNAPSHOT_EVERY);
    let outside = Rc::new(Outside::new(controllers, regrouping));
    let mut sim = simulation(&mut rng);
    let machine = |id| Machine {
        id,
        data_dir: dirs.path().join(host(id)),
        disk: Disk::new(seed ^ id.rotate_left(48)),
        reader: Reader::default(),
        up: true,
    };
    let machines: Vec<_> = outside.members().map(machine).collect();
    for machine in &machines {
        let controller = Controller {
            id: machine.id,
            seed,
            starts: Rc::default(),
            data_dir: machine.data_dir.clone(),
            disk: machine.disk.clone(),
            reader: Arc::clone(&machine.reader),
            snapshot_every,
            outside: Rc::clone(&outside),
        };
        sim.host(host(machine.id), move || controller.clone().run());
    }
    for machine in 0..workers::MACHINES {
        let worker = Worker { machine, seed, starts: Rc::default(), outside: Rc::clone(&outside) };
        sim.host(workers::host(machine), move || worker.clone().run());
    }
    sim.client(PEOPLE, people::work(seed, Rc::clone(&outside)));
    let plan = plan(&mut rng, outside.members().count() as u64, workers::MACHINES, ROUGH);
    let history = History { seed, ..History::default() };
    let seen = BTreeMap::new();
    let mut run = Run { sim, rng, machines, outside, history, seen, heard: BTreeMap::new() };
    run.note(&format!(
        "{controllers} controllers, a snapshot every {snapshot_every} entries, {regrouping:?}"
    ));
    run.form();
    run.suffer(plan);
    run.recover();
    run.end()
}

/// Draws the membership changes. A group has at most five voters.
fn regrouping(rng: &mut StdRng, controllers: u64) -> Regrouping {
    let joins = controllers + 1;
    let promotes = controllers < 5 && rng.random_ratio(3, 4);
    // If the joining controller stays a learner, only this controller is removed, so the group keeps
    // all voters.
    let removed = if promotes { rng.random_range(1..=joins) } else { joins };
    Regrouping { joins, promotes, removes: rng.random_ratio(2, 3).then_some(removed) }
}

/// Returns a temporary directory, in memory if the machine has `/dev/shm`, because syncs are simulated.
fn scratch() -> TempDir {
    let shared = Path::new("/dev/shm");
    let dir = if shared.is_dir() { tempfile::tempdir_in(shared) } else { tempfile::tempdir() };
    dir.expect("a directory for the controllers")
}

fn simulation(rng: &mut StdRng) -> Sim<'static> {
    turmoil::Builder::new()
        .rng_seed(rng.random())
        .epoch(SystemTime::UNIX_EPOCH)
        .simulation_duration(ROUGH + 2 * CALM_MAX)
        .tick_duration(Duration::from_millis(1))
        .min_message_latency(Duration::from_millis(0))
        .max_message_latency(Duration::from_millis(rng.random_range(LATENCY_MAX_MS)))
        .tcp_capacity(SEGMENTS_MAX)
        .build()
}

struct Run {
    sim: Sim<'static>,
    rng: StdRng,
    machines: Vec<Machine>,
    outside: Rc<Outside>,
    history: History,
    /// The last entry after which each controller's state was recorded.
    seen: BTreeMap<u64, Option<LogId>>,
    /// The last records of each controller.
    heard: BTreeMap<u64, Marks>,
}

impl Run {
    /// Simulates one millisecond. Returns whether all clients are done.
    fn step(&mut self) -> bool {
        let done = self.sim.step().unwrap_or_else(|error| {
            panic!("seed {}: {error}\n{}", self.history.seed, self.history.faults.join("\n"))
        });
        self.look();
        for machine in 0..self.machines.len() {
            let Machine { id, up, disk, .. } = &self.machines[machine];
            if *up && (disk.is_off() || self.outside.retired.get() == Some(*id)) {
                self.crash(machine);
            }
        }
        done
    }

    /// Records the visible state of every controller.
    fn look(&mut self) {
        let at = self.sim.elapsed();
        let Self { outside, history, seen, heard, machines, .. } = self;
        for (&id, watch) in outside.watches.borrow().iter() {
            if let Some(term) = watch.leads() {
                history.leaders.entry(term).or_default().insert(id);
            }
            if let Some(term) = watch.on_duty() {
                history.on_duty.entry((id, term)).or_insert(at);
            }
            let machine =
                machines.iter().find(|machine| machine.id == id).expect("every watch belongs to a machine");
            if let (false, Some(why)) = (machine.disk.is_off(), watch.halted()) {
                history.halts.push(format!("controller {id}: {why}"));
            }
            if seen.get(&id) != Some(&watch.last_applied())
                && let (Some(last), state) = watch.applied()
            {
                let marks = heard.entry(id).or_default();
                if last.index >= marks.digested + STATES_APART {
                    marks.digested = last.index;
                    let digest = digest(&state.encode());
                    history.states.push(Seen { controller: ControllerId(id), last, digest });
                }
                let before = seen.insert(id, Some(last)).flatten();
                note_applied(history, at, &machine.reader, before, last);
            }
            let marks = heard.entry(id).or_default();
            note_fleet(history, marks, at, id, watch);
            note_snapshot(history, marks, &machine.reader, watch);
        }
    }

    fn fail(&self, what: &str) -> ! {
        let outside = &self.outside;
        let watches = outside.watches.borrow();
        let controllers: Vec<_> =
            watches.iter().map(|(id, watch)| format!("controller {id}: {}", watch.status())).collect();
        panic!(
            "seed {}: {what}; entered: {:?}, regrouped: {}, retired: {:?}, last word: {:?}\n{}\nfaults:\n{}",
            self.history.seed,
            outside.entered.borrow(),
            outside.regrouped.get(),
            outside.retired.get(),
            outside.last_word.borrow(),
            controllers.join("\n"),
            self.history.faults.join("\n")
        )
    }

    fn note(&mut self, what: &str) {
        self.history.faults.push(format!("{:>8.3}s {what}", self.sim.elapsed().as_secs_f64()));
    }

    /// Simulates until a condition holds, which must happen within [`CALM_MAX`].
    fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let limit = self.sim.elapsed() + CALM_MAX;
        while !holds(self) {
            if self.sim.elapsed() > limit {
                self.fail(&format!("{what} took more than {CALM_MAX:?}"));
            }
            self.step();
        }
    }

    fn form(&mut self) {
        self.until("forming the group", |run| run.outside.is_formed());
    }

    /// Lets the planned faults happen.
    fn suffer(&mut self, plan: Vec<Planned>) {
        let start = self.sim.elapsed();
        let mut ends: Vec<(Duration, Fault)> = Vec::new();
        let mut plan = plan.into_iter().peekable();
        while self.sim.elapsed() < start + ROUGH {
            let now = self.sim.elapsed() - start;
            while let Some(next) = plan.next_if(|next| next.from <= now) {
                self.begin(&next.fault);
                ends.push((next.until, next.fault));
            }
            let (over, going): (Vec<_>, _) = ends.into_iter().partition(|(until, _)| *until <= now);
            ends = going;
            for (_, fault) in over {
                self.repair(&fault);
            }
            self.step();
        }
    }

    /// Repairs everything, and waits until all controllers agree.
    fn recover(&mut self) {
        self.note("everything is repaired");
        let workers = (0..workers::MACHINES).map(workers::host);
        let hosts = self.outside.members().map(host).chain(workers).chain([PEOPLE.to_owned()]);
        let hosts: Vec<String> = hosts.collect();
        for (at, one) in hosts.iter().enumerate() {
            for other in &hosts[at + 1..] {
                self.sim.release(one.as_str(), other.as_str());
                self.sim.repair(one.as_str(), other.as_str());
            }
        }
        for machine in 0..self.machines.len() {
            self.machines[machine].disk.restore(Path::new("")).expect("the power is on");
            self.start(machine);
        }
        self.outside.stalling.take();
        self.outside.leaving.take();
        for machine in 0..workers::MACHINES {
            self.start_worker(machine);
        }
        self.outside.calm.set(true);
        self.until("a last write", |run| run.outside.last_word.borrow().is_some());
        self.until("agreeing", Self::agree);
        // The invariants judge whether the workers settled.
        let limit = self.sim.elapsed() + CALM_MAX;
        while !self.history.settled && self.sim.elapsed() < limit {
            for _ in 0..LOOKS_APART {
                self.step();
            }
            self.history.settled = self.is_settled();
        }
    }

    /// Whether every worker serves all its placements, and the state has the data of every worker.
    fn is_settled(&self) -> bool {
        let watches = self.outside.watches.borrow();
        let ends = watches.iter().map(|(&id, watch)| (id, watch.applied().1)).collect();
        let processes = self.outside.processes.borrow();
        let workers: Vec<_> = processes.values().map(|process| process.end()).collect();
        self.agree() && placements_converge::converged(&ends, &workers).is_ok()
    }

    fn agree(&self) -> bool {
        let watches = self.outside.watches.borrow();
        let lasts: BTreeSet<_> = watches.values().map(MemberView::last_applied).collect();
        let word = self.outside.last_word.borrow();
        let has = |watch: &MemberView| {
            let (_, state) = watch.applied();
            state.functions().any(|function| Some(function.key.name.as_str()) == word.as_deref())
        };
        let up = self.machines.iter().filter(|machine| machine.up).count();
        watches.len() == up && lasts.len() == 1 && watches.values().all(has)
    }

    fn end(mut self) -> History {
        self.history.elapsed = self.sim.elapsed();
        let watches = self.outside.watches.take();
        self.history.ends = watches.into_iter().map(|(id, watch)| (id, watch.applied().1)).collect();
        for machine in 0..self.machines.len() {
            self.crash(machine);
        }
        let processes = self.outside.processes.take();
        self.history.workers = processes.values().map(|process| process.end()).collect();
        self.history.registered = self.outside.registered.take();
        self.history.told = self.outside.told.take();
        self.history.sent = self.outside.sent.take();
        self.history.acknowledged = self.outside.acknowledged.take();
        self.history.goodbyes = self.outside.goodbyes.take();
        self.history.regrouped = self.outside.regrouped.get();
        self.history.creations = self.outside.creations.take();
        self.history.registers = self.outside.registers.take();
        self.history.nodes = self.outside.nodes.take();
        self.history
    }
}
