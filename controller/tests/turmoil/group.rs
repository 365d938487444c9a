//! One run: a group of controllers, each a host with a disk of its own, the people who use it, and
//! what goes wrong meanwhile.
//!
//! ```text
//!   people ── admin API ──▶ c1 :8080 ┐         seed ─▶ plan of faults, latencies, disk times,
//!   stub workers ─ proposals ─▶ c1   ├─ :7070 ◀──▶ c2, c3      what is asked of whom and when
//!                                    └─ log on a disk with its own power
//! ```
//! First the group forms, then things go wrong for [`ROUGH`], then all is repaired and everybody
//! must agree.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use millrace_cluster_state::{Command, ControllerId, ModelSummary, State, UnixMillis};
use millrace_controller::clock::WallClock;
use millrace_controller::sim::{Member, MemberConfig, Watch, World};
use millrace_controller::{JoinAs, Start};
use millrace_raft_store::{ClusterConfig, DataDir, Identity, LogId, Store};
use millrace_types::{Bytes, Digest, Epoch, NodeName};
use openraft::RaftLogReader as _;
use openraft::storage::RaftLogStorage as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};
use turmoil::Sim;

use crate::disk::Disk;
use crate::faults::{Fault, Planned, plan};
use crate::history::{
    Created, History, Journal, Log, Moments, NodeAnswer, RegisterAnswer, RegisterAsked, Seen,
};
use crate::network::{dial, incoming};
use crate::runs::digest;
use crate::{people, workers};

pub(crate) const CLIENT_PORT: u16 = 8080;
const INTERNAL_PORT: u16 = 7070;
/// The one model there is. Only its name matters.
pub(crate) const MODEL: &[u8] = b"a model";

/// How long things go wrong.
const ROUGH: Duration = Duration::from_secs(20);
/// How long the group may take to form, and to agree at the end.
const CALM_MAX: Duration = Duration::from_secs(60);
/// The most a controller waits, in milliseconds, when all come back one after the other.
const BACK_ONE_BY_ONE_MS: u64 = 1_500;
/// Messages take up to this, in milliseconds; each run draws its own.
const LATENCY_MAX_MS: std::ops::RangeInclusive<u64> = 2..=40;
/// Segments on the way on one connection.
const SEGMENTS_MAX: usize = 1 << 16;

pub(crate) fn host(id: u64) -> String {
    format!("c{id}")
}

const PEOPLE: &str = "people";

/// What the hosts and the run have in common: what is seen, and what is known to all.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) controllers: u64,
    pub(crate) moments: Moments,
    pub(crate) creations: Journal<String, Created>,
    pub(crate) registers: Journal<RegisterAsked, RegisterAnswer>,
    pub(crate) nodes: Journal<Command, NodeAnswer>,
    /// The epochs that each node was given.
    pub(crate) epochs: RefCell<BTreeMap<NodeName, BTreeSet<Epoch>>>,
    /// The function that was created when all was well again.
    pub(crate) last_word: RefCell<Option<String>>,
    entered: RefCell<BTreeSet<u64>>,
    watches: RefCell<BTreeMap<u64, Watch>>,
    calm: Cell<bool>,
}

impl Outside {
    fn new(controllers: u64) -> Self {
        let moments = Moments::default();
        Self {
            controllers,
            creations: Journal::new(moments.clone()),
            registers: Journal::new(moments.clone()),
            nodes: Journal::new(moments.clone()),
            moments,
            epochs: RefCell::default(),
            last_word: RefCell::default(),
            entered: RefCell::default(),
            watches: RefCell::default(),
            calm: Cell::default(),
        }
    }

    fn is_formed(&self) -> bool {
        self.entered.borrow().len() as u64 == self.controllers
    }

    /// Waits until all controllers are members.
    pub(crate) async fn formed(&self) {
        while !self.is_formed() {
            tokio::time::sleep(Duration::from_millis(20)).await;
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

/// The simulated network, and a disk.
#[derive(Debug)]
struct Simulated(Disk);

impl World for Simulated {
    fn dial(&self, endpoint: &Endpoint) -> Channel {
        dial(endpoint)
    }

    fn open(&self, dir: DataDir, identity: &Identity) -> Result<Store<State>, millrace_raft_store::Error> {
        millrace_raft_store::sim::open(dir, identity, Box::new(self.0.clone()))
    }
}

/// A machine: what is left of a controller when its process is gone.
struct Machine {
    id: u64,
    data_dir: PathBuf,
    disk: Disk,
    up: bool,
}

/// Runs the group under a seed.
pub(crate) fn run(seed: u64) -> History {
    let mut rng = StdRng::seed_from_u64(seed);
    // Most groups are of three.
    let controllers = if rng.random_ratio(1, 4) { 5 } else { 3 };
    let dirs = scratch();
    let outside = Rc::new(Outside::new(controllers));
    let mut sim = simulation(&mut rng);
    let machine = |id| Machine {
        id,
        data_dir: dirs.path().join(host(id)),
        disk: Disk::new(seed ^ id.rotate_left(48)),
        up: true,
    };
    let machines: Vec<_> = (1..=controllers).map(machine).collect();
    for machine in &machines {
        let controller = Controller {
            id: machine.id,
            seed,
            starts: Rc::default(),
            data_dir: machine.data_dir.clone(),
            disk: machine.disk.clone(),
            outside: Rc::clone(&outside),
        };
        sim.host(host(machine.id), move || controller.clone().run());
    }
    sim.client(PEOPLE, people::work(seed, Rc::clone(&outside)));
    let plan = plan(&mut rng, controllers, ROUGH);
    let history = History { seed, ..History::default() };
    let mut run = Run { sim, rng, machines, outside, history, seen: BTreeMap::new() };
    run.form();
    run.suffer(plan);
    run.recover();
    run.end()
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
    outside: Rc<Outside>,
}

impl Controller {
    async fn run(self) -> turmoil::Result {
        let start = self.starts.get();
        self.starts.set(start + 1);
        let seed = self.seed ^ start.rotate_left(24);
        let begin = match self.id {
            1 => Start::Bootstrap,
            _ => Start::Join { at: vec![format!("{}:{INTERNAL_PORT}", host(1))], role: JoinAs::Voter },
        };
        let config = MemberConfig {
            id: ControllerId(self.id),
            start: begin,
            data_dir: self.data_dir,
            internal_address: format!("{}:{INTERNAL_PORT}", host(self.id)),
            world: Arc::new(Simulated(self.disk)),
            clock: Arc::new(SimClock),
            seed,
        };
        let (internal, clients) = (incoming(INTERNAL_PORT).await?, incoming(CLIENT_PORT).await?);
        let member = Rc::new(Member::open(config).await?);
        self.outside.watches.borrow_mut().insert(self.id, member.watch());
        let internal = tokio::spawn(member.serve_controllers(internal));
        let clients = tokio::spawn(member.serve_clients(clients));
        member.enter().await?;
        if self.id == 1 && start == 0 {
            upload(&member, self.outside.controllers).await?;
        }
        self.outside.entered.borrow_mut().insert(self.id);
        let rng = StdRng::seed_from_u64(seed ^ self.id.rotate_left(8));
        workers::work(rng, Rc::clone(&member), Rc::clone(&self.outside)).await;
        internal.await??;
        clients.await??;
        Ok(())
    }
}

/// Makes the model known, as if every controller had its file.
async fn upload(member: &Member, controllers: u64) -> turmoil::Result {
    for holder in (1..=controllers).map(ControllerId) {
        let model = ModelSummary {
            weights: Bytes(1),
            parameters: 1,
            launches: 1,
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        let known = Command::AddArtifact { digest: Digest::of(MODEL), bytes: Bytes(7), model, holder };
        member.propose(known).await.map_err(|failure| failure.message)?;
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
}

impl Run {
    /// One millisecond. Whether everybody is done.
    fn step(&mut self) -> bool {
        let done = self.sim.step().unwrap_or_else(|error| {
            panic!("seed {}: {error}\n{}", self.history.seed, self.history.faults.join("\n"))
        });
        self.look();
        for machine in 0..self.machines.len() {
            if self.machines[machine].up && self.machines[machine].disk.is_off() {
                self.crash(machine);
            }
        }
        done
    }

    /// Notes what can be seen of every controller.
    fn look(&mut self) {
        let Self { outside, history, seen, machines, .. } = self;
        for (&id, watch) in outside.watches.borrow().iter() {
            if let Some(term) = watch.leads() {
                history.leaders.entry(term).or_default().insert(id);
            }
            let powered = !machines.iter().any(|machine| machine.id == id && machine.disk.is_off());
            if let (true, Some(why)) = (powered, watch.halted()) {
                history.halts.push(format!("controller {id}: {why}"));
            }
            if seen.get(&id) != Some(&watch.last_applied())
                && let (Some(last), state) = watch.applied()
            {
                let digest = digest(&state.encode());
                history.states.push(Seen { controller: ControllerId(id), last, digest });
                seen.insert(id, Some(last));
            }
        }
    }

    fn fail(&self, what: &str) -> ! {
        panic!("seed {}: {what}; faults:\n{}", self.history.seed, self.history.faults.join("\n"))
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
        self.sim.crash(host(id));
        self.note(&format!("controller {id} is down"));
        let Machine { data_dir, disk, .. } = &self.machines[machine];
        disk.restore(&data_dir.join("log/db")).expect("the log's file is written");
        self.read_log(machine);
    }

    fn start(&mut self, machine: usize) {
        let Machine { id, up, .. } = &mut self.machines[machine];
        if !std::mem::replace(up, true) {
            let id = *id;
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
        let hosts: Vec<String> =
            (1..=self.outside.controllers).map(host).chain([PEOPLE.to_owned()]).collect();
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
        self.outside.calm.set(true);
        self.until("a last write", |run| run.outside.last_word.borrow().is_some());
        self.until("agreeing", Self::agree);
    }

    fn agree(&self) -> bool {
        let watches = self.outside.watches.borrow();
        let lasts: BTreeSet<_> = watches.values().map(Watch::last_applied).collect();
        let word = self.outside.last_word.borrow();
        let has = |watch: &Watch| {
            let (_, state) = watch.applied();
            state.functions().any(|function| Some(function.key.name.as_str()) == word.as_deref())
        };
        watches.len() == self.machines.len() && lasts.len() == 1 && watches.values().all(has)
    }

    fn end(mut self) -> History {
        let watches = self.outside.watches.take();
        self.history.ends = watches.into_iter().map(|(id, watch)| (id, watch.applied().1)).collect();
        for machine in 0..self.machines.len() {
            self.crash(machine);
        }
        self.history.creations = self.outside.creations.take();
        self.history.registers = self.outside.registers.take();
        self.history.nodes = self.outside.nodes.take();
        self.history
    }
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
