//! Events to the worker, sent from any thread.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use millrace_device::DeviceLoss;
use millrace_engine::Error as EngineError;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{self as wire, DeviceFailed};
use millrace_proto::frames::{self, FrameQueue, SocketFrame};

/// Longest error message of an event in bytes. The message may contain text of a model's author.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Sends events over the socket. Each event is sent completely before the next, so a worker that does
/// not read blocks the sender.
#[derive(Debug)]
pub(crate) struct EventSender {
    socket: OwnedFd,
    outbox: Mutex<FrameQueue>,
    device_failed: AtomicBool,
}

impl EventSender {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, outbox: Mutex::default(), device_failed: AtomicBool::new(false) }
    }

    /// Sends an event without descriptors. All text must be [`clip`]ped.
    pub(crate) fn send(&self, event: Event) {
        self.send_with(event, Vec::new()).expect("an event with clipped text fits in a frame");
    }

    /// Sends an event with descriptors.
    pub(crate) fn send_with(
        &self,
        event: Event,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), frames::FrameError> {
        let frame = SocketFrame::new(&wire::Event { event: Some(event) }, descriptors)?;
        let mut outbox = self.outbox.lock().unwrap_or_else(PoisonError::into_inner);
        outbox.push(frame)?;
        if let Err(error) = outbox.flush(self.socket.as_fd()) {
            // The worker is gone. The control thread sees the end of the socket, and then exits.
            tracing::debug!(%error, "cannot send an event");
        }
        Ok(())
    }

    /// Reports once that the GPU or the context is lost, if an error says so.
    pub(crate) fn report_loss(&self, error: &EngineError) {
        if let Some(loss) = error.loss() {
            self.device_failed(loss, &error.to_string());
        }
    }

    /// Reports once that the GPU or the context is lost.
    pub(crate) fn device_failed(&self, loss: DeviceLoss, message: &str) {
        if !self.device_failed.swap(true, Ordering::Relaxed) {
            let loss = match loss {
                DeviceLoss::Context => wire::DeviceLoss::Context,
                DeviceLoss::Gpu => wire::DeviceLoss::Gpu,
            };
            self.send(Event::DeviceFailed(DeviceFailed { message: clip(message), loss: loss.into() }));
        }
    }
}

/// Shortens a message to fit in an event.
pub(crate) fn clip(message: impl ToString) -> String {
    let mut message = message.to_string();
    if message.len() > MESSAGE_BYTES_MAX {
        let end = (0..=MESSAGE_BYTES_MAX).rev().find(|&end| message.is_char_boundary(end)).unwrap_or(0);
        message.truncate(end);
        message.push('…');
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_clipped_between_characters() {
        assert_eq!(clip("short"), "short");
        let clipped = clip("ä".repeat(MESSAGE_BYTES_MAX));
        assert!(clipped.len() <= MESSAGE_BYTES_MAX + '…'.len_utf8() && clipped.ends_with("ä…"));
    }
}
