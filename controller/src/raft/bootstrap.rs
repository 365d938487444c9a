//! How a controller gets its place in a group: it begins a cluster of its own, joins one, or goes on
//! where its data directory says.
//!
//! ```text
//!  empty directory ─┬─ Bootstrap ─► identity ─► initialize ─► leads alone
//!                   ├─ Found ─► has any of them a cluster? ─┬─ all empty ─► as Bootstrap
//!                   │                                       └─ one has ─► as Join
//!                   ├─ Join ─► would it be taken in? ─► identity ─► learner ─► voter
//!                   └─ Reopen ─► refused
//!  used directory ──► its identity ─► its log ─► goes on; says where it is now
//! ```
//! Whatever has an identity has been found admissible first, and the group takes in only the data
//! directory that was named: so that an operator's mistake leaves nothing behind.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Caller, Command, ControllerId, RulesVersion, State, UnixMillis};
use millrace_proto::raft::{JoinIntent, JoinRequest, JoinResponse};
use millrace_raft_store::{DataDir, Identity, Member, StateReader, Store};
use millrace_types::{ClusterId, Failure};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::asking::{ask_from, ask_to_join, join_request};
use super::founding::{Found, found_or_join};
use super::network::Network;
use super::peers::{Lane, Peers};
use super::replica::Replica;
use super::rules::Change;
use super::runtime::RaftSpawner;
use super::time::Time;
use super::world::{Snapshots, World};
use super::{Raft, config};
use crate::config::{JoinAs, Start};

/// How long a group of one may take to lead itself: a few syncs, on a disk that may be very busy.
const LEADING_TIMEOUT: Duration = Duration::from_secs(30);
/// How long joining may take: for the group to answer, then for the log to come.
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long between two attempts to join, or to be promoted.
pub(super) const JOIN_PAUSE: Duration = Duration::from_millis(200);
/// How long between two attempts to say where this controller is now.
const MOVED_PAUSE: Duration = Duration::from_secs(1);

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
    /// An empty data directory, and nothing to begin with.
    #[error(
        "{} is empty: bootstrap a cluster, or join one; a controller that lost its directory must be removed from its group and join with a new id", .0.display()
    )]
    Empty(PathBuf),
    /// A data directory of a controller that no group ever took in.
    #[error("controller {} was never taken in by its group: start it with the address of another controller to join at", .0.0)]
    NeverJoined(ControllerId),
    /// The group does not take this controller in.
    #[error("the group does not take this controller in: {}", .0.message)]
    Refused(Failure),
    /// Some other controller did not say in time that it has no cluster.
    #[error(
        "no cluster was begun: within {JOIN_TIMEOUT:?} not each of {} said that it has none: {reason}; start them all, and if one is gone for good, replace it", with.join(", ")
    )]
    NotFounded {
        /// Where it asked.
        with: Vec<String>,
        /// The last answer that was missing.
        reason: String,
    },
    /// No controller took this one in in time.
    #[error("no controller of {} took this one in within {JOIN_TIMEOUT:?}: {reason}", at.join(", "))]
    NotJoined {
        /// Where it asked.
        at: Vec<String>,
        /// The last answer.
        reason: String,
    },
}

/// A data directory that is open, and whose it is.
pub(crate) struct Opened {
    pub(crate) identity: Identity,
    store: Store<State>,
    snapshots: Snapshots,
    world: Arc<dyn World>,
}

/// What opening needs to know.
pub(crate) struct Opening {
    pub(crate) data_dir: PathBuf,
    pub(crate) id: ControllerId,
    pub(crate) start: Start,
    pub(crate) now: UnixMillis,
    pub(crate) seed: u64,
    pub(crate) snapshots: Snapshots,
    pub(crate) world: Arc<dyn World>,
}

/// Opens a used data directory, or makes an empty one this controller's. As long as that waits for
/// others, `meanwhile` is carried out: it tells them that the directory is empty.
pub(crate) async fn open(
    opening: Opening,
    meanwhile: impl Future<Output = ()> + Send,
) -> Result<Opened, Error> {
    let Opening { data_dir, id, start, now, seed, snapshots, world } = opening;
    let path = data_dir.clone();
    let dir = tokio::task::spawn_blocking(move || DataDir::open(path)).await??;
    let mut rng = StdRng::seed_from_u64(seed ^ id.0.rotate_left(32));
    let identity = match (dir.identity().cloned(), start) {
        (Some(found), _) => Identity { controller: id, ..found },
        (None, Start::Reopen) => return Err(Error::Empty(data_dir)),
        (None, Start::Bootstrap) => {
            let cluster = ClusterId(fresh_name(now, &mut rng).into());
            Identity { cluster, controller: id, directory: fresh_name(now, &mut rng) }
        }
        (None, Start::Found { with }) => {
            let directory = fresh_name(now, &mut rng);
            let asked = found_or_join(&*world, &with, join_request(id, &directory, JoinIntent::Check));
            let cluster = match beside(meanwhile, asked).await? {
                Found::Nothing => ClusterId(fresh_name(now, &mut rng).into()),
                Found::Cluster(cluster) => cluster,
            };
            Identity { cluster, controller: id, directory }
        }
        (None, Start::Join { at, .. }) => {
            let directory = fresh_name(now, &mut rng);
            let request = join_request(id, &directory, JoinIntent::Check);
            let cluster = beside(meanwhile, ask_to_join(&*world, &at, request)).await?;
            Identity { cluster, controller: id, directory }
        }
    };
    let (whose, disk) = (identity.clone(), world.clone());
    let store = tokio::task::spawn_blocking(move || disk.open(dir, &whose)).await??;
    Ok(Opened { identity, store, snapshots, world })
}

/// Carries `meanwhile` out until the work is done.
async fn beside<T>(meanwhile: impl Future<Output = ()> + Send, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    tokio::select! {
        done = work.as_mut() => done,
        () = meanwhile => work.await,
    }
}

fn fresh_name(now: UnixMillis, rng: &mut StdRng) -> String {
    ulid::Ulid::from_parts(now.0, rand::Rng::random(rng)).to_string().to_lowercase()
}

/// Starts the Raft node of an opened data directory.
pub(crate) async fn run(
    opened: Opened,
    spawner: RaftSpawner,
) -> Result<(Raft, StateReader<State>, Peers), Error> {
    let Opened { identity, store, snapshots, world } = opened;
    let config = config(&identity, snapshots)?;
    let peers = Peers::new(identity.clone(), world, spawner.clone());
    let network = Network { peers: peers.clone() };
    let reader = store.machine.reader();
    let raft = Raft::new(identity.controller.0, config, network, store.log, store.machine);
    let raft = spawner.within(raft).await;
    Ok((raft.map_err(|error| fatal(&error))?, reader, peers))
}

fn fatal(error: &dyn std::fmt::Display) -> Error {
    Error::Raft(error.to_string())
}

/// Takes this controller's place in its group. The others must be able to call it already, at
/// `address`. When this returns, a controller that is alone leads, and one that joins is what it was
/// to become; another goes on, and may still have to hear from its leader.
pub(crate) async fn enter(
    replica: &Replica,
    start: &Start,
    address: &str,
    stop: &CancellationToken,
) -> Result<(), Error> {
    let initialized = replica.raft.is_initialized().await.map_err(|error| fatal(&error))?;
    let own = replica.own();
    match start {
        _ if initialized => go_on(replica, start, address, stop).await,
        Start::Bootstrap => begin(replica, address).await,
        // Asked anew: whoever was empty, or had a cluster, before a crash here may have changed since.
        Start::Found { with } => {
            let request = join_request(own.controller, &own.directory, JoinIntent::Check);
            match found_or_join(replica.peers.world(), with, request).await? {
                Found::Nothing => begin(replica, address).await,
                Found::Cluster(_) => join(replica, with, JoinAs::Voter, address).await,
            }
        }
        Start::Join { at, role } => join(replica, at, *role, address).await,
        Start::Reopen => Err(Error::NeverJoined(own.controller)),
    }
}

async fn begin(replica: &Replica, address: &str) -> Result<(), Error> {
    let own = replica.own();
    let member = Member { address: address.to_owned(), directory: own.directory.clone() };
    let members = BTreeMap::from([(own.controller.0, member)]);
    replica.raft.initialize(members).await.map_err(|error| fatal(&error))?;
    lead(replica).await
}

async fn join(replica: &Replica, at: &[String], role: JoinAs, address: &str) -> Result<(), Error> {
    let own = replica.own();
    let request = JoinRequest {
        cluster_id: own.cluster.to_string(),
        address: address.to_owned(),
        ..join_request(own.controller, &own.directory, JoinIntent::Join)
    };
    ask_to_join(replica.peers.world(), at, request).await?;
    become_member(replica, role, at).await
}

/// Goes on with what the log says.
async fn go_on(
    replica: &Replica,
    start: &Start,
    address: &str,
    stop: &CancellationToken,
) -> Result<(), Error> {
    let membership = replica.membership();
    let own = replica.id().0;
    let voters: Vec<u64> = membership.voter_ids().collect();
    if voters == [own] {
        // Nobody to wait for: no need to wait for the election timeout.
        replica.raft.trigger().elect().await.map_err(|error| fatal(&error))?;
        lead(replica).await?;
    }
    let votes = matches!(start, Start::Join { role: JoinAs::Voter, .. } | Start::Found { .. });
    let promote = votes && !voters.contains(&own);
    let (replica, address) = (replica.clone(), address.to_owned());
    let settle = async move {
        say_where(&replica, &address).await;
        if promote && let Err(failure) = promoted(&replica).await {
            tracing::warn!(error = failure.message, "this controller stays a learner for now");
        }
    };
    let stop = stop.clone();
    tokio::spawn(async move { stop.run_until_cancelled(settle).await });
    Ok(())
}

/// Waits until this node leads its group of one, sets the rules of a new cluster, and names it.
async fn lead(replica: &Replica) -> Result<(), Error> {
    let own = replica.id().0;
    let leads = replica.raft.wait(Some(LEADING_TIMEOUT)).current_leader(own, "a group of one leads").await;
    leads.map_err(|error| Error::NoLeader(error.to_string()))?;
    let state = replica.linearizable().await.map_err(Error::Init)?;
    if state.cluster().is_none() {
        // First, so that the whole log is of these rules: one without them is of the last unnamed ones.
        let rules = Command::SetClusterVersion { version: RulesVersion::NEWEST };
        let init = Command::InitCluster { cluster_id: replica.own().cluster.clone() };
        for command in [rules, init] {
            replica.propose(Caller("controller".into()), None, command).await.map_err(Error::Init)?;
        }
    }
    Ok(())
}

/// Waits until the log says that this controller is a member, and of what kind.
async fn become_member(replica: &Replica, role: JoinAs, at: &[String]) -> Result<(), Error> {
    let own = replica.id().0;
    let mut states = replica.reader.watch();
    let member = states.wait_for(|applied| {
        applied.state.cluster().is_some() && applied.membership.membership().get_node(&own).is_some()
    });
    let not_joined = |reason: String| Error::NotJoined { at: at.to_owned(), reason };
    match tokio::time::timeout(JOIN_TIMEOUT, member).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) => return Err(fatal(&"it ended")),
        Err(_) => {
            let message = "it was taken in, and the leader sent it nothing: make sure that the others reach it at the address it advertises";
            return Err(not_joined(message.to_owned()));
        }
    }
    match role {
        JoinAs::Learner => Ok(()),
        JoinAs::Voter => promoted(replica).await.map_err(Error::Refused),
    }
}

/// Has this controller made a voter, as soon as the leader finds that it has the log.
async fn promoted(replica: &Replica) -> Result<(), Failure> {
    let until = Instant::now() + JOIN_TIMEOUT;
    loop {
        match replica.change_group(Change::Promote(replica.id().0), Caller("controller".into())).await {
            Ok(_) => return Ok(()),
            Err(failure) if !failure.retryable || Instant::now() >= until => return Err(failure),
            Err(failure) => tracing::debug!(error = failure.message, "not promoted yet"),
        }
        tokio::time::sleep(JOIN_PAUSE).await;
    }
}

/// Tells the group where this controller is now, if that is not what it knows, and hears whether it
/// is still a member.
async fn say_where(replica: &Replica, address: &str) {
    let own = replica.own();
    let request = JoinRequest {
        cluster_id: own.cluster.to_string(),
        address: address.to_owned(),
        ..join_request(own.controller, &own.directory, JoinIntent::Moved)
    };
    loop {
        let told = match replica.join(request.clone()).await {
            Ok(answer) if answer.leader_address.is_empty() => Ok(answer),
            Ok(answer) => ask_from(replica.peers.world(), &answer.leader_address, &request).await,
            Err(failure) if failure.retryable => ask_others(replica, &request).await,
            Err(failure) => Err(failure),
        };
        match told {
            Ok(_) => return,
            Err(failure) if failure.retryable => {
                tracing::debug!(error = failure.message, "the group does not know where this controller is");
            }
            Err(failure) => {
                tracing::error!(error = failure.message, "the group does not take this controller");
                return;
            }
        }
        tokio::time::sleep(MOVED_PAUSE).await;
    }
}

async fn ask_others(replica: &Replica, request: &JoinRequest) -> Result<JoinResponse, Failure> {
    let mut last = super::route::nobody_leads();
    for peer in replica.others(Lane::Requests) {
        match ask_from(replica.peers.world(), peer.address(), request).await {
            Err(failure) if failure.retryable => last = failure,
            answered => return answered,
        }
    }
    Err(last)
}

/// A handle over the Raft node of an opened data directory.
pub(crate) async fn replica(
    opened: Opened,
    client_address: String,
    clock: Arc<dyn crate::clock::WallClock>,
    spawner: RaftSpawner,
) -> Result<Replica, Error> {
    let disk = opened.store.log.disk();
    let before = opened.store.log.last();
    let snapshots = opened.store.machine.receiver();
    let (raft, reader, peers) = run(opened, spawner.clone()).await?;
    let time = Time::new(clock, reader.clone());
    spawner.spawn(time.clone().follow(before.map_or(0, |last| last.index)));
    Ok(Replica::new(raft, reader, peers, client_address, time, disk, snapshots))
}
