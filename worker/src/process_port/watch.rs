//! Follows one executor process from its start to its end: passes its events on, and kills it when
//! it does not greet, speaks another protocol or says what cannot be understood.

use std::cell::Cell;
use std::io;
use std::process::ExitStatus;
use std::rc::Rc;
use std::time::Duration;

use millrace_proto::PROTOCOL_VERSION;
use millrace_proto::executor::{Ready, event};
use millrace_proto::frames::FrameDecoder;
use millrace_types::{GpuIndex, Incarnation};
use tokio::process::Child;

use super::connection::{Arrived, Connection};
use crate::port::{PortEvent, PortEventKind, PortSink};

/// How long a process may take from its start to its `Ready`.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// One process under watch.
#[derive(Debug)]
pub(super) struct Watch {
    gpu: GpuIndex,
    incarnation: Incarnation,
    connection: Rc<Connection>,
    sink: PortSink,
    ready: Cell<bool>,
}

/// How long a process may take to exit after it closed its socket.
const EXIT_GRACE: Duration = Duration::from_millis(50);

/// How watching came to its end.
#[derive(Debug)]
enum End {
    /// The process ended, or closed its socket, which only its end should do.
    Ended,
    /// It must be killed.
    Kill(io::Error),
}

impl Watch {
    pub(super) fn new(
        gpu: GpuIndex,
        incarnation: Incarnation,
        connection: Rc<Connection>,
        sink: PortSink,
    ) -> Self {
        Self { gpu, incarnation, connection, sink, ready: Cell::new(false) }
    }

    /// Watches until the process has ended, and reports that last.
    pub(super) async fn run(self, mut child: Child) {
        let (gpu, incarnation) = (self.gpu, self.incarnation);
        let mut decoder = FrameDecoder::default();
        let end = self.follow(&mut child, &mut decoder).await;
        if let End::Kill(error) = &end {
            tracing::error!(%gpu, %incarnation, %error, "executor killed");
        }
        let status = end_of(&mut child, &end).await;
        // Of one that was killed for what it said nothing more is believed.
        if let End::Ended = end
            && let Err(error) = self.connection.read_rest(&mut decoder, |arrived| self.deliver(arrived))
        {
            tracing::warn!(%gpu, %incarnation, %error, "the last words of an executor");
        }
        let status = match (status, end) {
            (_, End::Kill(error)) => format!("killed: {error}"),
            (Ok(status), End::Ended) => status.to_string(),
            (Err(error), End::Ended) => format!("unknown: {error}"),
        };
        self.sink.deliver(PortEvent { incarnation, kind: PortEventKind::Exited { status } });
    }

    async fn follow(&self, child: &mut Child, decoder: &mut FrameDecoder) -> End {
        let not_ready = async {
            tokio::time::sleep(READY_TIMEOUT).await;
            if self.ready.get() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            read = self.connection.read(decoder, |arrived| self.deliver(arrived)) => {
                read.map_or_else(End::Kill, |()| End::Ended)
            }
            _status = child.wait() => End::Ended,
            // The reader meets what ended the writer, and with it the last events.
            _error = self.connection.write_rest() => End::Ended,
            () = not_ready => {
                End::Kill(io::Error::new(io::ErrorKind::TimedOut, format!("not ready within {READY_TIMEOUT:?}")))
            }
        }
    }

    fn deliver(&self, Arrived { event, descriptors }: Arrived) -> io::Result<()> {
        if let event::Event::Ready(ready) = &event {
            self.check(ready)?;
            self.ready.set(true);
        } else if !self.ready.get() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it spoke before it was ready"));
        }
        let kind = PortEventKind::Event(event, descriptors);
        self.sink.deliver(PortEvent { incarnation: self.incarnation, kind });
        Ok(())
    }

    fn check(&self, ready: &Ready) -> io::Result<()> {
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        if ready.protocol_version != PROTOCOL_VERSION {
            let (theirs, build) = (ready.protocol_version, &ready.build);
            return refuse(format!(
                "it speaks protocol {theirs} (build {build}) and this worker {PROTOCOL_VERSION}: restart the worker, its program was replaced"
            ));
        }
        if ready.incarnation != self.incarnation.0 {
            return refuse(format!("it says it is incarnation {}", ready.incarnation));
        }
        Ok(())
    }
}

/// The process's status, once it has one. What does not end by itself is killed.
async fn end_of(child: &mut Child, end: &End) -> io::Result<ExitStatus> {
    if let End::Ended = end
        && let Ok(status) = tokio::time::timeout(EXIT_GRACE, child.wait()).await
    {
        return status;
    }
    child.start_kill()?;
    child.wait().await
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;
    use std::sync::mpsc;

    use super::*;

    // Paused time runs on by itself while everybody waits.
    #[tokio::test(start_paused = true)]
    async fn an_executor_that_does_not_greet_in_time_is_killed() {
        let (connection, theirs) = Connection::pair().unwrap();
        let child =
            tokio::process::Command::new("sleep").arg("1000").stdin(Stdio::from(theirs)).spawn().unwrap();
        let (told, events) = mpsc::channel();
        let sink = PortSink::new(move |event| told.send(event).unwrap());
        Watch::new(GpuIndex(0), Incarnation(1), Rc::new(connection), sink).run(child).await;
        let PortEventKind::Exited { status } = events.recv().unwrap().kind else { panic!("not its end") };
        assert!(status.contains("not ready"), "{status}");
        assert!(events.recv().is_err());
    }
}
