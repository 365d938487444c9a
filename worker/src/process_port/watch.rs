//! The watch of an executor process: the task that follows the process from its start to its end and
//! passes its events on. The watch kills a process that sends no greeting in time, speaks another
//! protocol version or sends malformed events.

use std::cell::Cell;
use std::io;
use std::process::ExitStatus;
use std::rc::Rc;
use std::time::Duration;

use millrace_gpu::lifecycle::START_TIMEOUT;
use millrace_proto::PROTOCOL_VERSION;
use millrace_proto::executor::{Ready, event};
use millrace_proto::frames::FrameDecoder;
use millrace_types::{GpuIndex, Incarnation};
use tokio::process::Child;

use super::connection::{ProcessConnection, ReceivedEvent};
use crate::port::{PortEvent, PortEventKind, PortSink};

/// The watch of an executor process.
#[derive(Debug)]
pub(super) struct ExecutorWatch {
    gpu: GpuIndex,
    incarnation: Incarnation,
    connection: Rc<ProcessConnection>,
    sink: PortSink,
    ready: Cell<bool>,
}

/// Maximum time from the close of a process's socket to the exit.
const EXIT_GRACE: Duration = Duration::from_millis(50);

/// The reason why the watch stops to follow the process.
#[derive(Debug)]
enum WatchEnd {
    /// The process ended, or closed its socket, which only an ending process does.
    Ended,
    /// The process has to be killed because of this error.
    Kill(io::Error),
}

impl ExecutorWatch {
    pub(super) fn new(
        gpu: GpuIndex,
        incarnation: Incarnation,
        connection: Rc<ProcessConnection>,
        sink: PortSink,
    ) -> Self {
        Self { gpu, incarnation, connection, sink, ready: Cell::new(false) }
    }

    /// Follows the process, and reports its end as the last event.
    pub(super) async fn run(self, mut child: Child) {
        let gpu = self.gpu;
        let incarnation = self.incarnation;
        let mut decoder = FrameDecoder::default();
        let end = self.follow(&mut child, &mut decoder).await;
        if let WatchEnd::Kill(error) = &end {
            tracing::error!(%gpu, %incarnation, %error, "an executor is killed");
        }
        let status = end_of(&mut child, &end).await;
        // The remaining events of a process that was killed for its behaviour are not trusted.
        if let WatchEnd::Ended = end
            && let Err(error) = self.connection.read_rest(&mut decoder, |arrived| self.deliver(arrived))
        {
            tracing::warn!(%gpu, %incarnation, %error, "cannot read the last events of an executor");
        }
        let status = match (status, end) {
            (_, WatchEnd::Kill(error)) => format!("killed: {error}"),
            (Ok(status), WatchEnd::Ended) => status.to_string(),
            (Err(error), WatchEnd::Ended) => format!("unknown: {error}"),
        };
        self.sink.deliver(PortEvent { incarnation, kind: PortEventKind::Exited { status } });
    }

    async fn follow(&self, child: &mut Child, decoder: &mut FrameDecoder) -> WatchEnd {
        let not_ready = async {
            tokio::time::sleep(START_TIMEOUT).await;
            if self.ready.get() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            read = self.connection.read(decoder, |arrived| self.deliver(arrived)) => {
                read.map_or_else(WatchEnd::Kill, |()| WatchEnd::Ended)
            }
            _status = child.wait() => WatchEnd::Ended,
            // `read_rest` reads the last events, and finds the same end of the stream as the writer.
            _error = self.connection.write_rest() => WatchEnd::Ended,
            () = not_ready => {
                let message = format!("the executor was not ready within {START_TIMEOUT:?}");
                WatchEnd::Kill(io::Error::new(io::ErrorKind::TimedOut, message))
            }
        }
    }

    fn deliver(&self, ReceivedEvent { event, descriptors }: ReceivedEvent) -> io::Result<()> {
        if let event::Event::Ready(ready) = &event {
            self.check(ready)?;
            self.ready.set(true);
        } else if !self.ready.get() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the executor sent an event before it was ready",
            ));
        }
        let kind = PortEventKind::Event(event, descriptors);
        self.sink.deliver(PortEvent { incarnation: self.incarnation, kind });
        Ok(())
    }

    fn check(&self, ready: &Ready) -> io::Result<()> {
        let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        if ready.protocol_version != PROTOCOL_VERSION {
            let theirs = ready.protocol_version;
            let build = &ready.build;
            return refuse(format!(
                "the executor speaks protocol version {theirs} (build {build}) and this worker version {PROTOCOL_VERSION}: restart the worker, because its executable was replaced"
            ));
        }
        if ready.incarnation != self.incarnation.0 {
            return refuse(format!("the executor reports the wrong incarnation {}", ready.incarnation));
        }
        Ok(())
    }
}

/// Waits for the process's exit status. A process that does not end by itself is killed.
async fn end_of(child: &mut Child, end: &WatchEnd) -> io::Result<ExitStatus> {
    if let WatchEnd::Ended = end
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

    // Paused time advances by itself while all tasks wait.
    #[tokio::test(start_paused = true)]
    async fn an_executor_that_does_not_greet_in_time_is_killed() {
        let (connection, theirs) = ProcessConnection::pair().unwrap();
        let child =
            tokio::process::Command::new("sleep").arg("1000").stdin(Stdio::from(theirs)).spawn().unwrap();
        let (told, events) = mpsc::channel();
        let sink = PortSink::new(move |event| told.send(event).unwrap());
        ExecutorWatch::new(GpuIndex(0), Incarnation(1), Rc::new(connection), sink).run(child).await;
        let PortEventKind::Exited { status } = events.recv().unwrap().kind else {
            panic!("expected the end of the process")
        };
        assert!(status.contains("not ready"), "{status}");
        assert!(events.recv().is_err());
    }
}
