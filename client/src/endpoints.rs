//! The endpoints of a cluster's controllers, and one lazy connection to each. A call is sent to the
//! endpoint that answered last. If that endpoint fails the call, the client tries the others: see
//! [`failover`](crate::failover).

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
use crate::error::{CallFailure, Error};
use crate::failover::{FailoverRound, Pauses, RetryPolicy};

/// The HTTP/2 receive window of a stream, in bytes: a tensor of this size arrives without waiting
/// for a window update.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// The interval between pings on a busy connection, and the time limit for the reply to a ping. The
/// client therefore notices a hung or vanished server within twice this time. Used only with
/// several endpoints.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// The endpoints of a cluster. Clones share their connections.
#[derive(Clone)]
pub struct Endpoints {
    shared: Arc<Shared>,
}

struct Shared {
    connections: Vec<Connection>,
    /// The index of the connection that answered last.
    preferred: AtomicUsize,
    /// The first half of every request id. With `calls` it makes ids that are unique and, per
    /// client, ordered.
    client_id: u64,
    calls: AtomicU64,
}

struct Connection {
    address: Address,
    channel: Channel,
}

impl Endpoints {
    /// Creates endpoints from the addresses of a cluster's controllers, in the order in which to
    /// try them. Connects at the first call. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`Error::NoEndpoints`] without addresses, [`Error::NoRandomness`] when the system has no
    /// random numbers.
    pub fn new(addresses: Vec<Address>) -> Result<Self, Error> {
        Self::with_client_id(addresses, getrandom::u64().map_err(Error::NoRandomness)?)
    }

    /// Creates endpoints like [`new`](Self::new), but with a given client id, so that tests and
    /// replays can predict the ids of requests.
    ///
    /// # Errors
    /// [`Error::NoEndpoints`] without addresses.
    pub fn with_client_id(addresses: Vec<Address>, client_id: u64) -> Result<Self, Error> {
        if addresses.is_empty() {
            return Err(Error::NoEndpoints);
        }
        // Keep-alive helps only with another endpoint to fail over to. Other vendors' servers treat
        // frequent pings as an attack.
        let keep_alive = (addresses.len() > 1).then_some(KEEP_ALIVE);
        let connections =
            addresses.into_iter().map(|address| Connection::open(address, keep_alive)).collect();
        let preferred = AtomicUsize::new(0);
        let calls = AtomicU64::new(0);
        Ok(Self { shared: Arc::new(Shared { connections, preferred, client_id, calls }) })
    }

    /// Returns the addresses in the order in which they were given.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.shared.connections.iter().map(|connection| &connection.address)
    }

    /// Returns an id that no other call of any client has.
    #[must_use]
    pub fn next_id(&self) -> String {
        let call = self.shared.calls.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}-{call}", self.shared.client_id)
    }

    /// Sends a call to the preferred endpoint and, if that endpoint fails the call, to the others,
    /// all within `timeout`. While no controller leads, asks all endpoints again after a pause.
    pub(crate) async fn call<T, F, Fut>(
        &self,
        repeat: RetryPolicy,
        timeout: Duration,
        make: F,
    ) -> Result<T, Error>
    where
        F: Fn(Channel, Duration) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        let started = Instant::now();
        let mut pauses = Pauses::new(timeout);
        let mut round = FailoverRound::first(repeat, timeout);
        loop {
            if let Some(answer) = self.ask_each(&mut round, started + timeout, &make).await? {
                return Ok(answer);
            }
            round = round.next(pauses.next(started.elapsed()))?;
            tokio::time::sleep(round.pause()).await;
        }
    }

    /// Asks the endpoints in turn until one answers, or a failure is final. Returns `None` if every
    /// endpoint failed.
    async fn ask_each<T, F, Fut>(
        &self,
        round: &mut FailoverRound,
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
            let mut asked = PendingCall { endpoints: self, index, heard: false };
            let answer = make(channel.clone(), left).await;
            asked.heard = true;
            let status = match answer {
                Ok(answer) => {
                    self.shared.preferred.store(index, Ordering::Relaxed);
                    return Ok(Some(answer));
                }
                Err(status) => status,
            };
            let cause = match CallFailure::of(&status) {
                // A server that enforces the call's timeout itself may see it expire first and
                // report the call as cancelled. Nothing else cancels a call that is awaited here.
                CallFailure::Answer(failure)
                    if failure.reason == Reason::Cancelled && Instant::now() >= deadline =>
                {
                    CallFailure::TimedOut
                }
                cause => cause,
            };
            if !matches!(cause, CallFailure::Answer(_)) {
                self.leave(index);
            }
            round.failed(address, cause)?;
        }
        Ok(None)
    }

    /// Moves the preference to the next endpoint, unless another call has already moved it.
    fn leave(&self, index: usize) {
        let next = (index + 1) % self.shared.connections.len();
        let relaxed = Ordering::Relaxed;
        let _already_left = self.shared.preferred.compare_exchange(index, next, relaxed, relaxed);
    }
}

/// A call in progress at one endpoint. If the guard is dropped before an outcome arrived, the
/// caller gave up, and the next call starts at another endpoint. Otherwise, callers with a short
/// timeout would return to a hung or partitioned server forever, because they give up before
/// keep-alive notices it.
struct PendingCall<'a> {
    endpoints: &'a Endpoints,
    index: usize,
    /// Whether any outcome arrived, a broken connection included.
    heard: bool,
}

impl Drop for PendingCall<'_> {
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
    async fn ids_are_distinct_and_predictable() {
        let endpoints = Endpoints::with_client_id(vec!["a:1".parse().unwrap()], 255).unwrap();
        assert_eq!(endpoints.next_id(), "00000000000000ff-0");
        assert_eq!(endpoints.clone().next_id(), "00000000000000ff-1");
    }

    #[tokio::test]
    async fn a_caller_that_gives_up_asks_another_endpoint_next() {
        let endpoints = Endpoints::new(vec!["a:1".parse().unwrap(), "b:1".parse().unwrap()]).unwrap();
        let preferred = || endpoints.shared.preferred.load(Ordering::Relaxed);
        // Polls the call once, so a call that waits counts as given up.
        let call = |hangs: bool| {
            let answer = endpoints.call(RetryPolicy::Forbidden, KEEP_ALIVE, move |_, _| async move {
                if hangs { std::future::pending().await } else { Ok::<_, Status>(()) }
            });
            answer.now_or_never().is_some()
        };
        assert!(call(false));
        assert_eq!(preferred(), 0, "the first endpoint answered");
        assert!(!call(true));
        assert_eq!(preferred(), 1);
        assert!(call(false));
        assert_eq!(preferred(), 1, "the second endpoint answered");
    }

    #[test]
    fn no_endpoint_is_an_error() {
        assert!(matches!(Endpoints::with_client_id(Vec::new(), 0), Err(Error::NoEndpoints)));
    }
}
