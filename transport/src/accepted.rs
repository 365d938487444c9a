//! A connection from its first byte to its end.
//!
//! ```text
//!   accept loop ──▶ Accepted ── opening ──▶ conversation: hyper, HTTP/1.1 or HTTP/2
//!                   on the runtime          on the runtime of the accept loop, or at a low priority
//!                   of the accept loop,     if the address is distrusted
//!                   or at a low priority
//! ```

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::GracefulConnection;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::coalesce::Coalesce;
use crate::connection::{ConnectionEnd, ConnectionState};
use crate::listener::Listener;
use crate::opening::{self, ConnectionOpening, HttpVersion, Replayed};
use crate::pace::PacedWrites;
use crate::response_body::{ResponseBody, Tracked};
use crate::server_config::ServerConfig;
use crate::table::TableSlot;
use crate::violations::AddressViolations;

/// Time that an idle connection has to close gracefully before the server cuts the connection.
const PARTING_MAX: Duration = Duration::from_secs(1);

/// An accepted connection that has a slot in the [`ConnectionTable`](crate::table::ConnectionTable).
pub(crate) struct AcceptedConnection<H> {
    pub(crate) connection: PortConnection,
    pub(crate) handler: H,
    /// Permits for connections with the configured HTTP/2 windows; connections without a permit get
    /// narrow windows.
    pub(crate) roomy: Arc<Semaphore>,
}

/// A connection's state, without its byte stream.
pub(crate) struct PortConnection {
    pub(crate) address: SocketAddr,
    pub(crate) watched: Arc<ConnectionState>,
    pub(crate) conduct: AddressViolations,
    pub(crate) config: Arc<ServerConfig>,
    /// Becomes true when the port is closing.
    pub(crate) closed: watch::Receiver<bool>,
    pub(crate) slot: TableSlot,
}

impl<H> AcceptedConnection<H> {
    /// Serves the connection on the current runtime.
    pub(crate) async fn serve<IO, F, B>(mut self, mut io: IO)
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        H: Fn(Request<Incoming>) -> F + Send + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: ResponseBody,
    {
        if let Some(opening) = self.connection.opening(&mut io).await {
            self.converse(io, opening).await;
        }
    }

    /// Reads the opening on the current runtime, which has a low priority. Then the runtime `front`
    /// serves the rest, unless the address is distrusted.
    pub(crate) async fn serve_behind<L, F, B>(mut self, io: L::Io, front: Handle)
    where
        L: Listener,
        H: Fn(Request<Incoming>) -> F + Send + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: ResponseBody,
    {
        let Some(mut io) = self.connection.moved::<L>(io, &Handle::current()) else { return };
        let Some(opening) = self.connection.opening(&mut io).await else { return };
        if self.connection.conduct.is_distrusted() {
            return self.converse(io, opening).await;
        }
        let Some(io) = self.connection.moved::<L>(io, &front) else { return };
        // A `JoinSet`, because dropping the set aborts the task.
        let mut moved = JoinSet::new();
        moved.spawn_on(self.converse(io, opening), &front);
        if let Some(Err(error)) = moved.join_next().await {
            tracing::error!(%error, "a connection's task failed");
        }
    }

    /// Serves the requests of a connection until either side ends the connection.
    /// The future is boxed because it is large: a connection that sent no opening uses no memory for
    /// the future.
    fn converse<IO, F, B>(self, io: IO, opening: ConnectionOpening) -> BoxFuture<'static, ()>
    where
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        H: Fn(Request<Incoming>) -> F + Send + 'static,
        F: Future<Output = Response<B>> + Send + 'static,
        B: ResponseBody,
    {
        let Self { connection, handler, roomy } = self;
        Box::pin(async move {
            let asked = connection.watched.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let guard = asked.begin_request();
                let version = request.version();
                let answer = handler(request);
                async move { Ok::<_, Infallible>(answer.await.map(|body| Tracked::new(body, version, guard))) }
            });
            let io = TokioIo::new(Replayed::new(opening.said, io));
            let io = Coalesce::new(PacedWrites::new(io, connection.config.minimum_rate));
            match opening.version {
                HttpVersion::Http1 => {
                    let serving = connection.config.http1().serve_connection(io, service);
                    connection.until_it_ends(serving).await;
                }
                HttpVersion::Http2 => {
                    let roomy = roomy.try_acquire_owned().ok();
                    let protocol = connection.config.http2(roomy.is_some(), connection.conduct.clone());
                    connection.until_it_ends(protocol.serve_connection(io, service)).await;
                }
            }
        })
    }
}

impl PortConnection {
    /// Moves the connection to another runtime. Returns `None` if the connection is lost.
    fn moved<L: Listener>(&self, io: L::Io, to: &Handle) -> Option<L::Io> {
        let address = self.address;
        L::moved(io, to).inspect_err(|error| tracing::debug!(%error, %address, "a connection was lost")).ok()
    }

    /// Waits for the opening. Returns `None` if the connection ends without one.
    async fn opening<IO: AsyncRead + Unpin>(&mut self, io: &mut IO) -> Option<ConnectionOpening> {
        let address = self.address;
        tokio::select! {
            read = opening::read(io) => {
                self.watched.open();
                self.slot.open();
                read.inspect_err(|error| tracing::debug!(%error, %address, "connection ended")).ok().flatten()
            }
            why = self.watched.wait_for_end(&self.config) => {
                self.tell(why);
                None
            }
            () = closing(self.closed.clone()) => None,
        }
    }

    /// Drives a connection until either side ends the connection.
    async fn until_it_ends<C>(self, serving: C)
    where
        C: GracefulConnection<Error = hyper::Error>,
    {
        let mut serving = std::pin::pin!(serving);
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = closing(self.closed.clone()) => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
            why = self.watched.wait_for_end(&self.config) => {
                self.tell(why);
                serving.as_mut().graceful_shutdown();
                let parted = timeout(PARTING_MAX, serving.as_mut()).await;
                if parted.is_err() && self.watched.is_busy() {
                    // A request began before the client received the shutdown: it is the last request.
                    let _ended = serving.await;
                }
                // A client that does not close in time is cut: the future is dropped here.
                return;
            }
        };
        if let Err(error) = ended {
            // Most of these errors are clients that disconnected.
            tracing::debug!(%error, address = %self.address, "connection ended");
            if is_violation(&error) {
                self.conduct.violated();
            }
        }
    }

    /// Logs why the connection is ended, and counts a violation if the client caused the end.
    fn tell(&self, why: ConnectionEnd) {
        tracing::debug!(address = %self.address, ?why, "a connection is ended");
        let violation = match why {
            ConnectionEnd::NoOpening | ConnectionEnd::NoRequest => true,
            ConnectionEnd::Displaced => self.watched.is_unserved(),
            ConnectionEnd::Idle => false,
        };
        if violation {
            self.conduct.violated();
        }
    }
}

/// Waits until the port is closing.
pub(crate) async fn closing(mut closed: watch::Receiver<bool>) {
    // A dropped sender also closes the port.
    let _closing = closed.wait_for(|&closing| closing).await.is_ok();
}

/// Whether a connection ended in a way that well-behaved clients do not cause.
fn is_violation(error: &hyper::Error) -> bool {
    // A timeout is no violation: a paused or distant peer may fail to answer keep-alives.
    if error.is_incomplete_message() || error.is_canceled() || error.is_closed() || error.is_timeout() {
        return false;
    }
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            // Either the client disconnected, or the client did not read the response in time (`pace`).
            return error.kind() == io::ErrorKind::TimedOut;
        }
        cause = error.source();
    }
    // The bytes were neither HTTP/1.1 nor HTTP/2.
    true
}
