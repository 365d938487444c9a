//! The worker's side of the control plane. The worker keeps one stream to every controller and
//! sends telemetry on all streams. The worker obeys the leader's desired state and sends the leader
//! checkpoints of soft state. Without any controller the worker keeps serving its functions.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use millrace_proto::worker as wire;
use millrace_types::NodeName;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::clock::Clock;
use crate::data_dir::DataDir;
use crate::desired_state::DesiredState;
use crate::endpoint::endpoint;
use crate::handle::NodeHandle;
use crate::index_feed::{self, IndexFeed};
use crate::registration::NodeEpochStore;
use crate::slo_scores::SloScores;
use checkpoint::CheckpointTaskConfig;
use outgoing::StreamSources;
use session::{ControllerEndpoint, SessionContext};

pub mod checkpoint;
pub mod desired;
mod leaders;
mod outgoing;
mod session;
pub mod telemetry;

pub use session::WorkerRefusal;

/// Maximum number of unread checkpoint acknowledgements. Only one batch is in transit at a time.
const ANSWERS_MAX: usize = 16;
/// Time that the leader has to acknowledge the last checkpoint of a worker that shuts down.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);
/// Time that the controllers have to end their streams after the goodbye.
const GOODBYE_PATIENCE: Duration = Duration::from_millis(500);

/// The identity of this worker and the destinations of its streams.
pub struct ControlConfig {
    pub name: NodeName,
    /// The greeting. The session fills in cluster id, protocol, build and epoch.
    pub hello: wire::WorkerHello,
    /// Channels to the controllers, with their addresses.
    pub controllers: Vec<(String, Channel)>,
    /// Positions, in `controllers`, of the controllers with a working stream.
    pub attached: watch::Sender<BTreeSet<usize>>,
    /// The data directory, which stores the cluster id.
    pub data_dir: DataDir,
    /// The node, with the state that is checkpointed.
    pub node: NodeHandle,
    pub clock: Arc<dyn Clock>,
    /// Seed of the delays before reconnections.
    pub seed: u64,
}

/// The inputs and outputs of the streams.
#[derive(Debug)]
pub struct ControlChannels {
    /// The leader's desired state.
    pub desired: watch::Sender<DesiredState>,
    /// The state of each function.
    pub statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
    /// The models in host memory.
    pub models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    /// The node state that routing reads.
    pub telemetry: watch::Receiver<Arc<wire::Telemetry>>,
}

/// The running streams. Dropping this value ends the streams.
#[derive(Debug)]
pub struct ControlPlaneClient {
    sessions: JoinSet<Option<WorkerRefusal>>,
    checkpoints: JoinSet<()>,
    scores: watch::Receiver<SloScores>,
    index: IndexFeed,
    flushes: mpsc::Sender<oneshot::Sender<()>>,
    leaving: watch::Sender<bool>,
    attached: watch::Receiver<BTreeSet<usize>>,
}

impl ControlPlaneClient {
    /// Opens a stream to every controller and reopens lost streams.
    #[must_use]
    pub fn start(config: ControlConfig, channels: ControlChannels) -> Self {
        let ControlConfig { name, hello, controllers, attached, data_dir, node, clock, seed } = config;
        let ControlChannels { desired, statuses, models, telemetry } = channels;
        let registrations = NodeEpochStore::default();
        let leaders = watch::Sender::default();
        let (answers, answered) = mpsc::channel(ANSWERS_MAX);
        let (changes, changed) = mpsc::channel(index_feed::CHANGES_MAX);
        let (flushes, flushed) = mpsc::channel(1);
        let outbox = watch::Sender::default();
        let scores = watch::Sender::default();
        let leaving = watch::Sender::default();
        let control = Self {
            sessions: JoinSet::new(),
            checkpoints: JoinSet::new(),
            scores: scores.subscribe(),
            index: IndexFeed { changes, registration: registrations.subscribe(), node: name },
            flushes,
            leaving: leaving.clone(),
            attached: attached.subscribe(),
        };
        let feeds = StreamSources {
            hello,
            data_dir,
            registrations: registrations.clone(),
            statuses,
            telemetry,
            outbox: outbox.subscribe(),
            leaving: leaving.subscribe(),
        };
        let checkpoints = CheckpointTaskConfig {
            node,
            clock: clock.clone(),
            models,
            desired: desired.subscribe(),
            changes: changed,
            registrations,
            leaders: leaders.subscribe(),
            answers: answered,
            flushes: flushed,
            outbox,
            scores,
        };
        let streams = Arc::new(AtomicU64::new(0));
        let shared = SessionContext { feeds, desired, leaders, answers, attached, streams, clock };
        control.run(checkpoints, &shared, controllers, seed)
    }

    fn run(
        mut self,
        checkpoints: CheckpointTaskConfig,
        shared: &SessionContext,
        controllers: Vec<(String, Channel)>,
        seed: u64,
    ) -> Self {
        self.checkpoints.spawn(checkpoints.run());
        for (place, (address, channel)) in controllers.into_iter().enumerate() {
            let peer = ControllerEndpoint { place, address, channel };
            self.sessions.spawn(session::run(shared.clone(), peer, seed ^ place as u64));
        }
        self
    }

    /// Returns the SLO counts of the functions that are placed on this node.
    #[must_use]
    pub fn scores(&self) -> watch::Receiver<SloScores> {
        self.scores.clone()
    }

    /// Returns the feed by which the data plane reports the data on this node.
    #[must_use]
    pub fn index(&self) -> IndexFeed {
        self.index.clone()
    }

    /// Leaves the cluster in order: sends the leader the last checkpoint, says goodbye on every
    /// stream, and waits briefly for the controllers to end their streams.
    pub async fn leave(&self) {
        if *self.leaving.borrow() {
            return;
        }
        self.flush().await;
        self.leaving.send_replace(true);
        let mut attached = self.attached.clone();
        let heard = tokio::time::timeout(GOODBYE_PATIENCE, attached.wait_for(BTreeSet::is_empty)).await;
        if heard.is_err() {
            tracing::info!("a controller may have missed the goodbye: the node's lease expires there");
        }
    }

    async fn flush(&self) {
        let (tell, told) = oneshot::channel();
        let flushed = async {
            // If the sender is dropped unused, no leader is known.
            if self.flushes.send(tell).await.is_ok() {
                drop(told.await);
            }
        };
        if tokio::time::timeout(FLUSH_PATIENCE, flushed).await.is_err() {
            tracing::info!(
                "the leader did not acknowledge the last checkpoint: unreported usage is not billed"
            );
        }
    }

    /// Ends the streams. Returns when all of their tasks have ended.
    pub async fn stop(&mut self) {
        self.sessions.shutdown().await;
        self.checkpoints.shutdown().await;
    }

    /// Waits for a refusal after which this worker cannot continue: the controller is of another
    /// cluster or speaks another protocol.
    pub async fn failed(&mut self) -> WorkerRefusal {
        loop {
            match self.sessions.join_next().await {
                Some(Ok(Some(refused))) => return refused,
                // The worker left in order.
                Some(Ok(None)) => {}
                // A session that panicked is a bug of the worker; the other sessions continue.
                Some(Err(error)) => tracing::error!(%error, "a controller session panicked"),
                None => std::future::pending().await,
            }
        }
    }
}

/// Returns a channel to a controller. The channel connects at its first use and again after a loss.
///
/// # Errors
/// If the address is invalid.
pub fn channel(address: &str) -> Result<Channel, tonic::transport::Error> {
    Ok(endpoint(address)?.connect_lazy())
}
