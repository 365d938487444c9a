//! The load of a cluster during faults. Each client is a task with its own seed, uses the SDK as
//! users do, and records every operation and request.
//!
//! | client | sends | to |
//! |---|---|---|
//! | writers | apply, delete, enable, disable | all endpoints, each starting at another |
//! | readers | linearizable reads | one controller each |
//! | requesters | inferences of functions that stay | all endpoints |
//! | newcomers | one inference each, over a new connection | all endpoints, in scenarios that ask for newcomers |
//! | counting | sequences of functions that keep state | all endpoints |
//! | probe | a sequence of small writes | all endpoints, to show when writes are accepted |

mod admin;
mod availability;
mod client;
mod counter;
mod counting;
mod keys;
mod new_connections;
mod probe;
mod requester;
mod synth;
mod targets;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use millrace_client::{Address, Endpoints};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::Deserialize;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(crate) use self::admin::read_all;
pub use self::availability::CallAvailability;
use self::client::Client;
pub use self::counter::CounterFunction;
use self::counting::CounterClient;
use self::keys::Keys;
pub(crate) use self::new_connections::NewConnectionClients;
pub use self::synth::SynthModel;
pub(crate) use self::targets::{POISON, publish_slow};
pub use self::targets::{POKED, TargetFunction, TargetWorkflow, Targets};
use crate::history::{AdminHistory, RequestRecord, SequenceRequest};
use crate::timeline::Timeline;

/// Number of writers. The numbers are small, because the processes of the cluster share this
/// machine with the clients.
const WRITERS: u32 = 3;
const REQUESTERS: u32 = 4;
/// Number of clients of each function that keeps state.
const COUNTING: u32 = 3;
/// Number of requesters in a load without other clients.
const REQUESTERS_ALONE: u32 = 16;

/// Prefixes of names that a scenario may not give to its own functions.
pub(crate) const RESERVED: [&str; 4] = [keys::PREFIX, probe::NAME, POKED, POISON];

/// The kinds of clients in a load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadMix {
    /// All clients of the table above.
    #[default]
    Everything,
    /// Requesters alone, and more of them. No function is made or changed, so that a worker's
    /// memory has no reason to grow.
    Requests,
}

/// Maximum time that clients take to end: the last try of a request or of an admin call.
const END_TIMEOUT: Duration = Duration::from_secs(120);

/// The clients of a run.
pub struct ClientLoad {
    stop: CancellationToken,
    tasks: JoinSet<()>,
    /// The clients' admin operations.
    pub history: Arc<AdminHistory>,
    requests: Arc<Mutex<Vec<RequestRecord>>>,
    steps: Arc<Mutex<Vec<SequenceRequest>>>,
    /// Times at which writes were accepted.
    pub writes: Arc<CallAvailability>,
    /// Times at which requests were answered.
    pub answers: Arc<CallAvailability>,
}

impl ClientLoad {
    /// Starts every client, for the controllers at `addresses`.
    ///
    /// # Errors
    /// If the clients cannot be made.
    pub fn start(
        addresses: &[Address],
        targets: &Targets,
        mix: LoadMix,
        timeline: &Timeline,
        rng: &mut StdRng,
    ) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let history = Arc::<AdminHistory>::default();
        let requests = Arc::<Mutex<Vec<RequestRecord>>>::default();
        let steps = Arc::<Mutex<Vec<SequenceRequest>>>::default();
        let writes = Arc::new(CallAvailability::new("writes", timeline.clone()));
        let answers = Arc::new(CallAvailability::new("answers to requests", timeline.clone()));
        let keys = Arc::new(Keys::new(targets.model));
        let mut tasks = JoinSet::new();
        let mut clients = 0;
        let mut client = |addresses: Vec<Address>| {
            let seed = rng.random();
            let id = rng.random();
            let endpoints = Endpoints::with_client_id(addresses, id)?;
            clients += 1;
            let timeline = timeline.clone();
            let stop = stop.clone();
            anyhow::Ok(Client {
                number: clients,
                endpoints,
                timeline,
                stop,
                rng: StdRng::seed_from_u64(seed),
            })
        };
        let from = |first: usize| {
            let mut addresses = addresses.to_vec();
            let len = addresses.len().max(1);
            addresses.rotate_left(first % len);
            addresses
        };
        let requesters = match mix {
            LoadMix::Everything => REQUESTERS,
            LoadMix::Requests => REQUESTERS_ALONE,
        };
        if mix == LoadMix::Everything {
            for writer in 0..WRITERS as usize {
                tasks.spawn(admin::write(client(from(writer))?, keys.clone(), history.clone()));
            }
            for address in addresses {
                let reader = client(vec![address.clone()])?;
                timeline.did(format!("client {} reads at {address} alone", reader.number));
                tasks.spawn(admin::read(reader, keys.clone(), history.clone()));
            }
            tasks.spawn(probe::run(client(addresses.to_vec())?, targets.model, writes.clone()));
        }
        for requester in 0..requesters as usize {
            let targets = targets.clone();
            let answers = answers.clone();
            let asks = requester::run(client(from(requester))?, targets, answers, requests.clone());
            tasks.spawn(asks);
        }
        for counter in targets.counters() {
            for at in 0..COUNTING as usize {
                let counter = counter.clone();
                let steps = steps.clone();
                tasks.spawn(CounterClient { client: client(from(at))?, counter, steps }.run());
            }
        }
        Ok(Self { stop, tasks, history, requests, steps, writes, answers })
    }

    /// Tells every client to finish its present operation, and waits until all have ended.
    ///
    /// # Errors
    /// If a client does not end.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        let all = async {
            while let Some(ended) = self.tasks.join_next().await {
                ended.context("a client failed")?;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(END_TIMEOUT, all).await.context("a client does not end")?
    }

    /// Returns every request of a sequence that has ended.
    #[must_use]
    pub fn steps(&self) -> Vec<SequenceRequest> {
        self.steps.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Returns every other request that has ended.
    #[must_use]
    pub fn requests(&self) -> Vec<RequestRecord> {
        self.requests.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}
