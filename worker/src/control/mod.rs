//! The worker's side of the control plane: one stream to every controller, telemetry to all of
//! them, the leader's desired state obeyed, and checkpoints of soft state given to the leader. With
//! no controller at all the worker goes on serving what it has.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use millrace_proto::worker as wire;
use millrace_transport::channel::ChannelConfig;
use millrace_types::NodeName;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use crate::clock::Clock;
use crate::data_dir::DataDir;
use crate::handle::NodeHandle;
use checkpoint::{Checkpoints, Scores};
use desired::Desired;
use index::IndexFeed;
use outgoing::Feeds;
use registration::Registrations;
use session::{Peer, Shared};

pub mod checkpoint;
pub mod desired;
pub mod index;
mod leaders;
mod outgoing;
pub mod registration;
mod session;
pub mod telemetry;

/// How often an idle connection is tried, and how long the answer may take: a controller that
/// vanished without a word is noticed in twice this.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Acknowledgements that have come and were not looked at. One batch is on its way at a time.
const ANSWERS_MAX: usize = 16;
/// How long the leader may take to hear the last of what is to be kept, when a worker goes.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);
/// How long controllers may take to hear the goodbye.
const GOODBYE_PATIENCE: Duration = Duration::from_millis(500);

/// What the streams say of this worker and where they lead.
pub struct Config {
    /// Its name.
    pub name: NodeName,
    /// The greeting. Its cluster id, protocol, build and epoch are filled in.
    pub hello: wire::WorkerHello,
    /// The controllers' channels, by address.
    pub controllers: Vec<(String, Channel)>,
    /// Where it is shown which of them are there, by their place in the list.
    pub attached: watch::Sender<BTreeSet<usize>>,
    /// Where the cluster's id is kept.
    pub data_dir: DataDir,
    /// What is checkpointed.
    pub node: NodeHandle,
    /// What time it is.
    pub clock: Arc<dyn Clock>,
    /// Spreads reconnections.
    pub seed: u64,
}

/// What is told, and where what is heard goes.
#[derive(Debug)]
pub struct Channels {
    /// What the leader says.
    pub desired: watch::Sender<Desired>,
    /// How far each function is.
    pub statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
    /// The models in host memory.
    pub models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    /// What routing reads.
    pub telemetry: watch::Receiver<Arc<wire::Telemetry>>,
}

/// No controller took this worker in, and this one takes it for a stranger.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("controller {controller} refused this worker: {message}")]
pub struct Refused {
    /// Its address.
    pub controller: String,
    /// Why, and what to do.
    pub message: String,
}

/// The running streams. They end when it is dropped.
#[derive(Debug)]
pub struct Control {
    sessions: JoinSet<Option<Refused>>,
    checkpoints: JoinSet<()>,
    scores: watch::Receiver<Scores>,
    index: IndexFeed,
    flushes: mpsc::Sender<oneshot::Sender<()>>,
    leaving: watch::Sender<bool>,
    attached: watch::Receiver<BTreeSet<usize>>,
}

impl Control {
    /// Opens a stream to every controller, and keeps it open.
    #[must_use]
    pub fn start(config: Config, channels: Channels) -> Self {
        let Config { name, hello, controllers, attached, data_dir, node, clock, seed } = config;
        let Channels { desired, statuses, models, telemetry } = channels;
        let registrations = Registrations::default();
        let leaders = watch::Sender::default();
        let (answers, answered) = mpsc::channel(ANSWERS_MAX);
        let (changes, changed) = mpsc::channel(index::CHANGES_MAX);
        let (flushes, flushed) = mpsc::channel(1);
        let (outbox, scores, leaving) =
            (watch::Sender::default(), watch::Sender::default(), watch::Sender::default());
        let control = Self {
            sessions: JoinSet::new(),
            checkpoints: JoinSet::new(),
            scores: scores.subscribe(),
            index: IndexFeed { changes, registration: registrations.subscribe(), node: name },
            flushes,
            leaving: leaving.clone(),
            attached: attached.subscribe(),
        };
        let feeds = Feeds {
            hello,
            data_dir,
            registrations: registrations.clone(),
            statuses,
            telemetry,
            outbox: outbox.subscribe(),
            leaving: leaving.subscribe(),
        };
        let checkpoints = Checkpoints {
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
        let shared = Shared { feeds, desired, leaders, answers, attached, streams, clock };
        control.run(checkpoints, &shared, controllers, seed)
    }

    fn run(
        mut self,
        checkpoints: Checkpoints,
        shared: &Shared,
        controllers: Vec<(String, Channel)>,
        seed: u64,
    ) -> Self {
        self.checkpoints.spawn(checkpoints.run());
        for (place, (address, channel)) in controllers.into_iter().enumerate() {
            let peer = Peer { place, address, channel };
            self.sessions.spawn(session::run(shared.clone(), peer, seed ^ place as u64));
        }
        self
    }

    /// What functions placed here go by.
    #[must_use]
    pub fn scores(&self) -> watch::Receiver<Scores> {
        self.scores.clone()
    }

    /// Where the data plane says what it holds.
    #[must_use]
    pub fn index(&self) -> IndexFeed {
        self.index.clone()
    }

    /// Leaves in order: tells the leader the last of what is to be kept, says goodbye on every
    /// stream, and waits, briefly, until the controllers have ended theirs.
    pub async fn leave(&self) {
        if *self.leaving.borrow() {
            return;
        }
        self.flush().await;
        self.leaving.send_replace(true);
        let mut attached = self.attached.clone();
        let heard = tokio::time::timeout(GOODBYE_PATIENCE, attached.wait_for(BTreeSet::is_empty)).await;
        if heard.is_err() {
            tracing::info!("a controller may not have heard the goodbye: the lease runs out there");
        }
    }

    async fn flush(&self) {
        let (tell, told) = oneshot::channel();
        let flushed = async {
            // Dropped unused, there is no leader to tell.
            if self.flushes.send(tell).await.is_ok() {
                drop(told.await);
            }
        };
        if tokio::time::timeout(FLUSH_PATIENCE, flushed).await.is_err() {
            tracing::info!("the leader has not heard the last of this node: usage it missed is forgiven");
        }
    }

    /// Ends the streams. Returns when nothing of them is left.
    pub async fn stop(&mut self) {
        self.sessions.shutdown().await;
        self.checkpoints.shutdown().await;
    }

    /// Waits for a refusal that this worker cannot go on after: it is another cluster's, or speaks
    /// another protocol.
    pub async fn failed(&mut self) -> Refused {
        loop {
            match self.sessions.join_next().await {
                Some(Ok(Some(refused))) => return refused,
                // It left in order.
                Some(Ok(None)) => {}
                // A session that panicked was our bug; the others go on.
                Some(Err(error)) => tracing::error!(%error, "a controller session ended"),
                None => std::future::pending().await,
            }
        }
    }
}

/// A channel to a controller. It connects when first used and again after a loss.
///
/// # Errors
/// When the address is none.
pub fn channel(address: &str) -> Result<Channel, tonic::transport::Error> {
    Ok(endpoint(address)?.connect_lazy())
}

/// The way to another process of the cluster.
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    millrace_transport::channel::endpoint(address, ChannelConfig::watched(KEEP_ALIVE))
}
