//! turmoil's simulated TCP, adapted to tonic's connections.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use turmoil::net::{TcpListener, TcpStream};

/// An accepted connection.
pub(crate) struct Accepted(TcpStream);

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// Returns the connections to a port of this host.
pub(crate) async fn incoming(port: u16) -> io::Result<impl Stream<Item = io::Result<Accepted>> + Send> {
    let listener = TcpListener::bind(("0.0.0.0", port)).await?;
    Ok(async_stream::stream! {
        loop {
            yield listener.accept().await.map(|(stream, _)| Accepted(stream));
        }
    })
}

/// Returns a channel that connects at the first use.
pub(crate) fn dial(endpoint: &Endpoint) -> Channel {
    let connect = |to: Uri| async move {
        let host = to.host().ok_or(io::ErrorKind::InvalidInput)?;
        let port = to.port_u16().ok_or(io::ErrorKind::InvalidInput)?;
        TcpStream::connect((host, port)).await.map(TokioIo::new)
    };
    endpoint.connect_with_connector_lazy(tower::service_fn(connect))
}
