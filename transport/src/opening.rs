//! Reads the opening of a connection: the first bytes, which distinguish HTTP/2 from HTTP/1.1.
//!
//! A connection uses at most a few hundred bytes of memory until its opening has arrived. Silent
//! connections therefore cost little, even in large numbers.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};

/// The first bytes of an HTTP/2 connection.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The head of the SETTINGS frame that a client sends together with the preface (RFC 9113, 3.4).
const FRAME_HEAD_LEN: usize = 9;
const OPENING_LEN: usize = PREFACE.len() + FRAME_HEAD_LEN;

/// The version of HTTP that a connection speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HttpVersion {
    Http1,
    Http2,
}

/// The first bytes of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ConnectionOpening {
    pub(crate) version: HttpVersion,
    /// All bytes that were read. hyper reads them again through [`Replayed`].
    pub(crate) said: Bytes,
}

/// Reads until the version is known. Returns `None` if the client closed the connection first.
pub(crate) async fn read<T: AsyncRead + Unpin>(io: &mut T) -> io::Result<Option<ConnectionOpening>> {
    let mut said = [0; OPENING_LEN];
    let mut len = 0;
    loop {
        let read = io.read(&mut said[len..]).await?;
        if read == 0 {
            return Ok(None);
        }
        len += read;
        let compared = len.min(PREFACE.len());
        let version = if said[..compared] != PREFACE[..compared] {
            HttpVersion::Http1
        } else if len == OPENING_LEN {
            HttpVersion::Http2
        } else {
            continue;
        };
        return Ok(Some(ConnectionOpening { version, said: Bytes::copy_from_slice(&said[..len]) }));
    }
}

/// A connection that returns its opening again, followed by the remaining bytes.
pub(crate) struct Replayed<T> {
    said: Bytes,
    inner: T,
}

impl<T> Replayed<T> {
    pub(crate) fn new(said: Bytes, inner: T) -> Self {
        Self { said, inner }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Replayed<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.said.is_empty() {
            return Pin::new(&mut self.inner).poll_read(cx, buf);
        }
        let len = self.said.len().min(buf.remaining());
        buf.put_slice(&self.said[..len]);
        self.said.advance(len);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Replayed<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, piece: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, piece)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

    /// Returns the opening of a client that sends these bytes one by one and then closes.
    async fn opening_of(says: &[u8]) -> Option<ConnectionOpening> {
        let (mut client, mut server) = tokio::io::duplex(1);
        let says = says.to_vec();
        let client = tokio::spawn(async move {
            for byte in says {
                // Ignores errors, because the server stops reading after the opening.
                let _sent = client.write_all(&[byte]).await.is_ok();
            }
        });
        let opening = read(&mut server).await.unwrap();
        drop(server);
        client.await.unwrap();
        opening
    }

    #[tokio::test]
    async fn the_preface_and_settings_are_http2() {
        let said = [PREFACE, SETTINGS].concat();
        let opening = opening_of(&[&said, &b"more"[..]].concat()).await;
        assert_eq!(opening, Some(ConnectionOpening { version: HttpVersion::Http2, said: said.into() }));
    }

    #[tokio::test]
    async fn the_first_byte_that_is_not_of_the_preface_means_http1() {
        for (says, read) in [("GET / HTTP/1.1\r\n", 1), ("PRI * HTTP/1.1\r\n", 12), ("PROPFIND", 3)] {
            let said = Bytes::copy_from_slice(&says.as_bytes()[..read]);
            assert_eq!(
                opening_of(says.as_bytes()).await,
                Some(ConnectionOpening { version: HttpVersion::Http1, said })
            );
        }
    }

    #[tokio::test]
    async fn a_connection_that_closes_within_the_opening_has_none() {
        for len in [0, 1, PREFACE.len(), PREFACE.len() + SETTINGS.len() - 1] {
            assert_eq!(opening_of(&[PREFACE, SETTINGS].concat()[..len]).await, None, "{len}");
        }
    }

    #[tokio::test]
    async fn the_opening_is_read_again_before_later_bytes() {
        let mut replayed = Replayed::new(Bytes::from_static(b"GET /"), &b" HTTP/1.1"[..]);
        let mut read = String::new();
        let mut few = [0; 2];
        replayed.read_exact(&mut few).await.unwrap();
        replayed.read_to_string(&mut read).await.unwrap();
        assert_eq!((&few, read.as_str()), (b"GE", "T / HTTP/1.1"));
    }
}
