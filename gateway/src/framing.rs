//! The body of a gRPC call on its way in: length-prefixed messages, charged to the byte budget as
//! their bytes arrive, held to the minimum rate, and made plain when compressed.
//!
//! tonic would store a message before anyone could refuse it, reserve as much memory as its prefix
//! announces, and bound what one message expands to but not what all of them expand to together. So
//! that is done here, before tonic: what leaves has no compressed message, and a prefix leaves once
//! half of its message has arrived. Plain bytes pass through uncopied, and are read on their way: a
//! message that would take far more memory than its bytes once it is decoded ends the call.

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

use crate::budget::{BudgetShare, Charge, too_large};
use crate::bulk::{BulkThreads, BulkWork, unfinished};
use crate::decoded::MessageCheck;
use crate::inflate::{Encoding, Inflater, STEP, STEP_HERE_MAX};

/// Bytes handed on at a time, until other tasks of the thread have a turn: tonic copies them.
const GIVEN_AT_ONCE: usize = 1 << 20;

/// Who gives a message's bytes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// A call of one message. The message's charge becomes the answer's. The client has to end the
    /// call after the message: a second message is refused, and silence is below the minimum rate.
    WholeCall,
    /// The same of a small message whose handler waits long, for events say: its charge ends once the
    /// message is decoded.
    UntilDecoded,
    /// A stream whose handler is done with a message when it asks for the next. A message waits until
    /// there is room for it before any of it is charged.
    UntilNext,
    /// The same, of a stream that works on several messages at a time: the handler claims each message's
    /// charge.
    UntilClaimed,
}

/// The charges of a call. Dropping it gives all of them back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Charges>>);

#[derive(Debug, Default)]
struct Charges {
    /// Of messages that arrived, oldest first.
    arrived: VecDeque<Charge>,
    /// Of answers that the handler has given to the response's body, and that have not left it.
    answered: Option<Charge>,
}

impl Ledger {
    /// The charge of the oldest message not yet claimed.
    pub(crate) fn claim(&self) -> Option<Charge> {
        self.charges().arrived.pop_front()
    }

    /// Adds the charge of an answer that is given to the response's body.
    pub(crate) fn answer(&self, charge: Charge) {
        let answered = &mut self.charges().answered;
        match answered {
            Some(earlier) => earlier.merge(charge),
            None => *answered = Some(charge),
        }
    }

    /// Lets the charges of arrived messages be those of the answer: the call is answered.
    pub(crate) fn answered(&self) {
        let mut charges = self.charges();
        while let Some(arrived) = charges.arrived.pop_front() {
            match &mut charges.answered {
                Some(earlier) => earlier.merge(arrived),
                None => charges.answered = Some(arrived),
            }
        }
    }

    /// The charge of the answers that the response's body has and has not given on.
    pub(crate) fn take_answered(&self) -> Option<Charge> {
        self.charges().answered.take()
    }

    /// Whether an answer is charged.
    pub(crate) fn has_answered(&self) -> bool {
        self.charges().answered.is_some()
    }

    fn add(&self, charge: Charge) {
        self.charges().arrived.push_back(charge);
    }

    /// Gives the charges of messages back that the handler is done with.
    pub(crate) fn clear(&self) {
        self.charges().arrived.clear();
    }

    /// Never held across an await; a panic elsewhere leaves it whole.
    fn charges(&self) -> std::sync::MutexGuard<'_, Charges> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a call's body is held to.
#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) share: BudgetShare,
    pub(crate) message_len_max: usize,
    pub(crate) minimum_rate: MinimumRate,
    pub(crate) bulk: BulkThreads,
    pub(crate) encoding: Option<Encoding>,
    pub(crate) hold: Hold,
    /// The type of its messages; none of a method whose requests have no lists (health, reflection).
    pub(crate) message_type: Option<MessageType>,
}

/// A body whose messages are charged and plain.
pub(crate) struct Messages<B> {
    inner: B,
    terms: Terms,
    ledger: Ledger,
    /// Arrived and not yet looked at.
    input: Bytes,
    state: State,
    /// Of the message at hand.
    check: MessageCheck,
    /// Charged, and to be handed on before anything else.
    ready: VecDeque<Bytes>,
    /// Bytes handed on since other tasks had a turn.
    given: usize,
    /// Whether a whole message has arrived.
    has_message: bool,
    /// Of the message that has begun, once it had to be waited for.
    pace: Option<ProgressClock>,
    timer: DeadlineTimer,
}

enum State {
    /// The next message's prefix comes first in the input, or will.
    Prefix,
    /// A message of a stream waits until there is room for it, and holds nothing.
    Waiting {
        room: Pin<Box<dyn Future<Output = ()> + Send>>,
    },
    /// Plain bytes arrive.
    Arriving(Arriving),
    /// Compressed bytes arrive.
    Inflating(Box<Inflating>),
    /// A step of a long one is under way.
    InflatingApart(BulkWork<Result<Box<Inflating>, Status>>),
    Failed,
}

/// A compressed message of which not all has arrived.
struct Inflating {
    /// Compressed bytes in all.
    len: usize,
    /// Of those, the ones that have not arrived.
    left: usize,
    inflater: Inflater,
    check: MessageCheck,
}

impl Inflating {
    fn push(&mut self, piece: &[u8]) -> Result<(), Status> {
        self.inflater.push(piece).map_err(|failure| to_status(&failure))?;
        let more = self.check.read_to(self.inflater.plain())?;
        self.inflater.charge(more).map_err(|failure| to_status(&failure))
    }

    /// The message, plain, with a prefix.
    fn finish(self) -> Result<(Bytes, Charge), Status> {
        let Self { inflater, mut check, .. } = self;
        let (mut message, mut charge) = inflater.finish().map_err(|failure| to_status(&failure))?;
        // The decoder may have kept its last bytes until it was asked to end.
        let more = check.read_to(&message)?;
        charge.grow(more).map_err(|failure| to_status(&failure))?;
        check.finish()?;
        write_prefix(&mut message);
        Ok((message.freeze(), charge))
    }
}

/// A plain message of which not all has arrived.
struct Arriving {
    /// Bytes that have not.
    left: usize,
    charge: Charge,
    /// Its first half, its prefix in front, until more than that has arrived.
    held: Option<HeldBack>,
}

impl<B> Messages<B> {
    pub(crate) fn new(inner: B, terms: Terms, ledger: Ledger) -> Self {
        Self {
            inner,
            terms,
            ledger,
            input: Bytes::new(),
            state: State::Prefix,
            check: MessageCheck::default(),
            ready: VecDeque::new(),
            given: 0,
            has_message: false,
            pace: None,
            timer: DeadlineTimer::default(),
        }
    }

    /// Works on the input until something can be handed on or more input is needed (`Ok(None)`).
    fn advance(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Ok(Some(piece)));
            }
            match &mut self.state {
                State::Failed => return Poll::Ready(Ok(None)),
                State::Prefix if self.terms.hold == Hold::UntilNext && self.has_message => {
                    self.has_message = false;
                    self.ledger.clear();
                }
                State::Prefix if self.input.len() < PREFIX_LEN => return Poll::Ready(Ok(None)),
                State::Prefix => {
                    if let Some(whole) = self.begin()? {
                        return Poll::Ready(Ok(Some(whole)));
                    }
                }
                State::Waiting { room } => {
                    ready!(room.as_mut().poll(cx));
                    self.state = State::Prefix;
                }
                State::Arriving(_) if self.input.is_empty() => return Poll::Ready(Ok(None)),
                State::Arriving(message) => {
                    let piece = self.input.split_to(self.input.len().min(message.left));
                    let beyond = self.check.read(&piece)?;
                    // Refused, it drops what it holds: no message waits for another that waits.
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
                        && let State::Arriving(message) = std::mem::replace(&mut self.state, State::Prefix)
                    {
                        self.check.finish()?;
                        self.end_message(message.charge);
                    }
                }
                State::Inflating(message) if message.left == 0 => {
                    if let State::Inflating(message) = std::mem::replace(&mut self.state, State::Prefix) {
                        let (plain, charge) = message.finish()?;
                        self.end_message(charge);
                        self.ready = in_steps(plain);
                    }
                }
                State::Inflating(_) if self.input.is_empty() => return Poll::Ready(Ok(None)),
                State::Inflating(message) => {
                    let piece = self.input.split_to(self.input.len().min(message.left).min(STEP));
                    message.left -= piece.len();
                    if message.len <= STEP_HERE_MAX {
                        message.push(&piece)?;
                        continue;
                    }
                    if let State::Inflating(mut message) = std::mem::replace(&mut self.state, State::Failed) {
                        let step = move || message.push(&piece).map(|()| message);
                        self.state = State::InflatingApart(self.terms.bulk.run(step));
                    }
                }
                State::InflatingApart(step) => {
                    let done = ready!(Pin::new(step).poll(cx));
                    let message = done.map_err(|error| to_status(&unfinished(&error)))??;
                    self.state = State::Inflating(message);
                }
            }
        }
    }

    /// Checks the message whose prefix comes first in the input, and charges what is there of it.
    /// Returns the message if that is all of it, and plain.
    fn begin(&mut self) -> Result<Option<Bytes>, Status> {
        let (flag, len) = split(&self.input);
        if len > self.terms.message_len_max {
            return Err(to_status(&too_large("the message", self.terms.message_len_max)));
        }
        let share = &self.terms.share;
        match self.terms.hold {
            Hold::WholeCall | Hold::UntilDecoded if self.has_message => {
                return Err(to_status(&Failure::malformed("a second message, where a call has one")));
            }
            Hold::UntilNext | Hold::UntilClaimed if !share.has_room_for(len as u64) => {
                self.wait(len);
                return Ok(None);
            }
            _ => {}
        }
        if let (1, Some(encoding)) = (flag, self.terms.encoding) {
            // Compressed bytes are used as they arrive: the plain ones are charged.
            let charge = share.try_take(0).map_err(|refused| to_status(&refused))?;
            self.input.advance(PREFIX_LEN);
            let room = [0; PREFIX_LEN];
            let inflater = Inflater::new(encoding, &room, self.terms.message_len_max, charge);
            let check = MessageCheck::inflating(self.terms.message_type);
            self.state = State::Inflating(Box::new(Inflating { len, left: len, inflater, check }));
            return Ok(None);
        }
        // A flag that no encoding explains is tonic's to refuse: such a message is not decoded.
        let here = self.input.len().min(PREFIX_LEN + len);
        let mut charge = match share.try_take((here - PREFIX_LEN) as u64) {
            Ok(charge) => charge,
            // Another took the room: it holds nothing yet, and may wait.
            Err(_) if matches!(self.terms.hold, Hold::UntilNext | Hold::UntilClaimed) => {
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
        let mut message = Arriving { left, charge, held: None };
        let out = (here >= left).then_some(first.clone());
        if out.is_none() {
            message.held.insert(HeldBack::default()).push(first);
        }
        self.state = State::Arriving(message);
        Ok(out)
    }

    fn wait(&mut self, len: usize) {
        // The client is not waited for.
        self.pace = None;
        self.state = State::Waiting { room: Box::pin(self.terms.share.clone().room_for(len as u64)) };
    }

    fn end_message(&mut self, charge: Charge) {
        self.ledger.add(charge);
        self.has_message = true;
        self.pace = None;
    }

    /// Whether a message has begun and its end has not come.
    fn mid_message(&self) -> bool {
        match self.state {
            State::Prefix => !self.input.is_empty(),
            State::Failed => false,
            _ => true,
        }
    }

    /// More input is needed and none is there: fails when the message is below the minimum rate.
    fn poll_pace(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let is_unary = matches!(self.terms.hold, Hold::WholeCall | Hold::UntilDecoded);
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

/// Something that began to arrive and is below the minimum rate.
pub(crate) fn too_slow(what: &str, minimum: MinimumRate) -> Failure {
    let MinimumRate { grace, bytes_per_sec } = minimum;
    let rate = millrace_types::Bytes(bytes_per_sec);
    let message = format!("{what} is {grace:?} behind {rate} a second: send it again, faster");
    Failure::new(Reason::TimedOut, message)
}

impl<B> Messages<B>
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
                // Only a prefix that came in two pieces is left over.
                Ok(data) => self.input = [&self.input[..], &data[..]].concat().into(),
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    /// The client has sent everything.
    fn end(&self) -> Result<(), Status> {
        match self.state {
            State::Arriving(_) | State::Inflating(_) | State::InflatingApart(_) => {
                Err(to_status(&Failure::malformed("the call ended within a message")))
            }
            _ => Ok(()),
        }
    }
}

impl<B> Drop for Messages<B> {
    fn drop(&mut self) {
        if self.terms.hold == Hold::UntilDecoded {
            self.ledger.clear();
        }
    }
}

impl<B> Body for Messages<B>
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
            self.state = State::Failed;
            self.input = Bytes::new();
            self.ready.clear();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.input.is_empty() && self.ready.is_empty() && !self.mid_message() && self.inner.is_end_stream()
    }
}

/// A message in pieces that are handed on one by one.
fn in_steps(mut message: Bytes) -> VecDeque<Bytes> {
    let mut steps = VecDeque::with_capacity(message.len().div_ceil(GIVEN_AT_ONCE));
    while !message.is_empty() {
        steps.push_back(message.split_to(message.len().min(GIVEN_AT_ONCE)));
    }
    steps
}

/// The flag and length at the start of `input`, which has them.
fn split(mut input: &[u8]) -> (u8, usize) {
    (input.get_u8(), input.get_u32() as usize)
}

/// Fills in the prefix of a plain message that was left room for.
fn write_prefix(message: &mut BytesMut) {
    let len = u32::try_from(message.len() - PREFIX_LEN).expect("bounded by the message limit, a u32");
    message[0] = 0;
    message[1..PREFIX_LEN].copy_from_slice(&len.to_be_bytes());
}

#[cfg(test)]
mod tests;
