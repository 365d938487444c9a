//! Three controllers that write continuously on machines without random faults, for tests of a single
//! fault.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use millrace_cluster_state::{ControllerId, ModelSummary, State, StateCommand, UnixMillis};
use millrace_controller::clock::WallClock;
use millrace_controller::sim::{MemberConfig, MemberView, RaftEnvironment, SimMember, SnapshotSchedule};
use millrace_controller::{ClusterStart, JoinAs};
use millrace_raft_store::sim::SimDisk;
use millrace_raft_store::{DataDir, DirectoryOwner, Error, RaftStore};
use millrace_types::{Bytes, Digest};
use tonic::transport::{Channel, Endpoint};
use turmoil::Sim;

use crate::network::{dial, incoming};

const PORT: u16 = 7070;
const FAST_MS: u64 = 2;
/// The pause between two writes.
const WRITE_EVERY: Duration = Duration::from_millis(50);

/// A test's modification of a controller's opened store.
type Opened = fn(u64, &mut RaftStore<State>);

/// A disk with a fixed write time in milliseconds, and the machine.
#[derive(Debug, Clone)]
struct Paced {
    write_ms: Arc<AtomicU64>,
    opened: Opened,
}

impl SimDisk for Paced {
    fn write_time(&mut self) -> Duration {
        Duration::from_millis(self.write_ms.load(Ordering::Relaxed))
    }

    fn sync(&mut self, _: &Path) -> io::Result<()> {
        Ok(())
    }
}

impl RaftEnvironment for Paced {
    fn dial(&self, endpoint: &Endpoint) -> Channel {
        dial(endpoint)
    }

    fn open(&self, dir: DataDir, identity: &DirectoryOwner) -> Result<RaftStore<State>, Error> {
        let mut store = millrace_raft_store::sim::open(dir, identity, Box::new(self.clone()))?;
        (self.opened)(identity.controller.0, &mut store);
        Ok(store)
    }
}

#[derive(Debug)]
struct Clock;

impl WallClock for Clock {
    fn now(&self) -> UnixMillis {
        let elapsed = turmoil::sim_elapsed().unwrap_or_default();
        UnixMillis(1_700_000_000_000 + u64::try_from(elapsed.as_millis()).unwrap())
    }
}

type Watches = Rc<RefCell<BTreeMap<u64, MemberView>>>;

pub(crate) struct Group {
    pub(crate) sim: Sim<'static>,
    disks: BTreeMap<u64, Paced>,
    watches: Watches,
    _dir: tempfile::TempDir,
}

async fn control(id: u64, dir: std::path::PathBuf, disk: Paced, watches: Watches) -> turmoil::Result {
    let start = match id {
        1 => ClusterStart::Bootstrap,
        _ => ClusterStart::Join { at: vec![format!("c1:{PORT}")], role: JoinAs::Voter },
    };
    let config = MemberConfig {
        id: ControllerId(id),
        start,
        data_dir: dir,
        internal_address: format!("c{id}:{PORT}"),
        world: Arc::new(disk),
        snapshots: SnapshotSchedule::every(10_000),
        clock: Arc::new(Clock),
        seed: id,
    };
    let internal = incoming(PORT).await?;
    let member = SimMember::open(config).await?;
    let internal = tokio::spawn(member.serve_internal(internal));
    member.enter().await?;
    watches.borrow_mut().insert(id, member.watch());
    for n in 0u64.. {
        let model = ModelSummary {
            weights: Bytes(1),
            parameters: 1,
            launches: 1,
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        let digest = Digest::of(&(n % 100).to_le_bytes());
        let write = StateCommand::AddArtifact { digest, bytes: Bytes(7), model, holder: ControllerId(id) };
        if let Err(failure) = member.propose(write).await {
            assert!(failure.retryable || failure.may_have_executed, "{failure}");
        }
        tokio::time::sleep(WRITE_EVERY).await;
    }
    internal.await?;
    Ok(())
}

impl Group {
    pub(crate) fn form() -> Self {
        Self::form_opening(|_, _| ())
    }

    /// Forms a group like [`Self::form`], with each controller's opened store modified.
    pub(crate) fn form_opening(opened: Opened) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut sim = turmoil::Builder::new()
            .rng_seed(7)
            .epoch(SystemTime::UNIX_EPOCH)
            .simulation_duration(Duration::from_secs(600))
            .tick_duration(Duration::from_millis(1))
            .max_message_latency(Duration::from_millis(3))
            .tcp_capacity(1 << 16)
            .build();
        let watches = Watches::default();
        let mut disks = BTreeMap::new();
        for id in 1..=3 {
            let disk = Paced { write_ms: Arc::new(AtomicU64::new(FAST_MS)), opened };
            disks.insert(id, disk.clone());
            let dir = dir.path().join(format!("c{id}"));
            let watches = watches.clone();
            sim.host(format!("c{id}"), move || control(id, dir.clone(), disk.clone(), watches.clone()));
        }
        let mut group = Self { sim, disks, watches, _dir: dir };
        group.until("forming", |group| group.watches.borrow().len() == 3 && group.leader().is_some());
        group
    }

    /// Returns the term and the leader; the later term if two controllers believe to lead.
    pub(crate) fn leader(&self) -> Option<(u64, u64)> {
        let watches = self.watches.borrow();
        watches.iter().filter_map(|(&id, watch)| Some((watch.leads()?, id))).max()
    }

    /// Returns the last log entry that a controller applied.
    pub(crate) fn written(&self, id: u64) -> u64 {
        self.watches.borrow()[&id].last_applied().map_or(0, |last| last.index)
    }

    /// Returns the entry after which a controller's state was found to differ from a majority's.
    pub(crate) fn diverged(&self, id: u64) -> Option<u64> {
        self.watches.borrow()[&id].diverged()
    }

    pub(crate) fn slow(&self, id: u64, ms: u64) {
        self.disks[&id].write_ms.store(ms, Ordering::Relaxed);
    }

    pub(crate) fn until(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let limit = self.sim.elapsed() + Duration::from_secs(60);
        while !holds(self) {
            assert!(self.sim.elapsed() < limit, "{what}: not within 60 simulated seconds");
            self.sim.step().unwrap();
        }
    }

    pub(crate) fn pass(&mut self, span: Duration) {
        let end = self.sim.elapsed() + span;
        self.until("time", |group| group.sim.elapsed() >= end);
    }
}
