//! Joins the small writes of a flush into a single system call.
//!
//! h2 ends a vectored write after each data frame of 256 bytes or more. A gRPC response therefore
//! leaves in two writes, first headers and data, then trailers, and wakes its client twice. Here
//! small writes are buffered until the flush, or leave in front of the next large piece, which is not
//! copied.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use hyper::rt::{Read, ReadBufCursor, Write};

/// Most bytes that are buffered.
const HELD_MAX: usize = 4 << 10;

/// A connection whose small writes wait for the flush.
pub(crate) struct Coalesce<T> {
    inner: T,
    held: BytesMut,
}

impl<T> Coalesce<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self { inner, held: BytesMut::new() }
    }
}

impl<T: Write + Unpin> Coalesce<T> {
    /// Sends the buffered bytes.
    fn poll_release(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.held.is_empty() {
            let sent = ready!(Pin::new(&mut self.inner).poll_write(cx, &self.held))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.held.advance(sent);
        }
        self.held.clear();
        Poll::Ready(Ok(()))
    }
}

impl<T: Read + Unpin> Read for Coalesce<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: Write + Unpin> Write for Coalesce<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, piece: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.held.len() + piece.len() <= HELD_MAX {
            // Reserved only here, so that a connection without writes uses no memory for the buffer.
            this.held.reserve(HELD_MAX - this.held.len());
            this.held.extend_from_slice(piece);
            return Poll::Ready(Ok(piece.len()));
        }
        while !this.held.is_empty() {
            let both = [IoSlice::new(&this.held), IoSlice::new(piece)];
            let sent = ready!(Pin::new(&mut this.inner).poll_write_vectored(cx, &both))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_held = sent.min(this.held.len());
            this.held.advance(of_held);
            if sent > of_held {
                return Poll::Ready(Ok(sent - of_held));
            }
        }
        this.held.clear();
        Pin::new(&mut this.inner).poll_write(cx, piece)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_release(cx))?;
        Pin::new(&mut self.inner).poll_write_vectored(cx, pieces)
    }

    /// Returns false. h2 asks only once, and then hands over the pieces one by one, which this type can join.
    fn is_write_vectored(&self) -> bool {
        false
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_release(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_release(cx))?;
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use proptest::prelude::*;

    use super::*;

    /// A fake connection that accepts at most `at_most` bytes per call and is pending every other time.
    #[derive(Default)]
    struct Wire {
        sent: Vec<u8>,
        calls: usize,
        at_most: usize,
        ready: bool,
    }

    impl Write for Wire {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            piece: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.ready = !self.ready;
            if !self.ready {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let taken = piece.len().min(self.at_most);
            self.sent.extend_from_slice(&piece[..taken]);
            self.calls += 1;
            Poll::Ready(Ok(taken))
        }

        fn poll_write_vectored(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            pieces: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            self.poll_write(cx, &pieces.iter().flat_map(|piece| piece.to_vec()).collect::<Vec<_>>())
        }

        fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    async fn write(to: &mut Coalesce<Wire>, mut piece: &[u8]) {
        while !piece.is_empty() {
            let taken = poll_fn(|cx| Pin::new(&mut *to).poll_write(cx, piece)).await.unwrap();
            piece = &piece[taken..];
        }
    }

    async fn flush(to: &mut Coalesce<Wire>) {
        poll_fn(|cx| Pin::new(&mut *to).poll_flush(cx)).await.unwrap();
    }

    #[tokio::test]
    async fn small_writes_of_one_flush_are_one_call() {
        let mut wire = Coalesce::new(Wire { at_most: usize::MAX, ..Wire::default() });
        for piece in [b"headers".as_slice(), b"data", b"trailers"] {
            write(&mut wire, piece).await;
        }
        assert_eq!(wire.inner.calls, 0);
        flush(&mut wire).await;
        assert_eq!((wire.inner.calls, wire.inner.sent.as_slice()), (1, b"headersdatatrailers".as_slice()));
        flush(&mut wire).await;
        assert_eq!(wire.inner.calls, 1);
    }

    #[tokio::test]
    async fn a_large_piece_is_sent_together_with_the_buffered_bytes() {
        let mut wire = Coalesce::new(Wire { at_most: usize::MAX, ..Wire::default() });
        write(&mut wire, b"head").await;
        write(&mut wire, &[7; 2 * HELD_MAX]).await;
        assert_eq!((wire.inner.calls, wire.inner.sent.len()), (1, 4 + 2 * HELD_MAX));
    }

    proptest! {
        #[test]
        fn every_byte_arrives_in_order(
            pieces in proptest::collection::vec((0usize..9000, any::<bool>()), 1..20),
            at_most in 1usize..10_000,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut wire = Coalesce::new(Wire { at_most, ..Wire::default() });
                let mut expected = Vec::new();
                for (i, &(len, flushed)) in pieces.iter().enumerate() {
                    let piece: Vec<u8> = (0..len).map(|at| (at + i) as u8).collect();
                    write(&mut wire, &piece).await;
                    expected.extend(piece);
                    if flushed {
                        flush(&mut wire).await;
                        prop_assert_eq!(&wire.inner.sent, &expected);
                    }
                }
                flush(&mut wire).await;
                prop_assert_eq!(&wire.inner.sent, &expected);
                Ok(())
            })?;
        }
    }
}
