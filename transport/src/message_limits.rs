//! Bounds on gRPC messages while the messages arrive at a port for other processes.
//! The bounds are the bytes of all arriving messages together, the rate of each message, and the
//! silence between messages.
//!
//! tonic reserves as much memory as a message's prefix announces, and waits for the rest without a
//! time limit. Therefore tonic receives a message only when half of the message has arrived, and
//! tonic then reserves at most as many bytes again.
//!
//! The client port has a byte budget of its own instead (`millrace-gateway`). That budget also counts
//! a message after it arrived.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::pace::{DeadlineTimer, MinimumRate, ProgressClock};
use crate::server_config::ServerConfig;

/// Length of the prefix before each gRPC message: a flag for compression and a big-endian u32 length.
pub const PREFIX_LEN: usize = 5;
/// Size in bytes below which held-back pieces are copied together. A small piece on its own would
/// keep a whole buffer of its connection in memory.
const HELD_PIECE_MIN: usize = 16 << 10;

/// The held-back pieces of a message, in order.
#[derive(Debug, Default)]
pub struct HeldBack {
    pieces: VecDeque<Bytes>,
    len: usize,
    /// Small pieces that follow `pieces`, copied together.
    tail: BytesMut,
}

impl HeldBack {
    /// Appends a piece.
    pub fn push(&mut self, piece: Bytes) {
        self.len += piece.len();
        if piece.len() < HELD_PIECE_MIN {
            self.tail.extend_from_slice(&piece);
            return;
        }
        self.join();
        self.pieces.push_back(piece);
    }

    /// Returns the number of bytes held back.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is held back.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn join(&mut self) {
        if !self.tail.is_empty() {
            self.pieces.push_back(self.tail.split().freeze());
        }
    }

    /// Joins all pieces into a single buffer. Copies only if there are several pieces, and drops each
    /// piece after its copy.
    #[must_use]
    pub fn joined(self) -> Bytes {
        let len = self.len;
        let mut pieces = self.release();
        match pieces.pop_front() {
            Some(whole) if pieces.is_empty() => whole,
            first => {
                let mut joined = BytesMut::with_capacity(len);
                for piece in first.into_iter().chain(pieces) {
                    joined.extend_from_slice(&piece);
                }
                joined.freeze()
            }
        }
    }

    /// Returns all pieces, in order.
    #[must_use]
    pub fn release(mut self) -> VecDeque<Bytes> {
        self.join();
        self.pieces
    }
}

/// Builds the status of a call whose messages break a bound, in the format of the port's other errors.
pub type StatusBuilder = fn(Code, String) -> Status;

/// Reason why the server stops waiting for a call's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum ArrivalFailure {
    #[error("the messages that are arriving fill this port's {max} bytes: try again soon")]
    Full { max: u64 },
    #[error(
        "the message arrived slower than {bytes_per_sec} bytes a second for too long (tolerance {grace:?}): send it again, faster"
    )]
    Slow { grace: Duration, bytes_per_sec: u64 },
    #[error("no message and no end of the call arrived within {silence:?}: open the call again")]
    Silent { silence: Duration },
    #[error("the call ended within a message: send the whole message again")]
    CutShort,
}

impl ArrivalFailure {
    fn code(self) -> Code {
        match self {
            Self::Full { .. } => Code::ResourceExhausted,
            Self::Slow { .. } | Self::Silent { .. } => Code::DeadlineExceeded,
            Self::CutShort => Code::InvalidArgument,
        }
    }
}

/// The bytes of all messages that are arriving at a port, and the bounds on them.
#[derive(Debug)]
pub(crate) struct ArrivingBytes {
    max: u64,
    used: AtomicU64,
    minimum_rate: Option<MinimumRate>,
    /// Longest allowed silence between messages.
    silence_max: Duration,
    refuse: StatusBuilder,
}

impl ArrivingBytes {
    pub(crate) fn new(config: &ServerConfig, refuse: StatusBuilder) -> Arc<Self> {
        Arc::new(Self {
            max: config.arriving_max,
            used: AtomicU64::new(0),
            minimum_rate: config.minimum_rate,
            silence_max: config.idle_max,
            refuse,
        })
    }

    /// Wraps a body so that its messages count against the port's bounds.
    pub(crate) fn messages<B>(self: &Arc<Self>, inner: B) -> ArrivingMessages<B> {
        ArrivingMessages {
            inner,
            port: self.clone(),
            input: Bytes::new(),
            left: 0,
            charged: 0,
            held: None,
            ready: VecDeque::new(),
            has_message: false,
            pace: None,
            quiet_since: None,
            timer: DeadlineTimer::default(),
            failed: false,
        }
    }

    fn grow(&self, bytes: u64) -> Result<(), ArrivalFailure> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.max);
        let grown = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        grown.map(drop).map_err(|_used| ArrivalFailure::Full { max: self.max })
    }
}

/// A request's body whose messages arrive within the bounds of the port.
#[derive(Debug)]
pub struct ArrivingMessages<B> {
    inner: B,
    port: Arc<ArrivingBytes>,
    /// Bytes that have arrived but are not yet parsed.
    input: Bytes,
    /// Bytes of the current message that have not arrived; 0 between messages.
    left: usize,
    /// Bytes of the current message that are charged to the port.
    charged: u64,
    /// The part of the current message that has arrived, until that is at least half.
    held: Option<HeldBack>,
    /// Pieces to hand to tonic before anything else.
    ready: VecDeque<Bytes>,
    /// Whether a whole message has arrived.
    has_message: bool,
    /// Progress of the first message, or of a message that has begun. Set once the server had to wait
    /// for the message's bytes.
    pace: Option<ProgressClock>,
    /// Time since which the server waits for the next message. Set only between messages.
    quiet_since: Option<Instant>,
    timer: DeadlineTimer,
    failed: bool,
}

impl<B> ArrivingMessages<B> {
    /// Consumes as much input as belongs to a single message. Returns false if more input is needed.
    fn advance(&mut self) -> Result<bool, ArrivalFailure> {
        if self.left == 0 {
            let Some(prefix) = self.input.first_chunk::<PREFIX_LEN>() else { return Ok(false) };
            let [_, len @ ..] = *prefix;
            // A u32 plus 5 fits into a usize.
            self.left = u32::from_be_bytes(len) as usize + PREFIX_LEN;
            self.held = Some(HeldBack::default());
        }
        if self.input.is_empty() {
            return Ok(false);
        }
        let piece = self.input.split_to(self.input.len().min(self.left));
        self.port.grow(piece.len() as u64)?;
        self.charged += piece.len() as u64;
        self.left -= piece.len();
        match &mut self.held {
            None => self.ready.push_back(piece),
            Some(held) => {
                held.push(piece);
                if held.len() >= self.left {
                    self.ready.extend(self.held.take().unwrap_or_default().release());
                }
            }
        }
        if self.left == 0 {
            // From now on the handler accounts for the bytes of the message.
            self.give_back();
            self.has_message = true;
            self.pace = None;
            self.quiet_since = None;
        }
        Ok(true)
    }

    fn give_back(&mut self) {
        self.port.used.fetch_sub(std::mem::take(&mut self.charged), Ordering::Relaxed);
    }

    fn fail(&mut self, refused: ArrivalFailure) -> Status {
        self.failed = true;
        self.input = Bytes::new();
        self.held = None;
        self.ready.clear();
        self.give_back();
        (self.port.refuse)(refused.code(), refused.to_string())
    }

    /// Polls the time limits while more input is needed and none is available. Ready when the wait
    /// has lasted too long.
    fn poll_pace(&mut self, cx: &mut Context<'_>) -> Poll<ArrivalFailure> {
        let mid_message = self.left > 0 || !self.input.is_empty();
        if self.has_message && !mid_message {
            let silence_max = self.port.silence_max;
            let since = *self.quiet_since.get_or_insert_with(Instant::now);
            ready!(self.timer.poll(since + silence_max, cx));
            return Poll::Ready(ArrivalFailure::Silent { silence: silence_max });
        }
        let Some(minimum) = self.port.minimum_rate else { return Poll::Pending };
        let until = self.pace.get_or_insert_with(|| ProgressClock::begin(minimum)).until();
        ready!(self.timer.poll(until, cx));
        let MinimumRate { grace, bytes_per_sec } = minimum;
        Poll::Ready(ArrivalFailure::Slow { grace, bytes_per_sec })
    }
}

impl<B> Body for ArrivingMessages<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if this.failed {
                return Poll::Ready(None);
            }
            if let Some(piece) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            match this.advance() {
                Ok(true) => continue,
                Ok(false) => {}
                Err(refused) => return Poll::Ready(Some(Err(this.fail(refused)))),
            }
            let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(cx) else {
                let refused = ready!(this.poll_pace(cx));
                return Poll::Ready(Some(Err(this.fail(refused))));
            };
            let frame = match frame {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Poll::Ready(Some(Err(Status::from_error(error.into())))),
                None if this.left > 0 || !this.input.is_empty() => {
                    return Poll::Ready(Some(Err(this.fail(ArrivalFailure::CutShort))));
                }
                None => return Poll::Ready(None),
            };
            match frame.into_data() {
                Ok(data) => {
                    if let Some(pace) = &mut this.pace {
                        pace.progress(data.len());
                    }
                    // Only a prefix that arrived in two pieces can be left over here.
                    this.input = match this.input.is_empty() {
                        true => data,
                        false => [&this.input[..], &data[..]].concat().into(),
                    };
                }
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ready.is_empty() && self.input.is_empty() && self.left == 0 && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl<B> Drop for ArrivingMessages<B> {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream::{self, StreamExt as _};
    use http_body_util::{BodyExt as _, StreamBody};
    use proptest::prelude::*;

    use super::*;

    const RATE: MinimumRate = MinimumRate { grace: Duration::from_secs(5), bytes_per_sec: 1 << 10 };

    fn port(arriving_max: u64) -> Arc<ArrivingBytes> {
        let config = ServerConfig { arriving_max, minimum_rate: Some(RATE), ..ServerConfig::default() };
        ArrivingBytes::new(&config, Status::new)
    }

    fn message(len: usize) -> Vec<u8> {
        let len_bytes = u32::try_from(len).unwrap().to_be_bytes();
        [&[0][..], &len_bytes, &vec![7; len]].concat()
    }

    /// Returns a body of these pieces, which then ends or stays open.
    fn body(pieces: Vec<Bytes>, ends: bool) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let pieces = stream::iter(pieces.into_iter().map(|piece| Ok(Frame::data(piece))));
        let rest = if ends { stream::empty().boxed() } else { stream::pending().boxed() };
        StreamBody::new(pieces.chain(rest))
    }

    async fn next<B: Body<Data = Bytes> + Unpin>(
        messages: &mut ArrivingMessages<B>,
    ) -> Option<Result<Bytes, Status>>
    where
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Some(messages.frame().await?.map(|frame| frame.into_data().unwrap()))
    }

    #[tokio::test]
    async fn a_prefix_that_announces_much_is_held_back_until_half_is_there() {
        let whole = message(100_000);
        let port = port(1 << 20);
        let pieces = whole[..50_000].chunks(1_000).map(Bytes::copy_from_slice).collect();
        let mut messages = port.messages(body(pieces, false));
        let mut waiting = std::pin::pin!(messages.frame());
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        assert_eq!(port.used.load(Ordering::Relaxed), 50_000);
        drop(messages);
        assert_eq!(port.used.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn messages_beyond_the_ports_bytes_are_refused_and_give_theirs_back() {
        let port = port(60_000);
        let half = |len: usize| vec![Bytes::from(message(len)).slice(..len / 2)];
        let mut first = port.messages(body(half(80_000), false));
        let mut waiting = std::pin::pin!(first.frame());
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        let mut second = port.messages(body(half(80_000), false));
        let refused = next(&mut second).await.unwrap().unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(next(&mut second).await.is_none());
        assert_eq!(port.used.load(Ordering::Relaxed), 40_000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_stops_or_never_begins_is_given_up() {
        let port = port(1 << 20);
        let begun = vec![message(10).into(), Bytes::from(message(4_000)).slice(..1_000)];
        let mut messages = port.messages(body(begun, false));
        assert_eq!(next(&mut messages).await.unwrap().unwrap().len(), 15);
        let late = next(&mut messages).await.unwrap().unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        assert_eq!(port.used.load(Ordering::Relaxed), 0);
        let began = Instant::now();
        let mut silent = port.messages(body(vec![], false));
        let late = next(&mut silent).await.unwrap().unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        assert_eq!(began.elapsed().as_secs(), RATE.grace.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_may_be_silent_between_messages_as_long_as_a_connection() {
        let port = port(1 << 20);
        let mut quiet = port.messages(body(vec![message(10).into()], false));
        assert_eq!(next(&mut quiet).await.unwrap().unwrap().len(), 15);
        let began = Instant::now();
        let late = next(&mut quiet).await.unwrap().unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
        assert_eq!(began.elapsed().as_secs(), ServerConfig::default().idle_max.as_secs());
    }

    proptest! {
        #[test]
        fn messages_in_any_pieces_come_out_as_they_went_in(
            lens in proptest::collection::vec(0_usize..50_000, 0..5),
            piece in 1_usize..70_000,
            cut in 0_usize..3,
        ) {
            let mut sent: Vec<u8> = lens.into_iter().flat_map(message).collect();
            let is_whole = cut == 0 || sent.is_empty();
            sent.truncate(sent.len().saturating_sub(cut));
            let pieces = sent.chunks(piece).map(Bytes::copy_from_slice).collect();
            let port = port(1 << 20);
            let messages = port.messages(body(pieces, true));
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let collected = runtime.block_on(messages.collect());
            prop_assert_eq!(collected.is_ok(), is_whole);
            if let Ok(came) = collected {
                prop_assert_eq!(&came.to_bytes()[..], &sent[..]);
            }
            prop_assert_eq!(port.used.load(Ordering::Relaxed), 0);
        }
    }
}
