//! The worker's side of the control plane: one stream to every controller, telemetry to all of
//! them, and the leader's desired state obeyed. With no controller at all the worker goes on
//! serving what it has.

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::worker as wire;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use crate::data_dir::DataDir;
use desired::Desired;
use session::Shared;

pub mod desired;
mod session;
pub mod telemetry;

/// How long connecting to a controller may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How often an idle connection is tried, and how long the answer may take: a controller that
/// vanished without a word is noticed in twice this.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// What the streams say of this worker and where they lead.
#[derive(Debug)]
pub struct Config {
    /// The greeting. Its cluster id, protocol and build are filled in.
    pub hello: wire::WorkerHello,
    /// The controllers' channels, by address.
    pub controllers: Vec<(String, Channel)>,
    /// Where the cluster's id is kept.
    pub data_dir: DataDir,
    /// Spreads reconnections.
    pub seed: u64,
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
    sessions: JoinSet<Refused>,
}

impl Control {
    /// Opens a stream to every controller, and keeps it open. What the leader says goes to `desired`.
    #[must_use]
    pub fn start(
        config: Config,
        desired: watch::Sender<Desired>,
        statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
        telemetry: watch::Receiver<Arc<wire::Telemetry>>,
    ) -> Self {
        let Config { hello, controllers, data_dir, seed } = config;
        let epoch = watch::Sender::new(None);
        let shared = Shared { hello, data_dir, desired, statuses, telemetry, epoch };
        let mut sessions = JoinSet::new();
        for (place, (address, channel)) in controllers.into_iter().enumerate() {
            sessions.spawn(session::run(shared.clone(), address, channel, seed ^ place as u64));
        }
        Self { sessions }
    }

    /// Ends the streams. Returns when nothing of them is left.
    pub async fn stop(&mut self) {
        self.sessions.shutdown().await;
    }

    /// Waits for a refusal that this worker cannot go on after: it is another cluster's, or speaks
    /// another protocol.
    pub async fn failed(&mut self) -> Refused {
        loop {
            match self.sessions.join_next().await {
                Some(Ok(refused)) => return refused,
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
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_lazy())
}
