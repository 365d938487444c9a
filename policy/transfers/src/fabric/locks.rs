//! Locks that peer GPUs hold for transfers: the peers' replies, and the fallback if a peer is not
//! available.

use super::protocol::{Action, PeerBlocks, TransferCargo, TransferOutcome};
use super::scheduler::LinkScheduler;
use super::transfer::{TransferSource, TransferState};
use millrace_core::ids::TransferId;

impl LinkScheduler {
    pub(super) fn locked(&mut self, transfer: TransferId, peer: PeerBlocks, actions: &mut Vec<Action>) {
        let asked = |state: &&mut TransferState| {
            state.ending.is_none() && matches!(state.source, TransferSource::Asked(gpu) if gpu == peer.gpu)
        };
        match self.transfers.get_mut(&transfer).filter(asked) {
            Some(state) => {
                let from = peer.gpu;
                let to = state.gpu;
                let cargo = state.cargo;
                state.locked = Some(from);
                state.source = TransferSource::Peer(peer);
                if matches!(cargo, TransferCargo::Object(_)) && !self.begin_routes(transfer, from, to) {
                    self.give_up(transfer, TransferOutcome::Failed, actions);
                }
            }
            // The transfer has ended meanwhile, or continues from the host.
            None => actions.push(Action::Unlock { gpu: peer.gpu, transfer }),
        }
    }

    pub(super) fn not_locked(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let asked = |state: &&mut TransferState| matches!(state.source, TransferSource::Asked(_));
        if self.transfers.get_mut(&transfer).filter(asked).is_some() {
            self.lose_source(transfer, actions);
        }
    }

    /// Switches the chunks that are still to be granted to the host, or fails a transfer of an
    /// object that the host lacks. Batches in flight from the peer either arrive whole or fail, and
    /// the transfer holds the lock until the last of them has ended.
    pub(super) fn lose_source(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        if state.is_of_peers_object() {
            self.give_up(transfer, TransferOutcome::Failed, actions);
        } else {
            state.source = TransferSource::Host;
            self.request_rate(transfer);
        }
    }
}
