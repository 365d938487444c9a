//! The body of a response. A request counts as under way until its response is sent.

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Version;
use http_body::{Body, Frame, SizeHint};

use crate::connection::RequestGuard;
use crate::stream_timeout::{STEP, await_client, await_server};

/// Size in bytes below which a piece of a response is handed to HTTP/2 as a whole. A smaller piece
/// costs no more than the connection's own record of the piece.
const STEPS_MIN: usize = 4 << 10;

/// The body of a response, as HTTP requires.
pub trait ResponseBody:
    Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + Unpin + 'static
{
}

impl<B> ResponseBody for B where
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Send + Unpin + 'static
{
}

/// A response's body. The request counts as under way until the body is dropped. An HTTP/2 stream is
/// reset if its client does not read the response in time (`stream_timeout`).
#[derive(Debug)]
pub struct Tracked<B> {
    body: B,
    /// Whether large pieces are handed over in steps. True over HTTP/2, where hyper asks for the next
    /// step when the client has window for the last one.
    in_steps: bool,
    /// Remainder of a piece that is handed over in several steps.
    rest: Bytes,
    _request: RequestGuard,
}

impl<B> Tracked<B> {
    pub(crate) fn new(body: B, version: Version, request: RequestGuard) -> Self {
        Self { body, in_steps: version == Version::HTTP_2, rest: Bytes::new(), _request: request }
    }

    /// Returns the next step of `rest`. The last byte is a step of its own, because hyper asks for
    /// the next step as soon as the window has room for the previous one. So the time limit covers
    /// every byte except the last.
    fn step(&mut self) -> Bytes {
        let len = self.rest.len();
        self.rest.split_to(STEP.min(len.saturating_sub(1)).max(1))
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Tracked<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.rest.is_empty() {
            let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
                await_server();
                return Poll::Pending;
            };
            let piece = match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(piece))) => piece,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            };
            if !self.in_steps || piece.len() < STEPS_MIN {
                await_client();
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            self.rest = piece;
        }
        await_client();
        let step = self.step();
        Poll::Ready(Some(Ok(Frame::data(step))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let inner = self.body.size_hint();
        let rest = self.rest.len() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}
