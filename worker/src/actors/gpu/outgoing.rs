//! Copies from this GPU to host memory: outputs that the store has no room for, objects that migrate to
//! make room, and bytes whose reader no NVLink reaches.
//!
//! ```text
//! Refuse, Decline, Migrate, Fetch ─► CopyOut (granted), Transfer ─► HostTransferEnded ─► EndCopyOut ─► done with it
//!                         little ─► CopyOut ─► CopiedOut, NotCopiedOut ────────────────────────────────────┘
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

use millrace_core::ids::ObjectKey;
use millrace_core::ids::TransferId;
use millrace_memory::chunks_for;
use millrace_memory::elastic::{self, ElasticStore};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::copy_out::Source;
use millrace_proto::executor::{CopyOut, EndCopyOut, ObjectPart};
use millrace_transfers::fabric::{OutgoingCopy, TransferCargo, TransferOutcome};
use millrace_types::{Bytes, Timestamp};
use tracing::Span;

use super::actor::GpuActor;
use super::transfers::{HostCopyPurpose, OutgoingTransfer};
use crate::actors::spans;
use crate::messages::gpu::CopiedBatch;
use crate::messages::node;
use crate::object_handle::{HandleLocation, ObjectHandle, ObjectLost, Reply, TransferReader};
use crate::objects::{INLINE_BYTES_MAX, memory};
use crate::port::Descriptor;

impl GpuActor {
    /// Starts to copy a whole object to the host, or an output that will become an object.
    pub(super) fn copy_whole(&mut self, object: ObjectKey, purpose: HostCopyPurpose) {
        let Some(book) = self.data.records.get(&object) else { return };
        let bytes = book.bytes;
        let source = match &book.made {
            Some(output) => Source::Output(output.clone()),
            None => Source::Object(ObjectPart { object: object.0, offset: 0, bytes }),
        };
        let answers = self.data.storing.values().find(|storing| storing.left.contains(&object));
        let (reader, span) = match answers {
            Some(storing) => {
                let span = spans::host_copy_span(&storing.work.span, self.index(), bytes);
                (TransferReader::Answer(storing.work.answered()), span)
            }
            None if matches!(purpose, HostCopyPurpose::Migrate(_)) => (self.waits_for_room(), Span::none()),
            None => (TransferReader::None, Span::none()),
        };
        self.copy_out(source, bytes, purpose, reader, span);
    }

    /// Returns the reader that a migration makes room for: the run whose model has no memory, or else the
    /// reader of the next object that has none.
    fn waits_for_room(&self) -> TransferReader {
        let core = &self.core.core;
        let object = || core.store().and_then(ElasticStore::waits_for_room);
        match core.waits_for_room() {
            Some(key) => TransferReader::Run(key),
            None => object().map_or(TransferReader::None, |object| self.waits_for(object)),
        }
    }

    /// Returns the reader of an object that has not been placed: the answer that waits for the object, or
    /// the run that reads it.
    fn waits_for(&self, object: ObjectKey) -> TransferReader {
        if let Some(storing) = self.data.storing.values().find(|storing| storing.left.contains(&object)) {
            return TransferReader::Answer(storing.work.answered());
        }
        let run = self.data.moves.reader_of(object);
        let waiting =
            self.data.waiting.iter().find(|waiting| run.is_some_and(|run| waiting.run.run == run.0));
        TransferReader::run(waiting.map(|waiting| waiting.key))
    }

    /// Hastens the migrations under way if a run has begun to wait for memory: the migrations may have
    /// started without a waiting run, and so without an objective.
    pub(super) fn hasten_what_leaves(&mut self) {
        let roomless = self.core.core.waits_for_room();
        let before = std::mem::replace(&mut self.data.waiting_for_memory, roomless);
        let Some(reader) = roomless.filter(|_| roomless != before) else { return };
        let migrates = |outgoing: &OutgoingTransfer| matches!(outgoing.purpose, HostCopyPurpose::Migrate(_));
        let leaving =
            self.data.outgoing.iter().filter(|(_, outgoing)| outgoing.granted && migrates(outgoing));
        for (&transfer, _) in leaving {
            self.peers.node.post(node::Message::Hasten { transfer, reader });
        }
    }

    fn copy_out(
        &mut self,
        source: Source,
        bytes: u64,
        purpose: HostCopyPurpose,
        reader: TransferReader,
        span: Span,
    ) {
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
        self.data.outgoing.insert(transfer, OutgoingTransfer { purpose, to: Arc::clone(&to), granted, span });
        let copy_out = CopyOut { copy, contents_fd: 0, granted, source: Some(source) };
        self.send(Command::CopyOut(copy_out), vec![to]);
        if granted {
            let bytes = Bytes(bytes);
            let cargo = TransferCargo::ToHost(OutgoingCopy { copy, bytes });
            self.peers.node.post(node::Message::Transfer {
                gpu,
                transfer,
                cargo,
                chunks: std::iter::once(0..chunks_for(bytes)).collect(),
                from: None,
                reader,
            });
        }
    }

    /// Copies a part of an object to the host for a reader, or returns the object's copy on the host.
    pub(super) fn fetch(&mut self, part: ObjectPart, reader: TransferReader, reply: Reply) {
        let object = ObjectKey(part.object);
        let kept = self.data.records.get(&object).and_then(|book| book.kept.upgrade());
        match kept.map(|kept| (kept.place(), kept)) {
            Some((HandleLocation::Host(fd), _)) => reply.send(Ok((fd, part.offset))),
            Some((HandleLocation::Gpu(_), kept)) => {
                self.data.reserve(object);
                let bytes = part.bytes;
                self.copy_out(
                    Source::Object(part),
                    bytes,
                    HostCopyPurpose::Fetch(kept, reply),
                    reader,
                    Span::none(),
                );
            }
            // A reader learns the key of an object only after the object was placed, so `Coming` is no
            // state that a reader waits in.
            Some((HandleLocation::Coming | HandleLocation::Lost, _)) | None => reply.send(Err(ObjectLost)),
        }
    }

    /// Handles the executor's report on the end of a copy without grants. For a copy under grants the end
    /// of its transfer counts, and the report is ignored.
    pub(super) fn copied_out(&mut self, copy: u64, made: bool) {
        let transfer = TransferId(copy);
        let at_once = |outgoing: &OutgoingTransfer| !outgoing.granted;
        if self.data.outgoing.get(&transfer).is_some_and(at_once)
            && let Some(outgoing) = self.data.outgoing.remove(&transfer)
        {
            self.ended(outgoing, made);
        }
    }

    /// Handles the end of a transfer to the host.
    pub(super) fn host_transfer_ended(&mut self, transfer: TransferId, outcome: TransferOutcome) {
        if let Some(outgoing) = self.data.outgoing.remove(&transfer) {
            self.send(Command::EndCopyOut(EndCopyOut { copy: transfer.0 }), Vec::new());
            self.ended(outgoing, outcome == TransferOutcome::Complete);
        }
    }

    fn ended(&mut self, OutgoingTransfer { purpose, to, span, .. }: OutgoingTransfer, made: bool) {
        if made {
            self.copied(purpose, to);
        } else {
            millrace_proto::trace::fail(&span, "the copy to the host failed");
            self.not_copied(purpose);
        }
    }

    fn copied(&mut self, purpose: HostCopyPurpose, fd: Descriptor) {
        match purpose {
            HostCopyPurpose::Refused(object) => {
                self.data.set_location(object, HandleLocation::Host(fd));
                self.data.push_store_event(elastic::Event::Migrated { object });
                self.output_placed(object);
            }
            HostCopyPurpose::Declined(object) => {
                self.data.set_location(object, HandleLocation::Host(fd));
                self.data.records.remove(&object);
                self.output_placed(object);
            }
            HostCopyPurpose::Migrate(object) => {
                if let Some(book) = self.data.records.get_mut(&object) {
                    book.copy = Some(fd);
                }
                // The store now decides whether the object leaves the GPU (`Left`) or stays (`Keep`).
                self.data.push_store_event(elastic::Event::Migrated { object });
            }
            HostCopyPurpose::Fetch(kept, reply) => {
                self.data.release(kept.key);
                reply.send(Ok((fd, 0)));
            }
        }
    }

    fn not_copied(&mut self, purpose: HostCopyPurpose) {
        match purpose {
            HostCopyPurpose::Refused(object) | HostCopyPurpose::Migrate(object) => {
                self.data.push_store_event(elastic::Event::CopyFailed { object });
            }
            HostCopyPurpose::Declined(object) => {
                self.data.set_location(object, HandleLocation::Lost);
                self.data.records.remove(&object);
                self.output_placed(object);
            }
            HostCopyPurpose::Fetch(kept, reply) => {
                self.data.release(kept.key);
                reply.send(Err(ObjectLost));
            }
        }
    }

    /// Records a copied batch in the trace of the request that produced the output. Cancels a copy that no
    /// reader waits for any longer.
    pub(super) fn batch_crossed(&self, now: Timestamp, copied: &CopiedBatch) {
        let Some(outgoing) = self.data.outgoing.get(&copied.transfer) else { return };
        spans::copied(&outgoing.span, now, copied);
        let in_vain =
            |kept: &Arc<ObjectHandle>, reply: &Reply| reply.is_given_up() || Arc::strong_count(kept) == 1;
        if matches!(&outgoing.purpose, HostCopyPurpose::Fetch(kept, reply) if in_vain(kept, reply)) {
            self.peers.node.post(node::Message::CancelTransfer(copied.transfer));
        }
    }

    /// Cancels the migration of an object that the store frees anyway. The store still waits for the end
    /// of the copy, which the cancelled transfer reports.
    pub(super) fn stop_migration(&self, object: ObjectKey) {
        let its = |outgoing: &OutgoingTransfer| matches!(outgoing.purpose, HostCopyPurpose::Migrate(it) if it == object);
        let outgoing = self.data.outgoing.iter().filter(|(_, outgoing)| outgoing.granted && its(outgoing));
        for (&transfer, _) in outgoing {
            self.peers.node.post(node::Message::CancelTransfer(transfer));
        }
    }
}
