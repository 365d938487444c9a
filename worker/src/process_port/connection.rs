//! The worker's end of the socket of an executor, or of a process of a function: non-blocking, on the actor
//! thread.
//!
//! A command is written in the call that sends it, unless the socket is full. Then the command waits in
//! the outbox, and the writer task writes it.
//! [`OUTBOX_BYTES_MAX`](millrace_proto::frames::OUTBOX_BYTES_MAX) bounds the outbox. An executor that
//! lets the outbox fill up does not read its commands, and is stuck.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;

use millrace_proto::executor as wire;
use millrace_proto::frames::{self, FrameDecoder, FrameQueue, ReceivedFrame, SocketFrame};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;

/// An event of an executor, with descriptors.
#[derive(Debug)]
pub(super) struct ReceivedEvent {
    pub event: wire::event::Event,
    pub descriptors: Vec<OwnedFd>,
}

/// The reason why no part of a frame was sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OfferError {
    /// This machine lacks descriptors or memory. The other end has received no part of the frame.
    #[error(
        "this machine lacks descriptors or memory ({0}): raise the limit of open files (ulimit -n), or add memory"
    )]
    OutOfResources(io::Error),
    /// The frame is invalid, or the outbox is full.
    #[error(transparent)]
    Frame(#[from] frames::FrameError),
}

/// Returns whether an operation failed because this machine lacks descriptors or memory. The process at the
/// other end is not at fault then.
pub(crate) fn is_out_of_resources(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS))
}

/// The worker's end of the socket, and the frames that wait to be written.
#[derive(Debug)]
pub(crate) struct ProcessConnection {
    socket: UnixStream,
    outbox: RefCell<FrameQueue>,
    /// Notifies the writer task that a send left frames in the outbox.
    blocked: Notify,
}

impl ProcessConnection {
    /// Returns a connection and the executor's end of its socket, which is blocking. Both ends are
    /// close-on-exec.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        // This affects the worker's end only: each end is an open file with flags of its own.
        ours.set_nonblocking(true)?;
        let socket = UnixStream::from_std(ours)?;
        Ok((Self { socket, outbox: RefCell::default(), blocked: Notify::new() }, theirs.into()))
    }

    /// Sends a command after all earlier commands. Writes as much of the outbox as the socket accepts.
    ///
    /// # Errors
    /// The frame is invalid, or the outbox is full. Errors of the socket itself are not returned: the
    /// reader finds the end of the stream when the executor is gone.
    pub(crate) fn send(&self, frame: SocketFrame) -> Result<(), frames::FrameError> {
        let mut outbox = self.outbox.borrow_mut();
        // If other frames wait already, the writer task is active and writes this frame too.
        let first = outbox.is_empty();
        outbox.push(frame)?;
        if first && self.write_some(&mut outbox).is_err() {
            self.blocked.notify_one();
        }
        Ok(())
    }

    /// Sends a command as [`Self::send`] does. If this machine lacks descriptors or memory, the command is
    /// removed from the outbox again, provided that no part of it was written.
    ///
    /// # Errors
    /// [`OfferError`]: no part of the command was sent.
    pub(crate) fn offer(&self, frame: SocketFrame) -> Result<(), OfferError> {
        let mut outbox = self.outbox.borrow_mut();
        let first = outbox.is_empty();
        outbox.push(frame)?;
        if first && let Err(error) = self.write_some(&mut outbox) {
            if is_out_of_resources(&error) && outbox.take_back() {
                return Err(OfferError::OutOfResources(error));
            }
            self.blocked.notify_one();
        }
        Ok(())
    }

    /// Returns the number of frames in the outbox, which wait until the other end reads.
    pub(crate) fn waiting(&self) -> usize {
        self.outbox.borrow().len()
    }

    /// Writes until the socket is full (`WouldBlock`) or the outbox empty.
    fn write_some(&self, outbox: &mut FrameQueue) -> io::Result<()> {
        while !outbox.is_empty() {
            outbox.send_some(&self.socket)?;
        }
        Ok(())
    }

    /// Writes the frames that sends left in the outbox. Returns only with an error, for example when the
    /// executor is gone.
    pub(crate) async fn write_rest(&self) -> io::Error {
        loop {
            self.blocked.notified().await;
            while !self.outbox.borrow().is_empty() {
                let wrote = match self.socket.writable().await {
                    Ok(()) => self
                        .socket
                        .try_io(Interest::WRITABLE, || self.write_some(&mut self.outbox.borrow_mut())),
                    Err(error) => Err(error),
                };
                match wrote {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => return error,
                    _ => {}
                }
            }
        }
    }

    /// Waits for the next frame. Returns `None` when the other end is closed. Cancellation loses no
    /// bytes: the decoder keeps the part of a frame that was read.
    ///
    /// # Errors
    /// The received bytes are not a frame.
    pub(crate) async fn receive(&self, decoder: &mut FrameDecoder) -> io::Result<Option<ReceivedFrame>> {
        loop {
            if let Some(frame) = decoder.next_frame() {
                return Ok(Some(frame));
            }
            self.socket.readable().await?;
            match self.socket.try_io(Interest::READABLE, || decoder.recv_some(&self.socket)) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if is_end(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the next frame that has arrived already, without waiting.
    ///
    /// # Errors
    /// The errors of [`Self::receive`].
    pub(crate) fn receive_now(&self, decoder: &mut FrameDecoder) -> io::Result<Option<ReceivedFrame>> {
        loop {
            if let Some(frame) = decoder.next_frame() {
                return Ok(Some(frame));
            }
            match decoder.recv_some(&self.socket) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock || is_end(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Calls `on` with each event as it arrives. Returns `Ok` when the executor closes its end.
    ///
    /// # Errors
    /// The received bytes are not a frame or not an event, so later bytes have no meaning; or the error of
    /// `on`.
    pub(super) async fn read(
        &self,
        decoder: &mut FrameDecoder,
        mut on: impl FnMut(ReceivedEvent) -> io::Result<()>,
    ) -> io::Result<()> {
        while let Some(frame) = self.receive(decoder).await? {
            on(arrived(frame)?)?;
        }
        Ok(())
    }

    /// Calls `on` with the events that had arrived when the executor died, without waiting for more.
    ///
    /// # Errors
    /// The errors of [`Self::read`].
    pub(super) fn read_rest(
        &self,
        decoder: &mut FrameDecoder,
        mut on: impl FnMut(ReceivedEvent) -> io::Result<()>,
    ) -> io::Result<()> {
        while let Some(frame) = self.receive_now(decoder)? {
            on(arrived(frame)?)?;
        }
        Ok(())
    }
}

/// Whether an error is the end of a stream whose process was killed: in the middle of a frame, or with
/// unread commands.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

fn arrived(frame: ReceivedFrame) -> io::Result<ReceivedEvent> {
    let message: wire::Event = frame.decode()?;
    // An unknown variant of the oneof decodes as absent. The handshake has compared the protocol
    // versions, so an absent event means that the message is damaged.
    let event = message
        .event
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "an event without content"))?;
    Ok(ReceivedEvent { event, descriptors: frame.descriptors })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::rc::Rc;

    use tokio::task::{LocalSet, spawn_local};

    use super::*;

    fn command(run: u64, bytes: usize) -> wire::Command {
        let inline = wire::tensor::Contents::Inline(vec![0; bytes].into());
        let input = wire::Tensor { contents: Some(inline), ..Default::default() };
        let run = wire::Run { run, inputs: vec![input], ..Default::default() };
        wire::Command { command: Some(wire::command::Command::Run(run)) }
    }

    fn cancelled(run: u64) -> wire::event::Event {
        wire::event::Event::RunCancelled(wire::RunCancelled { run })
    }

    fn collect(seen: &mut Vec<wire::event::Event>) -> impl FnMut(ReceivedEvent) -> io::Result<()> {
        |arrived| {
            seen.push(arrived.event);
            Ok(())
        }
    }

    fn send_event(socket: impl AsFd, run: u64) {
        let mut outbox = FrameQueue::default();
        outbox
            .push(SocketFrame::new(&wire::Event { event: Some(cancelled(run)) }, Vec::new()).unwrap())
            .unwrap();
        outbox.flush(socket).unwrap();
    }

    #[tokio::test]
    async fn commands_beyond_the_sockets_buffer_arrive_in_order() {
        let (connection, theirs) = ProcessConnection::pair().unwrap();
        let connection = Rc::new(connection);
        LocalSet::new()
            .run_until(async {
                let writer = spawn_local({
                    let connection = connection.clone();
                    async move { connection.write_rest().await }
                });
                for run in 0..64 {
                    connection.send(SocketFrame::new(&command(run, 100_000), Vec::new()).unwrap()).unwrap();
                }
                assert!(!connection.outbox.borrow().is_empty());
                let received = tokio::task::spawn_blocking(move || {
                    let mut decoder = FrameDecoder::default();
                    let next = || decoder.recv_frame(&theirs).unwrap().unwrap().decode().unwrap();
                    std::iter::repeat_with(next).take(64).collect::<Vec<wire::Command>>()
                });
                assert!(received.await.unwrap().into_iter().eq((0..64).map(|run| command(run, 100_000))));
                writer.abort();
            })
            .await;
    }

    #[test]
    fn lacking_resources_differ_from_errors_of_the_other_end() {
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::TOOMANYREFS] {
            assert!(is_out_of_resources(&errno.into()), "{errno}");
        }
        for errno in [Errno::PIPE, Errno::CONNRESET, Errno::AGAIN, Errno::INVAL] {
            assert!(!is_out_of_resources(&errno.into()), "{errno}");
        }
        assert!(!is_out_of_resources(&io::Error::other("the process sent a message before it was ready")));
    }

    #[tokio::test]
    async fn an_executor_that_does_not_read_fills_the_outbox() {
        let (connection, _theirs) = ProcessConnection::pair().unwrap();
        let error = (0..100).find_map(|run| {
            connection.send(SocketFrame::new(&command(run, 4 << 20), Vec::new()).unwrap()).err()
        });
        assert_eq!(error, Some(frames::FrameError::OutboxFull));
    }

    #[tokio::test]
    async fn events_are_delivered_until_the_executor_closes_its_socket() {
        let (connection, theirs) = ProcessConnection::pair().unwrap();
        (1..=3).for_each(|run| send_event(&theirs, run));
        // The executor is killed in the middle of a frame, with a command unread.
        rustix::io::write(&theirs, &[9, 0, 0]).unwrap();
        connection.send(SocketFrame::new(&command(1, 1), Vec::new()).unwrap()).unwrap();
        drop(theirs);
        let mut seen = Vec::new();
        connection.read(&mut FrameDecoder::default(), collect(&mut seen)).await.unwrap();
        assert_eq!(seen, [cancelled(1), cancelled(2), cancelled(3)]);
    }

    #[tokio::test]
    async fn the_last_events_of_a_dead_executor_are_delivered() {
        let (connection, theirs) = ProcessConnection::pair().unwrap();
        send_event(&theirs, 1);
        let mut seen = Vec::new();
        connection.read_rest(&mut FrameDecoder::default(), collect(&mut seen)).unwrap();
        assert_eq!(seen, [cancelled(1)]);
    }

    #[tokio::test]
    async fn malformed_events_end_the_stream() {
        for bytes in [&[1, 0, 0, 0, 0xff][..], &[0, 0, 0, 0], &[0xff, 0xff, 0xff, 0xff]] {
            let (connection, theirs) = ProcessConnection::pair().unwrap();
            rustix::io::write(&theirs, bytes).unwrap();
            let outcome = connection.read(&mut FrameDecoder::default(), |_| Ok(())).await;
            assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }
}
