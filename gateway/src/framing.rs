//! The body of an incoming gRPC call: length-prefixed messages, charged to the byte budget as their
//! bytes arrive, held to the minimum rate, and decompressed.
//!
//! tonic would store a message before anything could refuse it, and would reserve as much memory as
//! its prefix announces. tonic bounds the decompressed size of a message, but not of all messages
//! together. Therefore this layer works before tonic: it passes on only decompressed messages, and a
//! prefix only after half of its message has arrived.
//!
//! Uncompressed bytes pass through without a copy, and are checked on the way. A message ends the call
//! if it would use far more memory than its bytes once it is decoded.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use millrace_proto::decoding::MessageType;
use millrace_proto::status::to_status;
use millrace_transport::{DeadlineTimer, HeldBack, MinimumRate, PREFIX_LEN, ProgressClock};
use millrace_types::{Failure, Reason};
use tonic::Status;

use crate::budget::{BudgetShare, ByteCharge, too_large};
use crate::bulk::{BulkThreads, BulkWork, unfinished};
use crate::decoded::MessageCheck;
use crate::decompression::{ContentEncoding, Inflater, STEP, STEP_HERE_MAX};

/// Bytes passed on in a row before other tasks of the thread get a turn, because tonic copies them.
const GIVEN_AT_ONCE: usize = 1 << 20;

/// Time at which a message's charge is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChargeRelease {
    /// A call of a single message. For `ModelInfer`, the charge becomes the charge of the response; for other
    /// methods, it is released when the call is answered. The client must
    /// end the call after the message: a second message is refused, and silence counts as below the
    /// minimum rate.
    WholeCall,
    /// A call of a single small message whose handler waits long, for example for events. The charge
    /// is released once the message is decoded.
    UntilDecoded,
    /// A stream whose handler has finished a message when it asks for the next one. A message waits
    /// until its bytes would fit before any of them is charged.
    UntilNext,
    /// A stream whose handler works on several messages at a time and claims the charge of each
    /// message. A message waits until its bytes would fit before any of them is charged.
    UntilClaimed,
}

/// The charges of a call. Dropping the last clone releases all charges.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallCharges(Arc<Mutex<Charges>>);

#[derive(Debug, Default)]
struct Charges {
    /// Charges of messages that arrived, oldest first.
    arrived: VecDeque<ByteCharge>,
    /// Charge of responses that the handler passed to the response's body and that have not left the body.
    answered: Option<ByteCharge>,
}

impl CallCharges {
    /// Takes the charge of the oldest message that is not yet claimed.
    pub(crate) fn claim(&self) -> Option<ByteCharge> {
        self.charges().arrived.pop_front()
    }

    /// Adds the charge of a response that is passed to the response's body.
    pub(crate) fn answer(&self, charge: ByteCharge) {
        let answered = &mut self.charges().answered;
        match answered {
            Some(earlier) => earlier.merge(charge),
            None => *answered = Some(charge),
        }
    }

    /// Turns the charges of arrived messages into charges of the response, because the call is answered.
    pub(crate) fn move_arrived_to_answered(&self) {
        let mut charges = self.charges();
        while let Some(arrived) = charges.arrived.pop_front() {
            match &mut charges.answered {
                Some(earlier) => earlier.merge(arrived),
                None => charges.answered = Some(arrived),
            }
        }
    }

    /// Takes the charge of the responses that the response's body has not passed on.
    pub(crate) fn take_answered(&self) -> Option<ByteCharge> {
        self.charges().answered.take()
    }

    /// Whether a response is charged.
    pub(crate) fn has_answered(&self) -> bool {
        self.charges().answered.is_some()
    }

    fn add(&self, charge: ByteCharge) {
        self.charges().arrived.push_back(charge);
    }

    /// Releases the charges of messages that the handler has finished.
    pub(crate) fn clear(&self) {
        self.charges().arrived.clear();
    }

    /// Locks the charges; the lock is never held across an await. Ignores a poisoned lock, because a
    /// panic elsewhere cannot leave the charges half written.
    fn charges(&self) -> std::sync::MutexGuard<'_, Charges> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bounds of a call's body.
#[derive(Clone)]
pub(crate) struct BodyBounds {
    pub(crate) share: BudgetShare,
    pub(crate) message_len_max: usize,
    pub(crate) minimum_rate: MinimumRate,
    pub(crate) bulk: BulkThreads,
    pub(crate) encoding: Option<ContentEncoding>,
    pub(crate) hold: ChargeRelease,
    /// Type of the call's messages. `None` for methods with requests without lists (health, reflection).
    pub(crate) message_type: Option<MessageType>,
}

/// A body that charges and decompresses the messages.
pub(crate) struct ChargedMessages<B> {
    inner: B,
    terms: BodyBounds,
    ledger: CallCharges,
    /// Bytes that have arrived but are not yet parsed.
    input: Bytes,
    state: FramingState,
    /// Check of the current message.
    check: MessageCheck,
    /// Charged bytes to pass on before anything else.
    ready: VecDeque<Bytes>,
    /// Bytes passed on since other tasks had a turn.
    given: usize,
    /// Whether a whole message has arrived.
    has_message: bool,
    /// Progress of the current message. Set once the server had to wait for the message's bytes.
    pace: Option<ProgressClock>,
    timer: DeadlineTimer,
}

enum FramingState {
    /// The next message's prefix is expected at the start of the input.
    Prefix,
    /// A stream's message waits until its bytes would fit, and has no charge.
    Waiting {
        room: Pin<Box<dyn Future<Output = ()> + Send>>,
    },
    /// An uncompressed message is arriving.
    Arriving(PlainMessage),
    /// A compressed message is arriving.
    Inflating(Box<CompressedMessage>),
    /// A bulk thread decompresses a step of a long message.
    InflatingApart(BulkWork<Result<Box<CompressedMessage>, Status>>),
    Failed,
}

/// A compressed message that is arriving.
struct CompressedMessage {
    /// Length of the message in compressed bytes.
    len: usize,
    /// Compressed bytes that have not arrived.
    left: usize,
    inflater: Inflater,
    check: MessageCheck,
}

impl CompressedMessage {
    fn push(&mut self, piece: &[u8]) -> Result<(), Status> {
        self.inflater.push(piece).map_err(|failure| to_status(&failure))?;
        let more = self.check.read_to(self.inflater.plain())?;
        self.inflater.charge(more).map_err(|failure| to_status(&failure))
    }

    /// Returns the decompressed message, with a prefix.
    fn finish(self) -> Result<(Bytes, ByteCharge), Status> {
        let Self { inflater, mut check, .. } = self;
        let (mut message, mut charge) = inflater.finish().map_err(|failure| to_status(&failure))?;
        // The decoder may have buffered its last bytes until the end.
        let more = check.read_to(&message)?;
        charge.grow(more).map_err(|failure| to_status(&failure))?;
        check.finish()?;
        write_prefix(&mut message);
        Ok((message.freeze(), charge))
    }
}

/// An uncompressed message that is arriving.
struct PlainMessage {
    /// Bytes that have not arrived.
    left: usize,
    charge: ByteCharge,
    /// The part of the message that has arrived, with its prefix, until that is at least half.
    held: Option<HeldBack>,
}

impl<B> ChargedMessages<B> {
    pub(crate) fn new(inner: B, terms: BodyBounds, ledger: CallCharges) -> Self {
        Self {
            inner,
            terms,
            ledger,
            input: Bytes::new(),
            state: FramingState::Prefix,
            check: MessageCheck::default(),
            ready: VecDeque::new(),
            given: 0,
            has_message: false,
            pace: None,
            timer: DeadlineTimer::default(),
        }
    }

    /// Processes the input until bytes can be passed on, or more input is needed (`Ok(None)`).
    fn advance(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Ok(Some(piece)));
            }
            match &mut self.state {
                FramingState::Failed => return Poll::Ready(Ok(None)),
                FramingState::Prefix if self.terms.hold == ChargeRelease::UntilNext && self.has_message => {
                    self.has_message = false;
                    self.ledger.clear();
                }
                FramingState::Prefix if self.input.len() < PREFIX_LEN => return Poll::Ready(Ok(None)),
                FramingState::Prefix => {
                    if let Some(whole) = self.begin()? {
                        return Poll::Ready(Ok(Some(whole)));
                    }
                }
                FramingState::Waiting { room } => {
                    ready!(room.as_mut().poll(cx));
                    self.state = FramingState::Prefix;
                }
                FramingState::Arriving(_) if self.input.is_empty() => return Poll::Ready(Ok(None)),
                FramingState::Arriving(message) => {
                    let piece = self.input.split_to(self.input.len().min(message.left));
                    let beyond = self.check.read(&piece)?;
                    // If the budget is full, the call fails and its charge is released: a message that holds bytes
                    // never waits for more.
                    let charged = message.charge.grow(piece.len() as u64 + beyond);
                    charged.map_err(|refused| to_status(&refused))?;
                    message.left -= piece.len();
                    match &mut message.held {
                        None => self.ready.push_back(piece),
                        Some(held) => {
                            held.push(piece);
                            if held.len() >= message.left {
                                self.ready = message.held.take().unwrap_or_default().release();
                            }
                        }
                    }
                    if message.left == 0
                        && let FramingState::Arriving(message) =
                            std::mem::replace(&mut self.state, FramingState::Prefix)
                    {
                        self.check.finish()?;
                        self.end_message(message.charge);
                    }
                }
                FramingState::Inflating(message) if message.left == 0 => {
                    if let FramingState::Inflating(message) =
                        std::mem::replace(&mut self.state, FramingState::Prefix)
                    {
                        let (plain, charge) = message.finish()?;
                        self.end_message(charge);
                        self.ready = in_steps(plain);
                    }
                }
                FramingState::Inflating(_) if self.input.is_empty() => return Poll::Ready(Ok(None)),
                FramingState::Inflating(message) => {
                    let piece = self.input.split_to(self.input.len().min(message.left).min(STEP));
                    message.left -= piece.len();
                    if message.len <= STEP_HERE_MAX {
                        message.push(&piece)?;
                        continue;
                    }
                    if let FramingState::Inflating(mut message) =
                        std::mem::replace(&mut self.state, FramingState::Failed)
                    {
                        let step = move || message.push(&piece).map(|()| message);
                        self.state = FramingState::InflatingApart(self.terms.bulk.run(step));
                    }
                }
                FramingState::InflatingApart(step) => {
                    let done = ready!(Pin::new(step).poll(cx));
                    let message = done.map_err(|error| to_status(&unfinished(&error)))??;
                    self.state = FramingState::Inflating(message);
                }
            }
        }
    }

    /// Checks the message whose prefix is at the start of the input, and charges the bytes that have
    /// arrived. Returns the bytes to pass on, if any: an uncompressed message of which at least half has
    /// arrived, complete or in part.
    fn begin(&mut self) -> Result<Option<Bytes>, Status> {
        let (flag, len) = split(&self.input);
        if len > self.terms.message_len_max {
            return Err(to_status(&too_large("the message", self.terms.message_len_max)));
        }
        let share = &self.terms.share;
        match self.terms.hold {
            ChargeRelease::WholeCall | ChargeRelease::UntilDecoded if self.has_message => {
                return Err(to_status(&Failure::malformed(
                    "the call has a second message: send a single message per call",
                )));
            }
            ChargeRelease::UntilNext | ChargeRelease::UntilClaimed if !share.has_room_for(len as u64) => {
                self.wait(len);
                return Ok(None);
            }
            _ => {}
        }
        if let (1, Some(encoding)) = (flag, self.terms.encoding) {
            // Compressed bytes are consumed on arrival, so only the decompressed bytes are charged.
            let charge = share.try_take(0).map_err(|refused| to_status(&refused))?;
            self.input.advance(PREFIX_LEN);
            let room = [0; PREFIX_LEN];
            let inflater = Inflater::new(encoding, &room, self.terms.message_len_max, charge);
            let check = MessageCheck::inflating(self.terms.message_type);
            self.state =
                FramingState::Inflating(Box::new(CompressedMessage { len, left: len, inflater, check }));
            return Ok(None);
        }
        // A message with the compression flag but without a known encoding comes here too. Its decoded size is
        // not checked, because tonic refuses it undecoded.
        let here = self.input.len().min(PREFIX_LEN + len);
        let mut charge = match share.try_take((here - PREFIX_LEN) as u64) {
            Ok(charge) => charge,
            // Another message used the capacity. This message has no charge yet, so it may wait.
            Err(_) if matches!(self.terms.hold, ChargeRelease::UntilNext | ChargeRelease::UntilClaimed) => {
                self.wait(len);
                return Ok(None);
            }
            Err(refused) => return Err(to_status(&refused)),
        };
        let first = self.input.split_to(here);
        self.check = MessageCheck::plain(self.terms.message_type.filter(|_| flag == 0), len);
        let beyond = self.check.read(&first)?;
        charge.grow(beyond).map_err(|refused| to_status(&refused))?;
        let left = PREFIX_LEN + len - here;
        if left == 0 {
            self.check.finish()?;
            self.end_message(charge);
            return Ok(Some(first));
        }
        let mut message = PlainMessage { left, charge, held: None };
        let out = (here >= left).then_some(first.clone());
        if out.is_none() {
            message.held.insert(HeldBack::default()).push(first);
        }
        self.state = FramingState::Arriving(message);
        Ok(out)
    }

    fn wait(&mut self, len: usize) {
        // The server now waits for capacity and not for the client.
        self.pace = None;
        self.state = FramingState::Waiting { room: Box::pin(self.terms.share.clone().room_for(len as u64)) };
    }

    fn end_message(&mut self, charge: ByteCharge) {
        self.ledger.add(charge);
        self.has_message = true;
        self.pace = None;
    }

    /// Whether a message has begun and its end has not arrived.
    fn mid_message(&self) -> bool {
        match self.state {
            FramingState::Prefix => !self.input.is_empty(),
            FramingState::Failed => false,
            _ => true,
        }
    }

    /// Polls the minimum rate while more input is needed and none is available. Ready when the
    /// message is too slow.
    fn poll_pace(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let is_unary = matches!(self.terms.hold, ChargeRelease::WholeCall | ChargeRelease::UntilDecoded);
        let must_end = is_unary && self.has_message;
        if !self.mid_message() && !must_end {
            return Poll::Pending;
        }
        let minimum = self.terms.minimum_rate;
        let until = self.pace.get_or_insert_with(|| ProgressClock::begin(minimum)).until();
        ready!(self.timer.poll(until, cx));
        Poll::Ready(to_status(&too_slow("the message", minimum)))
    }
}

/// Returns the failure of a message or body below the minimum rate.
pub(crate) fn too_slow(what: &str, minimum: MinimumRate) -> Failure {
    let MinimumRate { grace, bytes_per_sec } = minimum;
    let rate = millrace_types::Bytes(bytes_per_sec);
    let message = format!(
        "{what} arrived slower than {rate} a second for too long (tolerance {grace:?}): send it again, faster"
    );
    Failure::new(Reason::TimedOut, message)
}

impl<B> ChargedMessages<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<tonic::codegen::StdError>,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.given >= GIVEN_AT_ONCE {
            self.given = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        loop {
            if let Some(out) = ready!(self.advance(cx))? {
                self.given += out.len();
                return Poll::Ready(Some(Ok(Frame::data(out))));
            }
            let frame = match Pin::new(&mut self.inner).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => return self.poll_pace(cx).map(|status| Some(Err(status))),
            };
            let Some(frame) = frame else { return Poll::Ready(self.end().err().map(Err)) };
            let frame = frame.map_err(|error| Status::from_error(error.into()))?;
            if let (Some(pace), Some(data)) = (&mut self.pace, frame.data_ref()) {
                pace.progress(data.len());
            }
            match frame.into_data() {
                Ok(data) if self.input.is_empty() => self.input = data,
                // Only a prefix that arrived in two pieces can be left over here.
                Ok(data) => self.input = [&self.input[..], &data[..]].concat().into(),
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    /// Checks the state at the end of the client's bytes.
    fn end(&self) -> Result<(), Status> {
        match self.state {
            FramingState::Arriving(_) | FramingState::Inflating(_) | FramingState::InflatingApart(_) => {
                Err(to_status(&Failure::malformed(
                    "the call ended within a message: send the whole message again",
                )))
            }
            _ => Ok(()),
        }
    }
}

impl<B> Drop for ChargedMessages<B> {
    fn drop(&mut self) {
        if self.terms.hold == ChargeRelease::UntilDecoded {
            self.ledger.clear();
        }
    }
}

impl<B> Body for ChargedMessages<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<tonic::codegen::StdError>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = self.poll(cx);
        if let Poll::Ready(Some(Err(_))) = polled {
            self.state = FramingState::Failed;
            self.input = Bytes::new();
            self.ready.clear();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.input.is_empty() && self.ready.is_empty() && !self.mid_message() && self.inner.is_end_stream()
    }
}

/// Cuts a message into pieces that are passed on separately.
fn in_steps(mut message: Bytes) -> VecDeque<Bytes> {
    let mut steps = VecDeque::with_capacity(message.len().div_ceil(GIVEN_AT_ONCE));
    while !message.is_empty() {
        steps.push_back(message.split_to(message.len().min(GIVEN_AT_ONCE)));
    }
    steps
}

/// Returns the flag and length at the start of `input`, which must contain a prefix.
fn split(mut input: &[u8]) -> (u8, usize) {
    (input.get_u8(), input.get_u32() as usize)
}

/// Writes the prefix of an uncompressed message into the space at the start.
fn write_prefix(message: &mut BytesMut) {
    let len = u32::try_from(message.len() - PREFIX_LEN).expect("bounded by the message limit, a u32");
    message[0] = 0;
    message[1..PREFIX_LEN].copy_from_slice(&len.to_be_bytes());
}

#[cfg(test)]
mod tests;
