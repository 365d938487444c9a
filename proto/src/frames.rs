//! The framed Unix socket between a worker and its executors: what `executor.proto` calls a frame,
//! and the descriptors that travel with it.
//!
//! ```text
//! message, descriptors ─ Frame::new ─> Outbox ── sendmsg ──> recvmsg ─> FrameDecoder ─> Received
//! ```
//!
//! [`Outbox::send_some`] and [`FrameDecoder::recv_some`] make one system call each, so they serve a
//! non-blocking socket (inside `AsyncFd::try_io`) as well as a blocking one, for which
//! [`Outbox::flush`] and [`FrameDecoder::recv_frame`] loop over them. Nothing here knows what the
//! messages mean.
//!
//! A frame does not say how many descriptors it has. A `sendmsg` that carries descriptors carries
//! one frame only and starts with its first byte, and descriptors are a barrier for the reader
//! (unix(7), "ancillary data"): one `recvmsg` never returns bytes from behind them. So the
//! descriptors that a read returns are those of the last frame that begins in it.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use bytes::{BufMut as _, Bytes, BytesMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::decoding::{self, DecodeError, WalkLimits};

/// The longest message of a frame. Bulk bytes are in memfds: only many small tensors, or the
/// launches of a very deep model, come near.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// The most descriptors of one frame (the kernel's own limit is 253).
pub const DESCRIPTORS_MAX: usize = 64;
/// The most that an [`Outbox`] holds before it refuses more.
pub const OUTBOX_BYTES_MAX: usize = 64 << 20;

const HEADER_BYTES: usize = size_of::<u32>();
/// What one `recvmsg` reads at most, and so bounds the frames a decoder holds.
const RECV_BYTES: usize = 64 << 10;
/// The most frames that one `sendmsg` takes along.
const FRAMES_PER_SEND: usize = 16;

/// Why a frame could not be made, or a peer's bytes are not frames. After an error in what was
/// received the stream has no more meaning: close it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A message over [`MESSAGE_BYTES_MAX`].
    #[error(
        "a message of {bytes} bytes is over the {MESSAGE_BYTES_MAX} of a frame: send bulk bytes as a memfd"
    )]
    MessageTooLong {
        /// Its length.
        bytes: usize,
    },
    /// More than [`DESCRIPTORS_MAX`].
    #[error("{count} descriptors are over the {DESCRIPTORS_MAX} of a frame: put more tensors inline")]
    TooManyDescriptors {
        /// How many.
        count: usize,
    },
    /// The kernel dropped descriptors: the peer sent too many, or this process has too many open.
    #[error("descriptors were lost on the way: raise the limit of open files (ulimit -n)")]
    DescriptorsLost,
    /// Descriptors came with bytes that begin no frame.
    #[error("descriptors came in the middle of a frame")]
    StrayDescriptors,
    /// The peer is gone and its last frame is not whole.
    #[error("the peer closed the socket {missing} bytes before the end of a frame")]
    ClosedInFrame {
        /// What is missing of it, as far as known.
        missing: usize,
    },
    /// An [`Outbox`] at [`OUTBOX_BYTES_MAX`]: the peer does not read.
    #[error("{OUTBOX_BYTES_MAX} bytes wait to be sent: the peer does not read")]
    OutboxFull,
    /// A message that is no such message.
    #[error("a frame does not decode: {0}")]
    Malformed(#[from] DecodeError),
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match error {
            Error::ClosedInFrame { .. } => io::ErrorKind::UnexpectedEof,
            _ => io::ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

/// One message, encoded, and its descriptors. They are closed once they are sent.
#[derive(Debug)]
pub struct Frame {
    bytes: Bytes,
    descriptors: Vec<OwnedFd>,
}

impl Frame {
    /// Encodes a message. `descriptors` are in the order in which its `*_fd` fields index them.
    ///
    /// # Errors
    /// [`Error::MessageTooLong`], [`Error::TooManyDescriptors`].
    pub fn new(message: &impl prost::Message, descriptors: Vec<OwnedFd>) -> Result<Self, Error> {
        let length = message.encoded_len();
        if length > MESSAGE_BYTES_MAX {
            return Err(Error::MessageTooLong { bytes: length });
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(Error::TooManyDescriptors { count: descriptors.len() });
        }
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + length);
        bytes.put_u32_le(u32::try_from(length).expect("at most MESSAGE_BYTES_MAX"));
        message.encode(&mut bytes).expect("the buffer has room for encoded_len");
        Ok(Self { bytes: bytes.freeze(), descriptors })
    }
}

/// Frames that wait to be sent, in order.
#[derive(Debug, Default)]
pub struct Outbox {
    frames: VecDeque<Frame>,
    /// Of the first frame, how many bytes are sent.
    sent: usize,
    /// Of all frames, how many bytes are not.
    unsent: usize,
}

impl Outbox {
    /// Adds a frame behind the others.
    ///
    /// # Errors
    /// [`Error::OutboxFull`]; the frame is dropped.
    pub fn push(&mut self, frame: Frame) -> Result<(), Error> {
        if self.unsent + frame.bytes.len() > OUTBOX_BYTES_MAX {
            return Err(Error::OutboxFull);
        }
        self.unsent += frame.bytes.len();
        self.frames.push_back(frame);
        Ok(())
    }

    /// Takes back the frame that was added last, if nothing of it is sent. Says whether it did.
    pub fn take_back(&mut self) -> bool {
        if self.frames.len() == 1 && self.sent > 0 {
            return false;
        }
        let last = self.frames.pop_back();
        self.unsent -= last.as_ref().map_or(0, |frame| frame.bytes.len());
        last.is_some()
    }

    /// How many frames are not sent, or not to their end.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether everything is sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Sends what one `sendmsg` takes; returns how many bytes that was, 0 when nothing waits.
    ///
    /// # Errors
    /// The socket's, `WouldBlock` among them; nothing is lost then.
    pub fn send_some(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let Some(first) = self.frames.front() else { return Ok(0) };
        let descriptors: Vec<_> = first.descriptors.iter().map(AsFd::as_fd).collect();
        let mut slices = Vec::with_capacity(FRAMES_PER_SEND);
        slices.push(IoSlice::new(&first.bytes[self.sent..]));
        if descriptors.is_empty() {
            let more = self.frames.iter().skip(1).take_while(|frame| frame.descriptors.is_empty());
            slices.extend(more.take(FRAMES_PER_SEND - 1).map(|frame| IoSlice::new(&frame.bytes)));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let pushed = control.push(SendAncillaryMessage::ScmRights(&descriptors));
            assert!(pushed, "the space is for DESCRIPTORS_MAX");
        }
        let sent =
            rustix::io::retry_on_intr(|| sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL))?;
        self.advance(sent);
        Ok(sent)
    }

    /// Sends everything over a blocking socket.
    ///
    /// # Errors
    /// The socket's.
    pub fn flush(&mut self, socket: impl AsFd) -> io::Result<()> {
        while !self.is_empty() {
            self.send_some(&socket)?;
        }
        Ok(())
    }

    fn advance(&mut self, mut bytes: usize) {
        self.unsent -= bytes;
        while let Some(first) = self.frames.front_mut() {
            if bytes == 0 {
                break;
            }
            // They went with the first byte.
            first.descriptors.clear();
            let rest = first.bytes.len() - self.sent;
            if bytes < rest {
                self.sent += bytes;
                break;
            }
            bytes -= rest;
            self.sent = 0;
            self.frames.pop_front();
        }
    }
}

/// One frame that arrived.
#[derive(Debug)]
pub struct Received {
    /// The message's bytes.
    pub message: Bytes,
    /// The descriptors, close-on-exec, in the order sent.
    pub descriptors: Vec<OwnedFd>,
}

impl Received {
    /// Decodes the message, once it is known to take little memory. Its byte fields share the frame's
    /// buffer.
    ///
    /// # Errors
    /// [`Error::Malformed`].
    pub fn decode<M: prost::Message + prost::Name + Default>(&self) -> Result<M, Error> {
        Ok(decoding::decode(self.message.clone(), WalkLimits::PEER)?)
    }
}

/// Makes frames of what arrives, however it is cut.
#[derive(Debug)]
pub struct FrameDecoder {
    scratch: Box<[u8]>,
    /// The frame at hand: its header, then its message.
    open: BytesMut,
    open_descriptors: Vec<OwnedFd>,
    /// Whole frames not yet taken: at most what one read holds, if they are taken after each.
    whole: VecDeque<Received>,
}

impl Default for FrameDecoder {
    fn default() -> Self {
        Self {
            scratch: vec![0; RECV_BYTES].into_boxed_slice(),
            open: BytesMut::new(),
            open_descriptors: Vec::new(),
            whole: VecDeque::new(),
        }
    }
}

impl FrameDecoder {
    /// Takes the next whole frame, if one has arrived.
    pub fn next_frame(&mut self) -> Option<Received> {
        self.whole.pop_front()
    }

    /// Reads what one `recvmsg` gives; returns how many bytes that was, 0 when the peer has closed
    /// the socket between frames.
    ///
    /// # Errors
    /// The socket's, `WouldBlock` among them; `InvalidData` or `UnexpectedEof` around an [`Error`].
    pub fn recv_some(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            let slices = &mut [IoSliceMut::new(&mut self.scratch)];
            recvmsg(&socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Error::DescriptorsLost.into());
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(Error::TooManyDescriptors { count: descriptors.len() }.into());
        }
        if received.bytes == 0 {
            return self.close().map(|()| 0).map_err(io::Error::from);
        }
        let scratch = std::mem::take(&mut self.scratch);
        let fed = self.feed(&scratch[..received.bytes], descriptors);
        self.scratch = scratch;
        fed?;
        Ok(received.bytes)
    }

    /// Reads from a blocking socket until a frame is whole; `None` when the peer has closed it.
    ///
    /// # Errors
    /// As [`Self::recv_some`].
    pub fn recv_frame(&mut self, socket: impl AsFd) -> io::Result<Option<Received>> {
        loop {
            if let Some(frame) = self.next_frame() {
                return Ok(Some(frame));
            }
            if self.recv_some(&socket)? == 0 {
                return Ok(None);
            }
        }
    }

    /// Takes the bytes and descriptors of one read.
    ///
    /// # Errors
    /// [`Error::MessageTooLong`], [`Error::StrayDescriptors`].
    pub fn feed(&mut self, mut bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), Error> {
        let mut begun = false;
        while !bytes.is_empty() {
            begun |= self.open.is_empty();
            let (now, later) = bytes.split_at(bytes.len().min(self.missing()?));
            self.open.extend_from_slice(now);
            bytes = later;
            if self.missing()? == 0 {
                let mut message = std::mem::take(&mut self.open).freeze();
                let message = message.split_off(HEADER_BYTES);
                let descriptors = std::mem::take(&mut self.open_descriptors);
                self.whole.push_back(Received { message, descriptors });
            }
        }
        if descriptors.is_empty() {
            return Ok(());
        }
        if !begun {
            return Err(Error::StrayDescriptors);
        }
        let owner = if self.open.is_empty() {
            self.whole.back_mut().map(|frame| &mut frame.descriptors)
        } else {
            None
        };
        owner.unwrap_or(&mut self.open_descriptors).extend(descriptors);
        Ok(())
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// [`Error::ClosedInFrame`] when a frame is not whole.
    pub fn close(&mut self) -> Result<(), Error> {
        if self.open.is_empty() { Ok(()) } else { Err(Error::ClosedInFrame { missing: self.missing()? }) }
    }

    /// What the frame at hand still needs, as far as known: the rest of its header, then the rest
    /// of its message.
    fn missing(&mut self) -> Result<usize, Error> {
        let Some(header) = self.open.first_chunk::<HEADER_BYTES>() else {
            return Ok(HEADER_BYTES - self.open.len());
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(Error::MessageTooLong { bytes: length });
        }
        let missing = HEADER_BYTES + length - self.open.len();
        self.open.reserve(missing);
        Ok(missing)
    }
}
