//! The worker's end of the socket of one executor, or of one process of a function: non-blocking, on
//! the actor thread.
//!
//! A command is written in the call that sends it, unless the socket is full: then it waits in the
//! outbox and the writer task takes over. The outbox is bounded by
//! [`OUTBOX_BYTES_MAX`](millrace_proto::frames::OUTBOX_BYTES_MAX); an executor that lets it fill up
//! does not read, and is stuck.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;

use millrace_proto::executor as wire;
use millrace_proto::frames::{self, Frame, FrameDecoder, Outbox, Received};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;

/// One event of an executor, and the descriptors that came with it.
#[derive(Debug)]
pub(super) struct Arrived {
    pub event: wire::event::Event,
    pub descriptors: Vec<OwnedFd>,
}

/// Our end of the socket and what waits to be written to it.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: UnixStream,
    outbox: RefCell<Outbox>,
    // Told when a send left something in the outbox.
    blocked: Notify,
}

impl Connection {
    /// A connection, and the executor's end of it: a blocking socket, close-on-exec like ours.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        // On our end only: the flag belongs to the open file, and each end is its own.
        ours.set_nonblocking(true)?;
        let socket = UnixStream::from_std(ours)?;
        Ok((Self { socket, outbox: RefCell::default(), blocked: Notify::new() }, theirs.into()))
    }

    /// Sends a command behind all earlier ones, and as much of the outbox as the socket takes.
    ///
    /// # Errors
    /// A frame that cannot be, or an outbox that is full. What the socket itself says (the executor
    /// is gone) is left to the reader, which meets the end of the stream.
    pub(crate) fn send(&self, frame: Frame) -> Result<(), frames::Error> {
        let mut outbox = self.outbox.borrow_mut();
        // Behind others the writer task is at it already.
        let first = outbox.is_empty();
        outbox.push(frame)?;
        if first && self.write_some(&mut outbox).is_err() {
            self.blocked.notify_one();
        }
        Ok(())
    }

    /// How many frames wait until the other end reads.
    pub(crate) fn waiting(&self) -> usize {
        self.outbox.borrow().len()
    }

    /// Writes until the socket is full (`WouldBlock`) or the outbox empty.
    fn write_some(&self, outbox: &mut Outbox) -> io::Result<()> {
        while !outbox.is_empty() {
            outbox.send_some(&self.socket)?;
        }
        Ok(())
    }

    /// Writes what sends left behind. Ends when the executor is gone.
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

    /// The next frame; `None` when the other end is closed. What was read of one that is not whole stays
    /// in the decoder when this is given up.
    ///
    /// # Errors
    /// What arrived is no frame.
    pub(crate) async fn receive(&self, decoder: &mut FrameDecoder) -> io::Result<Option<Received>> {
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

    /// The next frame of those that have arrived, without waiting for more.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub(crate) fn receive_now(&self, decoder: &mut FrameDecoder) -> io::Result<Option<Received>> {
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

    /// Hands over each event as it arrives. Ends with `Ok` when the executor closes its end.
    ///
    /// # Errors
    /// What arrived is no frame or no event: nothing after it means anything.
    pub(super) async fn read(
        &self,
        decoder: &mut FrameDecoder,
        mut on: impl FnMut(Arrived) -> io::Result<()>,
    ) -> io::Result<()> {
        while let Some(frame) = self.receive(decoder).await? {
            on(arrived(frame)?)?;
        }
        Ok(())
    }

    /// Hands over what had arrived when the executor died, without waiting for more.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn read_rest(
        &self,
        decoder: &mut FrameDecoder,
        mut on: impl FnMut(Arrived) -> io::Result<()>,
    ) -> io::Result<()> {
        while let Some(frame) = self.receive_now(decoder)? {
            on(arrived(frame)?)?;
        }
        Ok(())
    }
}

/// The ways in which a stream ends when a process is killed: in the middle of what it was saying,
/// or with commands it had not read.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

fn arrived(frame: Received) -> io::Result<Arrived> {
    let message: wire::Event = frame.decode()?;
    // A oneof that this build does not know decodes as nothing: the handshake compared versions, so it
    // is damage.
    let event = message
        .event
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "an event without content"))?;
    Ok(Arrived { event, descriptors: frame.descriptors })
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

    fn collect(seen: &mut Vec<wire::event::Event>) -> impl FnMut(Arrived) -> io::Result<()> {
        |arrived| {
            seen.push(arrived.event);
            Ok(())
        }
    }

    fn send_event(socket: impl AsFd, run: u64) {
        let mut outbox = Outbox::default();
        outbox.push(Frame::new(&wire::Event { event: Some(cancelled(run)) }, Vec::new()).unwrap()).unwrap();
        outbox.flush(socket).unwrap();
    }

    #[tokio::test]
    async fn commands_beyond_what_the_socket_takes_arrive_in_order() {
        let (connection, theirs) = Connection::pair().unwrap();
        let connection = Rc::new(connection);
        LocalSet::new()
            .run_until(async {
                let writer = spawn_local({
                    let connection = connection.clone();
                    async move { connection.write_rest().await }
                });
                for run in 0..64 {
                    connection.send(Frame::new(&command(run, 100_000), Vec::new()).unwrap()).unwrap();
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

    #[tokio::test]
    async fn an_executor_that_does_not_read_fills_the_outbox() {
        let (connection, _theirs) = Connection::pair().unwrap();
        let error = (0..100)
            .find_map(|run| connection.send(Frame::new(&command(run, 4 << 20), Vec::new()).unwrap()).err());
        assert_eq!(error, Some(frames::Error::OutboxFull));
    }

    #[tokio::test]
    async fn events_are_handed_over_until_the_executor_closes() {
        let (connection, theirs) = Connection::pair().unwrap();
        (1..=3).for_each(|run| send_event(&theirs, run));
        // Killed in mid-sentence, with a command unread.
        rustix::io::write(&theirs, &[9, 0, 0]).unwrap();
        connection.send(Frame::new(&command(1, 1), Vec::new()).unwrap()).unwrap();
        drop(theirs);
        let mut seen = Vec::new();
        connection.read(&mut FrameDecoder::default(), collect(&mut seen)).await.unwrap();
        assert_eq!(seen, [cancelled(1), cancelled(2), cancelled(3)]);
    }

    #[tokio::test]
    async fn what_a_dead_executor_said_last_is_still_heard() {
        let (connection, theirs) = Connection::pair().unwrap();
        send_event(&theirs, 1);
        let mut seen = Vec::new();
        connection.read_rest(&mut FrameDecoder::default(), collect(&mut seen)).unwrap();
        assert_eq!(seen, [cancelled(1)]);
    }

    #[tokio::test]
    async fn bytes_that_are_no_event_end_the_stream() {
        for bytes in [&[1, 0, 0, 0, 0xff][..], &[0, 0, 0, 0], &[0xff, 0xff, 0xff, 0xff]] {
            let (connection, theirs) = Connection::pair().unwrap();
            rustix::io::write(&theirs, bytes).unwrap();
            let outcome = connection.read(&mut FrameDecoder::default(), |_| Ok(())).await;
            assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }
}
