//! Intermediate data on a GPU: outputs that stay in the GPU's memory as objects, and outputs that are
//! copied to host memory. The inputs of runs are in `inputs`, transfers to this GPU in `incoming`, transfers
//! to the host in `outgoing`, and the table of objects in `object_table`.
//!
//! ```text
//! RunDone, outputs kept ─► Store ─► Place ─► PlaceObject ─► ObjectPlaced ─┐
//!                                └► Refuse ─► CopyOut ────► CopiedOut ────┴► answered, by name
//! run whose input is an object: here ─► read in place; on the host ─► Fetch ─► InputFetched ─► sent;
//!                               on another GPU ─► copied here, if NVLinks lead here (`incoming`)
//! ```
//! The actor counts the readers of each object. The store never moves an object that a run reads or that is
//! being copied for a reader.
//!
//! The store's objects, the GPU's requests and their inputs bound the state.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_core::ids::ObjectKey;
use millrace_core::ids::{RequestKey, RunId};
use millrace_gpu::{GpuTimes, ObjectAction};
use millrace_memory::BlockRun;
use millrace_memory::elastic::{self, ConsumerDistance, ElasticStore, MemoryPool};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents;
use millrace_proto::executor::{DropOutputs, FreeObject, ObjectPart, OutputPart, PlaceObject};
use millrace_types::Bytes;

use super::actor::GpuActor;
use super::assigned_request::GpuRequest;
use super::object_table::{ObjectRecord, PendingAnswer};
use super::transfers::HostCopyPurpose;
use crate::actors::extents;
use crate::messages::gpu::ObjectReport;
use crate::messages::work::SharedWork;
use crate::object_handle::{HandleLocation, ObjectHandle, ObjectRequest};
use crate::objects::INLINE_BYTES_MAX;
use crate::request::RunOutputs;
use crate::snapshot::GpuData;
use crate::tensors::part;

/// Maximum number of answers that wait for their outputs to be stored. Above the maximum, outputs are
/// copied to the host, as without a store. The bound stays far below the 256 runs whose outputs an
/// executor keeps, because runs are queued on the executor ahead of time.
const STORING_MAX: usize = 64;

impl GpuActor {
    /// Returns the outputs of a run that the executor keeps on the GPU. Of a batch the executor keeps only
    /// outputs that every request of the batch keeps. The rows of the other outputs are split on the host.
    pub(super) fn kept_outputs(&self, entry: &GpuRequest) -> Vec<String> {
        if !self.core.core.keeps_data() || self.data.storing.len() >= STORING_MAX {
            return Vec::new();
        }
        let mut kept = entry.work().invocation.on_gpus.keep.clone();
        let others = &entry.works[1..];
        kept.retain(|name| others.iter().all(|work| work.invocation.on_gpus.keep.contains(name)));
        kept
    }

    /// Stores the outputs that an executor kept, and answers the request once each output has its place.
    /// Each request of a batch gets its rows as an object of its own, so that the object can be freed
    /// when that request's readers are done.
    ///
    /// Returns the objects that are small enough to be answered inline, for [`Self::copy_small_outputs`]. The
    /// caller copies them to the host only after this function has run for all requests of the batch:
    /// otherwise the executor could be told too early that no more outputs of the run will be read.
    pub(super) fn store_outputs(
        &mut self,
        run: RunId,
        work: &SharedWork,
        mut outputs: RunOutputs,
        spent: GpuTimes,
        attempts: u32,
    ) -> Vec<ObjectKey> {
        let mut left = BTreeSet::new();
        let mut little = Vec::new();
        for tensor in &mut outputs.tensors {
            let Some(Contents::KeptBytes(whole)) = tensor.contents else { continue };
            let Some(own) = self.peers.own_objects.mailbox() else { continue };
            let object = self.data.new_key();
            let rows = part(whole, outputs.share);
            let offset = rows.start;
            let bytes = rows.end - rows.start;
            let kept = Arc::new(ObjectHandle::new(self.index(), object, bytes, own));
            let made = OutputPart { run: run.0, output: tensor.name.clone(), offset, bytes };
            self.data.records.insert(object, ObjectRecord::new(Arc::downgrade(&kept), bytes, Some(made)));
            tensor.contents = Some(Contents::Object(ObjectPart { object: object.0, offset: 0, bytes }));
            outputs.objects.push(kept);
            left.insert(object);
            if bytes <= INLINE_BYTES_MAX as u64 {
                little.push(object);
                continue;
            }
            self.data.push_store_event(elastic::Event::Store {
                object,
                function: work.function,
                size: Bytes(bytes),
                consumers: vec![ConsumerDistance::Unqueued],
            });
        }
        let gpu = self.index();
        let storing = PendingAnswer { work: SharedWork::clone(work), outputs, spent, attempts, gpu, left };
        if storing.left.is_empty() {
            storing.answer();
            return little;
        }
        self.data.push_store_event(elastic::Event::Executed { function: work.function });
        self.data.storing.insert((run, work.key), storing);
        little
    }

    /// Copies outputs to the host that are too small to stay on the GPU.
    pub(super) fn copy_small_outputs(&mut self, objects: Vec<ObjectKey>) {
        objects.into_iter().for_each(|object| self.copy_whole(object, HostCopyPurpose::Declined(object)));
    }

    /// Notes that an output has its final place, or is lost, and sends the answer if the output was the
    /// last one that the answer waited for.
    pub(super) fn output_placed(&mut self, object: ObjectKey) {
        let storing = self.data.storing.iter_mut().find(|(_, storing)| storing.left.contains(&object));
        let Some((&(run, key), storing)) = storing else { return };
        storing.left.remove(&object);
        if storing.left.is_empty()
            && let Some(storing) = self.data.storing.remove(&(run, key))
        {
            self.drop_unwanted(run);
            storing.answer();
        }
    }

    /// Whether an answer waits for outputs of this run to be stored.
    fn has_pending_answers(&self, run: RunId) -> bool {
        self.data.storing.range((run, RequestKey(0))..).next().is_some_and(|((of, _), _)| *of == run)
    }

    pub(super) fn carry_out_data(&mut self, action: ObjectAction) {
        match action {
            ObjectAction::Place { object, blocks } => self.place_object(object, &blocks),
            ObjectAction::Refuse { object } | ObjectAction::Decline { object }
                if self.fall_back_to_host(object) => {}
            ObjectAction::Refuse { object } => self.copy_whole(object, HostCopyPurpose::Refused(object)),
            ObjectAction::Decline { object } => self.copy_whole(object, HostCopyPurpose::Declined(object)),
            ObjectAction::Migrate { object } => self.copy_whole(object, HostCopyPurpose::Migrate(object)),
            ObjectAction::Left { object } => self.finish_migration(object),
            ObjectAction::Keep { object } => {
                if let Some(book) = self.data.records.get_mut(&object) {
                    book.copy = None;
                }
            }
            ObjectAction::Reload { object, blocks } => self.reload(object, &blocks),
            ObjectAction::Free { object } => {
                self.drop_coming(object);
                self.stop_migration(object);
                self.unmap(object);
                self.data.records.remove(&object);
            }
            ObjectAction::Lost { object } => {
                self.data.set_location(object, HandleLocation::Lost);
                self.data.records.remove(&object);
                self.output_placed(object);
            }
        }
    }

    /// Frees an object's memory in the executor. The executor keeps the memory mapped for runs that still
    /// read the object.
    pub(super) fn unmap(&mut self, object: ObjectKey) {
        if let Some(book) = self.data.records.get_mut(&object).filter(|book| book.mapped) {
            book.mapped = false;
            self.send(Command::FreeObject(FreeObject { object: object.0 }), Vec::new());
        }
    }

    fn place_object(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let block = self.block();
        let made = self.data.records.get_mut(&object).and_then(|book| Some((book.made.clone()?, book)));
        let Some((output, book)) = made else { return self.place_coming(object, blocks) };
        book.mapped = true;
        let bytes = book.bytes;
        let place = PlaceObject {
            object: object.0,
            bytes,
            extents: extents::of_blocks(blocks, block),
            output: Some(output),
            ..PlaceObject::default()
        };
        self.send(Command::PlaceObject(place), Vec::new());
    }

    /// Handles a request of the handle of an object on this GPU.
    pub(super) fn handle_object_request(&mut self, request: ObjectRequest) {
        match request {
            ObjectRequest::ReaderQueued { object, place, waits } => self.data.queued(object, place, waits),
            ObjectRequest::Fetch { part, reader, reply } => self.fetch(part, reader, reply),
            ObjectRequest::Discard(object) => self.data.discard(object),
        }
    }

    /// Handles an executor's report on an object or on a copy to the host.
    pub(super) fn handle_object_report(&mut self, said: ObjectReport) {
        let made =
            |object| self.data.records.get(&object).is_some_and(|book: &ObjectRecord| book.made.is_some());
        match said {
            // For an object that a transfer fills, the end of the transfer counts
            // (`object_transfer_ended`).
            ObjectReport::Placed(object) | ObjectReport::NotPlaced(object) if !made(object) => {}
            ObjectReport::Placed(object) => {
                self.data.set_location(object, HandleLocation::Gpu(self.incarnation));
                self.data.push_store_event(elastic::Event::Filled { object });
                self.output_placed(object);
            }
            ObjectReport::NotPlaced(object) => {
                if let Some(book) = self.data.records.get_mut(&object) {
                    book.mapped = false;
                }
                self.data.push_store_event(elastic::Event::CopyFailed { object });
            }
            ObjectReport::CopiedOut(copy) => self.copied_out(copy, true),
            ObjectReport::NotCopiedOut(copy) => self.copied_out(copy, false),
        }
    }

    /// Returns the present memory use and the counts of the data on this GPU, for a snapshot.
    pub(super) fn data_report(&self) -> GpuData {
        let core = &self.core.core;
        let pool = core.store().map(ElasticStore::pool);
        let counts = core.data_counts();
        GpuData {
            used: pool.map_or(Bytes::ZERO, MemoryPool::used),
            pool: pool.map_or(Bytes::ZERO, MemoryPool::size),
            migrated: counts.migrated,
            reloaded: counts.reloaded,
            refused: counts.refused,
        }
    }

    /// Notes that an object has migrated: its only copy is on the host now.
    fn finish_migration(&mut self, object: ObjectKey) {
        let copy = self.data.records.get_mut(&object).and_then(|book| book.copy.take());
        if let Some(fd) = copy {
            self.data.set_location(object, HandleLocation::Host(fd));
        }
        self.unmap(object);
    }

    /// Tells the executor to drop the outputs of a run, unless answers wait for them. The executor may have
    /// kept outputs that no answer needs, for example those of a cancelled request.
    pub(super) fn drop_unwanted(&self, run: RunId) {
        if !self.has_pending_answers(run) {
            self.send(Command::DropOutputs(DropOutputs { run: run.0 }), Vec::new());
        }
    }

    /// Marks all data as lost with its executor. Answers that wait for their outputs to be stored are
    /// sent at once, with lost objects. A reader of a lost object has its producer run again.
    pub(super) fn mark_data_lost(&mut self) {
        let storing = self.data.clear_lost();
        storing.into_iter().for_each(PendingAnswer::answer);
    }
}
