//! Objects that come to this GPU under the fabric's grants: from another one of the node, for a run that
//! reads them here, and back from the host. Those that leave it for the host are in `outgoing`.
//!
//! ```text
//! run whose input is on another GPU ─► Store (claimed) ─► Place ─► PlaceObject, Transfer ─► Came ─► read in place
//!                                              └ Refuse, Decline ─► over the host ◄── failed ┘
//! Reload ─► PlaceObject (has_host), Transfer ─► Came ─► read in place from then on
//! Lock, from another GPU's transfer ─► claimed here until Unlock
//! ```
//! What comes for a run is a copy of its own, of the bytes that it reads, and goes with it. Bounded by the
//! inputs of the GPU's requests, and by the store's reloads.

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

/// Sets the names of objects' transfers apart from those of weights, which each GPU counts from its own
/// number on.
const OF_OBJECTS: u64 = 1 << 39;

/// What an object comes for.
#[derive(Debug)]
enum Errand {
    /// A run is to read it here, as one of its inputs.
    Input { run: RunId, place: usize, source: Arc<Kept>, offset: u64 },
    /// It was here before, and is on the host.
    Reload,
    /// Nothing any more. What is copied from stays until the copies have ended.
    Nothing { _source: Option<Arc<Kept>> },
}

#[derive(Debug)]
struct Coming {
    errand: Errand,
    bytes: u64,
    /// None before it has its place.
    transfer: Option<TransferId>,
}

/// Objects on their way to this GPU and from it.
#[derive(Debug, Default)]
pub(super) struct Moves {
    transfers: u64,
    /// By the objects that they fill.
    coming: BTreeMap<ObjectKey, Coming>,
    /// What other GPUs copy from here.
    lent: BTreeMap<TransferId, ObjectKey>,
}

impl Moves {
    /// A new name for a transfer to or from this GPU.
    pub(super) fn new_transfer(&mut self, gpu: GpuIndex) -> TransferId {
        self.transfers += 1;
        TransferId(u64::from(gpu.0) << 40 | OF_OBJECTS | self.transfers)
    }

    /// The run that is to read an object here once it has come.
    pub(super) fn reader_of(&self, object: ObjectKey) -> Option<RunId> {
        match self.coming.get(&object)?.errand {
            Errand::Input { run, .. } => Some(run),
            Errand::Reload | Errand::Nothing { .. } => None,
        }
    }

    /// Everything went with the executor.
    pub(super) fn clear(&mut self) {
        (self.coming, self.lent) = (BTreeMap::new(), BTreeMap::new());
    }
}

impl Gpu {
    /// Whether an object's bytes can come here without the host, as far as is known.
    pub(super) fn can_bring(&self, object: &Kept) -> bool {
        let there = object.gpu != self.index() && matches!(object.place(), Place::Gpu(_));
        there && self.peers.joined.contains(&object.gpu) && self.core.core.keeps_data()
    }

    /// Has bytes of an object on another GPU brought here for an input of a run.
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

    /// Puts an object that is to come into the memory it is given, and has its bytes copied there. Those
    /// go behind it, so nobody waits for its being there.
    pub(super) fn place_coming(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let transfer = self.data.moves.new_transfer(self.hardware.index);
        let Some(coming) = self.data.moves.coming.get_mut(&object) else {
            // Whoever it was for went.
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
        let (gpu, chunks) = (self.index(), std::iter::once(0..blocks_for(bytes)).collect());
        self.peers.node.post(node::Message::Transfer { gpu, transfer, cargo, chunks, from, reader });
    }

    /// Copies an object back that is on the host.
    pub(super) fn reload(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let Some(book) = self.data.books.get(&object) else {
            return self.data.tell(elastic::Event::CopyFailed { object });
        };
        let coming = Coming { errand: Errand::Reload, bytes: book.bytes, transfer: None };
        self.data.moves.coming.insert(object, coming);
        self.place_coming(object, blocks);
    }

    /// An object has no room here: whoever it is for has it from the host. False where it is for nobody.
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

    /// A run does not read what is on its way for it any more.
    pub(super) fn drop_inputs(&mut self, run: RunId) {
        let mine = |coming: &Coming| matches!(coming.errand, Errand::Input { run: its, .. } if its == run);
        let coming = self.data.moves.coming.iter().filter(|(_, coming)| mine(coming));
        for object in coming.map(|(&object, _)| object).collect::<Vec<_>>() {
            self.data.discard(object);
            self.drop_coming(object);
        }
    }

    /// An object is not wanted any more, though it may be on its way.
    pub(super) fn drop_coming(&mut self, object: ObjectKey) {
        let Some(coming) = self.data.moves.coming.get_mut(&object) else { return };
        let Some(transfer) = coming.transfer else {
            return drop(self.data.moves.coming.remove(&object));
        };
        // Said before, by its run or the store: its source stays until the copies have ended.
        if matches!(coming.errand, Errand::Nothing { .. }) {
            return;
        }
        let errand = std::mem::replace(&mut coming.errand, Errand::Nothing { _source: None });
        if let Errand::Input { source, .. } = errand {
            coming.errand = Errand::Nothing { _source: Some(source) };
        }
        self.peers.node.post(node::Message::CancelTransfer(transfer));
    }

    /// A transfer of an object to this GPU is over.
    pub(super) fn came(&mut self, now: Timestamp, transfer: TransferId, outcome: Outcome, routes: &[Hops]) {
        let found = self.data.moves.coming.iter().find(|(_, coming)| coming.transfer == Some(transfer));
        let Some(object) = found.map(|(&object, _)| object) else { return };
        let Some(coming) = self.data.moves.coming.remove(&object) else { return };
        match (&coming.errand, outcome) {
            (&Errand::Input { run, place, .. }, Outcome::Complete) => {
                self.data.tell(elastic::Event::Filled { object });
                self.input_came(now, (run, place), object, routes);
            }
            (Errand::Reload, Outcome::Complete) => {
                self.step(now, Event::Data(elastic::Event::Reloaded { object }), Carried::Nothing);
                // Unless nobody wanted it any more by then.
                let store = self.core.core.store();
                if store.and_then(|store| store.place(object)) == Some(Stored::Gpu) {
                    self.data.is_at(object, Place::Gpu(self.incarnation));
                }
            }
            (Errand::Reload, _) => {
                self.unmap(object);
                self.data.tell(elastic::Event::CopyFailed { object });
            }
            // Its memory is free once the store has heard that nothing is copied there.
            (Errand::Input { .. }, _) => {
                self.data.discard(object);
                self.data.tell(elastic::Event::CopyFailed { object });
                self.ask_host(coming);
            }
            (Errand::Nothing { .. }, _) => self.data.tell(elastic::Event::CopyFailed { object }),
        }
    }

    fn input_came(
        &mut self,
        now: Timestamp,
        (run, place): (RunId, usize),
        object: ObjectKey,
        routes: &[Hops],
    ) {
        let Some(waiting) = self.data.waiting.iter_mut().find(|it| it.run.run == run.0) else {
            return self.data.discard(object);
        };
        waiting.missing.retain(|&missing| missing != place);
        let bytes = self.data.books.get(&object).map_or(0, |book| book.bytes);
        let part = ObjectPart { object: object.0, offset: 0, bytes };
        waiting.run.inputs[place].contents = Some(Contents::Object(part));
        let (key, began) = (waiting.key, waiting.began);
        self.brought(now, key, place, (FetchMethod::InterGpu, routes), began);
        match self.entries.get_mut(&key) {
            Some(entry) => entry.copies.push(object),
            None => self.data.discard(object),
        }
        self.send_ready();
    }

    /// Another GPU is to copy an object from here: it stays where it is until that is over.
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

    /// It is not copied any more. False where it is none of the objects here.
    pub(super) fn unlend_object(&mut self, transfer: TransferId) -> bool {
        let object = self.data.moves.lent.remove(&transfer);
        object.is_some_and(|object| {
            self.data.unclaim(object);
            true
        })
    }
}
