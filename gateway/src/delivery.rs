//! Responses in transmission: the bytes stay charged until the transport has sent them.
//!
//! ```text
//! handler ─ charge ─▶ CallCharges ─▶ ChargedBody ─ a piece with its charge ─▶ transport ─▶ hyper, h2 ─▶ socket
//! ```

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use http_body::{Body as _, Frame, SizeHint};
use millrace_types::Failure;

use crate::budget::{BudgetShare, ByteCharge};
use crate::framing::CallCharges;

/// Size in bytes below which a piece carries no charge, because it costs no more than the
/// connection's own record of the piece.
const CARRIED_MIN: usize = 4 << 10;

/// Charges a complete response that has no charge yet.
///
/// # Errors
/// `BYTE_BUDGET_EXCEEDED`: the response must not be delivered.
pub(crate) fn charge_answer(
    response: &Response<Body>,
    ledger: &CallCharges,
    share: &BudgetShare,
) -> Result<(), Failure> {
    let len = response.body().size_hint().exact().unwrap_or(0);
    if len >= CARRIED_MIN as u64 && !ledger.has_answered() {
        ledger.answer(share.try_take(len).map_err(Failure::after_execution)?);
    }
    Ok(())
}

/// Keeps the bytes of a response charged until sent.
pub(crate) fn deliver(response: Response<Body>, ledger: &CallCharges, share: &BudgetShare) -> Response<Body> {
    if response.body().is_end_stream() {
        return response;
    }
    response.map(|inner| {
        Body::new(ChargedBody { inner, ledger: ledger.clone(), share: share.clone(), charge: None })
    })
}

/// A body that attaches charges to the pieces.
struct ChargedBody {
    inner: Body,
    ledger: CallCharges,
    share: BudgetShare,
    /// Charge of the bytes that the inner body has not returned yet.
    charge: Option<ByteCharge>,
}

/// A piece of a response with its charge. Both are freed together after the connection wrote the piece.
struct ChargedPiece {
    piece: Bytes,
    _charge: ByteCharge,
}

impl AsRef<[u8]> for ChargedPiece {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl ChargedBody {
    /// Attaches a piece's part of the charge.
    fn carry(&mut self, piece: Bytes) -> Result<Bytes, Failure> {
        if let Some(answered) = self.ledger.take_answered() {
            // The rest of the previous responses' charge was attached to their pieces.
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
        Ok(Bytes::from_owner(ChargedPiece { piece, _charge: charge }))
    }
}

impl http_body::Body for ChargedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) else {
            // All charges so far were attached to pieces.
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
