//! Answers on their way out: their bytes stay charged until they have left, and a client that does
//! not take them is given up (`millrace_transport::reading`).
//!
//! ```text
//! handler ─ charge ─▶ Ledger ─▶ Delivery ─ a piece with its charge ─▶ hyper, h2 ─▶ socket
//!                                   └─ waits for the client ─▶ StreamExecutor ─▶ RST_STREAM
//! ```

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http::{Response, Version};
use http_body::{Body as _, Frame, SizeHint};
use millrace_transport::reading::{STEP, await_client, await_server};

use crate::budget::{BudgetShare, Charge};
use crate::framing::Ledger;

/// Below this, a piece costs no more than the connection's own record of it: it carries no charge.
const CARRIED_MIN: usize = 4 << 10;

/// Makes the bytes of an answer stay charged until they have left.
pub(crate) fn deliver(
    response: Response<Body>,
    version: Version,
    ledger: &Ledger,
    share: &BudgetShare,
) -> Response<Body> {
    if response.body().is_end_stream() {
        return response;
    }
    response.map(|inner| {
        Body::new(Delivery {
            inner,
            ledger: ledger.clone(),
            share: share.clone(),
            charge: None,
            in_steps: version == Version::HTTP_2,
            rest: Bytes::new(),
        })
    })
}

/// A body that gives its pieces their charges.
struct Delivery {
    inner: Body,
    ledger: Ledger,
    share: BudgetShare,
    /// Of what the inner body has not given yet.
    charge: Option<Charge>,
    /// Whether large pieces are given in steps: over HTTP/2, where the next one is asked for when the
    /// client has room for the last.
    in_steps: bool,
    /// Of a piece of several steps.
    rest: Bytes,
}

/// A piece of an answer with what it is charged: freed together, once the connection wrote it.
struct Carried {
    piece: Bytes,
    _charge: Charge,
}

impl AsRef<[u8]> for Carried {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl Delivery {
    /// Gives a piece its part of the charge.
    fn carry(&mut self, piece: Bytes) -> Bytes {
        if let Some(answered) = self.ledger.take_answered() {
            // What is left of the answers before was given away with them.
            self.charge = Some(answered);
        }
        if piece.len() < CARRIED_MIN {
            return piece;
        }
        let bytes = piece.len() as u64;
        let charge = match &mut self.charge {
            Some(charge) => charge.split(bytes),
            None => self.share.take_held(bytes),
        };
        Bytes::from_owner(Carried { piece, _charge: charge })
    }

    /// The next step of `rest`. The last byte is a step of its own: hyper gives it away when there is
    /// room for all before it, so that none but it is beyond the reach of the time kept here.
    fn step(&mut self) -> Bytes {
        let len = self.rest.len();
        self.rest.split_to(STEP.min(len.saturating_sub(1)).max(1))
    }
}

impl http_body::Body for Delivery {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) else {
                // All that was charged so far was given away.
                self.charge = None;
                await_server();
                return Poll::Pending;
            };
            let piece = match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(piece))) => piece,
                Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            };
            let piece = self.carry(piece);
            if !self.in_steps || piece.len() < CARRIED_MIN {
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
        self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let inner = self.inner.size_hint();
        let rest = self.rest.len() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}
