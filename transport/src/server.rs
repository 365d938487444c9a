//! A served port: its bounds, its accept loop, and its shutdown.

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{Stream, StreamExt as _};
use http::header::ORIGIN;
use http::{Request, Response, StatusCode};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::TokioTimer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tower::{Service, ServiceExt as _};

use crate::accepted::{AcceptedConnection, PortConnection};
use crate::connection::{ConnectionState, PeerAddress};
use crate::message_limits::{ArrivingBytes, ArrivingMessages, StatusBuilder};
use crate::pace::MinimumRate;
use crate::priority;
use crate::stream_timeout::StreamExecutor;
use crate::table::{ConnectionTable, SlotRefusal};
use crate::violations::{AddressViolations, PortViolations};

/// Length of the kernel's listen queue; the kernel caps the length at `net.core.somaxconn`. With
/// tokio's default of 128, a client that connects together with hundreds of others waits a second
/// until the kernel tries again.
const LISTEN_QUEUE_MAX: u32 = 4096;
/// Connections accepted in a row before the accept loop yields to the other tasks of its thread.
const ACCEPTED_AT_ONCE: u32 = 16;
/// Wait before the next accept after the process ran out of descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Interval at which a full port with only busy connections is checked for a free slot.
const ROOM_LOOK_EVERY: Duration = Duration::from_millis(100);
/// Divisor of the default cap per address: an address off loopback may have a quarter of a port's
/// connections.
const ADDRESS_SHARE: usize = 4;
/// Most bytes of an HTTP/1.1 request's head, and most bytes of its body that are buffered unread.
const HTTP1_BUFFER_MAX: usize = 64 << 10;
/// Most bytes of an HTTP/2 request's headers.
const HEADER_LIST_MAX: u32 = 16 << 10;
/// Largest HTTP/2 frame that is accepted, in bytes. The size is above the protocol's default so that
/// large tensors arrive in fewer pieces.
const FRAME_MAX: u32 = 256 << 10;
/// Initial window of an HTTP/2 connection in bytes, which is also the smallest possible.
const NARROW_WINDOW: u32 = 65_535;
/// Most bytes of a response that are buffered for an HTTP/2 stream.
const SEND_BUFFER_MAX: usize = 1 << 20;

/// Connection limits of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortLimits {
    /// Open connections. Further connections displace idle ones, or wait in the listen queue.
    pub connections_max: usize,
    /// Cap on the open connections of an address, loopback included. `None` caps each address off
    /// loopback at a quarter of `connections_max`, and does not cap loopback.
    pub address_max: Option<usize>,
}

impl PortLimits {
    /// Returns limits with `connections_max` connections and the default cap per address.
    #[must_use]
    pub const fn new(connections_max: usize) -> Self {
        Self { connections_max, address_max: None }
    }

    /// Returns the cap on the connections of this address, or `None` if the address has no cap.
    pub(crate) fn address_max_of(&self, address: IpAddr) -> Option<usize> {
        let off_loopback = !address.to_canonical().is_loopback();
        self.address_max.or_else(|| off_loopback.then(|| self.connections_max.div_ceil(ADDRESS_SHARE)))
    }
}

/// Bounds of a server. A connection's time limits apply in the order `opening_max`, `head_max`,
/// `idle_max`; each must be at most as long as the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Connection limits of the port.
    pub port: PortLimits,
    /// Time limit for a connection's first bytes. These are HTTP/2's preface with the head of the
    /// SETTINGS frame, or the first byte of an HTTP/1.1 request.
    pub opening_max: Duration,
    /// Time limit for a request's head, and for an idle HTTP/1.1 connection.
    pub head_max: Duration,
    /// Time without a request under way after which a connection is ended.
    pub idle_max: Duration,
    /// Most concurrent calls on an HTTP/2 connection.
    pub streams_max: u32,
    /// Flow-control window of an HTTP/2 stream, in bytes.
    pub stream_window: u32,
    /// Flow-control window of an HTTP/2 connection, in bytes.
    pub connection_window: u32,
    /// Most bytes of all connections' windows of the port together. Further connections get the
    /// smallest window that HTTP/2 allows, 64 KiB.
    pub windows_max: u32,
    /// Interval of keep-alive pings to a quiet HTTP/2 peer.
    pub keep_alive_every: Duration,
    /// Time in which the peer must answer a keep-alive ping.
    pub keep_alive_max: Duration,
    /// Minimum rate at which a client must read responses. On a port for other processes, also the
    /// minimum rate at which a client must send a message that has begun. `None` allows any rate.
    pub minimum_rate: Option<MinimumRate>,
    /// Most bytes of all messages that are arriving. Applies to a port for other processes.
    pub arriving_max: u64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            port: PortLimits::new(1024),
            opening_max: Duration::from_secs(5),
            head_max: Duration::from_secs(75),
            idle_max: Duration::from_secs(300),
            streams_max: 128,
            stream_window: 1 << 20,
            connection_window: 2 << 20,
            windows_max: 1 << 30,
            keep_alive_every: Duration::from_secs(60),
            keep_alive_max: Duration::from_secs(30),
            minimum_rate: Some(MinimumRate::PEER),
            arriving_max: 256 << 20,
        }
    }
}

impl ServerConfig {
    /// Returns the number of connections that get the configured windows.
    fn roomy_max(&self) -> usize {
        let connections = self.windows_max / self.connection_window.max(NARROW_WINDOW);
        usize::try_from(connections.max(1)).unwrap_or(1)
    }

    pub(crate) fn http1(&self) -> http1::Builder {
        let mut builder = http1::Builder::new();
        builder
            .writev(true)
            .timer(TokioTimer::new())
            .header_read_timeout(self.head_max)
            .max_buf_size(HTTP1_BUFFER_MAX);
        builder
    }

    /// Returns the HTTP/2 settings; only a `roomy` connection gets the configured windows.
    pub(crate) fn http2(&self, roomy: bool, conduct: AddressViolations) -> http2::Builder<StreamExecutor> {
        let window_max = if roomy { u32::MAX } else { NARROW_WINDOW };
        let mut builder = http2::Builder::new(StreamExecutor { minimum: self.minimum_rate, conduct });
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(self.stream_window.min(window_max))
            .initial_connection_window_size(self.connection_window.min(window_max))
            .max_frame_size(FRAME_MAX)
            .max_header_list_size(HEADER_LIST_MAX)
            .max_send_buf_size(SEND_BUFFER_MAX)
            .max_concurrent_streams(self.streams_max)
            .keep_alive_interval(self.keep_alive_every)
            .keep_alive_timeout(self.keep_alive_max);
        builder
    }
}

/// The body of a response, as HTTP requires.
pub trait ResponseBody:
    Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + Unpin + 'static
{
}

impl<B> ResponseBody for B where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + Unpin + 'static
{
}

/// A source of incoming connections.
pub trait Listener: Send + 'static {
    /// Byte stream of a connection.
    type Io: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Waits for the next connection.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<(Self::Io, SocketAddr)>>;

    /// Returns the runtime that serves connections of distrusted addresses. `None` serves all
    /// connections on the same runtime.
    fn low_priority() -> Option<&'static Handle> {
        None
    }

    /// Moves a connection to the runtime `_to`, which from then on is notified of the connection's bytes.
    ///
    /// # Errors
    /// Returns the error of the operating system. The connection is closed in that case.
    fn moved(io: Self::Io, _to: &Handle) -> io::Result<Self::Io> {
        Ok(io)
    }
}

impl Listener for TcpListener {
    type Io = TcpStream;

    fn accept(&mut self) -> BoxFuture<'_, io::Result<(TcpStream, SocketAddr)>> {
        Box::pin(async {
            let (stream, address) = TcpListener::accept(self).await?;
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, %address, "cannot set TCP_NODELAY");
            }
            Ok((stream, address))
        })
    }

    fn low_priority() -> Option<&'static Handle> {
        priority::distrusted()
    }

    fn moved(stream: TcpStream, to: &Handle) -> io::Result<TcpStream> {
        let stream = stream.into_std()?;
        let _within = to.enter();
        TcpStream::from_std(stream)
    }
}

/// A listener whose connections come from a stream and share a single address; used for simulated networks.
#[derive(Debug)]
pub struct StreamListener<S> {
    /// Stream of incoming connections.
    pub connections: S,
    /// Address that all connections count for.
    pub address: SocketAddr,
}

impl<S, IO> Listener for StreamListener<S>
where
    S: Stream<Item = io::Result<IO>> + Send + Unpin + 'static,
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    type Io = IO;

    fn accept(&mut self) -> BoxFuture<'_, io::Result<(IO, SocketAddr)>> {
        Box::pin(async {
            match self.connections.next().await {
                Some(connection) => Ok((connection?, self.address)),
                // The simulated network is gone, so no further connection can arrive.
                None => std::future::pending().await,
            }
        })
    }
}

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

/// Listens on an address, and returns the bound address, which differs for port 0. Must be called
/// within the runtime that drives the listener.
///
/// # Errors
/// Returns the error of the operating system, for example [`io::ErrorKind::AddrInUse`].
pub fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Lets a restarted server bind its port at once, as `TcpListener::bind` does.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(LISTEN_QUEUE_MAX)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
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

/// Waits until the port is closing.
pub(crate) async fn closing(mut closed: watch::Receiver<bool>) {
    // A dropped sender also closes the port.
    let _closing = closed.wait_for(|&closing| closing).await.is_ok();
}
