//! A port that is served: its bounds, its accept loop, and its end.

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

use crate::accepted::{Accepted, PortConnection};
use crate::arriving::{ArrivingBytes, ArrivingMessages, Refuse};
use crate::conduct::{AddressConduct, PortConduct};
use crate::connection::{Peer, Watched};
use crate::pace::MinimumRate;
use crate::priority;
use crate::reading::StreamExecutor;
use crate::table::{ConnectionTable, Refused};

/// Connections that the kernel keeps for a port until they are accepted; at most `net.core.somaxconn`. With
/// tokio's 128, whoever connects while others do by the hundred waits a second for the kernel's next attempt.
const LISTEN_QUEUE_MAX: u32 = 4096;
/// Connections accepted one after the other, until other tasks of the thread have a turn.
const ACCEPTED_AT_ONCE: u32 = 16;
/// Wait after the process ran out of descriptors, before the next connection is accepted.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Interval between two looks for a slot while every connection of a full port is busy.
const ROOM_LOOK_EVERY: Duration = Duration::from_millis(100);
/// Share of a port's connections that one address off loopback may have: one in this many.
const ADDRESS_SHARE: usize = 4;
/// Most bytes of an HTTP/1.1 request's head, and of its body that wait to be read.
const HTTP1_BUFFER_MAX: usize = 64 << 10;
/// Most bytes of an HTTP/2 request's headers.
const HEADER_LIST_MAX: u32 = 16 << 10;
/// Largest HTTP/2 frame that is accepted. Large tensors come in fewer pieces.
const FRAME_MAX: u32 = 256 << 10;
/// The window of an HTTP/2 connection before anything is agreed on: none can have less.
const NARROW_WINDOW: u32 = 65_535;
/// Most bytes of an answer that are buffered for one HTTP/2 stream.
const SEND_BUFFER_MAX: usize = 1 << 20;

/// Most connections of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortLimits {
    /// Open connections. Further ones displace idle ones, or wait in the listen queue.
    pub connections_max: usize,
    /// Open connections of one address, loopback included. `None`: a quarter of `connections_max`
    /// for each address off loopback, and no cap on loopback.
    pub address_max: Option<usize>,
}

impl PortLimits {
    /// `connections_max` connections, with the default cap by address.
    #[must_use]
    pub const fn new(connections_max: usize) -> Self {
        Self { connections_max, address_max: None }
    }

    /// Most connections of this address.
    pub(crate) fn address_max_of(&self, address: IpAddr) -> Option<usize> {
        let off_loopback = !address.to_canonical().is_loopback();
        self.address_max.or_else(|| off_loopback.then(|| self.connections_max.div_ceil(ADDRESS_SHARE)))
    }
}

/// Bounds of a server. `opening_max`, `head_max` and `idle_max` are judged in this order, and each is
/// at most as long as the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Connections of the port.
    pub port: PortLimits,
    /// Time for a connection's first bytes: HTTP/2's preface with the SETTINGS frame's head, or the first byte of
    /// an HTTP/1.1 request.
    pub opening_max: Duration,
    /// Time for a request's head, and for an idle HTTP/1.1 connection.
    pub head_max: Duration,
    /// Time without a request under way after which a connection ends.
    pub idle_max: Duration,
    /// Concurrent calls on one HTTP/2 connection.
    pub streams_max: u32,
    /// Bytes of one HTTP/2 stream that may be on their way unread.
    pub stream_window: u32,
    /// The same for one HTTP/2 connection.
    pub connection_window: u32,
    /// Most bytes that the windows of a port's connections have together. Connections beyond that have a
    /// window of 64 KiB each, for which HTTP/2 has no smaller one.
    pub windows_max: u32,
    /// Interval between the questions to a quiet HTTP/2 peer whether it is there.
    pub keep_alive_every: Duration,
    /// Time in which such a peer has to answer.
    pub keep_alive_max: Duration,
    /// How slowly a client may take answers and, to a port for other processes, send messages that have
    /// begun. `None`: as slowly as it likes.
    pub minimum_rate: Option<MinimumRate>,
    /// To a port for other processes: bytes of all messages that are arriving.
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
    /// Connections that have the windows asked for.
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

    /// HTTP/2 with the windows asked for if the connection is `roomy`.
    pub(crate) fn http2(&self, roomy: bool, conduct: AddressConduct) -> http2::Builder<StreamExecutor> {
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

/// The body of an answer, as HTTP needs it.
pub trait AnswerBody:
    Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + Unpin + 'static
{
}

impl<B> AnswerBody for B where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + Unpin + 'static
{
}

/// Hands out connections.
pub trait Listener: Send + 'static {
    /// A connection's bytes.
    type Io: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Waits for the next connection.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<(Self::Io, SocketAddr)>>;

    /// The runtime that serves connections of distrusted addresses. `None`: the same that serves all.
    fn low_priority() -> Option<&'static Handle> {
        None
    }

    /// Moves a connection to this runtime, which is told of its bytes from now on.
    ///
    /// # Errors
    /// As the operating system says. The connection is closed then.
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

/// Connections that a stream hands out, all from one address: a simulated network's.
#[derive(Debug)]
pub struct StreamListener<S> {
    /// The connections.
    pub connections: S,
    /// The address that they count for.
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
                // The network is gone: nobody comes any more.
                None => std::future::pending().await,
            }
        })
    }
}

/// A port that is served. Dropping this closes the port and cuts its connections.
#[derive(Debug)]
pub struct Serving {
    closing: watch::Sender<bool>,
    accepting: JoinHandle<JoinSet<()>>,
}

impl Serving {
    /// Stops taking connections and requests, waits up to `grace` for the requests under way, then
    /// cuts what is left. Returns how many connections were cut.
    pub async fn close(mut self, grace: Duration) -> usize {
        self.closing.send_replace(true);
        let Ok(mut connections) = (&mut self.accepting).await else { return 0 };
        let drained = async { while connections.join_next().await.is_some() {} };
        // The rest is counted below.
        if timeout(grace, drained).await.is_err() {
            tracing::warn!(left = connections.len(), "connections were cut short");
        }
        let left = connections.len();
        connections.shutdown().await;
        left
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Listens on an address, and returns the one that it got: another one for port 0. Must be called within a
/// runtime, which is then the listener's.
///
/// # Errors
/// As the operating system says; [`io::ErrorKind::AddrInUse`] for one.
pub fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A server that starts again has its port at once, as with `TcpListener::bind`.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(LISTEN_QUEUE_MAX)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Serves `listener` with one service for other processes: a request of a web page is refused with 403, and
/// messages arrive within bounds ([`ArrivingMessages`]). See [`serve`].
pub fn serve_service<L, S, B>(listener: L, config: ServerConfig, service: S, refuse: Refuse) -> Serving
where
    L: Listener,
    S: MessageService<B>,
    S::Future: Send + 'static,
    B: AnswerBody + Default,
{
    let arriving = ArrivingBytes::new(&config, refuse);
    serve(listener, config, move |_peer| {
        let (service, arriving) = (service.clone(), arriving.clone());
        move |request: Request<_>| ask(service.clone(), request.map(|body| arriving.messages(body)))
    })
}

/// Serves `listener` with one service until this is dropped: the port is free at once then.
pub async fn serve_while_polled<L, S, B>(listener: L, config: ServerConfig, service: S, refuse: Refuse)
where
    L: Listener,
    S: MessageService<B>,
    S::Future: Send + 'static,
    B: AnswerBody + Default,
{
    let (_open, closed) = watch::channel(false);
    let arriving = ArrivingBytes::new(&config, refuse);
    let connected = move |_peer| {
        let (service, arriving) = (service.clone(), arriving.clone());
        move |request: Request<_>| ask(service.clone(), request.map(|body| arriving.messages(body)))
    };
    accept(listener, config, connected, closed).await;
}

/// A service that takes gRPC messages.
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

/// The answer of a service that cannot fail. A web page gets none: browsers name the page in `Origin`.
async fn ask<S, B>(service: S, request: Request<ArrivingMessages<Incoming>>) -> Response<B>
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

/// Serves `listener` on the current runtime. `connected` makes the handler of each connection, which
/// lives as long as the connection does.
pub fn serve<L, C, H, F, B>(listener: L, config: ServerConfig, connected: C) -> Serving
where
    L: Listener,
    C: Fn(Peer) -> H + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: AnswerBody,
{
    let (closing, closed) = watch::channel(false);
    let accepting = tokio::spawn(accept(listener, config, connected, closed));
    Serving { closing, accepting }
}

/// Takes connections until the port closes. Returns those that are open then.
async fn accept<L, C, H, F, B>(
    mut listener: L,
    config: ServerConfig,
    connected: C,
    closed: watch::Receiver<bool>,
) -> JoinSet<()>
where
    L: Listener,
    C: Fn(Peer) -> H + Send + 'static,
    H: Fn(Request<Incoming>) -> F + Send + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: AnswerBody,
{
    let config = Arc::new(config);
    let table = ConnectionTable::new(config.port);
    let conducts = PortConduct::new(config.port);
    let roomy = Arc::new(Semaphore::new(config.roomy_max()));
    let mut connections = JoinSet::new();
    let mut closing = std::pin::pin!(begun(closed.clone()));
    // Accepted, and waiting for a slot. Further ones stay in the listen queue meanwhile.
    let mut newcomer: Option<(L::Io, SocketAddr)> = None;
    let mut accepted_at_once = 0;
    loop {
        if accepted_at_once == ACCEPTED_AT_ONCE {
            accepted_at_once = 0;
            tokio::task::yield_now().await;
        }
        if let Some((io, address)) = newcomer.take() {
            let watched = Watched::new();
            let conduct = conducts.of(address.ip());
            match table.take(address.ip(), &watched) {
                Ok(slot) => {
                    let handler = connected(Peer { address });
                    let waits_behind = conduct.is_distrusted() || slot.is_among_silent();
                    let (config, closed) = (config.clone(), closed.clone());
                    let connection = PortConnection { address, watched, conduct, config, closed, slot };
                    let accepted = Accepted { connection, handler, roomy: roomy.clone() };
                    match waits_behind.then(L::low_priority).flatten() {
                        Some(behind) => {
                            let served = accepted.serve_behind::<L, _, _>(io, Handle::current());
                            connections.spawn_on(served, behind)
                        }
                        None => connections.spawn(accepted.serve(io)),
                    };
                }
                Err(Refused::AddressFull) => {
                    conduct.violated();
                    tracing::debug!(%address, "a connection was refused: its address has as many as it may have");
                }
                Err(Refused::PortFull) => {
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
            // Finished connections leave the set as they finish, and leave a slot.
            Some(finished) = connections.join_next() => if let Err(error) = finished {
                tracing::error!(%error, "a connection's task failed");
            },
            // A busy connection may have become idle.
            () = tokio::time::sleep(ROOM_LOOK_EVERY), if newcomer.is_some() => {}
            () = closing.as_mut() => return connections,
        }
    }
}

/// Ends once the port is closing.
pub(crate) async fn begun(mut closed: watch::Receiver<bool>) {
    // A sender that was dropped closes the port too.
    let _closing = closed.wait_for(|&closing| closing).await.is_ok();
}
