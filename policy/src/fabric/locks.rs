//! Peers that lock what a transfer is to take from them: whether they did, and what is done where none does
//! any more.

use super::Fabric;
use super::protocol::{Action, Cargo, Outcome, PeerBlocks};
use super::transfer::{Source, Transfer};
use crate::ids::TransferId;

impl Fabric {
    pub(super) fn locked(&mut self, transfer: TransferId, peer: PeerBlocks, actions: &mut Vec<Action>) {
        let asked = |state: &&mut Transfer| {
            state.ending.is_none() && matches!(state.source, Source::Asked(gpu) if gpu == peer.gpu)
        };
        match self.transfers.get_mut(&transfer).filter(asked) {
            Some(state) => {
                let (from, to, cargo) = (peer.gpu, state.gpu, state.cargo);
                state.locked = Some(from);
                state.source = Source::Peer(peer);
                if matches!(cargo, Cargo::Object(_)) && !self.begin_routes(transfer, from, to) {
                    self.give_up(transfer, Outcome::Failed, actions);
                }
            }
            // It has ended meanwhile, or goes on from the host.
            None => actions.push(Action::Unlock { gpu: peer.gpu, transfer }),
        }
    }

    pub(super) fn not_locked(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let asked = |state: &&mut Transfer| matches!(state.source, Source::Asked(_));
        if self.transfers.get_mut(&transfer).filter(asked).is_some() {
            self.lose_source(transfer, actions);
        }
    }

    /// What is still to be granted comes from the host, if it is there. What is out from the peer comes
    /// whole or fails; until it has, the transfer holds the lock.
    pub(super) fn lose_source(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        if state.is_of_peers_object() {
            self.give_up(transfer, Outcome::Failed, actions);
        } else {
            state.source = Source::Host;
            self.promise(transfer);
        }
    }
}
