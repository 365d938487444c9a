//! Events about an object: reported at once, or when the object's memory is unmapped.

use std::sync::{Mutex, MutexGuard, PoisonError};

use millrace_proto::executor::event::Event;
use millrace_proto::executor::{ObjectFreed, ObjectPlaced, PlaceFailed};

use crate::socket::events::clip;

/// The reports about an object that are due when the memory is unmapped.
#[derive(Debug, Default)]
pub(crate) struct ObjectReports(Mutex<PendingReports>);

#[derive(Debug, Default)]
pub(super) struct PendingReports {
    /// Error of a failed placement that is not yet reported.
    pub(super) failed: Option<String>,
    pub(super) freed: bool,
    /// Whether the object's memory is unmapped.
    pub(super) away: bool,
}

impl ObjectReports {
    pub(super) fn ends(&self) -> MutexGuard<'_, PendingReports> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the object's memory is unmapped, and sends the pending reports. The reports are
    /// sent under the lock, because a filling may fail while the object is being freed: the report
    /// that the object is freed must be sent once, and last.
    pub(crate) fn record_unmapped(&self, object: u64, say: impl FnMut(Event)) {
        let mut ends = self.ends();
        ends.away = true;
        ends.tell(object, say);
    }

    /// Sends the pending reports if the memory is already unmapped. Otherwise the thread that unmaps
    /// the memory sends them.
    pub(crate) fn send_if_unmapped(&self, object: u64, say: impl FnMut(Event)) {
        let mut ends = self.ends();
        if ends.away {
            ends.tell(object, say);
        }
    }
}

impl PendingReports {
    fn tell(&mut self, object: u64, mut say: impl FnMut(Event)) {
        if let Some(message) = self.failed.take() {
            say(refused(object, message));
        }
        if std::mem::take(&mut self.freed) {
            say(Event::ObjectFreed(ObjectFreed { object }));
        }
    }
}

/// Returns the event for a placed object.
pub(crate) fn placed(object: u64) -> Event {
    Event::ObjectPlaced(ObjectPlaced { object })
}

/// Returns the event for an object that was not placed.
pub(crate) fn refused(object: u64, why: impl ToString) -> Event {
    Event::PlaceFailed(PlaceFailed { object, message: clip(why) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_about_an_object_are_sent_once_after_its_memory_is_unmapped() {
        let fate = ObjectReports::default();
        let mut told = Vec::new();
        fate.ends().failed = Some("no room".into());
        // The object is freed while the copy thread unmaps the memory.
        fate.ends().freed = true;
        fate.send_if_unmapped(5, |event| told.push(event));
        assert!(told.is_empty(), "{told:?}");
        fate.record_unmapped(5, |event| told.push(event));
        fate.send_if_unmapped(5, |event| told.push(event));
        assert_eq!(told, [refused(5, "no room"), Event::ObjectFreed(ObjectFreed { object: 5 })]);
    }
}
