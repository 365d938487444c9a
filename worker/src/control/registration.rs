//! Under which registrations the controllers know this node. Any stream may bring one; the newest
//! holds, and an older one, in which a slower controller still believes, never comes back.

use millrace_types::Epoch;
use tokio::sync::watch;

/// What is known of this node's epochs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Registration {
    /// The newest; `None` before the first controller took this worker in.
    pub current: Option<Epoch>,
    /// The highest met, in the names of data too. The greeting says it, so that a controller group
    /// that was rebuilt from nothing gives none twice.
    pub seen: Epoch,
}

/// The registrations, kept by every stream together. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Registrations(watch::Sender<Registration>);

impl Registrations {
    /// A controller says under which epoch it knows this node. Gives whether that is new.
    pub(super) fn registered(&self, epoch: Epoch) -> bool {
        self.0.send_if_modified(|known| {
            let newer = known.current < Some(epoch);
            if newer {
                *known = Registration { current: Some(epoch), seen: known.seen.max(epoch) };
            }
            newer
        })
    }

    /// Data came by that was named under an epoch.
    pub(super) fn met(&self, epoch: Epoch) {
        self.0.send_if_modified(|known| {
            known.seen = known.seen.max(epoch);
            false
        });
    }

    pub(super) fn get(&self) -> Registration {
        *self.0.borrow()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Registration> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_registration_holds_whatever_the_order_of_arrival() {
        let known = Registrations::default();
        for (epoch, newer) in [(3, true), (2, false), (3, false), (5, true), (4, false)] {
            assert_eq!(known.registered(Epoch(epoch)), newer, "{epoch}");
        }
        assert_eq!(known.get(), Registration { current: Some(Epoch(5)), seen: Epoch(5) });
    }

    #[test]
    fn an_epoch_in_a_name_is_remembered_and_registers_nobody() {
        let known = Registrations::default();
        known.met(Epoch(9));
        known.met(Epoch(4));
        assert_eq!(known.get(), Registration { current: None, seen: Epoch(9) });
        known.registered(Epoch(2));
        assert_eq!(known.get(), Registration { current: Some(Epoch(2)), seen: Epoch(9) });
    }
}
