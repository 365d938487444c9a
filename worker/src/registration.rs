//! The registrations of this node at the controllers. Any stream may bring a registration. The
//! newest epoch holds; an older epoch, from a controller that lags behind, never replaces a newer
//! epoch.

use millrace_types::Epoch;
use tokio::sync::watch;

/// The epochs that are known of this node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeEpochs {
    /// The newest registration; `None` before a controller registered this worker.
    pub current: Option<Epoch>,
    /// The highest epoch met, those in names of data included. The greeting reports this epoch, so
    /// that a controller group that was rebuilt from nothing issues no epoch twice.
    pub seen: Epoch,
}

/// The registrations, updated by all streams. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeEpochStore(watch::Sender<NodeEpochs>);

impl NodeEpochStore {
    /// Records the epoch under which a controller registered this node. Returns whether the epoch
    /// is newer.
    pub(crate) fn registered(&self, epoch: Epoch) -> bool {
        self.0.send_if_modified(|known| {
            let newer = known.current < Some(epoch);
            if newer {
                *known = NodeEpochs { current: Some(epoch), seen: known.seen.max(epoch) };
            }
            newer
        })
    }

    /// Records an epoch met in the name of data.
    pub(crate) fn observe(&self, epoch: Epoch) {
        self.0.send_if_modified(|known| {
            known.seen = known.seen.max(epoch);
            false
        });
    }

    pub(crate) fn get(&self) -> NodeEpochs {
        *self.0.borrow()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<NodeEpochs> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_registration_holds_in_any_order_of_arrival() {
        let known = NodeEpochStore::default();
        for (epoch, newer) in [(3, true), (2, false), (3, false), (5, true), (4, false)] {
            assert_eq!(known.registered(Epoch(epoch)), newer, "{epoch}");
        }
        assert_eq!(known.get(), NodeEpochs { current: Some(Epoch(5)), seen: Epoch(5) });
    }

    #[test]
    fn an_epoch_in_a_data_name_is_remembered_without_a_registration() {
        let known = NodeEpochStore::default();
        known.observe(Epoch(9));
        known.observe(Epoch(4));
        assert_eq!(known.get(), NodeEpochs { current: None, seen: Epoch(9) });
        known.registered(Epoch(2));
        assert_eq!(known.get(), NodeEpochs { current: Some(Epoch(2)), seen: Epoch(9) });
    }
}
