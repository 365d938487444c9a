//! The framed Unix socket between a worker and its executors or its users' programs: the frames of
//! `executor.proto` and `function.proto`, and the file descriptors that travel with them.
//!
//! ```text
//! message, descriptors ─ SocketFrame::new ─> FrameQueue ── sendmsg ──> recvmsg ─> FrameDecoder ─> ReceivedFrame
//! ```
//!
//! [`FrameQueue::send_some`] and [`FrameDecoder::recv_some`] make a single system call each, so they
//! work on a non-blocking socket (inside `AsyncFd::try_io`) and on a blocking one. For a blocking
//! socket, [`FrameQueue::flush`] and [`FrameDecoder::recv_frame`] loop over them. This module does not
//! interpret the messages.
//!
//! A frame does not state its number of descriptors. A `sendmsg` with descriptors carries a single
//! frame and starts with the frame's first byte. For the reader, descriptors are a barrier
//! (unix(7), "ancillary data"): a `recvmsg` never returns bytes from behind them. The descriptors
//! that a read returns therefore belong to the last frame that begins in the read.

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

/// Maximum size of a frame's message, in bytes. Bulk data is sent in memfds, so only many small
/// tensors or the launches of a very deep model come near this size.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Maximum number of descriptors of a frame (the kernel's own limit is 253).
pub const DESCRIPTORS_MAX: usize = 64;
/// Maximum number of unsent bytes in an [`FrameQueue`].
pub const OUTBOX_BYTES_MAX: usize = 64 << 20;

const HEADER_BYTES: usize = size_of::<u32>();
/// Maximum number of bytes that a `recvmsg` reads; also bounds the frames that a decoder holds.
const RECV_BYTES: usize = 64 << 10;
/// Maximum number of frames in a `sendmsg`.
const FRAMES_PER_SEND: usize = 16;

/// The fault of a frame, or of received bytes that are not frames. After an error in received bytes
/// the stream cannot be resynchronised: close the stream.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The message exceeds [`MESSAGE_BYTES_MAX`].
    #[error(
        "a message of {bytes} bytes exceeds the {MESSAGE_BYTES_MAX} bytes of a frame: send bulk data in a memfd"
    )]
    MessageTooLong { bytes: usize },
    /// The frame has more than [`DESCRIPTORS_MAX`] descriptors.
    #[error("{count} descriptors exceed the {DESCRIPTORS_MAX} of a frame: put more tensors inline")]
    TooManyDescriptors { count: usize },
    /// The kernel dropped descriptors: the peer sent too many, or this process has too many files
    /// open.
    #[error("the kernel dropped received descriptors: raise the limit of open files (ulimit -n)")]
    DescriptorsLost,
    /// Descriptors arrived with bytes in which no frame begins.
    #[error("descriptors arrived in the middle of a frame")]
    StrayDescriptors,
    /// The peer closed the socket in the middle of a frame.
    #[error("the peer closed the socket {missing} bytes before the end of a frame")]
    ClosedInFrame {
        /// The number of missing bytes, as far as known.
        missing: usize,
    },
    /// The [`FrameQueue`] holds [`OUTBOX_BYTES_MAX`] unsent bytes, because the peer does not read.
    #[error("{OUTBOX_BYTES_MAX} bytes wait to be sent: the peer does not read")]
    OutboxFull,
    /// The bytes are not a message of the expected type.
    #[error("a frame does not decode: {0}")]
    Malformed(#[from] DecodeError),
}

impl From<FrameError> for io::Error {
    fn from(error: FrameError) -> Self {
        let kind = match error {
            FrameError::ClosedInFrame { .. } => io::ErrorKind::UnexpectedEof,
            _ => io::ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

/// An encoded message with its descriptors. The descriptors are closed after they were sent.
#[derive(Debug)]
pub struct SocketFrame {
    bytes: Bytes,
    descriptors: Vec<OwnedFd>,
}

impl SocketFrame {
    /// Encodes a message. `descriptors` are in the order by which the message's `*_fd` fields index
    /// them.
    ///
    /// # Errors
    /// [`FrameError::MessageTooLong`], [`FrameError::TooManyDescriptors`].
    pub fn new(message: &impl prost::Message, descriptors: Vec<OwnedFd>) -> Result<Self, FrameError> {
        let length = message.encoded_len();
        if length > MESSAGE_BYTES_MAX {
            return Err(FrameError::MessageTooLong { bytes: length });
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(FrameError::TooManyDescriptors { count: descriptors.len() });
        }
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES + length);
        bytes.put_u32_le(u32::try_from(length).expect("at most MESSAGE_BYTES_MAX"));
        message.encode(&mut bytes).expect("the buffer has room for encoded_len");
        Ok(Self { bytes: bytes.freeze(), descriptors })
    }
}

/// A queue of frames to be sent.
#[derive(Debug, Default)]
pub struct FrameQueue {
    frames: VecDeque<SocketFrame>,
    /// Sent bytes of the first frame.
    sent: usize,
    /// Unsent bytes of all frames.
    unsent: usize,
}

impl FrameQueue {
    /// Appends a frame.
    ///
    /// # Errors
    /// [`FrameError::OutboxFull`]; the frame is then dropped.
    pub fn push(&mut self, frame: SocketFrame) -> Result<(), FrameError> {
        if self.unsent + frame.bytes.len() > OUTBOX_BYTES_MAX {
            return Err(FrameError::OutboxFull);
        }
        self.unsent += frame.bytes.len();
        self.frames.push_back(frame);
        Ok(())
    }

    /// Removes the last frame if no byte of the frame was sent. Returns whether a frame was
    /// removed.
    pub fn take_back(&mut self) -> bool {
        if self.frames.len() == 1 && self.sent > 0 {
            return false;
        }
        let last = self.frames.pop_back();
        self.unsent -= last.as_ref().map_or(0, |frame| frame.bytes.len());
        last.is_some()
    }

    /// Returns the number of frames that are not completely sent.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns whether all frames are sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Sends as much as a single `sendmsg` accepts. Returns the number of bytes sent, 0 if nothing
    /// waits.
    ///
    /// # Errors
    /// The error of the socket, for example `WouldBlock`. No bytes are lost then.
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
            assert!(pushed, "the space fits DESCRIPTORS_MAX");
        }
        let sent =
            rustix::io::retry_on_intr(|| sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL))?;
        self.advance(sent);
        Ok(sent)
    }

    /// Sends all frames over a blocking socket.
    ///
    /// # Errors
    /// The error of the socket.
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
            // The descriptors were sent with the first byte.
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

/// A received frame.
#[derive(Debug)]
pub struct ReceivedFrame {
    /// The encoded message.
    pub message: Bytes,
    /// The descriptors, close-on-exec, in the order sent.
    pub descriptors: Vec<OwnedFd>,
}

impl ReceivedFrame {
    /// Decodes the message after a check of the memory that the decoded form takes. Byte fields
    /// share the frame's buffer.
    ///
    /// # Errors
    /// [`FrameError::Malformed`].
    pub fn decode<M: prost::Message + prost::Name + Default>(&self) -> Result<M, FrameError> {
        Ok(decoding::decode(self.message.clone(), WalkLimits::PEER)?)
    }
}

/// Decodes frames from received bytes, in pieces of any size.
#[derive(Debug)]
pub struct FrameDecoder {
    scratch: Box<[u8]>,
    /// The unfinished frame: its header, then its message.
    open: BytesMut,
    open_descriptors: Vec<OwnedFd>,
    /// Whole frames that the caller has not taken. If the caller takes them after each read, these
    /// are at most the frames of a read.
    whole: VecDeque<ReceivedFrame>,
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
    /// Takes the next whole frame, if a frame has arrived.
    pub fn next_frame(&mut self) -> Option<ReceivedFrame> {
        self.whole.pop_front()
    }

    /// Reads with a single `recvmsg`. Returns the number of bytes, 0 if the peer closed the socket
    /// between frames.
    ///
    /// # Errors
    /// The error of the socket, for example `WouldBlock`; `InvalidData` or `UnexpectedEof` around
    /// an [`FrameError`].
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
            return Err(FrameError::DescriptorsLost.into());
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(FrameError::TooManyDescriptors { count: descriptors.len() }.into());
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

    /// Reads from a blocking socket until a frame is whole. Returns `None` if the peer closed the
    /// socket.
    ///
    /// # Errors
    /// Like [`Self::recv_some`].
    pub fn recv_frame(&mut self, socket: impl AsFd) -> io::Result<Option<ReceivedFrame>> {
        loop {
            if let Some(frame) = self.next_frame() {
                return Ok(Some(frame));
            }
            if self.recv_some(&socket)? == 0 {
                return Ok(None);
            }
        }
    }

    /// Adds the bytes and descriptors of a read.
    ///
    /// # Errors
    /// [`FrameError::MessageTooLong`], [`FrameError::StrayDescriptors`].
    pub fn feed(&mut self, mut bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), FrameError> {
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
                self.whole.push_back(ReceivedFrame { message, descriptors });
            }
        }
        if descriptors.is_empty() {
            return Ok(());
        }
        if !begun {
            return Err(FrameError::StrayDescriptors);
        }
        let owner = if self.open.is_empty() {
            self.whole.back_mut().map(|frame| &mut frame.descriptors)
        } else {
            None
        };
        owner.unwrap_or(&mut self.open_descriptors).extend(descriptors);
        Ok(())
    }

    /// Marks the end of the stream.
    ///
    /// # Errors
    /// [`FrameError::ClosedInFrame`] if the last frame is unfinished.
    pub fn close(&mut self) -> Result<(), FrameError> {
        if self.open.is_empty() {
            Ok(())
        } else {
            Err(FrameError::ClosedInFrame { missing: self.missing()? })
        }
    }

    /// Returns the number of bytes that the unfinished frame still needs, as far as known: first
    /// those of the header, then those of the message.
    fn missing(&mut self) -> Result<usize, FrameError> {
        let Some(header) = self.open.first_chunk::<HEADER_BYTES>() else {
            return Ok(HEADER_BYTES - self.open.len());
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(FrameError::MessageTooLong { bytes: length });
        }
        let missing = HEADER_BYTES + length - self.open.len();
        self.open.reserve(missing);
        Ok(missing)
    }
}
