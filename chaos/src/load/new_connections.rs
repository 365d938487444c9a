//! Clients that make a single request over a new connection, as a command or a script does. Clients
//! with old connections do not show whether a server still accepts new ones.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use millrace_client::{Address, Endpoints};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::client::error_name;
use super::targets::Targets;
use crate::history::{RequestRecord, RequestResult};
use crate::timeline::Timeline;

/// Pause between two newcomers, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 30..90;
/// Maximum wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Newcomers in sequence, until [`NewConnectionClients::end`].
#[derive(Debug)]
pub(crate) struct NewConnectionClients {
    stop: CancellationToken,
    requests: Arc<Mutex<Vec<RequestRecord>>>,
    coming: JoinHandle<()>,
}

impl NewConnectionClients {
    pub(crate) fn begin(
        addresses: Vec<Address>,
        targets: Targets,
        timeline: Timeline,
        rng: &mut StdRng,
    ) -> Self {
        let stop = CancellationToken::new();
        let requests = Arc::<Mutex<Vec<RequestRecord>>>::default();
        let rng = StdRng::seed_from_u64(rng.random());
        let come = come(addresses, targets, timeline, rng, requests.clone());
        let stopped = stop.clone();
        let coming = tokio::spawn(async move {
            // A request that is under way is not recorded.
            stopped.run_until_cancelled(come).await.unwrap_or_default();
        });
        Self { stop, requests, coming }
    }

    /// Returns every request that has ended so far.
    pub(crate) fn requests(&self) -> Vec<RequestRecord> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the newcomers.
    pub(crate) async fn end(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.coming.await.context("newcomers failed")
    }
}

async fn come(
    mut addresses: Vec<Address>,
    targets: Targets,
    timeline: Timeline,
    mut rng: StdRng,
    requests: Arc<Mutex<Vec<RequestRecord>>>,
) {
    let names: Vec<String> = targets.names().map(str::to_owned).collect();
    loop {
        tokio::time::sleep(Duration::from_millis(rng.random_range(PAUSE_MS))).await;
        addresses.rotate_left(1);
        let function = names[rng.random_range(0..names.len())].clone();
        // Use a single address: with a second one, the client would hide that the first refuses
        // connections.
        let Ok(endpoints) = Endpoints::with_client_id(vec![addresses[0].clone()], rng.random()) else {
            return;
        };
        let id = endpoints.next_id();
        let begun = timeline.now();
        let asked = tokio::time::timeout(PATIENCE, targets.try_ask(&function, endpoints)).await;
        let how = match asked {
            Ok(Ok(Ok(()))) => RequestResult::Right,
            Ok(Ok(Err(error))) => {
                RequestResult::Refused(format!("over a new connection: {}", error_name(&error)))
            }
            Ok(Err(other)) => RequestResult::Wrong(other.to_string()),
            Err(_) => RequestResult::GivenUp(format!("over a new connection: no answer in {PATIENCE:?}")),
        };
        let request = RequestRecord { id, function, begun, ended: timeline.now(), retried: Vec::new(), how };
        requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
    }
}
