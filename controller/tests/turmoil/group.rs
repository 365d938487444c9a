//! One run: a group of controllers, each a host with a disk of its own, the people and workers who
//! use it, and what goes wrong meanwhile.
//!
//! ```text
//!   people ── admin API ──▶ c1 :8080 ┐         seed ─▶ plan of faults, latencies, disk times,
//!   w0 … w3 ── streams ────────▶ c1  ├─ :7070 ◀──▶ c2, c3      what is asked of whom and when,
//!   late news ── proposals ───▶ c1   │                         snapshots, changes of the group
//!                                    └─ log on a disk with its own power
//! ```
//! First the group forms, then things go wrong for [`ROUGH`], then all is repaired and everybody
//! must agree.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use millrace_cluster_state::{Command, ControllerId, ModelSummary, State, UnixMillis};
use millrace_controller::clock::WallClock;
use millrace_controller::sim::{Member, MemberConfig, Snapshots, Watch, World};
use millrace_controller::{JoinAs, Start};
use millrace_raft_store::{ClusterConfig, DataDir, Identity, LogId, LogReader, Store};
use millrace_types::{Bytes, Digest, Epoch, NodeName, Timestamp};
use openraft::RaftLogReader as _;
use openraft::storage::RaftLogStorage as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tempfile::TempDir;
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint};
use turmoil::Sim;

use crate::disk::Disk;
use crate::faults::{Fault, Planned, plan};
use crate::history::{
    Acknowledged, Created, FoundLost, Heard, History, Journal, Log, Moments, NodeAnswer, RegisterAnswer,
    RegisterAsked, Registered, Seen, Sent, Told,
};
use crate::network::{dial, incoming};
use crate::runs::digest;
use crate::workers::{self, Process, Worker};
use crate::{late_news, people, placements_converge};

pub(crate) const CLIENT_PORT: u16 = 8080;
pub(crate) const INTERNAL_PORT: u16 = 7070;
/// A model that fits every worker, and one that fits none. Only their names and sizes matter.
pub(crate) const MODEL: &[u8] = b"a model";
pub(crate) const LARGE_MODEL: &[u8] = b"a large model";
const MODEL_WEIGHTS: Bytes = Bytes::gib(1);
const LARGE_MODEL_WEIGHTS: Bytes = Bytes::gib(64);
/// What each worker has.
pub(crate) const HOST_MEMORY: Bytes = Bytes::gib(16);
pub(crate) const GPU_MEMORY: Bytes = Bytes::gib(80);

/// How long things go wrong.
const ROUGH: Duration = Duration::from_secs(20);
/// How long the group may take to form, and to agree at the end.
const CALM_MAX: Duration = Duration::from_secs(60);
/// The most a controller waits, in milliseconds, when all come back one after the other.
const BACK_ONE_BY_ONE_MS: u64 = 1_500;
/// Messages take up to this, in milliseconds; each run draws its own.
const LATENCY_MAX_MS: std::ops::RangeInclusive<u64> = 2..=40;
/// Log entries between two snapshots; each run draws its own.
const SNAPSHOT_EVERY: std::ops::Range<u64> = 15..120;
/// Entries between two digests of one controller's state, at least: one that differs goes on to.
const STATES_APART: u64 = 8;
/// Milliseconds between two looks at whether all is settled.
const LOOKS_APART: u32 = 100;
/// Segments on the way on one connection.
const SEGMENTS_MAX: usize = 1 << 16;

pub(crate) fn host(id: u64) -> String {
    format!("c{id}")
}

const PEOPLE: &str = "people";

/// A change of the group in the midst of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Regrouping {
    /// Who joins, as a learner.
    pub(crate) joins: u64,
    /// Whether it becomes a voter.
    pub(crate) promotes: bool,
    /// Who is removed in the end.
    pub(crate) removes: Option<u64>,
}

/// What the hosts and the run have in common: what is seen, and what is known to all.
pub(crate) struct Outside {
    pub(crate) controllers: u64,
    pub(crate) regrouping: Option<Regrouping>,
    /// Whether who joins is to do so; who was removed; how many changes were acknowledged.
    pub(crate) joining: Cell<bool>,
    pub(crate) retired: Cell<Option<u64>>,
    pub(crate) regrouped: Cell<usize>,
    pub(crate) moments: Moments,
    pub(crate) creations: Journal<String, Created>,
    pub(crate) registers: Journal<RegisterAsked, RegisterAnswer>,
    pub(crate) nodes: Journal<Command, NodeAnswer>,
    /// The epochs that each node was given.
    pub(crate) epochs: RefCell<BTreeMap<NodeName, BTreeSet<Epoch>>>,
    /// The function that was created when all was well again.
    pub(crate) last_word: RefCell<Option<String>>,
    pub(crate) registered: RefCell<BTreeSet<Registered>>,
    pub(crate) told: RefCell<Vec<Told>>,
    pub(crate) sent: RefCell<Sent>,
    pub(crate) acknowledged: RefCell<Vec<Acknowledged>>,
    pub(crate) goodbyes: RefCell<BTreeSet<String>>,
    /// The workers' processes that are up, by machine.
    pub(crate) processes: RefCell<BTreeMap<u64, Rc<Process>>>,
    /// Machines whose worker stands still, and those whose worker is to leave.
    stalling: RefCell<BTreeSet<u64>>,
    leaving: RefCell<BTreeSet<u64>>,
    entered: RefCell<BTreeSet<u64>>,
    watches: RefCell<BTreeMap<u64, Watch>>,
    calm: Cell<bool>,
}

impl Outside {
    fn new(controllers: u64, regrouping: Option<Regrouping>) -> Self {
        let moments = Moments::default();
        Self {
            controllers,
            regrouping,
            joining: Cell::default(),
            retired: Cell::default(),
            regrouped: Cell::default(),
            creations: Journal::new(moments.clone()),
            registers: Journal::new(moments.clone()),
            nodes: Journal::new(moments.clone()),
            moments,
            epochs: RefCell::default(),
            last_word: RefCell::default(),
            registered: RefCell::default(),
            told: RefCell::default(),
            sent: RefCell::default(),
            acknowledged: RefCell::default(),
            goodbyes: RefCell::default(),
            processes: RefCell::default(),
            stalling: RefCell::default(),
            leaving: RefCell::default(),
            entered: RefCell::default(),
            watches: RefCell::default(),
            calm: Cell::default(),
        }
    }

    fn is_formed(&self) -> bool {
        (1..=self.controllers).all(|id| self.has_entered(id))
    }

    /// Whether a controller ever was a member.
    pub(crate) fn has_entered(&self, id: u64) -> bool {
        self.entered.borrow().contains(&id)
    }

    /// Every controller that there may be.
    pub(crate) fn members(&self) -> impl Iterator<Item = u64> + use<> {
        (1..=self.controllers).chain(self.regrouping.map(|change| change.joins))
    }

    /// Whether a machine's worker stands still.
    pub(crate) fn stalls(&self, machine: u64) -> bool {
        self.stalling.borrow().contains(&machine)
    }

    /// Whether a machine's worker is to leave.
    pub(crate) fn leaves(&self, machine: u64) -> bool {
        self.leaving.borrow().contains(&machine)
    }

    /// Waits until all controllers are members.
    pub(crate) async fn formed(&self) {
        while !self.is_formed() {
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether nothing goes wrong any more, and nothing more is to be asked.
    pub(crate) fn is_calm(&self) -> bool {
        self.calm.get()
    }

    /// Simulated time since the beginning.
    pub(crate) fn elapsed(&self) -> Duration {
        turmoil::sim_elapsed().unwrap_or_default()
    }
}

/// Simulated time as wall-clock time.
#[derive(Debug)]
struct SimClock;

impl WallClock for SimClock {
    fn now(&self) -> UnixMillis {
        let elapsed = turmoil::sim_elapsed().unwrap_or_default();
        UnixMillis(1_700_000_000_000 + u64::try_from(elapsed.as_millis()).unwrap())
    }
}

/// Reads a log that its controller has open.
type Reader = Arc<Mutex<Option<LogReader<State>>>>;

/// The simulated network, and a disk.
struct Simulated {
    disk: Disk,
    reader: Reader,
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Simulated").field(&self.disk).finish_non_exhaustive()
    }
}

impl World for Simulated {
    fn dial(&self, endpoint: &Endpoint) -> Channel {
        dial(endpoint)
    }

    fn open(&self, dir: DataDir, identity: &Identity) -> Result<Store<State>, millrace_raft_store::Error> {
        let mut store = millrace_raft_store::sim::open(dir, identity, Box::new(self.disk.clone()))?;
        let reader = futures::executor::block_on(store.log.get_log_reader());
        *self.reader.lock().unwrap() = Some(reader);
        Ok(store)
    }
}

/// A machine: what is left of a controller when its process is gone.
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
    // Most groups are of three.
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

/// There are five voters at most.
fn regrouping(rng: &mut StdRng, controllers: u64) -> Regrouping {
    let joins = controllers + 1;
    let promotes = controllers < 5 && rng.random_ratio(3, 4);
    // Of a group that nobody joins as a voter, nobody is missed less than who just came.
    let removed = if promotes { rng.random_range(1..=joins) } else { joins };
    Regrouping { joins, promotes, removes: rng.random_ratio(2, 3).then_some(removed) }
}

/// In memory where the machine has such a place: what is synced is simulated.
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

/// The process of one controller, as it is started each time.
#[derive(Clone)]
struct Controller {
    id: u64,
    seed: u64,
    starts: Rc<Cell<u64>>,
    data_dir: PathBuf,
    disk: Disk,
    reader: Reader,
    snapshot_every: u64,
    outside: Rc<Outside>,
}

impl Controller {
    async fn run(self) -> turmoil::Result {
        let disk = self.disk.clone();
        match self.live().await {
            // Whatever it met, its power is gone, and so is it.
            Err(_) if disk.is_off() => std::future::pending().await,
            ended => ended,
        }
    }

    async fn live(self) -> turmoil::Result {
        let start = self.starts.get();
        self.starts.set(start + 1);
        let seed = self.seed ^ start.rotate_left(24);
        let late = self.outside.regrouping.is_some_and(|change| change.joins == self.id);
        let at = |id| format!("{}:{INTERNAL_PORT}", host(id));
        let begin = match self.id {
            1 => Start::Bootstrap,
            _ if late => Start::Join { at: (1..self.id).map(at).collect(), role: JoinAs::Learner },
            _ => Start::Join { at: vec![at(1)], role: JoinAs::Voter },
        };
        while late && !self.outside.joining.get() {
            sleep(Duration::from_millis(20)).await;
        }
        let config = MemberConfig {
            id: ControllerId(self.id),
            start: begin,
            data_dir: self.data_dir,
            internal_address: at(self.id),
            world: Arc::new(Simulated { disk: self.disk, reader: self.reader }),
            snapshots: Snapshots {
                every: self.snapshot_every,
                kept: self.snapshot_every / 10 + 4,
                purged_at_once: 1,
            },
            clock: Arc::new(SimClock),
            seed,
        };
        let (internal, clients) = (incoming(INTERNAL_PORT).await?, incoming(CLIENT_PORT).await?);
        let member = Rc::new(Member::open(config).await?);
        self.outside.watches.borrow_mut().insert(self.id, member.watch());
        let internal = tokio::spawn(member.serve_internal(internal));
        let clients = tokio::spawn(member.serve_clients(clients));
        member.enter().await?;
        if self.id == 1 && start == 0 {
            upload(&member, &self.outside).await?;
        }
        self.outside.entered.borrow_mut().insert(self.id);
        let rng = StdRng::seed_from_u64(seed ^ self.id.rotate_left(8));
        late_news::work(rng, Rc::clone(&member), Rc::clone(&self.outside)).await;
        internal.await??;
        clients.await??;
        Ok(())
    }
}

/// Makes the models known, as if every controller had their files.
async fn upload(member: &Member, outside: &Outside) -> turmoil::Result {
    for (model, weights) in [(MODEL, MODEL_WEIGHTS), (LARGE_MODEL, LARGE_MODEL_WEIGHTS)] {
        let digest = Digest::of(model);
        for holder in outside.members().map(ControllerId) {
            let (inputs, outputs) = (Vec::new(), Vec::new());
            let model = ModelSummary { weights, parameters: 1, launches: 1, inputs, outputs };
            let known = Command::AddArtifact { digest, bytes: Bytes(7), model, holder };
            member.propose(known).await.map_err(|failure| failure.message)?;
        }
    }
    Ok(())
}

struct Run {
    sim: Sim<'static>,
    rng: StdRng,
    machines: Vec<Machine>,
    outside: Rc<Outside>,
    history: History,
    /// The last entry of which each controller's state was noted.
    seen: BTreeMap<u64, Option<LogId>>,
    /// When each controller last heard each node, by its own clock, and the last snapshot it has.
    heard: BTreeMap<u64, Marks>,
}

/// What was last noted of a controller.
#[derive(Debug, Default)]
struct Marks {
    heard: BTreeMap<NodeName, (Epoch, Timestamp)>,
    lost: Vec<(NodeName, Epoch)>,
    /// The last entry after which its state was digested.
    digested: u64,
    snapshot: Option<LogId>,
}

impl Run {
    /// One millisecond. Whether everybody is done.
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

    /// Notes what can be seen of every controller.
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
            let machine = machines.iter().find(|machine| machine.id == id).expect("every watch is of one");
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

    /// Steps until something holds, which must be soon.
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

    /// Lets things go wrong as planned.
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

    fn begin(&mut self, fault: &Fault) {
        self.note(&format!("{fault:?}"));
        let index = |id: u64| usize::try_from(id - 1).unwrap();
        match fault {
            Fault::Crash(id) => self.crash(index(*id)),
            Fault::PowerCut(id) => {
                if self.machines[index(*id)].up {
                    self.machines[index(*id)].disk.cut_soon();
                }
            }
            Fault::CrashAll => (0..self.machines.len()).for_each(|machine| self.crash(machine)),
            Fault::Split(one, other) => {
                for (a, b) in pairs(one, other) {
                    self.sim.partition(host(a), host(b));
                }
            }
            Fault::OneWay(from, to) => self.sim.partition_oneway(host(*from), host(*to)),
            Fault::Late(a, b) => self.sim.hold(host(*a), host(*b)),
            Fault::CutOff(id) => self.sim.partition(PEOPLE, host(*id)),
            Fault::WorkerCrash(machine) => {
                self.outside.processes.borrow_mut().remove(machine);
                self.sim.crash(workers::host(*machine));
            }
            Fault::WorkerLeaves(machine) => {
                self.outside.leaving.borrow_mut().insert(*machine);
            }
            Fault::WorkerStalls(machine) => {
                self.outside.stalling.borrow_mut().insert(*machine);
            }
            Fault::WorkerCutOff(machine, controllers) => {
                for id in controllers {
                    self.sim.partition(workers::host(*machine), host(*id));
                }
            }
            Fault::WorkerUnheard(machine, id) => {
                self.sim.partition_oneway(workers::host(*machine), host(*id));
            }
            Fault::WorkerLate(machine, id) => self.sim.hold(workers::host(*machine), host(*id)),
        }
    }

    fn repair(&mut self, fault: &Fault) {
        self.note(&format!("over: {fault:?}"));
        let index = |id: u64| usize::try_from(id - 1).unwrap();
        match fault {
            Fault::Crash(id) | Fault::PowerCut(id) => self.start(index(*id)),
            Fault::CrashAll => {
                for machine in 0..self.machines.len() {
                    for _ in 0..self.rng.random_range(0..BACK_ONE_BY_ONE_MS) {
                        self.step();
                    }
                    self.start(machine);
                }
            }
            Fault::Split(one, other) => {
                for (a, b) in pairs(one, other) {
                    self.sim.repair(host(a), host(b));
                }
            }
            Fault::OneWay(from, to) => self.sim.repair_oneway(host(*from), host(*to)),
            Fault::Late(a, b) => self.sim.release(host(*a), host(*b)),
            Fault::CutOff(id) => self.sim.repair(PEOPLE, host(*id)),
            Fault::WorkerCrash(machine) => self.start_worker(*machine),
            Fault::WorkerLeaves(machine) => {
                self.outside.leaving.borrow_mut().remove(machine);
                self.start_worker(*machine);
            }
            Fault::WorkerStalls(machine) => {
                self.outside.stalling.borrow_mut().remove(machine);
            }
            Fault::WorkerCutOff(machine, controllers) => {
                for id in controllers {
                    self.sim.repair(workers::host(*machine), host(*id));
                }
            }
            Fault::WorkerUnheard(machine, id) => {
                self.sim.repair_oneway(workers::host(*machine), host(*id));
            }
            Fault::WorkerLate(machine, id) => self.sim.release(workers::host(*machine), host(*id)),
        }
    }

    fn start_worker(&mut self, machine: u64) {
        if !self.sim.is_host_running(workers::host(machine)) {
            self.sim.bounce(workers::host(machine));
        }
    }

    /// Loses a process, and reads the log that it leaves.
    fn crash(&mut self, machine: usize) {
        let Machine { id, up, .. } = &mut self.machines[machine];
        if !std::mem::replace(up, false) {
            return;
        }
        let id = *id;
        self.outside.watches.borrow_mut().remove(&id);
        self.seen.remove(&id);
        self.heard.remove(&id);
        self.sim.crash(host(id));
        self.note(&format!("controller {id} is down"));
        let Machine { data_dir, disk, reader, .. } = &self.machines[machine];
        *reader.lock().unwrap() = None;
        disk.restore(&data_dir.join("log/db")).expect("the log's file is written");
        self.read_log(machine);
    }

    fn start(&mut self, machine: usize) {
        let Machine { id, up, .. } = &mut self.machines[machine];
        let id = *id;
        if self.outside.retired.get() != Some(id) && !std::mem::replace(up, true) {
            self.note(&format!("controller {id} is started"));
            self.sim.bounce(host(id));
        }
    }

    fn read_log(&mut self, machine: usize) {
        let Machine { id, data_dir, .. } = &self.machines[machine];
        let id = *id;
        match log(data_dir) {
            Ok(entries) => {
                self.history.logs.push(Log { controller: ControllerId(id), entries });
            }
            Err(error) => self.fail(&format!("the log that controller {id} left is refused: {error}")),
        }
    }

    /// Repairs everything, and waits until all agree.
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
        // Whether they did is for the invariants to find.
        let limit = self.sim.elapsed() + CALM_MAX;
        while !self.history.settled && self.sim.elapsed() < limit {
            for _ in 0..LOOKS_APART {
                self.step();
            }
            self.history.settled = self.is_settled();
        }
    }

    /// Whether every worker does what the state says, and the state says what every worker does.
    fn is_settled(&self) -> bool {
        let watches = self.outside.watches.borrow();
        let ends = watches.iter().map(|(&id, watch)| (id, watch.applied().1)).collect();
        let processes = self.outside.processes.borrow();
        let workers: Vec<_> = processes.values().map(|process| process.end()).collect();
        self.agree() && placements_converge::converged(&ends, &workers).is_ok()
    }

    fn agree(&self) -> bool {
        let watches = self.outside.watches.borrow();
        let lasts: BTreeSet<_> = watches.values().map(Watch::last_applied).collect();
        let word = self.outside.last_word.borrow();
        let has = |watch: &Watch| {
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

/// Notes the entries that a controller has applied, unless another one did before.
fn note_applied(history: &mut History, at: Duration, reader: &Reader, before: Option<LogId>, last: LogId) {
    let from = before.map_or(0, |before| before.index + 1);
    let unseen = |index: &u64| !history.applied.contains_key(index);
    let Some(from) = (from..=last.index).find(unseen) else { return };
    if let Some(reader) = reader.lock().unwrap().as_mut() {
        for entry in read(reader, from..=last.index) {
            history.applied.entry(entry.log_id.index).or_insert((at, entry));
        }
    }
}

/// Notes whom a controller heard, and whom it found lost.
fn note_fleet(history: &mut History, marks: &mut Marks, at: Duration, id: u64, watch: &Watch) {
    let heard = watch.heard().into_iter().map(|(node, epoch, heard)| (node, (epoch, heard)));
    let heard: BTreeMap<_, _> = heard.collect();
    for (node, now) in &heard {
        if marks.heard.get(node).is_none_or(|last| last.1 != now.1) {
            history.heard.push(Heard { at, controller: id, node: node.clone(), epoch: now.0 });
        }
    }
    marks.heard = heard;
    let lost = watch.found_lost();
    if let Some(term) = watch.on_duty() {
        for (node, epoch) in lost.iter().filter(|&found| !marks.lost.contains(found)).cloned() {
            history.found_lost.push(FoundLost { at, controller: id, term, node, epoch });
        }
    }
    marks.lost = lost;
}

/// Notes a snapshot that a controller took or was sent. Whoever was sent one has not got its last
/// entry.
fn note_snapshot(history: &mut History, marks: &mut Marks, reader: &Reader, watch: &Watch) {
    let newest = watch.snapshot();
    if std::mem::replace(&mut marks.snapshot, newest) != newest
        && let (Some(newest), Some(reader)) = (newest, reader.lock().unwrap().as_mut())
    {
        history.snapshots += 1;
        history.installed += usize::from(read(reader, newest.index..=newest.index).is_empty());
    }
}

/// Entries of a log that its controller has open.
fn read(
    reader: &mut LogReader<State>,
    range: std::ops::RangeInclusive<u64>,
) -> Vec<openraft::Entry<ClusterConfig>> {
    let read = futures::executor::block_on(reader.try_get_log_entries(range));
    read.expect("an open log is read")
}

fn pairs(one: &[u64], other: &[u64]) -> Vec<(u64, u64)> {
    one.iter().flat_map(|&a| other.iter().map(move |&b| (a, b))).collect()
}

/// The log in a data directory that nobody has open.
fn log(data_dir: &Path) -> Result<Vec<openraft::Entry<ClusterConfig>>, Box<dyn std::error::Error>> {
    let dir = DataDir::open(data_dir)?;
    let Some(identity) = dir.identity().cloned() else { return Ok(Vec::new()) };
    let mut store = millrace_raft_store::open::<State>(dir, &identity)?;
    let read = async { store.log.get_log_reader().await.try_get_log_entries(0..).await };
    Ok(futures::executor::block_on(read)?)
}
