//! A REST request's body: collected within the byte budget, and made plain when compressed.

use std::time::Duration;

use axum::body::Body;
use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH};
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;
use millrace_types::{Failure, Reason};
use tokio::time::timeout;

use super::error::RestError;
use crate::budget::{Charge, too_large};
use crate::front::Front;
use crate::inflate::{Encoding, Inflater, STEP};

/// How long the rest of a refused body is read and dropped. A client that is still sending when the
/// connection closes would see that, and not the refusal.
const DISCARD_FOR: Duration = Duration::from_secs(5);

/// Collects a body; its bytes stay charged while the charge lives.
pub(crate) async fn collect(
    front: &Front,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Bytes, Charge), RestError> {
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let len_max = front.limits.message_len_max();
    let mut arriving = Arriving { front, body, len_max, announced };
    let collected = match arriving.admit(headers) {
        Ok((charge, None)) => arriving.plain(charge).await,
        Ok((charge, Some(encoding))) => arriving.inflated(charge, encoding).await,
        Err(refused) => Err(refused),
    };
    if collected.is_err() {
        arriving.discard().await;
    }
    collected
}

/// The compression a body came with. Several on top of each other are not served.
fn encoding(headers: &HeaderMap) -> Result<Option<Encoding>, RestError> {
    let Some(name) = headers.get(CONTENT_ENCODING) else { return Ok(None) };
    let name = name.as_bytes().to_ascii_lowercase();
    if name.is_empty() || name == b"identity" {
        return Ok(None);
    }
    Encoding::from_name(&name).map(Some).ok_or_else(|| {
        let message = format!(
            "content-encoding {:?} is not served: send gzip, deflate or none",
            String::from_utf8_lossy(&name)
        );
        RestError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Reason::MalformedRequest, message)
    })
}

struct Arriving<'a> {
    front: &'a Front,
    body: Body,
    len_max: usize,
    /// Its length, where that is known beforehand: charged before any of it arrives.
    announced: Option<u64>,
}

impl Arriving<'_> {
    /// Decides on the body from what is known of it before it arrives.
    fn admit(&self, headers: &HeaderMap) -> Result<(Charge, Option<Encoding>), RestError> {
        let encoding = encoding(headers)?;
        if self.announced.is_some_and(|length| length > self.len_max as u64) {
            return Err(too_large("the body", self.len_max).into());
        }
        Ok((self.front.budget.try_take(self.announced.unwrap_or(0))?, encoding))
    }

    /// Reads what is left, for a while, and drops it.
    async fn discard(&mut self) {
        let rest = async { while let Some(Ok(_)) = self.body.frame().await {} };
        if timeout(DISCARD_FOR, rest).await.is_err() {
            tracing::debug!("a refused body went on for too long");
        }
    }

    /// The next piece, charged; `None` at the end.
    async fn next(&mut self, charge: &mut Charge) -> Result<Option<Bytes>, Failure> {
        let stall_max = self.front.limits.stall_max;
        loop {
            let Ok(frame) = timeout(stall_max, self.body.frame()).await else {
                let message = format!("the body stopped arriving for {stall_max:?}: send it again");
                return Err(Failure::new(Reason::TimedOut, message));
            };
            let Some(frame) = frame else { return Ok(None) };
            let frame = frame.map_err(|error| Failure::malformed(format!("the body broke off: {error}")))?;
            // Trailers say nothing here.
            let Ok(data) = frame.into_data() else { continue };
            if self.announced.is_none() {
                charge.grow(data.len() as u64)?;
            }
            return Ok(Some(data));
        }
    }

    async fn plain(&mut self, mut charge: Charge) -> Result<(Bytes, Charge), RestError> {
        let Some(first) = self.next(&mut charge).await? else { return Ok((Bytes::new(), charge)) };
        if self.announced == Some(first.len() as u64) {
            return Ok((first, charge));
        }
        // Grows with what arrives: the announced length is a client's number.
        let mut whole = BytesMut::new();
        let mut next = Some(first);
        while let Some(data) = next {
            if data.len() > self.len_max - whole.len() {
                return Err(too_large("the body", self.len_max).into());
            }
            whole.extend_from_slice(&data);
            next = self.next(&mut charge).await?;
        }
        Ok((whole.freeze(), charge))
    }

    async fn inflated(
        &mut self,
        mut charge: Charge,
        encoding: Encoding,
    ) -> Result<(Bytes, Charge), RestError> {
        let mut arrived = 0;
        // What it expands to is charged apart from what arrives.
        let mut inflater = Inflater::new(encoding, b"", self.len_max, self.front.budget.try_take(0)?);
        while let Some(mut data) = self.next(&mut charge).await? {
            arrived += data.len();
            if arrived > self.len_max {
                return Err(too_large("the body", self.len_max).into());
            }
            while !data.is_empty() {
                let step = data.len().min(STEP);
                inflater.push(&data[..step])?;
                data.advance(step);
                if !data.is_empty() {
                    // A step may have been long: let others run.
                    tokio::task::yield_now().await;
                }
            }
        }
        let (plain, plain_charge) = inflater.finish()?;
        // The compressed bytes are gone; the plain ones stay.
        Ok((plain.freeze(), plain_charge))
    }
}
