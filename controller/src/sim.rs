//! One member of a simulated controller group: the Raft node, the calls of the other controllers, the
//! workers' streams, the leader's duties and the admin API, over a simulated network and disk.
//!
//! The member has no gateway, because the gateway accepts only connections of the machine's network. So
//! no request reaches a worker. Garbage collection and fetching of model files are absent too.
//! [`crate::server`] starts the same parts in the same order.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use futures::Stream;
use millrace_cluster_state::{CallerName, CommandEffect, ControllerId, State, StateCommand};
use millrace_nodes::lease::LeaseState;
use millrace_proto::admin::admin_server::AdminServer;
use millrace_proto::parts::control_server;
use millrace_proto::status::of_code;
use millrace_raft_store::{LogId, StateReader};
use millrace_transport::{StreamListener, serve_while_polled};
use millrace_types::{Epoch, Failure, NodeName, Timestamp};
use openraft::{RaftMetrics, ServerState};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tonic::{Request, Status};

use crate::admin::{AdminService, FaultPermission};
use crate::artifacts::ArtifactService;
use crate::clock::WallClock;
use crate::config::{ClusterStart, ControllerLimits, Inspection, internal_server};
use crate::connector::Tcp;
use crate::events::ClusterEventLog;
use crate::fleet::{WorkerControlService, WorkerFleet};
use crate::leader::Duties;
use crate::leadership::LeaderStatus;
use crate::passed::TrafficMatrix;
use crate::peers::{Activities, GatewayActivity, PeerFanout, PeerService, Traces};
use crate::raft::bootstrap::{self, OpenOptions};
use crate::raft::runtime::RaftSpawner;
pub use crate::raft::world::{RaftEnvironment, SnapshotSchedule};
use crate::raft::{Replica, disks, divergence, elections, unfinished_change, unheard, versions};
use crate::start_error::StartError;
use millrace_storage::FileStore;

pub use crate::serving::crowd::RoutingFixture;

/// The configuration of a member.
#[derive(Debug, Clone)]
pub struct MemberConfig {
    /// The member's number in the group.
    pub id: ControllerId,
    /// The source of membership for a member with an empty data directory.
    pub start: ClusterStart,
    pub data_dir: PathBuf,
    /// The address at which the other members reach this member.
    pub internal_address: String,
    /// The network and the disk of the simulation.
    pub world: Arc<dyn RaftEnvironment>,
    /// When the log is replaced by a snapshot.
    pub snapshots: SnapshotSchedule,
    /// The clock that stamps commands.
    pub clock: Arc<dyn WallClock>,
    /// The seed of random choices.
    pub seed: u64,
}

/// An open member. The tasks end with the runtime of the start.
#[derive(Debug)]
pub struct SimMember {
    replica: Replica,
    service: PeerService,
    control: WorkerControlService,
    admin: AdminService,
    /// The leader's duties, until [`SimMember::enter`] starts them.
    duties: RefCell<Option<Duties>>,
    config: MemberConfig,
    stop: CancellationToken,
    _stop: DropGuard,
}

impl SimMember {
    /// Opens the data directory and starts the Raft node.
    ///
    /// # Errors
    /// The same as [`crate::start`].
    pub async fn open(config: MemberConfig) -> Result<Self, StartError> {
        let opening = OpenOptions {
            data_dir: config.data_dir.clone(),
            id: config.id,
            start: config.start.clone(),
            now: config.clock.now(),
            seed: config.seed,
            snapshots: config.snapshots,
            world: config.world.clone(),
        };
        let opened = bootstrap::open(opening, std::future::pending()).await?;
        let replica =
            bootstrap::replica(opened, String::new(), config.clock.clone(), RaftSpawner::current()).await?;
        let store = FileStore::open(&config.data_dir.join("artifacts")).map_err(|error| {
            StartError::Artifacts { data_dir: config.data_dir.clone(), reason: error.to_string() }
        })?;
        let inspection = Inspection::InProcess;
        let artifacts =
            ArtifactService::new(store, None, replica.clone(), ControllerLimits::default(), inspection);
        let artifacts = Arc::new(artifacts);
        let service = PeerService::new(replica.clone(), artifacts.clone());
        let fleet = WorkerFleet::new();
        let stop = CancellationToken::new();
        let limits = ControllerLimits::default().lease;
        // A simulated member drives no runs, so the traffic counts stay empty.
        let passed = TrafficMatrix::default();
        let duties = Duties::new(replica.clone(), fleet.clone(), limits, passed.clone());
        let outlook = duties.outlook();
        let control = WorkerControlService {
            cluster_id: replica.own().cluster.clone(),
            replica: replica.clone(),
            fleet: fleet.clone(),
            artifacts: artifacts.clone(),
            // The connector never connects: only requests would use it.
            connector: Arc::new(Tcp),
            requests: Handle::current(),
            outlook: outlook.clone(),
            stop: stop.clone(),
        };
        let faults = FaultPermission::Refused;
        let everyone = PeerFanout { replica: replica.clone(), fleet: fleet.clone() };
        let traces = Traces { own: None, everyone: everyone.clone() };
        let activities = Activities { own: GatewayActivity::default(), everyone };
        let events = ClusterEventLog::new(config.seed);
        let ended = stop.clone();
        let replica_of = replica.clone();
        let admin = AdminService {
            replica: replica_of,
            fleet,
            outlook,
            artifacts,
            traces,
            activities,
            events,
            passed,
            stop: ended,
            faults,
            order_searches: Arc::new(tokio::sync::Semaphore::new(crate::admin::ORDER_SEARCHES_MAX)),
        };
        let guard = stop.clone().drop_guard();
        let duties = RefCell::new(Some(duties));
        Ok(Self { replica, service, control, admin, duties, config, stop, _stop: guard })
    }

    /// Serves the other controllers and the workers like the internal port, until the future is
    /// dropped.
    pub fn serve_internal<I, IO>(&self, connections: I) -> impl Future<Output = ()> + use<I, IO>
    where
        I: Stream<Item = io::Result<IO>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut routes = Routes::builder();
        routes.add_service(control_server(self.control.clone()));
        routes.add_service(self.service.clone().server());
        serve(connections, routes.routes())
    }

    /// Serves the admin API to every caller, until the future is dropped.
    pub fn serve_clients<I, IO>(&self, connections: I) -> impl Future<Output = ()> + use<I, IO>
    where
        I: Stream<Item = io::Result<IO>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let named = |mut request: Request<()>| -> Result<Request<()>, Status> {
            request.extensions_mut().insert(millrace_gateway::authentication::Caller::anonymous());
            Ok(request)
        };
        serve(connections, Routes::new(AdminServer::with_interceptor(self.admin.clone(), named)))
    }

    /// Enters the group, and may become the leader from then on. The other members must already be able
    /// to call this member. The member performs the leader's duties while leading.
    ///
    /// # Errors
    /// The same as [`crate::start`].
    ///
    /// # Panics
    /// The member has already entered.
    pub async fn enter(&self) -> Result<(), StartError> {
        let Self { replica, config, stop, .. } = self;
        let duties = self.duties.take().expect("a member enters once");
        tokio::spawn(elections::run_until(stop.clone(), replica.clone(), config.seed));
        tokio::spawn(unfinished_change::run_until(stop.clone(), replica.clone()));
        tokio::spawn(disks::run_until(stop.clone(), replica.clone()));
        tokio::spawn(unheard::run_until(stop.clone(), replica.clone()));
        tokio::spawn(versions::run_until(stop.clone(), replica.clone()));
        tokio::spawn(divergence::run_until(stop.clone(), replica.clone()));
        bootstrap::enter(replica, &config.start, &config.internal_address, stop).await?;
        tokio::spawn(self.control.fleet.clone().follow_until(
            stop.clone(),
            replica.clone(),
            ControllerLimits::default().lease.lease,
        ));
        tokio::spawn(duties.run_until(stop.clone()));
        Ok(())
    }

    /// Proposes a command like the parts of a controller do, wherever the leader is.
    ///
    /// # Errors
    /// The refusal, or the reason why the command was not, or may not have been, proposed.
    pub async fn propose(&self, command: StateCommand) -> Result<CommandEffect, Failure> {
        self.replica.propose(CallerName("member".into()), None, command).await
    }

    /// Returns a view of the member for observers, which keeps nothing of the member open.
    #[must_use]
    pub fn watch(&self) -> MemberView {
        let WorkerControlService { replica, fleet, outlook, .. } = &self.control;
        let state = replica.reader.clone();
        let raft = replica.raft.metrics();
        let diverged = replica.diverged.clone();
        MemberView { state, raft, fleet: fleet.clone(), outlook: outlook.clone(), diverged }
    }
}

/// Serves connections of the simulated network with the limits of the internal port.
async fn serve<I, IO>(connections: I, routes: Routes)
where
    I: Stream<Item = io::Result<IO>> + Send + 'static,
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = StreamListener { connections: Box::pin(connections), address };
    serve_while_polled(
        listener,
        internal_server(ControllerLimits::default().internal),
        routes.prepare(),
        of_code,
    )
    .await;
}

/// A view of a member for observers.
#[derive(Debug)]
pub struct MemberView {
    state: StateReader<State>,
    raft: watch::Receiver<RaftMetrics<u64, millrace_raft_store::GroupMember>>,
    fleet: WorkerFleet,
    outlook: LeaderStatus,
    diverged: Arc<OnceLock<u64>>,
}

impl MemberView {
    /// Returns the last applied entry, and the resulting state.
    #[must_use]
    pub fn applied(&self) -> (Option<LogId>, State) {
        let latest = self.state.latest();
        (latest.last, latest.state.clone())
    }

    /// Returns the last applied entry.
    #[must_use]
    pub fn last_applied(&self) -> Option<LogId> {
        self.state.latest().last
    }

    /// Returns the term in which the member believes to lead, if any.
    #[must_use]
    pub fn leads(&self) -> Option<u64> {
        let raft = self.raft.borrow();
        (raft.state == ServerState::Leader).then_some(raft.current_term)
    }

    /// Returns Raft's metrics as text for people.
    #[must_use]
    pub fn status(&self) -> String {
        self.raft.borrow().to_string()
    }

    /// Returns the reason why the Raft node has halted, if any.
    #[must_use]
    pub fn halted(&self) -> Option<String> {
        self.raft.borrow().running_state.as_ref().err().map(ToString::to_string)
    }

    /// Returns the log entry after which the member's state was found to differ from a majority's, if
    /// any.
    #[must_use]
    pub fn diverged(&self) -> Option<u64> {
        self.diverged.get().copied()
    }

    /// Returns the term in which the member performs the leader's duties, if any.
    #[must_use]
    pub fn on_duty(&self) -> Option<u64> {
        let leadership = *self.outlook.leadership().borrow();
        leadership.leads.then_some(leadership.term)
    }

    /// Returns the attached workers, each with the epoch known to this member and the time of the last
    /// sign of life, by this member's clock.
    #[must_use]
    pub fn heard(&self) -> Vec<(NodeName, Epoch, Timestamp)> {
        let workers = self.fleet.workers();
        workers.values().map(|worker| (worker.name.clone(), worker.epoch(), worker.heard())).collect()
    }

    /// Returns registrations that this member found expired, and that are still live in the state.
    #[must_use]
    pub fn found_lost(&self) -> Vec<(NodeName, Epoch)> {
        let lease_states = self.outlook.lease_states();
        let latest = self.state.latest();
        let lost = lease_states.iter().filter(|(_, lease_state)| **lease_state == LeaseState::Lost);
        lost.filter_map(|(name, _)| Some((name.clone(), latest.state.node(name)?.epoch))).collect()
    }

    /// Returns the last entry that the newest snapshot covers.
    #[must_use]
    pub fn snapshot(&self) -> Option<LogId> {
        self.raft.borrow().snapshot
    }
}
