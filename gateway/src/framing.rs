//! The body of a gRPC call on its way in: length-prefixed messages, each charged to the byte budget
//! when its prefix is seen, and made plain when compressed.
//!
//! tonic would store a message before anyone could refuse it, and bounds what one expands to but not
//! what all of them expand to together. So it is done here, before tonic: what leaves has no
//! compressed message. Plain bytes pass through uncopied, and are read on their way: a message that
//! would take far more memory than its bytes once it is decoded ends the call.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use millrace_proto::decoding::MessageType;
use millrace_proto::status::to_status;
use millrace_types::{Failure, Reason};
use tokio::time::Sleep;
use tonic::Status;

use crate::budget::{Budget, Charge, too_large};
use crate::decoded::MessageCheck;
use crate::inflate::{Encoding, Inflater, STEP};

/// A compressed flag and a big-endian u32 length.
pub(crate) const PREFIX_LEN: usize = 5;

/// Who gives a message's bytes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// A call of one message, or one whose handler is done with a message when it asks for the next:
    /// each message's charge replaces the last one's.
    UntilNext,
    /// A stream that works on several messages at a time: the handler claims each message's charge,
    /// and a message waits for its bytes instead of being refused.
    UntilClaimed,
}

/// The charges of a call's messages, oldest first. Dropping it gives all of them back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<VecDeque<Charge>>>);

impl Ledger {
    /// The charge of the oldest message not yet claimed.
    pub(crate) fn claim(&self) -> Option<Charge> {
        self.entries().pop_front()
    }

    fn add(&self, charge: Charge, hold: Hold) {
        let mut entries = self.entries();
        if hold == Hold::UntilNext {
            entries.clear();
        }
        entries.push_back(charge);
    }

    /// Adds to the charge of the newest message, for what decoding the message takes beyond its bytes.
    fn grow_newest(&self, more: u64) -> Result<(), Failure> {
        match self.entries().back_mut() {
            Some(charge) if more > 0 => charge.grow(more),
            _ => Ok(()),
        }
    }

    /// Never held across an await; a panic elsewhere leaves it whole.
    fn entries(&self) -> std::sync::MutexGuard<'_, VecDeque<Charge>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a call's body is held to.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) budget: Budget,
    pub(crate) message_len_max: usize,
    pub(crate) stall_max: Duration,
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
    /// Running while a message that has begun waits for more bytes.
    stall: Option<Pin<Box<Sleep>>>,
}

enum State {
    /// The next message's prefix comes first in the input, or will.
    Prefix,
    /// A message of a stream waits for the budget.
    Charging {
        waiting: Pin<Box<dyn Future<Output = Charge> + Send>>,
    },
    /// Handing plain bytes on.
    Passing {
        left: usize,
    },
    Inflating {
        left: usize,
        inflater: Box<Inflater>,
    },
    Failed,
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
            stall: None,
        }
    }

    /// Works on the input until something can be handed on or more input is needed (`Ok(None)`).
    fn advance(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        loop {
            match &mut self.state {
                State::Failed => return Poll::Ready(Ok(None)),
                State::Prefix if self.input.len() < PREFIX_LEN => return Poll::Ready(Ok(None)),
                State::Prefix => self.begin()?,
                State::Charging { waiting } => {
                    let charge = ready!(waiting.as_mut().poll(cx));
                    self.begin_charged(charge);
                }
                State::Passing { left } => {
                    let out = self.input.split_to(self.input.len().min(*left));
                    *left -= out.len();
                    let more = self.check.read(&out)?;
                    self.ledger.grow_newest(more).map_err(|failure| to_status(&failure))?;
                    if *left == 0 {
                        self.state = State::Prefix;
                        self.check.finish()?;
                    }
                    return Poll::Ready(Ok((!out.is_empty()).then_some(out)));
                }
                State::Inflating { left, inflater } => {
                    let piece = self.input.split_to(self.input.len().min(*left).min(STEP));
                    *left -= piece.len();
                    inflater.push(&piece).map_err(|failure| to_status(&failure))?;
                    let more = self.check.read_to(inflater.plain())?;
                    inflater.charge(more).map_err(|failure| to_status(&failure))?;
                    if *left == 0 {
                        return Poll::Ready(self.end_inflating().map(Some));
                    }
                    if self.input.is_empty() {
                        return Poll::Ready(Ok(None));
                    }
                    // A step may have been long: let others run.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
        }
    }

    /// Checks and charges the message whose prefix comes first in the input.
    fn begin(&mut self) -> Result<(), Status> {
        let (_, len) = split(&self.input);
        if len > self.terms.message_len_max {
            return Err(to_status(&too_large("the message", self.terms.message_len_max)));
        }
        let budget = &self.terms.budget;
        match (budget.try_take(len as u64), self.terms.hold) {
            (Ok(charge), _) => self.begin_charged(charge),
            (Err(refused), Hold::UntilNext) => return Err(to_status(&refused)),
            (Err(_), Hold::UntilClaimed) => {
                self.state = State::Charging { waiting: Box::pin(budget.clone().take(len as u64)) };
            }
        }
        Ok(())
    }

    fn begin_charged(&mut self, charge: Charge) {
        let (flag, len) = split(&self.input);
        self.state = match self.terms.encoding {
            Some(encoding) if flag == 1 => {
                self.input.advance(PREFIX_LEN);
                let room = [0; PREFIX_LEN];
                let inflater = Inflater::new(encoding, &room, self.terms.message_len_max, charge);
                self.check = MessageCheck::inflating(self.terms.message_type);
                State::Inflating { left: len, inflater: Box::new(inflater) }
            }
            // A flag that no encoding explains is tonic's to refuse: such a message is not decoded.
            _ => {
                let message_type = self.terms.message_type.filter(|_| flag == 0);
                self.check = MessageCheck::plain(message_type, len);
                self.ledger.add(charge, self.terms.hold);
                State::Passing { left: PREFIX_LEN + len }
            }
        };
    }

    fn end_inflating(&mut self) -> Result<Bytes, Status> {
        let State::Inflating { inflater, .. } = std::mem::replace(&mut self.state, State::Prefix) else {
            return Err(Status::internal("a message ended that had not begun"));
        };
        let (mut message, mut charge) = inflater.finish().map_err(|failure| to_status(&failure))?;
        // The decoder may have kept its last bytes until it was asked to end.
        let more = self.check.read_to(&message)?;
        charge.grow(more).map_err(|failure| to_status(&failure))?;
        self.check.finish()?;
        write_prefix(&mut message);
        self.ledger.add(charge, self.terms.hold);
        Ok(message.freeze())
    }

    /// Whether a message has begun and its end has not come.
    fn mid_message(&self) -> bool {
        match self.state {
            State::Prefix => !self.input.is_empty(),
            State::Failed => false,
            _ => true,
        }
    }

    /// More input is needed and none is there: fails when that has been so for too long.
    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        if !self.mid_message() {
            return Poll::Pending;
        }
        let stall_max = self.terms.stall_max;
        let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall_max)));
        ready!(stall.as_mut().poll(cx));
        let message = format!("the message stopped arriving for {stall_max:?}: send it again");
        Poll::Ready(to_status(&Failure::new(Reason::TimedOut, message)))
    }
}

impl<B> Messages<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<tonic::codegen::StdError>,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(out) = ready!(self.advance(cx))? {
                return Poll::Ready(Some(Ok(Frame::data(out))));
            }
            let frame = match Pin::new(&mut self.inner).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => return self.poll_stall(cx).map(|status| Some(Err(status))),
            };
            self.stall = None;
            let Some(frame) = frame else { return Poll::Ready(self.end().err().map(Err)) };
            let frame = frame.map_err(|error| Status::from_error(error.into()))?;
            match frame.into_data() {
                Ok(data) if self.input.is_empty() => self.input = data,
                // Only a prefix that came in two pieces is left over.
                Ok(data) => self.input = [&self.input[..], &data[..]].concat().into(),
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    /// The client has sent everything. A plain message cut short is tonic's to notice.
    fn end(&self) -> Result<(), Status> {
        match self.state {
            State::Inflating { .. } => {
                Err(to_status(&Failure::malformed("the call ended within a compressed message")))
            }
            _ => Ok(()),
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
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.input.is_empty() && !self.mid_message() && self.inner.is_end_stream()
    }
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
