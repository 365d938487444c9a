//! A served port: its accept loop, and its shutdown.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::ORIGIN;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tower::{Service, ServiceExt as _};

use crate::accepted::{AcceptedConnection, PortConnection, closing};
use crate::connection::{ConnectionState, PeerAddress};
use crate::listener::Listener;
use crate::message_limits::{ArrivingBytes, ArrivingMessages, StatusBuilder};
use crate::response_body::ResponseBody;
use crate::server_config::ServerConfig;
use crate::table::{ConnectionTable, SlotRefusal};
use crate::violations::PortViolations;

/// Connections accepted in a row before the accept loop yields to the other tasks of its thread.
const ACCEPTED_AT_ONCE: u32 = 16;
/// Wait before the next accept after the process ran out of descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Interval at which a full port with only busy connections is checked for a free slot.
const ROOM_LOOK_EVERY: Duration = Duration::from_millis(100);

/// A served port. Dropping this value closes the port and cuts its connections.
#[derive(Debug)]
pub struct ServedPort {
    closing: watch::Sender<bool>,
    accepting: JoinHandle<JoinSet<()>>,
}

impl ServedPort {
    /// Stops accepting connections and requests, waits up to `grace` for the requests under way, and
    /// then cuts the remaining connections. Returns the number of cut connections.
    pub async fn close(mut self, grace: Duration) -> usize {
        self.closing.send_replace(true);
        let Ok(mut connections) = (&mut self.accepting).await else { return 0 };
        let drained = async { while connections.join_next().await.is_some() {} };
        // A timeout is no error here: the remaining connections are counted below.
        if timeout(grace, drained).await.is_err() {
            tracing::warn!(left = connections.len(), "connections were cut short");
        }
        let left = connections.len();
        connections.shutdown().await;
        left
    }
}

impl Drop for ServedPort {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Serves `listener` with a service for other processes. A request from a web page is refused with
/// 403, and messages arrive within bounds ([`ArrivingMessages`]). See [`serve`].
pub fn serve_service<L, S, B>(
    listener: L,
    config: ServerConfig,
    service: S,
    refuse: StatusBuilder,
) -> ServedPort
where
    L: Listener,
    S: MessageService<B>,
    S::Future: Send + 'static,
    B: ResponseBody + Default,
{
    let arriving = ArrivingBytes::new(&config, refuse);
    serve(listener, config, move |_peer| {
        let service = service.clone();
        let arriving = arriving.clone();
        move |request: Request<_>| respond(service.clone(), request.map(|body| arriving.messages(body)))
    })
}

/// Serves `listener` with a service until the returned future is dropped, which frees the port at once.
pub async fn serve_while_polled<L, S, B>(listener: L, config: ServerConfig, service: S, refuse: StatusBuilder)
where
    L: Listener,
    S: MessageService<B>,
    S::Future: Send + 'static,
    B: ResponseBody + Default,
{
    let (_open, closed) = watch::channel(false);
    let arriving = ArrivingBytes::new(&config, refuse);
    let connected = move |_peer| {
        let service = service.clone();
        let arriving = arriving.clone();
        move |request: Request<_>| respond(service.clone(), request.map(|body| arriving.messages(body)))
    };
    accept(listener, config, connected, closed).await;
}

/// A service that accepts gRPC messages.
pub trait MessageService<B>:
    Service<Request<ArrivingMessages<Incoming>>, Response = Response<B>, Error = Infallible>
    + Clone
    + Send
    + 'static
{
}

impl<B, S> MessageService<B> for S where
    S: Service<Request<ArrivingMessages<Incoming>>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static
{
}

/// Returns the response of a service that cannot fail. Refuses requests from web pages, which
/// browsers mark with `Origin`.
async fn respond<S, B>(service: S, request: Request<ArrivingMessages<Incoming>>) -> Response<B>
where
    S: MessageService<B>,
    B: Default,
{
    if request.headers().contains_key(ORIGIN) {
        let mut refused = Response::new(B::default());
        *refused.status_mut() = StatusCode::FORBIDDEN;
        return refused;
    }
    match service.oneshot(request).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    }
}

/// Serves `listener` on the current runtime. `connected` creates a handler for each connection, and
/// the handler lives as long as its connection.
pub fn serve<L, C, H, F, B>(listener: L, config: ServerConfig, connected: C) -> ServedPort
where
    L: Listener,
    C: Fn(PeerAddress) -> H + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: ResponseBody,
{
    let (closing, closed) = watch::channel(false);
    let accepting = tokio::spawn(accept(listener, config, connected, closed));
    ServedPort { closing, accepting }
}

/// Accepts connections until the port closes, and returns the connections that are open at that time.
async fn accept<L, C, H, F, B>(
    mut listener: L,
    config: ServerConfig,
    connected: C,
    closed: watch::Receiver<bool>,
) -> JoinSet<()>
where
    L: Listener,
    C: Fn(PeerAddress) -> H + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: ResponseBody,
{
    let config = Arc::new(config);
    let table = ConnectionTable::new(config.port);
    let conducts = PortViolations::new(config.port);
    let roomy = Arc::new(Semaphore::new(config.roomy_max()));
    let mut connections = JoinSet::new();
    let mut closing = std::pin::pin!(closing(closed.clone()));
    // An accepted connection that waits for a slot. Further connections stay in the listen queue in
    // the meantime.
    let mut newcomer: Option<(L::Io, SocketAddr)> = None;
    let mut accepted_at_once = 0;
    loop {
        if accepted_at_once == ACCEPTED_AT_ONCE {
            accepted_at_once = 0;
            tokio::task::yield_now().await;
        }
        if let Some((io, address)) = newcomer.take() {
            let watched = ConnectionState::new();
            let conduct = conducts.of(address.ip());
            match table.take(address.ip(), &watched) {
                Ok(slot) => {
                    let handler = connected(PeerAddress { address });
                    let waits_behind = conduct.is_distrusted() || slot.is_among_silent();
                    let config = config.clone();
                    let closed = closed.clone();
                    let connection = PortConnection { address, watched, conduct, config, closed, slot };
                    let accepted = AcceptedConnection { connection, handler, roomy: roomy.clone() };
                    match waits_behind.then(L::low_priority).flatten() {
                        Some(behind) => {
                            let served = accepted.serve_behind::<L, _, _>(io, Handle::current());
                            connections.spawn_on(served, behind)
                        }
                        None => connections.spawn(accepted.serve(io)),
                    };
                }
                Err(SlotRefusal::AddressFull) => {
                    conduct.violated();
                    tracing::debug!(%address, "refused a connection: its address is at its cap");
                }
                Err(SlotRefusal::PortFull) => {
                    table.displace();
                    newcomer = Some((io, address));
                }
            }
        }
        tokio::select! {
            accepted = listener.accept(), if newcomer.is_none() => match accepted {
                Ok(accepted) => {
                    newcomer = Some(accepted);
                    accepted_at_once += 1;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                }
            },
            // Reaps finished connections at once, so that the set does not grow and a failed task is logged.
            Some(finished) = connections.join_next() => if let Err(error) = finished {
                tracing::error!(%error, "a connection's task failed");
            },
            // Retries with the waiting connection: a busy connection may have become idle.
            () = tokio::time::sleep(ROOM_LOOK_EVERY), if newcomer.is_some() => {}
            () = closing.as_mut() => return connections,
        }
    }
}
