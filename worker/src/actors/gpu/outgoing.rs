//! Copies of what is on this GPU to host memory: outputs that the store has no room for, objects that make
//! room, and whatever is read where no NVLink leads.
//!
//! ```text
//! Refuse, Decline, Migrate, Fetch ─► CopyOut (granted), Transfer ─► Left ─► EndCopyOut ─► done with it
//!                         little ─► CopyOut ─► CopiedOut, NotCopiedOut ───────────────────────┘
//! ```
//! They cross the GPU's way to the host under the fabric's grants, as what comes from there does (D11 to
//! D16). What is no larger than an output that travels inline needs no grant: it is less than a chunk, and
//! inputs and outputs of that size wait for no link either. It has its turn among the copies that the
//! executor was given.
//!
//! What is read stays until its copy has ended. A copy for somebody who has given up by the end of a batch
//! goes no further, nor does one of what nobody else holds; one for a run or an answer goes on to its end,
//! though its request may be over.
//!
//! Bounded by the store's objects, the outputs of the GPU's runs, and those who read.

use std::sync::Arc;

use millrace_policy::elastic::{self, ObjectKey, Store};
use millrace_policy::fabric::{Cargo, Leaving, Outcome};
use millrace_policy::ids::TransferId;
use millrace_policy::memory::blocks_for;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::copy_out::Source;
use millrace_proto::executor::{CopyOut, EndCopyOut, ObjectPart};
use millrace_types::{Bytes, Timestamp};
use tracing::Span;

use super::Gpu;
use crate::actors::node::{self, Reader};
use crate::actors::spans::{self, Copied};
use crate::objects::{Kept, Lost, Place, Reply, memory};
use crate::port::Descriptor;
use crate::service::tensors::INLINE_BYTES_MAX;

/// Why something is copied to the host.
#[derive(Debug)]
pub(super) enum Purpose {
    /// The store has no room for it.
    Refused(ObjectKey),
    /// The store does not take it, and knows nothing of it.
    Declined(ObjectKey),
    /// The store wants its room.
    Migrate(ObjectKey),
    /// Somebody reads it elsewhere, who holds it too.
    Fetch(Arc<Kept>, Reply),
}

/// A copy that is under way.
#[derive(Debug)]
pub(super) struct Outgoing {
    purpose: Purpose,
    to: Descriptor,
    /// Whether it goes under grants.
    granted: bool,
    /// In the trace of the request whose output it is.
    span: Span,
}

impl Gpu {
    /// Copies all of an object, or of an output that is to be one.
    pub(super) fn copy_whole(&mut self, object: ObjectKey, purpose: Purpose) {
        let Some(book) = self.data.books.get(&object) else { return };
        let bytes = book.bytes;
        let source = match &book.made {
            Some(output) => Source::Output(output.clone()),
            None => Source::Object(ObjectPart { object: object.0, offset: 0, bytes }),
        };
        let answers = self.data.storing.values().find(|storing| storing.left.contains(&object));
        let (reader, span) = match answers {
            Some(storing) => {
                let span = spans::leaves(&storing.work.span, self.index(), bytes);
                (Reader::Answer(Arc::clone(&storing.work)), span)
            }
            None if matches!(purpose, Purpose::Migrate(_)) => (self.waits_for_room(), Span::none()),
            None => (Reader::Nobody, Span::none()),
        };
        self.copy_out((source, bytes), purpose, reader, span);
    }

    /// For whom what leaves makes room: the run whose model has none, or else whoever waits for the next
    /// object that has none.
    fn waits_for_room(&self) -> Reader {
        let core = &self.core.core;
        let object = || core.store().and_then(Store::waits_for_room);
        match core.waits_for_room() {
            Some(key) => Reader::Run(key),
            None => object().map_or(Reader::Nobody, |object| self.waits_for(object)),
        }
    }

    /// Who waits for an object that has no place yet: the answer that it is of, or the run that it comes for.
    fn waits_for(&self, object: ObjectKey) -> Reader {
        if let Some(storing) = self.data.storing.values().find(|storing| storing.left.contains(&object)) {
            return Reader::Answer(Arc::clone(&storing.work));
        }
        let run = self.data.moves.reader_of(object);
        let waiting =
            self.data.waiting.iter().find(|waiting| run.is_some_and(|run| waiting.run.run == run.0));
        Reader::run(waiting.map(|waiting| waiting.key))
    }

    /// A run waits for room from now on, perhaps for what began to leave when nobody did.
    pub(super) fn hasten_what_leaves(&mut self) {
        let roomless = self.core.core.waits_for_room();
        let before = std::mem::replace(&mut self.data.roomless, roomless);
        let Some(reader) = roomless.filter(|_| roomless != before) else { return };
        let migrates = |outgoing: &Outgoing| matches!(outgoing.purpose, Purpose::Migrate(_));
        let leaving =
            self.data.outgoing.iter().filter(|(_, outgoing)| outgoing.granted && migrates(outgoing));
        for (&transfer, _) in leaving {
            self.peers.node.post(node::Message::Hasten { transfer, reader });
        }
    }

    fn copy_out(&mut self, (source, bytes): (Source, u64), purpose: Purpose, reader: Reader, span: Span) {
        let to = match memory("millrace-object") {
            Ok(file) => Descriptor::new(file.into()),
            Err(error) => {
                tracing::warn!(gpu = self.index().0, %error, "no memory for a copy of an object");
                return self.not_copied(purpose);
            }
        };
        let (gpu, granted) = (self.index(), bytes > INLINE_BYTES_MAX as u64);
        let transfer = self.data.moves.new_transfer(gpu);
        let copy = transfer.0;
        self.data.outgoing.insert(transfer, Outgoing { purpose, to: Arc::clone(&to), granted, span });
        let copy_out = CopyOut { copy, contents_fd: 0, granted, source: Some(source) };
        self.send(Command::CopyOut(copy_out), vec![to]);
        if granted {
            let bytes = Bytes(bytes);
            let cargo = Cargo::ToHost(Leaving { copy, bytes });
            let (chunks, from) = (std::iter::once(0..blocks_for(bytes)).collect(), None);
            self.peers.node.post(node::Message::Transfer { gpu, transfer, cargo, chunks, from, reader });
        }
    }

    /// Copies a part of an object for somebody.
    pub(super) fn fetch(&mut self, part: ObjectPart, reader: Reader, reply: Reply) {
        let object = ObjectKey(part.object);
        let kept = self.data.books.get(&object).and_then(|book| book.kept.upgrade());
        match kept.map(|kept| (kept.place(), kept)) {
            Some((Place::Host(fd), _)) => reply.send(Ok((fd, part.offset))),
            Some((Place::Gpu(_), kept)) => {
                self.data.claim(object);
                let (bytes, purpose) = (part.bytes, Purpose::Fetch(kept, reply));
                self.copy_out((Source::Object(part), bytes), purpose, reader, Span::none());
            }
            // Nobody has the name of one that is still coming.
            Some((Place::Coming | Place::Lost, _)) | None => reply.send(Err(Lost)),
        }
    }

    /// A copy that went at once was made, or not. Of one under grants its transfer's end tells.
    pub(super) fn copied_out(&mut self, copy: u64, made: bool) {
        let transfer = TransferId(copy);
        let at_once = |outgoing: &Outgoing| !outgoing.granted;
        if self.data.outgoing.get(&transfer).is_some_and(at_once)
            && let Some(outgoing) = self.data.outgoing.remove(&transfer)
        {
            self.ended(outgoing, made);
        }
    }

    /// A transfer to the host is over.
    pub(super) fn went_out(&mut self, transfer: TransferId, outcome: Outcome) {
        if let Some(outgoing) = self.data.outgoing.remove(&transfer) {
            self.send(Command::EndCopyOut(EndCopyOut { copy: transfer.0 }), Vec::new());
            self.ended(outgoing, outcome == Outcome::Complete);
        }
    }

    fn ended(&mut self, Outgoing { purpose, to, span, .. }: Outgoing, made: bool) {
        if made {
            self.copied(purpose, to);
        } else {
            millrace_proto::trace::fail(&span, "it was not copied");
            self.not_copied(purpose);
        }
    }

    fn copied(&mut self, purpose: Purpose, fd: Descriptor) {
        match purpose {
            Purpose::Refused(object) => {
                self.data.is_at(object, Place::Host(fd));
                self.data.tell(elastic::Event::Migrated { object });
                self.settled(object);
            }
            Purpose::Declined(object) => {
                self.data.is_at(object, Place::Host(fd));
                self.data.books.remove(&object);
                self.settled(object);
            }
            Purpose::Migrate(object) => {
                if let Some(book) = self.data.books.get_mut(&object) {
                    book.copy = Some(fd);
                }
                // It says whether the object leaves.
                self.data.tell(elastic::Event::Migrated { object });
            }
            Purpose::Fetch(kept, reply) => {
                self.data.unclaim(kept.key);
                reply.send(Ok((fd, 0)));
            }
        }
    }

    fn not_copied(&mut self, purpose: Purpose) {
        match purpose {
            Purpose::Refused(object) | Purpose::Migrate(object) => {
                self.data.tell(elastic::Event::CopyFailed { object });
            }
            Purpose::Declined(object) => {
                self.data.is_at(object, Place::Lost);
                self.data.books.remove(&object);
                self.settled(object);
            }
            Purpose::Fetch(kept, reply) => {
                self.data.unclaim(kept.key);
                reply.send(Err(Lost));
            }
        }
    }

    /// A batch of a transfer crossed: if it was of an output, its request's trace says so. What nobody waits
    /// for any more goes no further.
    pub(super) fn batch_crossed(&self, now: Timestamp, copied: &Copied) {
        let Some(outgoing) = self.data.outgoing.get(&copied.transfer) else { return };
        spans::copied(&outgoing.span, now, copied);
        let in_vain = |kept: &Arc<Kept>, reply: &Reply| reply.is_given_up() || Arc::strong_count(kept) == 1;
        if matches!(&outgoing.purpose, Purpose::Fetch(kept, reply) if in_vain(kept, reply)) {
            self.peers.node.post(node::Message::CancelTransfer(copied.transfer));
        }
    }

    /// An object is not wanted any more: it makes room by itself. The store waits for the end of the copy that
    /// it asked for.
    pub(super) fn stop_migration(&self, object: ObjectKey) {
        let its = |outgoing: &Outgoing| matches!(outgoing.purpose, Purpose::Migrate(it) if it == object);
        let outgoing = self.data.outgoing.iter().filter(|(_, outgoing)| outgoing.granted && its(outgoing));
        for (&transfer, _) in outgoing {
            self.peers.node.post(node::Message::CancelTransfer(transfer));
        }
    }
}
