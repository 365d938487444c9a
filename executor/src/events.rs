//! The way back: events to the worker, from whichever thread has one.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use millrace_proto::executor::event::Event;
use millrace_proto::executor::{self as wire, DeviceFailed};
use millrace_proto::frames::{self, Frame, Outbox};

/// The longest error message an event carries: what a model's author wrote may be in it.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Sends events over the socket. Each is sent whole before the next; a worker that does not read
/// makes the sender wait.
#[derive(Debug)]
pub(crate) struct Events {
    socket: OwnedFd,
    outbox: Mutex<Outbox>,
    device_failed: AtomicBool,
}

impl Events {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, outbox: Mutex::default(), device_failed: AtomicBool::new(false) }
    }

    /// Sends an event that has no descriptors, and no text but what was [`clip`]ped.
    pub(crate) fn send(&self, event: Event) {
        self.send_with(event, Vec::new()).expect("such an event is shorter than a frame may be");
    }

    /// Sends an event and its descriptors.
    pub(crate) fn send_with(&self, event: Event, descriptors: Vec<OwnedFd>) -> Result<(), frames::Error> {
        let frame = Frame::new(&wire::Event { event: Some(event) }, descriptors)?;
        let mut outbox = self.outbox.lock().unwrap_or_else(PoisonError::into_inner);
        outbox.push(frame)?;
        if let Err(error) = outbox.flush(self.socket.as_fd()) {
            // The worker is gone. The control thread meets the end of the socket and ends us.
            tracing::debug!(%error, "an event could not be sent");
        }
        Ok(())
    }

    /// Says that the device is gone, once.
    pub(crate) fn device_failed(&self, message: &str) {
        if !self.device_failed.swap(true, Ordering::Relaxed) {
            self.send(Event::DeviceFailed(DeviceFailed { message: clip(message) }));
        }
    }
}

/// A message short enough for an event.
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
