//! The body of a REST request: collected within the byte budget and at the minimum rate, and decompressed.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH};
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;
use millrace_transport::{HeldBack, MinimumRate, ProgressClock};
use millrace_types::{Failure, Reason};
use tokio::time::{timeout, timeout_at};

use super::error::RestError;
use crate::budget::{BudgetShare, ByteCharge, too_large};
use crate::bulk::{BulkThreads, unfinished};
use crate::decompression::{ContentEncoding, Inflater, STEP, STEP_HERE_MAX};
use crate::framing::too_slow;
use crate::handler::BULK_BYTES_MIN;

/// Time for which the rest of a refused body is read and dropped. If the connection closed while the
/// client was still sending, the client would see the closed connection instead of the refusal.
const DISCARD_FOR: Duration = Duration::from_secs(5);

/// The bounds of a body.
#[derive(Clone, Copy)]
pub(crate) struct RestBodyBounds<'a> {
    pub(crate) share: &'a BudgetShare,
    pub(crate) len_max: usize,
    pub(crate) minimum_rate: MinimumRate,
    pub(crate) bulk: &'a BulkThreads,
}

/// Collects a body. The bytes stay charged as long as the returned charge lives.
pub(crate) async fn collect(
    terms: RestBodyBounds<'_>,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Bytes, ByteCharge), RestError> {
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let pace = ProgressClock::begin(terms.minimum_rate);
    let mut arriving = IncomingBody { terms, body, announced, pace };
    let collected = match arriving.admit(headers) {
        Ok(None) => arriving.plain().await,
        Ok(Some(encoding)) => arriving.inflated(encoding).await,
        Err(refused) => Err(refused),
    };
    // The server waits no longer for a client that is too slow.
    if collected.as_ref().is_err_and(|error| error.failure().reason != Reason::TimedOut) {
        arriving.discard().await;
    }
    collected
}

/// Returns the compression of a body. Nested compressions are not supported.
fn encoding(headers: &HeaderMap) -> Result<Option<ContentEncoding>, RestError> {
    let Some(name) = headers.get(CONTENT_ENCODING) else { return Ok(None) };
    let name = name.as_bytes().to_ascii_lowercase();
    if name.is_empty() || name == b"identity" {
        return Ok(None);
    }
    ContentEncoding::from_name(&name).map(Some).ok_or_else(|| {
        let message = format!(
            "content-encoding {:?} is not served: send gzip, deflate or none",
            String::from_utf8_lossy(&name)
        );
        RestError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Reason::MalformedRequest, message)
    })
}

struct IncomingBody<'a> {
    terms: RestBodyBounds<'a>,
    body: Body,
    /// Length that the sender announced. Nothing is charged or allocated because of this length alone.
    announced: Option<u64>,
    pace: ProgressClock,
}

impl IncomingBody<'_> {
    /// Accepts or refuses the body by the headers. Returns the compression.
    fn admit(&self, headers: &HeaderMap) -> Result<Option<ContentEncoding>, RestError> {
        let encoding = encoding(headers)?;
        if self.announced.is_some_and(|length| length > self.terms.len_max as u64) {
            return Err(self.too_large().into());
        }
        Ok(encoding)
    }

    fn too_large(&self) -> Failure {
        too_large("the body", self.terms.len_max)
    }

    /// Reads and drops the rest of the body, for a limited time.
    async fn discard(&mut self) {
        let rest = async { while let Some(Ok(_)) = self.body.frame().await {} };
        if timeout(DISCARD_FOR, rest).await.is_err() {
            tracing::debug!("stopped reading a refused body: the client still sends");
        }
    }

    /// Returns the next piece, or `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let Ok(frame) = timeout_at(self.pace.until(), self.body.frame()).await else {
                return Err(too_slow("the body", self.terms.minimum_rate));
            };
            let Some(frame) = frame else { return Ok(None) };
            let frame = frame.map_err(|error| {
                Failure::malformed(format!("the connection failed within the body: {error}"))
            })?;
            // Trailers are ignored.
            let Ok(data) = frame.into_data() else { continue };
            self.pace.progress(data.len());
            return Ok(Some(data));
        }
    }

    async fn plain(&mut self) -> Result<(Bytes, ByteCharge), RestError> {
        let mut charge = self.terms.share.try_take(0)?;
        let Some(first) = self.next().await? else { return Ok((Bytes::new(), charge)) };
        if first.len() > self.terms.len_max {
            return Err(self.too_large().into());
        }
        charge.grow(first.len() as u64)?;
        if self.announced == Some(first.len() as u64) {
            return Ok((first, charge));
        }
        let mut held = HeldBack::default();
        held.push(first);
        while let Some(data) = self.next().await? {
            if data.len() > self.terms.len_max - held.len() {
                return Err(self.too_large().into());
            }
            charge.grow(data.len() as u64)?;
            held.push(data);
        }
        if held.len() < BULK_BYTES_MIN {
            return Ok((held.joined(), charge));
        }
        // The charge moves along, because the work continues when the call is cancelled.
        let joining = self.terms.bulk.run(move || (held.joined(), charge));
        Ok(joining.await.map_err(|error| unfinished(&error))?)
    }

    async fn inflated(&mut self, encoding: ContentEncoding) -> Result<(Bytes, ByteCharge), RestError> {
        let mut arrived = 0;
        // Compressed bytes are consumed on arrival, so only the decompressed bytes are charged.
        let mut inflater = Inflater::new(encoding, b"", self.terms.len_max, self.terms.share.try_take(0)?);
        while let Some(mut data) = self.next().await? {
            arrived += data.len();
            if arrived > self.terms.len_max {
                return Err(self.too_large().into());
            }
            while !data.is_empty() {
                let step = data.split_to(data.len().min(STEP));
                if arrived <= STEP_HERE_MAX {
                    inflater.push(&step)?;
                    continue;
                }
                let pushing = self.terms.bulk.run(move || {
                    inflater.push(&step)?;
                    Ok::<_, Failure>(inflater)
                });
                inflater = pushing.await.map_err(|error| unfinished(&error))??;
            }
        }
        let (plain, charge) = inflater.finish()?;
        Ok((plain.freeze(), charge))
    }
}
