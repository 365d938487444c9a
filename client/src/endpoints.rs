//! The controllers a client knows, one lazy connection to each, and the rule for going on to the
//! next one.

use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_types::Reason;
use tokio::time::Instant;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::error::{Cause, Error};

/// How long one endpoint may take to accept a connection before the next is tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// HTTP/2 receive windows: a tensor of this size arrives without waiting for a window update.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// Where a server of clients listens: a host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    authority: String,
}

/// A text that names no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not of the form `host:port`.
    #[error("{0:?} is not an endpoint: write host:port, such as 127.0.0.1:8080 or [::1]:8080")]
    Malformed(String),
    /// TLS was asked for.
    #[error("{0:?} asks for TLS, which this version does not speak: write http:// or only host:port")]
    Tls(String),
}

impl Address {
    /// The address as an `http` URI.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// `host:port`.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.authority)
    }
}

impl FromStr for Address {
    type Err = AddressError;
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let malformed = || AddressError::Malformed(text.to_owned());
        let authority = match text.trim().split_once("://") {
            None => text.trim(),
            Some(("http" | "grpc", rest)) => rest.strip_suffix('/').unwrap_or(rest),
            Some(("https" | "grpcs", _)) => return Err(AddressError::Tls(text.to_owned())),
            Some(_) => return Err(malformed()),
        };
        let (host, port) = authority.rsplit_once(':').ok_or_else(malformed)?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let plain = !host.contains(['/', '@', '?', '#', '[', ']', ' ']) && (bracketed || !host.contains(':'));
        if host.is_empty() || !(plain || bracketed) || port.parse::<u16>().is_err() {
            return Err(malformed());
        }
        Ok(Self { authority: authority.to_owned() })
    }
}

/// What a call may do when its connection breaks after it was sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Repeat {
    /// Make it again at the next endpoint, under the same id: a second execution does no harm.
    #[default]
    Allowed,
    /// Report [`Error::ConnectionLost`]: the call may have been carried out.
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
        let connections = addresses.into_iter().map(Connection::open).collect();
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

    /// Makes a call at the preferred endpoint, and at the next where that cannot be reached. Each
    /// endpoint is tried at most once, all within `timeout`.
    pub(crate) async fn call<T, F, Fut>(&self, repeat: Repeat, timeout: Duration, make: F) -> Result<T, Error>
    where
        F: Fn(Channel, Duration) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        let deadline = Instant::now() + timeout;
        let all = &self.shared.connections;
        let first = self.shared.preferred.load(Ordering::Relaxed);
        let mut tried = Vec::new();
        let mut failure = Error::NoEndpoints;
        for index in (0..all.len()).map(|step| (first + step) % all.len()) {
            let Connection { address, channel } = &all[index];
            let left = deadline.saturating_duration_since(Instant::now());
            let status = match make(channel.clone(), left).await {
                Ok(answer) => {
                    self.shared.preferred.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(status) => status,
            };
            tried.push(address.clone());
            failure = match Cause::of(&status) {
                // A server that keeps the call's time itself may see it end first, and says cancelled:
                // nobody else cancels a call that is awaited here.
                Cause::Answer(failure)
                    if failure.reason == Reason::Cancelled && Instant::now() >= deadline =>
                {
                    return Err(Error::TimedOut { address: address.clone(), timeout });
                }
                Cause::Answer(failure) => return Err(Error::Refused(failure)),
                Cause::TimedOut => return Err(Error::TimedOut { address: address.clone(), timeout }),
                Cause::NotSent(cause) => Error::Unreachable { addresses: tried.clone(), cause },
                Cause::Broken(cause) => {
                    let lost = Error::ConnectionLost { address: address.clone(), cause };
                    match repeat {
                        Repeat::Allowed => lost,
                        Repeat::Forbidden => return Err(lost),
                    }
                }
            };
        }
        Err(failure)
    }
}

impl Connection {
    fn open(address: Address) -> Self {
        let endpoint = Endpoint::from_shared(address.uri())
            .expect("an address was checked to be host:port")
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        Self { address, channel: endpoint.connect_lazy() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_in_every_usual_form() {
        for (text, expected) in [
            ("127.0.0.1:8080", "127.0.0.1:8080"),
            ("http://localhost:80/", "localhost:80"),
            ("grpc://node-1.example:7", "node-1.example:7"),
            ("[::1]:8080", "[::1]:8080"),
            (" a:1 ", "a:1"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().authority(), expected);
        }
    }

    #[test]
    fn refuses_what_is_no_endpoint() {
        for text in
            ["", "localhost", ":80", "a:b", "a:70000", "ftp://a:1", "http://a:1/v2", "::1:80", "u@a:1"]
        {
            assert_eq!(text.parse::<Address>(), Err(AddressError::Malformed(text.to_owned())), "{text}");
        }
        assert!(matches!("https://a:1".parse::<Address>(), Err(AddressError::Tls(_))));
    }

    #[test]
    fn every_accepted_address_makes_a_uri() {
        for text in ["127.0.0.1:8080", "[::1]:8080", "a-b.c:1"] {
            assert!(Endpoint::from_shared(text.parse::<Address>().unwrap().uri()).is_ok());
        }
    }

    #[tokio::test]
    async fn ids_are_distinct_and_can_be_foretold() {
        let endpoints = Endpoints::with_client_id(vec!["a:1".parse().unwrap()], 255).unwrap();
        assert_eq!(endpoints.next_id(), "00000000000000ff-0");
        assert_eq!(endpoints.clone().next_id(), "00000000000000ff-1");
    }

    #[test]
    fn no_endpoint_is_an_error() {
        assert!(matches!(Endpoints::with_client_id(Vec::new(), 0), Err(Error::NoEndpoints)));
    }
}
