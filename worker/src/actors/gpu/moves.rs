//! Transfers of objects to this GPU under the fabric's grants: copies from another GPU of the node, for a
//! run that reads the object here, and reloads from the host. Copies to the host are in `outgoing`.
//!
//! ```text
//! run whose input is on another GPU ─► Store (claimed) ─► Place ─► PlaceObject, Transfer ─► Came ─► read in place
//!                                              └ Refuse, Decline ─► over the host ◄── failed ┘
//! Reload ─► PlaceObject (has_host), Transfer ─► Came ─► read in place from then on
//! Lock, from another GPU's transfer ─► claimed here until Unlock
//! ```
//! A run gets its own copy of the bytes that it reads, and the copy is discarded with the run. The inputs
//! of the GPU's requests and the store's reloads bound the state.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use millrace_policy::elastic::{self, ObjectKey, Place as Stored, Standing};
use millrace_policy::fabric::{self, Cargo, Outcome, PeerBlocks, Piece};
use millrace_policy::gpu::Event;
use millrace_policy::ids::{RunId, TransferId};
use millrace_policy::memory::{BLOCK, Run as BlockRun, blocks_for};
use millrace_policy::paths::Hops;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents;
use millrace_proto::executor::{ObjectPart, PlaceObject};
use millrace_proto::worker::FetchMethod;
use millrace_types::{Bytes, GpuIndex, Timestamp};

use super::books::{Book, Waiting};
use super::inputs::bring;
use super::{Carried, Gpu};
use crate::actors::node::Reader;
use crate::actors::{extents, node};
use crate::objects::{Kept, Place, Reply};

/// The bit that separates transfer ids of objects from transfer ids of weights. Each GPU counts both from
/// its own index, shifted by 40 bits.
const OF_OBJECTS: u64 = 1 << 39;

/// The purpose of a transfer of an object to this GPU.
#[derive(Debug)]
enum Errand {
    /// A run reads the bytes here, as its input number `place`.
    Input { run: RunId, place: usize, source: Arc<Kept>, offset: u64 },
    /// The store reloads an object that had migrated to the host.
    Reload,
    /// The transfer is cancelled. The source's handle is held until its copies have ended, because the
    /// copies still read the source's blocks.
    Nothing { _source: Option<Arc<Kept>> },
}

#[derive(Debug)]
struct Coming {
    errand: Errand,
    bytes: u64,
    /// The transfer, once the store has placed the object.
    transfer: Option<TransferId>,
}

/// The objects that are copied to this GPU, and the objects that other GPUs copy from this GPU.
#[derive(Debug, Default)]
pub(super) struct Moves {
    transfers: u64,
    /// The transfers to this GPU, by the objects that the transfers fill.
    coming: BTreeMap<ObjectKey, Coming>,
    /// The objects that other GPUs copy from here, by the transfers.
    lent: BTreeMap<TransferId, ObjectKey>,
}

impl Moves {
    /// Returns a new id for a transfer of an object to or from this GPU.
    pub(super) fn new_transfer(&mut self, gpu: GpuIndex) -> TransferId {
        self.transfers += 1;
        TransferId(u64::from(gpu.0) << 40 | OF_OBJECTS | self.transfers)
    }

    /// Returns the run that will read an object here once the object has arrived.
    pub(super) fn reader_of(&self, object: ObjectKey) -> Option<RunId> {
        match self.coming.get(&object)?.errand {
            Errand::Input { run, .. } => Some(run),
            Errand::Reload | Errand::Nothing { .. } => None,
        }
    }

    /// Forgets all transfers of objects: the executor is gone, and the objects with it.
    pub(super) fn clear(&mut self) {
        self.coming.clear();
        self.lent.clear();
    }
}

impl Gpu {
    /// Whether an object can be copied to this GPU over NVLinks, without the host.
    pub(super) fn can_bring(&self, object: &Kept) -> bool {
        let there = object.gpu != self.index() && matches!(object.place(), Place::Gpu(_));
        there && self.peers.joined.contains(&object.gpu) && self.core.core.keeps_data()
    }

    /// Asks the store for room for a copy of an object on another GPU, as input number `place` of a run.
    pub(super) fn bring_here(
        &mut self,
        waiting: &mut Waiting,
        place: usize,
        source: &Arc<Kept>,
        part: ObjectPart,
    ) {
        let Some(entry) = self.entries.get(&waiting.key) else { return };
        let function = entry.work().function;
        let object = self.data.new_key();
        let ObjectPart { offset, bytes, .. } = part;
        let mut book = Book::new(Weak::new(), bytes, None);
        book.claims = 1;
        self.data.books.insert(object, book);
        let run = RunId(waiting.run.run);
        let errand = Errand::Input { run, place, source: Arc::clone(source), offset };
        self.data.moves.coming.insert(object, Coming { errand, bytes, transfer: None });
        let consumers = vec![Standing::Claimed];
        self.data.tell(elastic::Event::Store { object, function, size: Bytes(bytes), consumers });
        waiting.missing.push(place);
    }

    /// Maps an object into the blocks that the store has chosen, and starts the transfer of its bytes. The
    /// executor handles the mapping before the copies, so the actor does not wait for the mapping.
    pub(super) fn place_coming(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let transfer = self.data.moves.new_transfer(self.hardware.index);
        let Some(coming) = self.data.moves.coming.get_mut(&object) else {
            // The run that needed the object has left.
            return self.data.tell(elastic::Event::CopyFailed { object });
        };
        coming.transfer = Some(transfer);
        let bytes = Bytes(coming.bytes);
        let (of, offset, from) = match &coming.errand {
            Errand::Input { source, offset, .. } => (source.key, Bytes(*offset), Some(source.gpu)),
            Errand::Reload | Errand::Nothing { .. } => (object, Bytes::ZERO, None),
        };
        let Some(book) = self.data.books.get_mut(&object) else { return };
        book.mapped = true;
        let reader = Reader::run(book.next_reader());
        let host = match book.kept.upgrade().map(|kept| kept.place()) {
            Some(Place::Host(fd)) if from.is_none() => vec![fd],
            _ => Vec::new(),
        };
        let place = PlaceObject {
            object: object.0,
            bytes: bytes.get(),
            extents: extents::of_program(blocks, bytes),
            has_host: !host.is_empty(),
            ..PlaceObject::default()
        };
        self.send(Command::PlaceObject(place), host);
        let cargo = Cargo::Object(Piece { object, of, offset, bytes });
        let gpu = self.index();
        let chunks = std::iter::once(0..blocks_for(bytes)).collect();
        self.peers.node.post(node::Message::Transfer { gpu, transfer, cargo, chunks, from, reader });
    }

    /// Starts to copy an object from the host back to this GPU.
    pub(super) fn reload(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let Some(book) = self.data.books.get(&object) else {
            return self.data.tell(elastic::Event::CopyFailed { object });
        };
        let coming = Coming { errand: Errand::Reload, bytes: book.bytes, transfer: None };
        self.data.moves.coming.insert(object, coming);
        self.place_coming(object, blocks);
    }

    /// Falls back to the host for an object that the store has no room for: the run reads the object from
    /// host memory. Returns false if the object was not being copied to this GPU for a run.
    pub(super) fn no_room_for(&mut self, object: ObjectKey) -> bool {
        let Some(coming) = self.data.moves.coming.remove(&object) else { return false };
        self.data.discard(object);
        self.data.books.remove(&object);
        self.ask_host(coming);
        true
    }

    fn ask_host(&mut self, Coming { errand, bytes, .. }: Coming) {
        let (Errand::Input { run, place, source, offset }, Some(own)) = (errand, self.peers.own.mailbox())
        else {
            return;
        };
        let waiting = self.data.waiting.iter().find(|waiting| waiting.run.run == run.0);
        let reply = Reply::new(move |found| bring(found, bytes, own, run, place));
        source.ask(offset, bytes, Reader::run(waiting.map(|waiting| waiting.key)), reply);
    }

    /// Cancels the transfers of a run's inputs, which the run no longer reads.
    pub(super) fn drop_inputs(&mut self, run: RunId) {
        let mine = |coming: &Coming| matches!(coming.errand, Errand::Input { run: its, .. } if its == run);
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
        if matches!(coming.errand, Errand::Nothing { .. }) {
            return;
        }
        let errand = std::mem::replace(&mut coming.errand, Errand::Nothing { _source: None });
        if let Errand::Input { source, .. } = errand {
            coming.errand = Errand::Nothing { _source: Some(source) };
        }
        self.peers.node.post(node::Message::CancelTransfer(transfer));
    }

    /// Handles the end of a transfer of an object to this GPU.
    pub(super) fn came(&mut self, now: Timestamp, transfer: TransferId, outcome: Outcome, routes: &[Hops]) {
        let found = self.data.moves.coming.iter().find(|(_, coming)| coming.transfer == Some(transfer));
        let Some(object) = found.map(|(&object, _)| object) else { return };
        let Some(coming) = self.data.moves.coming.remove(&object) else { return };
        match (&coming.errand, outcome) {
            (&Errand::Input { run, place, .. }, Outcome::Complete) => {
                self.data.tell(elastic::Event::Filled { object });
                self.input_came(now, run, place, object, routes);
            }
            (Errand::Reload, Outcome::Complete) => {
                self.step(now, Event::Data(elastic::Event::Reloaded { object }), Carried::Nothing);
                // The store may have discarded the object meanwhile.
                let store = self.core.core.store();
                if store.and_then(|store| store.place(object)) == Some(Stored::Gpu) {
                    self.data.is_at(object, Place::Gpu(self.incarnation));
                }
            }
            (Errand::Reload, _) => {
                self.unmap(object);
                self.data.tell(elastic::Event::CopyFailed { object });
            }
            // The store frees the memory of a discarded object only on an event that no copy writes there
            // any longer, so both events are needed.
            (Errand::Input { .. }, _) => {
                self.data.discard(object);
                self.data.tell(elastic::Event::CopyFailed { object });
                self.ask_host(coming);
            }
            (Errand::Nothing { .. }, _) => self.data.tell(elastic::Event::CopyFailed { object }),
        }
    }

    fn input_came(&mut self, now: Timestamp, run: RunId, place: usize, object: ObjectKey, routes: &[Hops]) {
        let Some(waiting) = self.data.waiting.iter_mut().find(|it| it.run.run == run.0) else {
            return self.data.discard(object);
        };
        waiting.missing.retain(|&missing| missing != place);
        let bytes = self.data.books.get(&object).map_or(0, |book| book.bytes);
        let part = ObjectPart { object: object.0, offset: 0, bytes };
        waiting.run.inputs[place].contents = Some(Contents::Object(part));
        let key = waiting.key;
        let began = waiting.began;
        self.brought(now, key, place, FetchMethod::InterGpu, routes, began);
        match self.entries.get_mut(&key) {
            Some(entry) => entry.copies.push(object),
            None => self.data.discard(object),
        }
        self.send_ready();
    }

    /// Locks an object for a copy to another GPU: the store does not move the object until the unlock.
    pub(super) fn lend_object(&mut self, transfer: TransferId, piece: Piece) {
        let kept = self.data.books.get(&piece.of).and_then(|book| book.kept.upgrade());
        let here = kept.is_some_and(|kept| matches!(kept.place(), Place::Gpu(at) if at == self.incarnation));
        let blocks = self.core.core.object_blocks(piece.of).filter(|_| here);
        let Some(blocks) = blocks else { return self.tell_fabric(fabric::Event::NotLocked { transfer }) };
        self.data.claim(piece.of);
        self.data.moves.lent.insert(transfer, piece.of);
        let all = PeerBlocks { gpu: self.index(), incarnation: self.incarnation, blocks, skip: Bytes::ZERO };
        let first = u32::try_from(piece.offset.get() / BLOCK.get()).unwrap_or(u32::MAX);
        let peer = PeerBlocks { skip: Bytes(piece.offset.get() % BLOCK.get()), ..all.of(&(first..u32::MAX)) };
        self.tell_fabric(fabric::Event::Locked { transfer, peer });
    }

    /// Unlocks the object that a transfer copied from here. Returns false if the transfer copied no object.
    pub(super) fn unlend_object(&mut self, transfer: TransferId) -> bool {
        let object = self.data.moves.lent.remove(&transfer);
        object.is_some_and(|object| {
            self.data.unclaim(object);
            true
        })
    }
}
