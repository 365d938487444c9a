//! Sources of incoming connections.

use std::io;
use std::net::SocketAddr;

use futures::future::BoxFuture;
use futures::{Stream, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Handle;

use crate::priority;

/// Length of the kernel's listen queue; the kernel caps the length at `net.core.somaxconn`. With
/// tokio's default of 128, a client that connects together with hundreds of others waits a second
/// until the kernel tries again.
const LISTEN_QUEUE_MAX: u32 = 4096;

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

/// A listener that takes its connections from a stream. All connections have the same address. For
/// simulated networks.
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
