//! The messages to a Link actor.

use millrace_transfers::fabric::link::Event;

use crate::snapshot::SnapshotSender;

/// A message to a Link actor.
pub(crate) enum Message {
    /// An event for the link's core.
    Event(Event),
    /// A request for the link's part of a snapshot.
    Report { parts: SnapshotSender },
}
