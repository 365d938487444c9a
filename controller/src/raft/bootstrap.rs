//! Obtains a controller's membership: the controller begins a cluster, joins a cluster, or continues as
//! the data directory says.
//!
//! ```text
//!  empty directory ─┬─ Bootstrap ─► identity ─► initialize ─► leads alone
//!                   ├─ Found ─► has any of them a cluster? ─┬─ all empty ─► as Bootstrap
//!                   │                                       └─ one has ─► as Join
//!                   ├─ Join ─► would the group accept it? ─► identity ─► learner ─► voter
//!                   └─ Reopen ─► refused
//!  used directory ──► its identity ─► its log ─► continues; reports its address
//! ```
//! A controller gets an identity only after the group has found the controller admissible, and the
//! group accepts only the data directory of that identity. So an operator's mistake leaves nothing
//! behind.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{CallerName, ControllerId, RulesVersion, State, StateCommand, UnixMillis};
use millrace_proto::raft::{JoinIntent, JoinRequest, JoinResponse};
use millrace_raft_store::{DataDir, DirectoryOwner, GroupMember, RaftStore, StateReader};
use millrace_types::{ClusterId, Failure};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::asking::{ask_from, ask_to_join, join_request};
use super::error::Error;
use super::failures::nobody_leads;
use super::founding::{BootstrapOutcome, found_or_join};
use super::network::Network;
use super::peers::{RaftPeerConnections, TrafficClass};
use super::replica::{OpenedLog, Replica};
use super::rules::MembershipRequest;
use super::runtime::RaftSpawner;
use super::settings::{Raft, config};
use super::time::StampClock;
use super::timing::{JOIN_PAUSE, JOIN_TIMEOUT, LEADING_TIMEOUT};
use super::world::{RaftEnvironment, SnapshotSchedule};
use crate::config::{ClusterStart, JoinAs};

/// The pause between two attempts to report this controller's address.
const MOVED_PAUSE: Duration = Duration::from_secs(1);

/// An open data directory and the stored identity.
pub(crate) struct Opened {
    pub(crate) identity: DirectoryOwner,
    store: RaftStore<State>,
    snapshots: SnapshotSchedule,
    world: Arc<dyn RaftEnvironment>,
}

/// The arguments of [`open`].
pub(crate) struct OpenOptions {
    pub(crate) data_dir: PathBuf,
    pub(crate) id: ControllerId,
    pub(crate) start: ClusterStart,
    pub(crate) now: UnixMillis,
    pub(crate) seed: u64,
    pub(crate) snapshots: SnapshotSchedule,
    pub(crate) world: Arc<dyn RaftEnvironment>,
}

/// Opens a used data directory, or claims an empty directory for this controller. While opening waits
/// for other controllers, `meanwhile` runs and reports to the others that the directory is empty.
pub(crate) async fn open(
    opening: OpenOptions,
    meanwhile: impl Future<Output = ()> + Send,
) -> Result<Opened, Error> {
    let OpenOptions { data_dir, id, start, now, seed, snapshots, world } = opening;
    let path = data_dir.clone();
    let dir = tokio::task::spawn_blocking(move || DataDir::open(path)).await??;
    let mut rng = StdRng::seed_from_u64(seed ^ id.0.rotate_left(32));
    let identity = match (dir.identity().cloned(), start) {
        (Some(found), _) => DirectoryOwner { controller: id, ..found },
        (None, ClusterStart::Reopen) => return Err(Error::Empty(data_dir)),
        (None, ClusterStart::Bootstrap) => {
            let cluster = ClusterId(fresh_name(now, &mut rng).into());
            DirectoryOwner { cluster, controller: id, directory: fresh_name(now, &mut rng) }
        }
        (None, ClusterStart::Found { with }) => {
            let directory = fresh_name(now, &mut rng);
            let asked = found_or_join(&*world, &with, join_request(id, &directory, JoinIntent::Check));
            let cluster = match beside(meanwhile, asked).await? {
                BootstrapOutcome::Nothing => ClusterId(fresh_name(now, &mut rng).into()),
                BootstrapOutcome::Cluster(cluster) => cluster,
            };
            DirectoryOwner { cluster, controller: id, directory }
        }
        (None, ClusterStart::Join { at, .. }) => {
            let directory = fresh_name(now, &mut rng);
            let request = join_request(id, &directory, JoinIntent::Check);
            let cluster = beside(meanwhile, ask_to_join(&*world, &at, request)).await?;
            DirectoryOwner { cluster, controller: id, directory }
        }
    };
    let whose = identity.clone();
    let disk = world.clone();
    let store = tokio::task::spawn_blocking(move || disk.open(dir, &whose)).await??;
    Ok(Opened { identity, store, snapshots, world })
}

/// Runs `meanwhile` until the work is done.
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
) -> Result<(Raft, StateReader<State>, RaftPeerConnections), Error> {
    let Opened { identity, store, snapshots, world } = opened;
    let config = config(&identity, snapshots)?;
    let peers = RaftPeerConnections::new(identity.clone(), world, spawner.clone());
    let network = Network { peers: peers.clone() };
    let reader = store.machine.reader();
    let raft = Raft::new(identity.controller.0, config, network, store.log, store.machine);
    let raft = spawner.within(raft).await;
    Ok((raft.map_err(|error| fatal(&error))?, reader, peers))
}

fn fatal(error: &dyn std::fmt::Display) -> Error {
    Error::Raft(error.to_string())
}

/// Enters the group. The other controllers must already be able to call this controller at `address`.
/// On return, a controller of a group of one leads, and a joining controller has the requested role.
/// Any other member continues, perhaps without having heard from the leader.
pub(crate) async fn enter(
    replica: &Replica,
    start: &ClusterStart,
    address: &str,
    stop: &CancellationToken,
) -> Result<(), Error> {
    let initialized = replica.raft.is_initialized().await.map_err(|error| fatal(&error))?;
    let own = replica.own();
    match start {
        _ if initialized => go_on(replica, start, address, stop).await,
        ClusterStart::Bootstrap => begin(replica, address).await,
        // Ask again: the other controllers may have changed between empty and member since a crash of
        // this controller.
        ClusterStart::Found { with } => {
            let request = join_request(own.controller, &own.directory, JoinIntent::Check);
            match found_or_join(replica.peers.world(), with, request).await? {
                BootstrapOutcome::Nothing => begin(replica, address).await,
                BootstrapOutcome::Cluster(_) => join(replica, with, JoinAs::Voter, address).await,
            }
        }
        ClusterStart::Join { at, role } => join(replica, at, *role, address).await,
        ClusterStart::Reopen => Err(Error::NeverJoined(own.controller)),
    }
}

async fn begin(replica: &Replica, address: &str) -> Result<(), Error> {
    let own = replica.own();
    let member = GroupMember { address: address.to_owned(), directory: own.directory.clone() };
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

/// Continues as the log says.
async fn go_on(
    replica: &Replica,
    start: &ClusterStart,
    address: &str,
    stop: &CancellationToken,
) -> Result<(), Error> {
    let membership = replica.membership();
    let own = replica.id().0;
    let voters: Vec<u64> = membership.voter_ids().collect();
    if voters == [own] {
        // A group of one has no other voter, so there is no reason to wait for the election timeout.
        replica.raft.trigger().elect().await.map_err(|error| fatal(&error))?;
        lead(replica).await?;
    }
    let votes = matches!(start, ClusterStart::Join { role: JoinAs::Voter, .. } | ClusterStart::Found { .. });
    let promote = votes && !voters.contains(&own);
    let replica = replica.clone();
    let address = address.to_owned();
    let settle = async move {
        say_where(&replica, &address).await;
        if promote && let Err(failure) = promoted(&replica).await {
            tracing::warn!(
                error = failure.message,
                "cannot promote this controller: it stays a learner for now"
            );
        }
    };
    let stop = stop.clone();
    tokio::spawn(async move { stop.run_until_cancelled(settle).await });
    Ok(())
}

/// Waits until this controller leads its group of one, then sets the rules and the name of the new
/// cluster.
async fn lead(replica: &Replica) -> Result<(), Error> {
    let own = replica.id().0;
    let leads = replica.raft.wait(Some(LEADING_TIMEOUT)).current_leader(own, "a group of one leads").await;
    leads.map_err(|error| Error::NoLeader(error.to_string()))?;
    let state = replica.linearizable().await.map_err(Error::Init)?;
    if state.cluster().is_none() {
        // Set the rules first, so that the whole log follows them. A log without this entry follows the
        // last rules that had no number.
        let rules = StateCommand::SetClusterVersion { version: RulesVersion::NEWEST };
        let init = StateCommand::InitCluster { cluster_id: replica.own().cluster.clone() };
        for command in [rules, init] {
            replica.propose(CallerName("controller".into()), None, command).await.map_err(Error::Init)?;
        }
    }
    Ok(())
}

/// Waits until the log lists this controller as a member with the requested role.
async fn become_member(replica: &Replica, role: JoinAs, at: &[String]) -> Result<(), Error> {
    let own = replica.id().0;
    let mut states = replica.reader.watch();
    let member = states.wait_for(|applied| {
        applied.state.cluster().is_some() && applied.membership.membership().get_node(&own).is_some()
    });
    let not_joined = |reason: String| Error::NotJoined { at: at.to_owned(), reason };
    match tokio::time::timeout(JOIN_TIMEOUT, member).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) => return Err(fatal(&"raft has ended")),
        Err(_) => {
            let message = "the group accepted this controller, but the leader sent nothing: make sure that the other controllers reach its advertised address";
            return Err(not_joined(message.to_owned()));
        }
    }
    match role {
        JoinAs::Learner => Ok(()),
        JoinAs::Voter => promoted(replica).await.map_err(Error::Refused),
    }
}

/// Requests this controller's promotion to voter, until the leader finds that the controller has the
/// log.
async fn promoted(replica: &Replica) -> Result<(), Failure> {
    let until = Instant::now() + JOIN_TIMEOUT;
    loop {
        match replica
            .change_group(MembershipRequest::Promote(replica.id().0), CallerName("controller".into()))
            .await
        {
            Ok(_) => return Ok(()),
            Err(failure) if !failure.retryable || Instant::now() >= until => return Err(failure),
            Err(failure) => tracing::debug!(error = failure.message, "cannot promote this controller yet"),
        }
        tokio::time::sleep(JOIN_PAUSE).await;
    }
}

/// Reports this controller's address to the group if the address changed, and checks that the
/// controller is still a member.
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
                tracing::debug!(
                    error = failure.message,
                    "cannot report this controller's address to the group yet"
                );
            }
            Err(failure) => {
                tracing::error!(error = failure.message, "the group refuses this controller");
                return;
            }
        }
        tokio::time::sleep(MOVED_PAUSE).await;
    }
}

async fn ask_others(replica: &Replica, request: &JoinRequest) -> Result<JoinResponse, Failure> {
    let mut last = nobody_leads();
    for peer in replica.others(TrafficClass::Requests) {
        match ask_from(replica.peers.world(), peer.address(), request).await {
            Err(failure) if failure.retryable => last = failure,
            answered => return answered,
        }
    }
    Err(last)
}

/// Returns a handle over the Raft node of an opened data directory.
pub(crate) async fn replica(
    opened: Opened,
    client_address: String,
    clock: Arc<dyn crate::clock::WallClock>,
    spawner: RaftSpawner,
) -> Result<Replica, Error> {
    let log = OpenedLog { disk: opened.store.log.disk(), last: opened.store.log.last() };
    let snapshots = opened.store.machine.receiver();
    let (raft, reader, peers) = run(opened, spawner.clone()).await?;
    let time = StampClock::new(clock, reader.clone());
    spawner.spawn(time.clone().follow(log.last.map_or(0, |last| last.index)));
    Ok(Replica::new(raft, reader, peers, client_address, time, log, snapshots))
}
