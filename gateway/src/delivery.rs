//! Answers on their way out: their bytes stay charged until they have left.
//!
//! ```text
//! handler ─ charge ─▶ Ledger ─▶ Delivery ─ a piece with its charge ─▶ transport ─▶ hyper, h2 ─▶ socket
//! ```

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use http_body::{Body as _, Frame, SizeHint};
use millrace_types::Failure;

use crate::budget::{BudgetShare, Charge};
use crate::framing::Ledger;

/// Below this, a piece costs no more than the connection's own record of it: it carries no charge.
const CARRIED_MIN: usize = 4 << 10;

/// Charges an answer that is whole and that nobody has charged.
///
/// # Errors
/// `BYTE_BUDGET_EXCEEDED`: the answer must not be delivered.
pub(crate) fn charge_answer(
    response: &Response<Body>,
    ledger: &Ledger,
    share: &BudgetShare,
) -> Result<(), Failure> {
    let len = response.body().size_hint().exact().unwrap_or(0);
    if len >= CARRIED_MIN as u64 && !ledger.has_answered() {
        ledger.answer(share.try_take(len).map_err(Failure::after_execution)?);
    }
    Ok(())
}

/// Makes the bytes of an answer stay charged until they have left.
pub(crate) fn deliver(response: Response<Body>, ledger: &Ledger, share: &BudgetShare) -> Response<Body> {
    if response.body().is_end_stream() {
        return response;
    }
    response.map(|inner| {
        Body::new(Delivery { inner, ledger: ledger.clone(), share: share.clone(), charge: None })
    })
}

/// A body that gives its pieces their charges.
struct Delivery {
    inner: Body,
    ledger: Ledger,
    share: BudgetShare,
    /// Of what the inner body has not given yet.
    charge: Option<Charge>,
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
    fn carry(&mut self, piece: Bytes) -> Result<Bytes, Failure> {
        if let Some(answered) = self.ledger.take_answered() {
            // What is left of the answers before was given away with them.
            self.charge = Some(answered);
        }
        if piece.len() < CARRIED_MIN {
            return Ok(piece);
        }
        let bytes = piece.len() as u64;
        let charge = match &mut self.charge {
            Some(charge) => charge.split(bytes),
            None => self.share.try_take(bytes)?,
        };
        Ok(Bytes::from_owner(Carried { piece, _charge: charge }))
    }
}

impl http_body::Body for Delivery {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) else {
            // All that was charged so far was given away.
            self.charge = None;
            return Poll::Pending;
        };
        Poll::Ready(frame.map(|frame| {
            Ok(match frame?.into_data() {
                Ok(piece) => Frame::data(self.carry(piece).map_err(axum::Error::new)?),
                Err(trailers) => trailers,
            })
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
