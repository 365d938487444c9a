//! The controllers a client knows, and one lazy connection to each. A call is made at the one that
//! answered last, and where that one fails it, at the others: see [`failover`](crate::failover).

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_transport::channel::{ChannelConfig, endpoint};
use millrace_types::Reason;
use tokio::time::Instant;
use tonic::Status;
use tonic::transport::Channel;

use crate::address::Address;
use crate::error::{Cause, Error};
use crate::failover::{Pauses, Round};

/// HTTP/2 receive windows: a tensor of this size arrives without waiting for a window update.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// How often a busy connection is tried, and how long the answer may take, where there is another
/// endpoint to go on to: a server that hangs or vanished is noticed in twice this.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// What to do with a call whose connection broke after it was sent: it may have been carried out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Repeat {
    /// As the function is declared: the next endpoint is asked whether it is idempotent. Where none
    /// says so, the call is not made again.
    #[default]
    AsDeclared,
    /// Make it again at the next endpoint, under the same id: a second execution does no harm.
    Allowed,
    /// Report [`Error::ConnectionLost`].
    Forbidden,
}

/// The endpoints of one cluster. Clones share their connections.
#[derive(Clone)]
pub struct Endpoints {
    shared: Arc<Shared>,
}

struct Shared {
    connections: Vec<Connection>,
    /// The one that answered last.
    preferred: AtomicUsize,
    /// Together they make the ids of requests: unique per client, and ordered.
    client_id: u64,
    calls: AtomicU64,
}

struct Connection {
    address: Address,
    channel: Channel,
}

impl Endpoints {
    /// Takes the addresses of a cluster's controllers, in the order in which to try them. Nothing
    /// is connected until the first call. To be called within a tokio runtime.
    ///
    /// # Errors
    /// [`Error::NoEndpoints`] without addresses, [`Error::NoRandomness`] when the system has none.
    pub fn new(addresses: Vec<Address>) -> Result<Self, Error> {
        Self::with_client_id(addresses, getrandom::u64().map_err(Error::NoRandomness)?)
    }

    /// The same with ids that can be foretold, for tests and replays.
    ///
    /// # Errors
    /// [`Error::NoEndpoints`] without addresses.
    pub fn with_client_id(addresses: Vec<Address>, client_id: u64) -> Result<Self, Error> {
        if addresses.is_empty() {
            return Err(Error::NoEndpoints);
        }
        // Only where it helps: servers of other makers take pings for an attack.
        let keep_alive = (addresses.len() > 1).then_some(KEEP_ALIVE);
        let connections =
            addresses.into_iter().map(|address| Connection::open(address, keep_alive)).collect();
        let (preferred, calls) = (AtomicUsize::new(0), AtomicU64::new(0));
        Ok(Self { shared: Arc::new(Shared { connections, preferred, client_id, calls }) })
    }

    /// The addresses, in the order given.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.shared.connections.iter().map(|connection| &connection.address)
    }

    /// An id no other call of any client has.
    #[must_use]
    pub fn next_id(&self) -> String {
        let call = self.shared.calls.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}-{call}", self.shared.client_id)
    }

    /// Makes a call at the preferred endpoint, and at the others where that one fails it, all within
    /// `timeout`. While no controller leads, they are asked again after a pause.
    pub(crate) async fn call<T, F, Fut>(&self, repeat: Repeat, timeout: Duration, make: F) -> Result<T, Error>
    where
        F: Fn(Channel, Duration) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        let started = Instant::now();
        let mut pauses = Pauses::new(timeout);
        let mut round = Round::first(repeat, timeout);
        loop {
            if let Some(answer) = self.ask_each(&mut round, started + timeout, &make).await? {
                return Ok(answer);
            }
            round = round.next(pauses.next(started.elapsed()))?;
            tokio::time::sleep(round.pause()).await;
        }
    }

    /// Asks every endpoint once, until one answers or it makes no sense to ask another.
    async fn ask_each<T, F, Fut>(
        &self,
        round: &mut Round,
        deadline: Instant,
        make: &F,
    ) -> Result<Option<T>, Error>
    where
        F: Fn(Channel, Duration) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        let all = &self.shared.connections;
        let first = self.shared.preferred.load(Ordering::Relaxed);
        for index in (0..all.len()).map(|step| (first + step) % all.len()) {
            let Connection { address, channel } = &all[index];
            let left = deadline.saturating_duration_since(Instant::now());
            let mut asked = Asked { endpoints: self, index, heard: false };
            let answer = make(channel.clone(), left).await;
            asked.heard = true;
            let status = match answer {
                Ok(answer) => {
                    self.shared.preferred.store(index, Ordering::Relaxed);
                    return Ok(Some(answer));
                }
                Err(status) => status,
            };
            let cause = match Cause::of(&status) {
                // A server that keeps the call's time itself may see it end first, and says cancelled:
                // nobody else cancels a call that is awaited here.
                Cause::Answer(failure)
                    if failure.reason == Reason::Cancelled && Instant::now() >= deadline =>
                {
                    Cause::TimedOut
                }
                cause => cause,
            };
            if !matches!(cause, Cause::Answer(_)) {
                self.leave(index);
            }
            round.failed(address, cause)?;
        }
        Ok(None)
    }

    /// Begins the next call at another endpoint than this one, unless somebody else saw to that.
    fn leave(&self, index: usize) {
        let next = (index + 1) % self.shared.connections.len();
        let relaxed = Ordering::Relaxed;
        let _already_left = self.shared.preferred.compare_exchange(index, next, relaxed, relaxed);
    }
}

/// A call at one endpoint. Dropped without having heard of it, its caller gave up: the next call
/// begins at another endpoint, or callers with less patience than it takes to notice that a server
/// hangs or is cut off would ask it for ever.
struct Asked<'a> {
    endpoints: &'a Endpoints,
    index: usize,
    /// Whatever was heard, and if it is that the connection broke.
    heard: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.heard {
            self.endpoints.leave(self.index);
        }
    }
}

impl Connection {
    fn open(address: Address, keep_alive: Option<Duration>) -> Self {
        let windows = Some((STREAM_WINDOW, CONNECTION_WINDOW));
        let config = ChannelConfig { keep_alive, windows, ..ChannelConfig::default() };
        let endpoint = endpoint(address.authority(), config).expect("an address was checked to be host:port");
        Self { address, channel: endpoint.connect_lazy() }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn ids_are_distinct_and_can_be_foretold() {
        let endpoints = Endpoints::with_client_id(vec!["a:1".parse().unwrap()], 255).unwrap();
        assert_eq!(endpoints.next_id(), "00000000000000ff-0");
        assert_eq!(endpoints.clone().next_id(), "00000000000000ff-1");
    }

    #[tokio::test]
    async fn a_caller_that_gives_up_asks_another_endpoint_next() {
        let endpoints = Endpoints::new(vec!["a:1".parse().unwrap(), "b:1".parse().unwrap()]).unwrap();
        let preferred = || endpoints.shared.preferred.load(Ordering::Relaxed);
        // Waits no longer than it takes to ask.
        let call = |hangs: bool| {
            let answer = endpoints.call(Repeat::Forbidden, KEEP_ALIVE, move |_, _| async move {
                if hangs { std::future::pending().await } else { Ok::<_, Status>(()) }
            });
            answer.now_or_never().is_some()
        };
        assert!(call(false));
        assert_eq!(preferred(), 0, "it answered");
        assert!(!call(true));
        assert_eq!(preferred(), 1);
        assert!(call(false));
        assert_eq!(preferred(), 1, "it answered");
    }

    #[test]
    fn no_endpoint_is_an_error() {
        assert!(matches!(Endpoints::with_client_id(Vec::new(), 0), Err(Error::NoEndpoints)));
    }
}
