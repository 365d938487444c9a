//! Transfers of objects to this GPU under the fabric's grants: copies from another GPU of the node, for a
//! run that reads the object here, and reloads from the host. Copies to the host are in `outgoing`.
//!
//! ```text
//! run whose input is on another GPU ─► Store (claimed) ─► Place ─► PlaceObject, Transfer ─► ObjectTransferEnded ─► read in place
//!                                              └ Refuse, Decline ─► over the host ◄── failed ┘
//! Reload ─► PlaceObject (has_host), Transfer ─► ObjectTransferEnded ─► read in place from then on
//! Lock, from another GPU's transfer ─► claimed here until Unlock
//! ```
//! A run gets its own copy of the bytes that it reads, and the copy is discarded with the run. The inputs
//! of the GPU's requests and the store's reloads bound the state.

use std::sync::{Arc, Weak};

use millrace_core::ids::ObjectKey;
use millrace_core::ids::{RunId, TransferId};
use millrace_gpu::Event;
use millrace_memory::elastic::{self, ConsumerDistance, ObjectLocation as Stored};
use millrace_memory::{BlockRun, chunks_for};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents;
use millrace_proto::executor::{ObjectPart, PlaceObject};
use millrace_proto::worker::FetchMethod;
use millrace_transfers::fabric::{self, ObjectPiece, PeerBlocks, TransferCargo, TransferOutcome};
use millrace_transfers::paths::RouteHops;
use millrace_types::{Bytes, Timestamp};

use super::actor::{GpuActor, GpuPayload};
use super::inputs::post_fetched_input;
use super::object_table::{ObjectRecord, WaitingRun};
use super::transfers::{IncomingObject, TransferPurpose};
use crate::actors::extents;
use crate::messages::node;
use crate::object_handle::{HandleLocation, ObjectHandle, Reply, TransferReader};

impl GpuActor {
    /// Whether an object can be copied to this GPU over NVLinks, without the host.
    pub(super) fn can_bring(&self, object: &ObjectHandle) -> bool {
        let there = object.gpu != self.index() && matches!(object.place(), HandleLocation::Gpu(_));
        there && self.peers.joined.contains(&object.gpu) && self.core.core.keeps_data()
    }

    /// Asks the store for room for a copy of an object on another GPU, as input number `place` of a run.
    pub(super) fn start_input_copy(
        &mut self,
        waiting: &mut WaitingRun,
        place: usize,
        source: &Arc<ObjectHandle>,
        part: ObjectPart,
    ) {
        let Some(entry) = self.entries.get(&waiting.key) else { return };
        let function = entry.work().function;
        let object = self.data.new_key();
        let ObjectPart { offset, bytes, .. } = part;
        let mut book = ObjectRecord::new(Weak::new(), bytes, None);
        book.claims = 1;
        self.data.records.insert(object, book);
        let run = RunId(waiting.run.run);
        let errand = TransferPurpose::Input { run, place, source: Arc::clone(source), offset };
        self.data.moves.coming.insert(object, IncomingObject { errand, bytes, transfer: None });
        let consumers = vec![ConsumerDistance::Claimed];
        self.data.push_store_event(elastic::Event::Store { object, function, size: Bytes(bytes), consumers });
        waiting.missing.push(place);
    }

    /// Maps an object into the blocks that the store has chosen, and starts the transfer of its bytes. The
    /// executor handles the mapping before the copies, so the actor does not wait for the mapping.
    pub(super) fn place_coming(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let transfer = self.data.moves.new_transfer(self.hardware.index);
        let Some(coming) = self.data.moves.coming.get_mut(&object) else {
            // The run that needed the object has left.
            return self.data.push_store_event(elastic::Event::CopyFailed { object });
        };
        coming.transfer = Some(transfer);
        let bytes = Bytes(coming.bytes);
        let (of, offset, from) = match &coming.errand {
            TransferPurpose::Input { source, offset, .. } => (source.key, Bytes(*offset), Some(source.gpu)),
            TransferPurpose::Reload | TransferPurpose::Cancelled { .. } => (object, Bytes::ZERO, None),
        };
        let block = self.block();
        let Some(book) = self.data.records.get_mut(&object) else { return };
        book.mapped = true;
        let reader = TransferReader::run(book.next_reader());
        let host = match book.kept.upgrade().map(|kept| kept.place()) {
            Some(HandleLocation::Host(fd)) if from.is_none() => vec![fd],
            _ => Vec::new(),
        };
        let place = PlaceObject {
            object: object.0,
            bytes: bytes.get(),
            extents: extents::of_blocks(blocks, block),
            has_host: !host.is_empty(),
            ..PlaceObject::default()
        };
        self.send(Command::PlaceObject(place), host);
        let cargo = TransferCargo::Object(ObjectPiece { object, of, offset, bytes });
        let gpu = self.index();
        let chunks = std::iter::once(0..chunks_for(bytes)).collect();
        self.peers.node.post(node::Message::Transfer { gpu, transfer, cargo, chunks, from, reader });
    }

    /// Starts to copy an object from the host back to this GPU.
    pub(super) fn reload(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let Some(book) = self.data.records.get(&object) else {
            return self.data.push_store_event(elastic::Event::CopyFailed { object });
        };
        let coming = IncomingObject { errand: TransferPurpose::Reload, bytes: book.bytes, transfer: None };
        self.data.moves.coming.insert(object, coming);
        self.place_coming(object, blocks);
    }

    /// Falls back to the host for an object that the store has no room for: the run reads the object from
    /// host memory. Returns false if the object was not being copied to this GPU for a run.
    pub(super) fn fall_back_to_host(&mut self, object: ObjectKey) -> bool {
        let Some(coming) = self.data.moves.coming.remove(&object) else { return false };
        self.data.discard(object);
        self.data.records.remove(&object);
        self.ask_host(coming);
        true
    }

    fn ask_host(&mut self, IncomingObject { errand, bytes, .. }: IncomingObject) {
        let (TransferPurpose::Input { run, place, source, offset }, Some(own)) =
            (errand, self.peers.own.mailbox())
        else {
            return;
        };
        let waiting = self.data.waiting.iter().find(|waiting| waiting.run.run == run.0);
        let reply = Reply::new(move |found| post_fetched_input(found, bytes, own, run, place));
        source.ask(offset, bytes, TransferReader::run(waiting.map(|waiting| waiting.key)), reply);
    }

    /// Cancels the transfers of a run's inputs, which the run no longer reads.
    pub(super) fn drop_inputs(&mut self, run: RunId) {
        let mine = |coming: &IncomingObject| matches!(coming.errand, TransferPurpose::Input { run: its, .. } if its == run);
        let coming = self.data.moves.coming.iter().filter(|(_, coming)| mine(coming));
        for object in coming.map(|(&object, _)| object).collect::<Vec<_>>() {
            self.data.discard(object);
            self.drop_coming(object);
        }
    }

    /// Cancels the transfer of an object to this GPU, if there is one.
    pub(super) fn drop_coming(&mut self, object: ObjectKey) {
        let Some(coming) = self.data.moves.coming.get_mut(&object) else { return };
        let Some(transfer) = coming.transfer else {
            return drop(self.data.moves.coming.remove(&object));
        };
        // The run or the store has cancelled the transfer before. The errand is not replaced a second time,
        // because it holds the source until the copies have ended.
        if matches!(coming.errand, TransferPurpose::Cancelled { .. }) {
            return;
        }
        let errand = std::mem::replace(&mut coming.errand, TransferPurpose::Cancelled { _source: None });
        if let TransferPurpose::Input { source, .. } = errand {
            coming.errand = TransferPurpose::Cancelled { _source: Some(source) };
        }
        self.peers.node.post(node::Message::CancelTransfer(transfer));
    }

    /// Handles the end of a transfer of an object to this GPU.
    pub(super) fn object_transfer_ended(
        &mut self,
        now: Timestamp,
        transfer: TransferId,
        outcome: TransferOutcome,
        routes: &[RouteHops],
    ) {
        let found = self.data.moves.coming.iter().find(|(_, coming)| coming.transfer == Some(transfer));
        let Some(object) = found.map(|(&object, _)| object) else { return };
        let Some(coming) = self.data.moves.coming.remove(&object) else { return };
        match (&coming.errand, outcome) {
            (&TransferPurpose::Input { run, place, .. }, TransferOutcome::Complete) => {
                self.data.push_store_event(elastic::Event::Filled { object });
                self.input_came(now, run, place, object, routes);
            }
            (TransferPurpose::Reload, TransferOutcome::Complete) => {
                self.step(now, Event::Data(elastic::Event::Reloaded { object }), GpuPayload::Nothing);
                // The store may have discarded the object meanwhile.
                let store = self.core.core.store();
                if store.and_then(|store| store.place(object)) == Some(Stored::Gpu) {
                    self.data.set_location(object, HandleLocation::Gpu(self.incarnation));
                }
            }
            (TransferPurpose::Reload, _) => {
                self.unmap(object);
                self.data.push_store_event(elastic::Event::CopyFailed { object });
            }
            // The store frees the memory of a discarded object only on an event that no copy writes there
            // any longer, so both events are needed.
            (TransferPurpose::Input { .. }, _) => {
                self.data.discard(object);
                self.data.push_store_event(elastic::Event::CopyFailed { object });
                self.ask_host(coming);
            }
            (TransferPurpose::Cancelled { .. }, _) => {
                self.data.push_store_event(elastic::Event::CopyFailed { object })
            }
        }
    }

    fn input_came(
        &mut self,
        now: Timestamp,
        run: RunId,
        place: usize,
        object: ObjectKey,
        routes: &[RouteHops],
    ) {
        let Some(waiting) = self.data.waiting.iter_mut().find(|it| it.run.run == run.0) else {
            return self.data.discard(object);
        };
        waiting.missing.retain(|&missing| missing != place);
        let bytes = self.data.records.get(&object).map_or(0, |book| book.bytes);
        let part = ObjectPart { object: object.0, offset: 0, bytes };
        waiting.run.inputs[place].contents = Some(Contents::Object(part));
        let key = waiting.key;
        let began = waiting.began;
        self.record_fetch(now, key, place, FetchMethod::InterGpu, routes, began);
        match self.entries.get_mut(&key) {
            Some(entry) => entry.copies.push(object),
            None => self.data.discard(object),
        }
        self.send_ready();
    }

    /// Locks an object for a copy to another GPU: the store does not move the object until the unlock.
    pub(super) fn lock_object(&mut self, transfer: TransferId, piece: ObjectPiece) {
        let kept = self.data.records.get(&piece.of).and_then(|book| book.kept.upgrade());
        let here = kept
            .is_some_and(|kept| matches!(kept.place(), HandleLocation::Gpu(at) if at == self.incarnation));
        let blocks = self.core.core.object_blocks(piece.of).filter(|_| here);
        let Some(blocks) = blocks else { return self.tell_fabric(fabric::Event::NotLocked { transfer }) };
        self.data.reserve(piece.of);
        self.data.moves.lent.insert(transfer, piece.of);
        let incarnation = self.incarnation;
        let block = self.block();
        let all = PeerBlocks { gpu: self.index(), incarnation, blocks, block, skip: Bytes::ZERO };
        let peer = all.after(piece.offset);
        self.tell_fabric(fabric::Event::Locked { transfer, peer });
    }

    /// Unlocks the object that a transfer copied from here. Returns false if the transfer copied no object.
    pub(super) fn unlock_object(&mut self, transfer: TransferId) -> bool {
        let object = self.data.moves.lent.remove(&transfer);
        object.is_some_and(|object| {
            self.data.release(object);
            true
        })
    }
}
