//! Copies from this GPU to host memory: outputs that the store has no room for, objects that migrate to
//! make room, and bytes whose reader no NVLink reaches.
//!
//! ```text
//! Refuse, Decline, Migrate, Fetch ─► CopyOut (granted), Transfer ─► Left ─► EndCopyOut ─► done with it
//!                         little ─► CopyOut ─► CopiedOut, NotCopiedOut ───────────────────────┘
//! ```
//! A copy crosses the GPU's path to the host under the fabric's grants, as copies from the host do (D11
//! to D16). A copy that is no larger than an inline output (64 KiB) needs no grant, because the copy is
//! smaller than a chunk, and inline inputs and outputs wait for no link either. The executor makes small
//! copies in the order of its commands.
//!
//! An object stays on the GPU until all copies of it have ended. At the end of each batch, a copy for a
//! reader is cancelled if the reader has given up or if only the copy itself still holds the object. A
//! copy for a run or an answer continues to its end, even if its request is over.
//!
//! The store's objects, the outputs of the GPU's runs, and the number of readers bound the state.

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

/// The purpose of a copy to the host.
#[derive(Debug)]
pub(super) enum Purpose {
    /// The store has no room for the object, and tracks it on the host.
    Refused(ObjectKey),
    /// The store neither accepts nor tracks the object.
    Declined(ObjectKey),
    /// The store migrates the object to make room.
    Migrate(ObjectKey),
    /// A reader outside this GPU asked for bytes of the object. The handle keeps the object alive.
    Fetch(Arc<Kept>, Reply),
}

/// A copy to the host that is under way.
#[derive(Debug)]
pub(super) struct Outgoing {
    purpose: Purpose,
    to: Descriptor,
    /// Whether the copy is a transfer under the fabric's grants. Small copies are not.
    granted: bool,
    /// The span of the copy in the trace of the request that produced the output; otherwise disabled.
    span: Span,
}

impl Gpu {
    /// Starts to copy a whole object to the host, or an output that will become an object.
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
        self.copy_out(source, bytes, purpose, reader, span);
    }

    /// Returns the reader that a migration makes room for: the run whose model has no memory, or else the
    /// reader of the next object that has none.
    fn waits_for_room(&self) -> Reader {
        let core = &self.core.core;
        let object = || core.store().and_then(Store::waits_for_room);
        match core.waits_for_room() {
            Some(key) => Reader::Run(key),
            None => object().map_or(Reader::Nobody, |object| self.waits_for(object)),
        }
    }

    /// Returns the reader of an object that has not been placed: the answer that waits for the object, or
    /// the run that reads it.
    fn waits_for(&self, object: ObjectKey) -> Reader {
        if let Some(storing) = self.data.storing.values().find(|storing| storing.left.contains(&object)) {
            return Reader::Answer(Arc::clone(&storing.work));
        }
        let run = self.data.moves.reader_of(object);
        let waiting =
            self.data.waiting.iter().find(|waiting| run.is_some_and(|run| waiting.run.run == run.0));
        Reader::run(waiting.map(|waiting| waiting.key))
    }

    /// Hastens the migrations under way if a run has begun to wait for memory: the migrations may have
    /// started without a waiting run, and so without an objective.
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

    fn copy_out(&mut self, source: Source, bytes: u64, purpose: Purpose, reader: Reader, span: Span) {
        let to = match memory("millrace-object") {
            Ok(file) => Descriptor::new(file.into()),
            Err(error) => {
                tracing::warn!(gpu = self.index().0, %error, "cannot allocate memory for a copy of an object");
                return self.not_copied(purpose);
            }
        };
        let gpu = self.index();
        let granted = bytes > INLINE_BYTES_MAX as u64;
        let transfer = self.data.moves.new_transfer(gpu);
        let copy = transfer.0;
        self.data.outgoing.insert(transfer, Outgoing { purpose, to: Arc::clone(&to), granted, span });
        let copy_out = CopyOut { copy, contents_fd: 0, granted, source: Some(source) };
        self.send(Command::CopyOut(copy_out), vec![to]);
        if granted {
            let bytes = Bytes(bytes);
            let cargo = Cargo::ToHost(Leaving { copy, bytes });
            self.peers.node.post(node::Message::Transfer {
                gpu,
                transfer,
                cargo,
                chunks: std::iter::once(0..blocks_for(bytes)).collect(),
                from: None,
                reader,
            });
        }
    }

    /// Copies a part of an object to the host for a reader, or returns the object's copy on the host.
    pub(super) fn fetch(&mut self, part: ObjectPart, reader: Reader, reply: Reply) {
        let object = ObjectKey(part.object);
        let kept = self.data.books.get(&object).and_then(|book| book.kept.upgrade());
        match kept.map(|kept| (kept.place(), kept)) {
            Some((Place::Host(fd), _)) => reply.send(Ok((fd, part.offset))),
            Some((Place::Gpu(_), kept)) => {
                self.data.claim(object);
                let bytes = part.bytes;
                self.copy_out(Source::Object(part), bytes, Purpose::Fetch(kept, reply), reader, Span::none());
            }
            // A reader learns the key of an object only after the object was placed, so `Coming` is no
            // state that a reader waits in.
            Some((Place::Coming | Place::Lost, _)) | None => reply.send(Err(Lost)),
        }
    }

    /// Handles the executor's report on the end of a copy without grants. For a copy under grants the end
    /// of its transfer counts, and the report is ignored.
    pub(super) fn copied_out(&mut self, copy: u64, made: bool) {
        let transfer = TransferId(copy);
        let at_once = |outgoing: &Outgoing| !outgoing.granted;
        if self.data.outgoing.get(&transfer).is_some_and(at_once)
            && let Some(outgoing) = self.data.outgoing.remove(&transfer)
        {
            self.ended(outgoing, made);
        }
    }

    /// Handles the end of a transfer to the host.
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
            millrace_proto::trace::fail(&span, "the copy to the host failed");
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
                // The store now decides whether the object leaves the GPU (`Left`) or stays (`Keep`).
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

    /// Records a copied batch in the trace of the request that produced the output. Cancels a copy that no
    /// reader waits for any longer.
    pub(super) fn batch_crossed(&self, now: Timestamp, copied: &Copied) {
        let Some(outgoing) = self.data.outgoing.get(&copied.transfer) else { return };
        spans::copied(&outgoing.span, now, copied);
        let in_vain = |kept: &Arc<Kept>, reply: &Reply| reply.is_given_up() || Arc::strong_count(kept) == 1;
        if matches!(&outgoing.purpose, Purpose::Fetch(kept, reply) if in_vain(kept, reply)) {
            self.peers.node.post(node::Message::CancelTransfer(copied.transfer));
        }
    }

    /// Cancels the migration of an object that the store frees anyway. The store still waits for the end
    /// of the copy, which the cancelled transfer reports.
    pub(super) fn stop_migration(&self, object: ObjectKey) {
        let its = |outgoing: &Outgoing| matches!(outgoing.purpose, Purpose::Migrate(it) if it == object);
        let outgoing = self.data.outgoing.iter().filter(|(_, outgoing)| outgoing.granted && its(outgoing));
        for (&transfer, _) in outgoing {
            self.peers.node.post(node::Message::CancelTransfer(transfer));
        }
    }
}
