//! The first start of a cluster, and every later one: opens the data directory, starts the Raft
//! node, and waits until it leads and has applied what its log holds.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Caller, Command, ControllerId, State, UnixMillis};
use millrace_raft_store::{DataDir, Identity, StateReader, Store};
use millrace_types::{ClusterId, Failure};
use openraft::BasicNode;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::network::Network;
use super::{Raft, Replica, config};
use crate::clock::WallClock;

/// The number of a cluster's first controller.
const FIRST: ControllerId = ControllerId(1);
/// How long a group of one may take to lead itself: a few syncs, on a disk that may be very busy.
const LEADING_TIMEOUT: Duration = Duration::from_secs(30);

/// Why Raft did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The data directory was refused.
    #[error(transparent)]
    Store(#[from] millrace_raft_store::Error),
    /// Opening it did not finish.
    #[error("opening the data directory did not finish: {0}")]
    Interrupted(#[from] tokio::task::JoinError),
    /// Raft refused to start, or halted.
    #[error("raft did not start: {0}")]
    Raft(String),
    /// It runs and does not lead.
    #[error("raft did not elect a leader within {LEADING_TIMEOUT:?}: {0}")]
    NoLeader(String),
    /// The cluster could not be named.
    #[error("the cluster could not be initialized: {}", .0.message)]
    Init(Failure),
}

/// A Raft node that leads.
pub(crate) struct Started {
    pub(crate) raft: Raft,
    pub(crate) replica: Replica,
}

/// A data directory that is open, and whose it is.
pub(crate) struct Opened {
    pub(crate) identity: Identity,
    store: Store<State>,
}

/// Opens or begins the cluster in `data_dir`.
pub(crate) async fn open(data_dir: PathBuf, now: UnixMillis, seed: u64) -> Result<Opened, Error> {
    let opened = tokio::task::spawn_blocking(move || open_blocking(data_dir, now, seed)).await??;
    Ok(Opened { identity: opened.0, store: opened.1 })
}

/// Runs what was opened as a group of one, which other controllers reach at `address`.
pub(crate) async fn start(
    opened: Opened,
    address: String,
    clock: Arc<dyn WallClock>,
) -> Result<Started, Error> {
    let Opened { identity, store } = opened;
    let (raft, reader) = run(&identity, store).await?;
    let replica = Replica::new(raft.clone(), reader, clock);
    lead(&raft, &identity, address).await?;
    let init = Command::InitCluster { cluster_id: identity.cluster.clone() };
    replica.propose(Caller("controller".into()), None, init).await.map_err(Error::Init)?;
    Ok(Started { raft, replica })
}

fn open_blocking(
    data_dir: PathBuf,
    now: UnixMillis,
    seed: u64,
) -> Result<(Identity, Store<State>), millrace_raft_store::Error> {
    let dir = DataDir::open(data_dir)?;
    let fresh = || Identity { cluster: fresh_cluster_id(now, seed), controller: FIRST };
    let identity = dir.identity().cloned().unwrap_or_else(fresh);
    let store = millrace_raft_store::open(dir, &identity)?;
    Ok((identity, store))
}

fn fresh_cluster_id(now: UnixMillis, seed: u64) -> ClusterId {
    let random = rand::Rng::random(&mut StdRng::seed_from_u64(seed));
    ClusterId(ulid::Ulid::from_parts(now.0, random).to_string().to_lowercase().into())
}

/// Starts the Raft node of an opened data directory.
pub(crate) async fn run(
    identity: &Identity,
    store: Store<State>,
) -> Result<(Raft, StateReader<State>), Error> {
    let config = config(&identity.cluster)?;
    let network = Network { cluster: identity.cluster.clone() };
    let reader = store.machine.reader();
    let raft = Raft::new(identity.controller.0, config, network, store.log, store.machine).await;
    Ok((raft.map_err(|error| Error::Raft(error.to_string()))?, reader))
}

/// Makes a fresh node a group of one, and waits until this node leads. Does not wait for the
/// election timeout: there is nobody to wait for.
async fn lead(raft: &Raft, identity: &Identity, address: String) -> Result<(), Error> {
    let fatal = |error: &dyn std::fmt::Display| Error::Raft(error.to_string());
    if raft.is_initialized().await.map_err(|error| fatal(&error))? {
        raft.trigger().elect().await.map_err(|error| fatal(&error))?;
    } else {
        let members = BTreeMap::from([(identity.controller.0, BasicNode::new(address))]);
        raft.initialize(members).await.map_err(|error| fatal(&error))?;
    }
    let leads =
        raft.wait(Some(LEADING_TIMEOUT)).current_leader(identity.controller.0, "a group of one leads").await;
    leads.map_err(|error| Error::NoLeader(error.to_string()))?;
    raft.ensure_linearizable().await.map_err(|error| fatal(&error))?;
    Ok(())
}
