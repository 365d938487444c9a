//! The response of an inference over REST: JSON, followed by the outputs in binary.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Response};
use http_body::{Frame, SizeHint};
use millrace_types::{Failure, Reason};
use serde::Serialize;

use super::elements::{self, FlatJsonArray};
use super::error::JSON;
use super::request::{HEADER_LENGTH, ResponseForm};
use crate::backend::NamedTensor;
use crate::budget::ByteCharge;
use crate::compression::{COMPRESS_APART_MIN, COMPRESS_MIN, compressed};
use crate::decompression::ContentEncoding;
use crate::handler::InferenceHandler;
use crate::handler::InferenceResponse;

const BINARY: HeaderValue = HeaderValue::from_static("application/octet-stream");
/// Bytes of JSON that are not charged, because every response has some.
const JSON_FREE: usize = 1 << 10;

#[derive(Serialize)]
struct ResponseJson<'a> {
    model_name: &'a str,
    model_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    outputs: Vec<Output<'a>>,
}

#[derive(Serialize)]
struct Output<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: &'a [i64],
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<BinarySize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<FlatJsonArray<'a>>,
}

#[derive(Serialize)]
struct BinarySize {
    binary_data_size: usize,
}

/// The body of a response: the pieces, and the length of the JSON if binary outputs follow.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Encoded {
    pieces: VecDeque<Bytes>,
    json_len: Option<usize>,
}

/// Returns the number of output bytes that are written as JSON.
pub(crate) fn json_data_len(answer: &InferenceResponse, form: &ResponseForm) -> usize {
    let is_binary = |at: usize| form.binary.get(at).copied().unwrap_or(false);
    let outputs = answer.completion.outputs.iter().enumerate();
    outputs.filter(|&(at, _)| !is_binary(at)).map(|(_, output)| output.data.len()).sum()
}

/// Encodes a response. The growing JSON is added to the charge.
pub(crate) fn encode(
    answer: &InferenceResponse,
    form: &ResponseForm,
    charge: &mut ByteCharge,
) -> Result<Encoded, Failure> {
    let tensors = &answer.completion.outputs;
    let is_binary = |at: usize| form.binary.get(at).copied().unwrap_or(false);
    let output = |(at, tensor): (usize, &'_ NamedTensor)| -> Result<(), Failure> {
        if is_binary(at) || elements::is_finite(tensor) {
            return Ok(());
        }
        let message = format!(
            "output {:?} has NaN or infinity, which JSON cannot represent: request binary_data, or use gRPC",
            tensor.name
        );
        Err(Failure::new(Reason::InvalidOutput, message).after_execution())
    };
    tensors.iter().enumerate().try_for_each(output)?;
    let outputs = tensors.iter().enumerate().map(|(at, tensor)| Output {
        name: &tensor.name,
        datatype: tensor.datatype.as_str(),
        shape: &tensor.shape,
        parameters: is_binary(at).then_some(BinarySize { binary_data_size: tensor.data.len() }),
        data: (!is_binary(at)).then_some(FlatJsonArray(tensor)),
    });
    let written = ResponseJson {
        model_name: answer.model.key.name.as_str(),
        model_version: answer.model.revision.to_string(),
        id: form.id.as_deref(),
        outputs: outputs.collect(),
    };
    let mut json = ChargedJson { text: Vec::with_capacity(JSON_FREE), charge, refused: None };
    if let Err(error) = serde_json::to_writer(&mut json, &written) {
        let ours = || Failure::new(Reason::Internal, format!("cannot write the response: {error}"));
        return Err(json.refused.unwrap_or_else(ours));
    }
    let json = json.text;
    let binary =
        tensors.iter().enumerate().filter(|&(at, _)| is_binary(at)).map(|(_, tensor)| tensor.data.clone());
    let json_len = form.binary.contains(&true).then_some(json.len());
    let pieces = std::iter::once(Bytes::from(json)).chain(binary).collect();
    Ok(Encoded { pieces, json_len })
}

/// A JSON buffer that is charged before each allocation.
struct ChargedJson<'a> {
    text: Vec<u8>,
    charge: &'a mut ByteCharge,
    /// Failure because of which the JSON was not written.
    refused: Option<Failure>,
}

impl io::Write for ChargedJson<'_> {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        let capacity = self.text.capacity();
        let len = self.text.len() + piece.len();
        if len > capacity {
            let wanted = len.max(2 * capacity);
            if let Err(refused) = self.charge.grow((wanted - capacity) as u64) {
                self.refused = Some(refused.after_execution());
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            self.text.reserve_exact(wanted - self.text.len());
        }
        self.text.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Builds the HTTP response, compressed if the client accepts that. Also returns the charge of the response.
pub(crate) async fn response(
    front: &InferenceHandler,
    encoded: Encoded,
    headers: &HeaderMap,
    mut charge: ByteCharge,
) -> Result<(Response<Body>, ByteCharge), Failure> {
    let Encoded { pieces, json_len } = encoded;
    let len: usize = pieces.iter().map(Bytes::len).sum();
    let encoding = (len >= COMPRESS_MIN).then(|| accepted(headers)).flatten();
    let body = match encoding {
        None => Body::new(PieceBody(pieces)),
        Some(encoding) if len < COMPRESS_APART_MIN => Body::from(compressed(encoding, pieces)?),
        Some(encoding) => {
            // The charge moves along, because the work continues when the call is cancelled.
            let compress = move || (compressed(encoding, pieces), charge);
            let (done, returned) = front.convert(len, compress).await.map_err(Failure::after_execution)?;
            charge = returned;
            Body::from(done?)
        }
    };
    let mut response = Response::new(body);
    let kind = if json_len.is_some() { BINARY } else { JSON };
    response.headers_mut().insert(CONTENT_TYPE, kind);
    if let Some(json_len) = json_len {
        response.headers_mut().insert(HEADER_LENGTH, HeaderValue::from(json_len));
    }
    if let Some(encoding) = encoding {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(encoding.name()));
    }
    Ok((response, charge))
}

/// Returns the compression for a client: gzip, then deflate, unless the client gives it the weight 0.
fn accepted(headers: &HeaderMap) -> Option<ContentEncoding> {
    let listed = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let names = listed.flat_map(|list| list.split(',')).filter_map(|entry| {
        let (name, weight) = entry.split_once(';').unwrap_or((entry, "q=1"));
        let refused = weight.trim().strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0));
        (!refused).then(|| name.trim().to_ascii_lowercase())
    });
    let names: Vec<_> = names.collect();
    [ContentEncoding::Gzip, ContentEncoding::Deflate]
        .into_iter()
        .find(|encoding| names.iter().any(|name| name == encoding.name()))
}

/// A body of known pieces, which are sent without a copy and with a known length.
struct PieceBody(VecDeque<Bytes>);

impl http_body::Body for PieceBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|piece| piece.len() as u64).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_accepted_compression_is_chosen() {
        let chosen = |accept: &'static str| {
            accepted(&HeaderMap::from_iter([(ACCEPT_ENCODING, accept.parse().unwrap())]))
        };
        assert_eq!(chosen("gzip"), Some(ContentEncoding::Gzip));
        assert_eq!(chosen("deflate"), Some(ContentEncoding::Deflate));
        assert_eq!(chosen("deflate, GZIP;q=0.5"), Some(ContentEncoding::Gzip));
        assert_eq!(chosen("gzip;q=0, deflate"), Some(ContentEncoding::Deflate));
        assert_eq!(chosen("br, identity"), None);
        assert_eq!(accepted(&HeaderMap::new()), None);
    }
}
