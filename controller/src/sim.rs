//! One member of a controller group in a simulation: its Raft node, the calls of the other
//! controllers, the workers' streams, the leader's duties and the admin API, over a network and a
//! disk of the simulation's.
//!
//! Absent: the front door, which takes connections of the machine's network and no others, and with
//! it requests on their way to workers; and the upkeep of model files, which are not simulated.
//! [`crate::server`] starts the same parts in the same order.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use futures::Stream;
use millrace_cluster_state::{Applied, Caller, Command, ControllerId, State};
use millrace_policy::lease::Standing;
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

use crate::StartError;
use crate::activity::{Activities, Doors};
use crate::admin::{AdminService, Faults};
use crate::artifacts::{Artifacts, Store};
use crate::clock::WallClock;
use crate::config::{Limits, Start, internal_server};
use crate::connector::Tcp;
use crate::events::Events;
use crate::everyone::Everyone;
use crate::fleet::Fleet;
use crate::fleet::control::Control;
use crate::inspection::Inspection;
use crate::leader::{Duties, Outlook};
use crate::passed::Passed;
use crate::raft::bootstrap::{self, Opening};
use crate::raft::runtime::RaftSpawner;
use crate::raft::service::Service;
pub use crate::raft::world::{Snapshots, World};
use crate::raft::{Replica, disks, divergence, duties, elections, unheard, versions};
use crate::traces::Traces;

pub use crate::serving::crowd::Crowd;

/// What a member is started with.
#[derive(Debug, Clone)]
pub struct MemberConfig {
    /// Its number in the group.
    pub id: ControllerId,
    /// Where its place comes from while its directory is empty.
    pub start: Start,
    /// Its data directory.
    pub data_dir: PathBuf,
    /// Where the others reach it.
    pub internal_address: String,
    /// Its network and disk.
    pub world: Arc<dyn World>,
    /// When its log is cut short.
    pub snapshots: Snapshots,
    /// Where stamps come from.
    pub clock: Arc<dyn WallClock>,
    /// What chance is made of.
    pub seed: u64,
}

/// A member that is open. Its tasks end with the runtime they were started in.
#[derive(Debug)]
pub struct Member {
    replica: Replica,
    service: Service,
    control: Control,
    admin: AdminService,
    /// Until it enters.
    duties: RefCell<Option<Duties>>,
    config: MemberConfig,
    stop: CancellationToken,
    _stop: DropGuard,
}

impl Member {
    /// Opens the data directory and starts the Raft node.
    ///
    /// # Errors
    /// As [`crate::start`].
    pub async fn open(config: MemberConfig) -> Result<Self, StartError> {
        let opening = Opening {
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
        let store = Store::open(&config.data_dir).map_err(|error| StartError::Artifacts {
            data_dir: config.data_dir.clone(),
            reason: error.to_string(),
        })?;
        let inspection = Inspection::InProcess;
        let artifacts = Artifacts::new(store, None, replica.clone(), Limits::default(), inspection);
        let artifacts = Arc::new(artifacts);
        let service = Service::new(replica.clone(), artifacts.clone());
        let (fleet, stop) = (Fleet::new(), CancellationToken::new());
        let limits = Limits::default().lease;
        // No run is driven here.
        let passed = Passed::default();
        let duties = Duties::new(replica.clone(), fleet.clone(), limits, passed.clone());
        let outlook = duties.outlook();
        let control = Control {
            cluster_id: replica.own().cluster.clone(),
            replica: replica.clone(),
            fleet: fleet.clone(),
            artifacts: artifacts.clone(),
            // Never connects: only requests would go there.
            connector: Arc::new(Tcp),
            requests: Handle::current(),
            outlook: outlook.clone(),
            stop: stop.clone(),
        };
        let faults = Faults::Refused;
        let everyone = Everyone { replica: replica.clone(), fleet: fleet.clone() };
        let traces = Traces { own: None, everyone: everyone.clone() };
        let activities = Activities { own: Doors::default(), everyone };
        let (events, ended) = (Events::new(config.seed), stop.clone());
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

    /// Serves the other controllers and the workers, as the internal port does, until this is dropped.
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

    /// Serves the admin API, to whoever calls, until this is dropped.
    pub fn serve_clients<I, IO>(&self, connections: I) -> impl Future<Output = ()> + use<I, IO>
    where
        I: Stream<Item = io::Result<IO>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let named = |mut request: Request<()>| -> Result<Request<()>, Status> {
            request.extensions_mut().insert(millrace_gateway::auth::Caller::anonymous());
            Ok(request)
        };
        serve(connections, Routes::new(AdminServer::with_interceptor(self.admin.clone(), named)))
    }

    /// Takes its place in the group, and stands for election from then on. The others must be able
    /// to call it already. It does what a leader does whenever it leads.
    ///
    /// # Errors
    /// As [`crate::start`].
    ///
    /// # Panics
    /// When it entered before.
    pub async fn enter(&self) -> Result<(), StartError> {
        let Self { replica, config, stop, .. } = self;
        let duties = self.duties.take().expect("a member enters once");
        tokio::spawn(elections::run_until(stop.clone(), replica.clone(), config.seed));
        tokio::spawn(duties::run_until(stop.clone(), replica.clone()));
        tokio::spawn(disks::run_until(stop.clone(), replica.clone()));
        tokio::spawn(unheard::run_until(stop.clone(), replica.clone()));
        tokio::spawn(versions::run_until(stop.clone(), replica.clone()));
        tokio::spawn(divergence::run_until(stop.clone(), replica.clone()));
        bootstrap::enter(replica, &config.start, &config.internal_address, stop).await?;
        tokio::spawn(self.control.fleet.clone().follow_until(
            stop.clone(),
            replica.clone(),
            Limits::default().lease.lease,
        ));
        tokio::spawn(duties.run_until(stop.clone()));
        Ok(())
    }

    /// Proposes a command as the parts of a controller do, wherever the leader is.
    ///
    /// # Errors
    /// The refusal, or why it was not proposed, or may have been.
    pub async fn propose(&self, command: Command) -> Result<Applied, Failure> {
        self.replica.propose(Caller("member".into()), None, command).await
    }

    /// Looks on from outside. Holds nothing of the member open.
    #[must_use]
    pub fn watch(&self) -> Watch {
        let Control { replica, fleet, outlook, .. } = &self.control;
        let (state, raft) = (replica.reader.clone(), replica.raft.metrics());
        let diverged = replica.diverged.clone();
        Watch { state, raft, fleet: fleet.clone(), outlook: outlook.clone(), diverged }
    }
}

/// Serves connections of the simulated network as the internal port serves its own.
async fn serve<I, IO>(connections: I, routes: Routes)
where
    I: Stream<Item = io::Result<IO>> + Send + 'static,
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = StreamListener { connections: Box::pin(connections), address };
    serve_while_polled(listener, internal_server(Limits::default().internal), routes.prepare(), of_code)
        .await;
}

/// A member as seen from outside.
#[derive(Debug)]
pub struct Watch {
    state: StateReader<State>,
    raft: watch::Receiver<RaftMetrics<u64, millrace_raft_store::Member>>,
    fleet: Fleet,
    outlook: Outlook,
    diverged: Arc<OnceLock<u64>>,
}

impl Watch {
    /// The last entry that it applied, and its state then.
    #[must_use]
    pub fn applied(&self) -> (Option<LogId>, State) {
        let latest = self.state.latest();
        (latest.last, latest.state.clone())
    }

    /// The last entry that it applied.
    #[must_use]
    pub fn last_applied(&self) -> Option<LogId> {
        self.state.latest().last
    }

    /// The term in which it believes to lead, if it does.
    #[must_use]
    pub fn leads(&self) -> Option<u64> {
        let raft = self.raft.borrow();
        (raft.state == ServerState::Leader).then_some(raft.current_term)
    }

    /// What Raft says of itself, for people.
    #[must_use]
    pub fn status(&self) -> String {
        self.raft.borrow().to_string()
    }

    /// Why it takes no part any more, if so.
    #[must_use]
    pub fn halted(&self) -> Option<String> {
        self.raft.borrow().running_state.as_ref().err().map(ToString::to_string)
    }

    /// The log entry after which its state was found to differ from a majority's, if so.
    #[must_use]
    pub fn diverged(&self) -> Option<u64> {
        self.diverged.get().copied()
    }

    /// The term in which it does what a leader does, if it does.
    #[must_use]
    pub fn on_duty(&self) -> Option<u64> {
        let leadership = *self.outlook.leadership().borrow();
        leadership.leads.then_some(leadership.term)
    }

    /// The workers attached to it, each with its registration as it is known here and when it was
    /// last heard, by this member's clock.
    #[must_use]
    pub fn heard(&self) -> Vec<(NodeName, Epoch, Timestamp)> {
        let workers = self.fleet.workers();
        workers.values().map(|worker| (worker.name.clone(), worker.epoch(), worker.heard())).collect()
    }

    /// Registrations that it has found lost, and that are live in its state yet.
    #[must_use]
    pub fn found_lost(&self) -> Vec<(NodeName, Epoch)> {
        let (standings, latest) = (self.outlook.standings(), self.state.latest());
        let lost = standings.iter().filter(|(_, standing)| **standing == Standing::Lost);
        lost.filter_map(|(name, _)| Some((name.clone(), latest.state.node(name)?.epoch))).collect()
    }

    /// The last entry that its newest snapshot covers.
    #[must_use]
    pub fn snapshot(&self) -> Option<LogId> {
        self.raft.borrow().snapshot
    }
}
