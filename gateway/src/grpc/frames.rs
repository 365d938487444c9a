//! The messages of a stream, each in its own memory. tonic reads and writes all messages of a stream
//! through a single buffer, which keeps the size of the largest message as long as the stream is
//! open.

use std::collections::VecDeque;
use std::pin::Pin;

use axum::body::Body;
use bytes::{BufMut as _, Bytes, BytesMut};
use futures::stream::{self, Stream, StreamExt as _};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use millrace_proto::decoding::{self, WalkLimits};
use millrace_proto::inference::{ModelInferRequest, ModelStreamInferResponse};
use millrace_proto::status::to_status;
use millrace_transport::PREFIX_LEN;
use millrace_types::Failure;
use prost::Message as _;
use tonic::Status;

use crate::compression::{COMPRESS_APART_MIN, COMPRESS_MIN, compressed};
use crate::decompression::ContentEncoding;

/// The responses of a stream, in the order of the requests.
pub(super) type ResponseStream = Pin<Box<dyn Stream<Item = Result<ModelStreamInferResponse, Status>> + Send>>;

/// Returns the requests in a body of the byte budget's layer (`framing::ChargedMessages`): uncompressed
/// messages, of which at least half has arrived when their first piece does.
pub(super) fn requests(body: Body) -> impl Stream<Item = Result<ModelInferRequest, Status>> + Send {
    stream::unfold(Some(Incoming { body, message: BytesMut::new() }), |incoming| async {
        let mut incoming = incoming?;
        match incoming.next().await {
            Some(Ok(request)) => Some((Ok(request), Some(incoming))),
            Some(Err(status)) => Some((Err(status), None)),
            None => None,
        }
    })
}

struct Incoming {
    body: Body,
    /// Bytes of the next message, including the prefix.
    message: BytesMut,
}

impl Incoming {
    async fn next(&mut self) -> Option<Result<ModelInferRequest, Status>> {
        loop {
            if let Some(message) = self.whole() {
                return Some(message.and_then(|message| {
                    decoding::decode(message, WalkLimits::PEER)
                        .map_err(|error| to_status(&Failure::malformed(error.to_string())))
                }));
            }
            match self.body.frame().await? {
                Ok(frame) => {
                    // Trailers are ignored.
                    let Ok(piece) = frame.into_data() else { continue };
                    self.message.extend_from_slice(&piece);
                    self.make_room();
                }
                Err(error) => return Some(Err(Status::from_error(error.into()))),
            }
        }
    }

    /// Reserves memory for the rest of a message that has begun. The rest is at most as long as the
    /// part that has arrived, because a prefix arrives only with half of its message.
    fn make_room(&mut self) {
        if let Some(len) = self.len_announced() {
            self.message.reserve((PREFIX_LEN + len).saturating_sub(self.message.len()));
        }
    }

    fn len_announced(&self) -> Option<usize> {
        let [_, len @ ..] = self.message.first_chunk::<PREFIX_LEN>()?;
        // A u32 fits into a usize.
        Some(u32::from_be_bytes(*len) as usize)
    }

    /// Takes the next message if it is complete. The bytes after the message move to separate memory.
    fn whole(&mut self) -> Option<Result<Bytes, Status>> {
        let end = PREFIX_LEN + self.len_announced()?;
        if self.message.len() < end {
            return None;
        }
        let rest = BytesMut::from(&self.message[end..]);
        let mut message = std::mem::replace(&mut self.message, rest).freeze();
        self.make_room();
        if message[0] != 0 {
            let text = "a message is compressed, but the call has no grpc-encoding: send that header";
            return Some(Err(to_status(&Failure::malformed(text))));
        }
        Some(Ok(message.split_off(PREFIX_LEN).slice(..end - PREFIX_LEN)))
    }
}

/// Returns a body of responses and of the final status of the stream. Responses are compressed by
/// `encoding`, as their requests were.
pub(super) fn body(answers: ResponseStream, encoding: Option<ContentEncoding>) -> Body {
    let frames = stream::unfold(Some(answers), move |answers| async move {
        let mut answers = answers?;
        let status = match answers.next().await {
            Some(Ok(answer)) => match encode(&answer, encoding) {
                Ok(frame) => return Some((Ok(Frame::data(frame)), Some(answers))),
                Err(status) => status,
            },
            Some(Err(status)) => status,
            None => Status::ok(""),
        };
        let mut trailers = HeaderMap::new();
        let ended = status.add_header(&mut trailers).map(|()| Frame::trailers(trailers));
        Some((ended, None))
    });
    Body::new(StreamBody::new(frames))
}

fn encode(answer: &ModelStreamInferResponse, encoding: Option<ContentEncoding>) -> Result<Bytes, Status> {
    let len = answer.encoded_len();
    // A longer response would take too long to compress on this thread.
    let encoding = encoding.filter(|_| (COMPRESS_MIN..COMPRESS_APART_MIN).contains(&len));
    // This allocation is safe: the server's own response is in memory, so its length is not a claim
    // of the client.
    let mut frame = BytesMut::with_capacity(PREFIX_LEN + len);
    frame.put_bytes(0, PREFIX_LEN);
    answer.encode_raw(&mut frame);
    if let Some(encoding) = encoding {
        let plain = VecDeque::from([frame.split_off(PREFIX_LEN).freeze()]);
        frame.put_slice(&compressed(encoding, plain).map_err(|failure| to_status(&failure))?);
        frame[0] = 1;
    }
    let len = u32::try_from(frame.len() - PREFIX_LEN)
        .map_err(|_| Status::out_of_range("the response has more than 4 GiB"))?;
    frame[1..PREFIX_LEN].copy_from_slice(&len.to_be_bytes());
    Ok(frame.freeze())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framed(request: &ModelInferRequest) -> Vec<u8> {
        let message = request.encode_to_vec();
        let len = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &len, &message].concat()
    }

    fn read(pieces: Vec<Bytes>) -> Vec<Result<ModelInferRequest, Status>> {
        let pieces = stream::iter(pieces.into_iter().map(Ok::<_, Status>));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(requests(Body::from_stream(pieces)).collect())
    }

    #[test]
    fn a_message_keeps_no_memory_of_another() {
        let large = ModelInferRequest {
            raw_input_contents: vec![vec![7; 1 << 20].into()],
            ..ModelInferRequest::default()
        };
        let mut incoming = Incoming { body: Body::empty(), message: BytesMut::new() };
        incoming.message.extend_from_slice(&framed(&large));
        incoming.message.extend_from_slice(&[0, 0, 0]);
        assert!(incoming.whole().unwrap().is_ok());
        assert_eq!(&incoming.message[..], [0, 0, 0]);
        assert!(incoming.message.capacity() < 1 << 10, "{}", incoming.message.capacity());
    }

    #[test]
    fn a_compressed_message_without_an_encoding_ends_the_stream() {
        let mut message = framed(&ModelInferRequest::default());
        message[0] = 1;
        let whole = framed(&ModelInferRequest::default());
        let read = read(vec![[whole.clone(), message, whole].concat().into()]);
        assert!(matches!(&read[..], [Ok(_), Err(_)]), "{read:?}");
    }

    proptest! {
        #[test]
        fn requests_in_any_pieces_are_read_in_order(
            ids in proptest::collection::vec("[a-z]{0,300}", 0..6),
            piece in 1_usize..500,
        ) {
            let requests: Vec<_> =
                ids.into_iter().map(|id| ModelInferRequest { id, ..ModelInferRequest::default() }).collect();
            let sent: Vec<u8> = requests.iter().flat_map(framed).collect();
            let came = read(sent.chunks(piece).map(Bytes::copy_from_slice).collect());
            let came: Vec<_> = came.into_iter().map(Result::unwrap).collect();
            prop_assert_eq!(came, requests);
        }
    }
}
