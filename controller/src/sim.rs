//! One member of a controller group in a simulation: its Raft node, the calls of the other
//! controllers and the admin API, over a network and a disk of the simulation's. No front door,
//! workers or model files: those have no part in what the group agrees on.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use futures::Stream;
use millrace_cluster_state::{Applied, Caller, Command, ControllerId, State};
use millrace_proto::admin::admin_server::AdminServer;
use millrace_raft_store::{LogId, StateReader};
use millrace_types::Failure;
use openraft::{RaftMetrics, ServerState};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Status};

use crate::StartError;
use crate::admin::{AdminService, Faults};
use crate::artifacts::{Artifacts, Store};
use crate::clock::WallClock;
use crate::config::{KEEP_ALIVE, Limits, Start};
use crate::fleet::Fleet;
use crate::leader::Duties;
use crate::raft::bootstrap::{self, Opening};
use crate::raft::service::Service;
pub use crate::raft::world::World;
use crate::raft::{Replica, disks, duties, elections};

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
    admin: AdminService,
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
            snapshot_every: crate::config::SNAPSHOT_EVERY,
            world: config.world.clone(),
        };
        let opened = bootstrap::open(opening).await?;
        let replica = bootstrap::replica(opened, String::new(), config.clock.clone()).await?;
        let store = Store::open(&config.data_dir).map_err(|error| StartError::Artifacts {
            data_dir: config.data_dir.clone(),
            reason: error.to_string(),
        })?;
        let artifacts = Artifacts::new(store, None, replica.clone(), Limits::default());
        let artifacts = Arc::new(artifacts);
        let service = Service::new(replica.clone(), artifacts.clone());
        let (fleet, faults) = (Fleet::new(), Faults::Refused);
        // Nobody carries the leader's duties out: there are no workers.
        let outlook = Duties::new(replica.clone(), fleet.clone(), Limits::default().lease).outlook();
        let admin = AdminService { replica: replica.clone(), fleet, outlook, artifacts, faults };
        let stop = CancellationToken::new();
        let guard = stop.clone().drop_guard();
        Ok(Self { replica, service, admin, config, stop, _stop: guard })
    }

    /// Serves the other controllers, as the internal port does.
    ///
    /// # Errors
    /// When the listener fails.
    pub fn serve_controllers<I, IO>(
        &self,
        incoming: I,
    ) -> impl Future<Output = Result<(), tonic::transport::Error>> + use<I, IO>
    where
        I: Stream<Item = io::Result<IO>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let router = server().add_service(self.service.clone().server());
        router.serve_with_incoming(incoming)
    }

    /// Serves the admin API, to whoever calls.
    ///
    /// # Errors
    /// When the listener fails.
    pub fn serve_clients<I, IO>(
        &self,
        incoming: I,
    ) -> impl Future<Output = Result<(), tonic::transport::Error>> + use<I, IO>
    where
        I: Stream<Item = io::Result<IO>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let named = |mut request: Request<()>| -> Result<Request<()>, Status> {
            request.extensions_mut().insert(millrace_gateway::auth::Caller::anonymous());
            Ok(request)
        };
        let router = server().add_service(AdminServer::with_interceptor(self.admin.clone(), named));
        router.serve_with_incoming(incoming)
    }

    /// Takes its place in the group, and stands for election from then on. The others must be able
    /// to call it already.
    ///
    /// # Errors
    /// As [`crate::start`].
    pub async fn enter(&self) -> Result<(), StartError> {
        let Self { replica, config, stop, .. } = self;
        tokio::spawn(elections::run_until(stop.clone(), replica.clone(), config.seed));
        tokio::spawn(duties::run_until(stop.clone(), replica.clone()));
        tokio::spawn(disks::run_until(stop.clone(), replica.clone()));
        bootstrap::enter(replica, &config.start, &config.internal_address, stop).await?;
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
        Watch::of(&self.replica)
    }
}

/// As the internal port is served.
fn server() -> Server {
    Server::builder().http2_keepalive_interval(Some(KEEP_ALIVE)).http2_keepalive_timeout(Some(KEEP_ALIVE))
}

/// A member as seen from outside.
#[derive(Debug)]
pub struct Watch {
    state: StateReader<State>,
    raft: watch::Receiver<RaftMetrics<u64, millrace_raft_store::Member>>,
}

impl Watch {
    pub(crate) fn of(replica: &Replica) -> Self {
        Self { state: replica.reader.clone(), raft: replica.raft.metrics() }
    }

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

    /// Why it takes no part any more, if so.
    #[must_use]
    pub fn halted(&self) -> Option<String> {
        self.raft.borrow().running_state.as_ref().err().map(ToString::to_string)
    }
}
