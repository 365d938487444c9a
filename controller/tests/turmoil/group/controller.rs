//! The process of a controller on a simulated machine.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use millrace_cluster_state::{ControllerId, ModelSummary, State, StateCommand, UnixMillis};
use millrace_controller::clock::WallClock;
use millrace_controller::sim::{MemberConfig, RaftEnvironment, SimMember, SnapshotSchedule};
use millrace_controller::{ClusterStart, JoinAs};
use millrace_raft_store::{DataDir, DirectoryOwner, LogReader, RaftStore};
use millrace_types::{Bytes, Digest};
use openraft::storage::RaftLogStorage as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint};

use super::{
    CLIENT_PORT, INTERNAL_PORT, LARGE_MODEL, LARGE_MODEL_WEIGHTS, MODEL, MODEL_WEIGHTS, Outside, host,
};
use crate::disk::Disk;
use crate::late_news;
use crate::network::{dial, incoming};

/// Simulated time as wall-clock time.
#[derive(Debug)]
struct SimClock;

impl WallClock for SimClock {
    fn now(&self) -> UnixMillis {
        let elapsed = turmoil::sim_elapsed().unwrap_or_default();
        UnixMillis(1_700_000_000_000 + u64::try_from(elapsed.as_millis()).unwrap())
    }
}

/// A reader of the log that a controller has open.
pub(super) type Reader = Arc<Mutex<Option<LogReader<State>>>>;

/// The simulated network and a disk.
struct Simulated {
    disk: Disk,
    reader: Reader,
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Simulated").field(&self.disk).finish_non_exhaustive()
    }
}

impl RaftEnvironment for Simulated {
    fn dial(&self, endpoint: &Endpoint) -> Channel {
        dial(endpoint)
    }

    fn open(
        &self,
        dir: DataDir,
        identity: &DirectoryOwner,
    ) -> Result<RaftStore<State>, millrace_raft_store::Error> {
        let mut store = millrace_raft_store::sim::open(dir, identity, Box::new(self.disk.clone()))?;
        let reader = futures::executor::block_on(store.log.get_log_reader());
        *self.reader.lock().unwrap() = Some(reader);
        Ok(store)
    }
}

/// The process of a controller, as started each time.
#[derive(Clone)]
pub(super) struct Controller {
    pub(super) id: u64,
    pub(super) seed: u64,
    pub(super) starts: Rc<Cell<u64>>,
    pub(super) data_dir: PathBuf,
    pub(super) disk: Disk,
    pub(super) reader: Reader,
    pub(super) snapshot_every: u64,
    pub(super) outside: Rc<Outside>,
}

impl Controller {
    pub(super) async fn run(self) -> turmoil::Result {
        let disk = self.disk.clone();
        match self.live().await {
            // Any error after a power cut counts as the cut: the process hangs until the simulation
            // stops it.
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
            1 => ClusterStart::Bootstrap,
            _ if late => ClusterStart::Join { at: (1..self.id).map(at).collect(), role: JoinAs::Learner },
            _ => ClusterStart::Join { at: vec![at(1)], role: JoinAs::Voter },
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
            snapshots: SnapshotSchedule {
                every: self.snapshot_every,
                kept: self.snapshot_every / 10 + 4,
                purged_at_once: 1,
            },
            clock: Arc::new(SimClock),
            seed,
        };
        let internal = incoming(INTERNAL_PORT).await?;
        let clients = incoming(CLIENT_PORT).await?;
        let member = Rc::new(SimMember::open(config).await?);
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
        internal.await?;
        clients.await?;
        Ok(())
    }
}

/// Records the models as if every controller had the files.
async fn upload(member: &SimMember, outside: &Outside) -> turmoil::Result {
    for (model, weights) in [(MODEL, MODEL_WEIGHTS), (LARGE_MODEL, LARGE_MODEL_WEIGHTS)] {
        let digest = Digest::of(model);
        for holder in outside.members().map(ControllerId) {
            let inputs = Vec::new();
            let outputs = Vec::new();
            let model = ModelSummary { weights, parameters: 1, launches: 1, inputs, outputs };
            let known = StateCommand::AddArtifact { digest, bytes: Bytes(7), model, holder };
            member.propose(known).await.map_err(|failure| failure.message)?;
        }
    }
    Ok(())
}
