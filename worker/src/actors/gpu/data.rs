//! Intermediate data on a GPU, as its actor carries it out: outputs that stay there as objects, and those
//! that are copied to host memory for everybody else. What runs read is in `inputs`, what crosses links to
//! this GPU in `moves`, to the host in `outgoing`, what is known of each object in `books`.
//!
//! ```text
//! RunDone, outputs kept ─► Store ─► Place ─► PlaceObject ─► ObjectPlaced ─┐
//!                                └► Refuse ─► CopyOut ────► CopiedOut ────┴► answered, by name
//! run whose input is an object: here ─► read in place; on the host ─► Fetch ─► Brought ─► sent;
//!                               on another GPU ─► brought here, where it can be (`moves`)
//! ```
//! Who reads an object is counted here: the store never moves one that a run reads or that is copied
//! for somebody.
//!
//! Bounded by the store's objects, the GPU's requests and their inputs.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_policy::elastic::{self, ObjectKey, Pool, Standing, Store};
use millrace_policy::gpu::{DataAction, Spent};
use millrace_policy::ids::{RequestKey, RunId};
use millrace_policy::memory::Run as BlockRun;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents;
use millrace_proto::executor::{DropOutputs, FreeObject, ObjectPart, OutputPart, PlaceObject};
use millrace_types::Bytes;

use super::Gpu;
use super::books::{Book, Storing};
use super::outgoing::Purpose;
use super::requests::Entry;
use crate::actors::extents;
use crate::actors::function::Outputs;
use crate::actors::work::SharedWork;
use crate::objects::{Kept, Place};
use crate::service::tensors::{INLINE_BYTES_MAX, part};
use crate::snapshot::GpuData;

/// Answers that wait for their outputs to be stored. Beyond them outputs go to the host, as they would
/// without a store: an executor keeps those of 256 runs at most, and runs are sent to it ahead.
const STORING_MAX: usize = 64;

/// What an executor says of objects.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DataSaid {
    Placed(ObjectKey),
    NotPlaced(ObjectKey),
    CopiedOut(u64),
    NotCopiedOut(u64),
}

impl Gpu {
    /// Which outputs of a request the executor is to keep; of several that run as one, those that each
    /// of them keeps: the others cut theirs up by rows on the host, where they are answered from.
    pub(super) fn kept_outputs(&self, entry: &Entry) -> Vec<String> {
        if !self.core.core.keeps_data() || self.data.storing.len() >= STORING_MAX {
            return Vec::new();
        }
        let mut kept = entry.work().invocation.on_gpus.keep.clone();
        let others = &entry.works[1..];
        kept.retain(|name| others.iter().all(|work| work.invocation.on_gpus.keep.contains(name)));
        kept
    }

    /// Has the outputs that an executor kept stored, and answers once each is somewhere. Of requests that
    /// ran as one each has its rows as an object of its own, so that it goes when its readers have. Gives
    /// those that are little, and are to be copied to the host to be answered: once the others that ran
    /// with it wait for theirs, or the executor might be told too soon that nobody takes more.
    pub(super) fn store_outputs(
        &mut self,
        run: RunId,
        work: &SharedWork,
        mut outputs: Outputs,
        (spent, attempts): (Spent, u32),
    ) -> Vec<ObjectKey> {
        let (mut left, mut little) = (BTreeSet::new(), Vec::new());
        for tensor in &mut outputs.tensors {
            let Some(Contents::KeptBytes(whole)) = tensor.contents else { continue };
            let Some(own) = self.peers.own.mailbox() else { continue };
            let object = self.data.new_key();
            let rows = part(whole, outputs.share);
            let (offset, bytes) = (rows.start, rows.end - rows.start);
            let kept = Arc::new(Kept::new(self.index(), object, bytes, own));
            let made = OutputPart { run: run.0, output: tensor.name.clone(), offset, bytes };
            self.data.books.insert(object, Book::new(Arc::downgrade(&kept), bytes, Some(made)));
            tensor.contents = Some(Contents::Object(ObjectPart { object: object.0, offset: 0, bytes }));
            outputs.kept.push(kept);
            left.insert(object);
            if bytes <= INLINE_BYTES_MAX as u64 {
                little.push(object);
                continue;
            }
            let (function, size, consumers) = (work.function, Bytes(bytes), vec![Standing::Unqueued]);
            self.data.tell(elastic::Event::Store { object, function, size, consumers });
        }
        let (work_, gpu) = (SharedWork::clone(work), self.index());
        let storing = Storing { work: work_, outputs, spent, attempts, gpu, left };
        if storing.left.is_empty() {
            storing.answer();
            return little;
        }
        self.data.tell(elastic::Event::Executed { function: work.function });
        self.data.storing.insert((run, work.key), storing);
        little
    }

    /// Copies outputs to the host that are too little to stay.
    pub(super) fn copy_little(&mut self, objects: Vec<ObjectKey>) {
        objects.into_iter().for_each(|object| self.copy_whole(object, Purpose::Declined(object)));
    }

    /// An output is where it will be found, or lost.
    pub(super) fn settled(&mut self, object: ObjectKey) {
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

    /// Whether answers wait for outputs of a run.
    fn stores(&self, run: RunId) -> bool {
        self.data.storing.range((run, RequestKey(0))..).next().is_some_and(|((of, _), _)| *of == run)
    }

    pub(super) fn carry_out_data(&mut self, action: DataAction) {
        match action {
            DataAction::Place { object, blocks } => self.place_object(object, &blocks),
            DataAction::Refuse { object } | DataAction::Decline { object } if self.no_room_for(object) => {}
            DataAction::Refuse { object } => self.copy_whole(object, Purpose::Refused(object)),
            DataAction::Decline { object } => self.copy_whole(object, Purpose::Declined(object)),
            DataAction::Migrate { object } => self.copy_whole(object, Purpose::Migrate(object)),
            DataAction::Left { object } => self.left(object),
            DataAction::Keep { object } => {
                if let Some(book) = self.data.books.get_mut(&object) {
                    book.copy = None;
                }
            }
            DataAction::Reload { object, blocks } => self.reload(object, &blocks),
            DataAction::Free { object } => {
                self.drop_coming(object);
                self.stop_migration(object);
                self.unmap(object);
                self.data.books.remove(&object);
            }
            DataAction::Lost { object } => {
                self.data.is_at(object, Place::Lost);
                self.data.books.remove(&object);
                self.settled(object);
            }
        }
    }

    /// Takes an object out of the GPU's memory. Runs that read it have it to their end.
    pub(super) fn unmap(&mut self, object: ObjectKey) {
        if let Some(book) = self.data.books.get_mut(&object).filter(|book| book.mapped) {
            book.mapped = false;
            self.send(Command::FreeObject(FreeObject { object: object.0 }), Vec::new());
        }
    }

    fn place_object(&mut self, object: ObjectKey, blocks: &[BlockRun]) {
        let made = self.data.books.get_mut(&object).and_then(|book| Some((book.made.clone()?, book)));
        let Some((output, book)) = made else { return self.place_coming(object, blocks) };
        book.mapped = true;
        let (output, bytes) = (Some(output), book.bytes);
        let extents = extents::of_program(blocks, Bytes(bytes));
        let place = PlaceObject { object: object.0, bytes, extents, output, ..PlaceObject::default() };
        self.send(Command::PlaceObject(place), Vec::new());
    }

    /// An executor said something of objects.
    pub(super) fn data_said(&mut self, said: DataSaid) {
        let made = |object| self.data.books.get(&object).is_some_and(|book: &Book| book.made.is_some());
        match said {
            // Of what comes under grants the end of its copies tells.
            DataSaid::Placed(object) | DataSaid::NotPlaced(object) if !made(object) => {}
            DataSaid::Placed(object) => {
                self.data.is_at(object, Place::Gpu(self.incarnation));
                self.data.tell(elastic::Event::Filled { object });
                self.settled(object);
            }
            DataSaid::NotPlaced(object) => {
                if let Some(book) = self.data.books.get_mut(&object) {
                    book.mapped = false;
                }
                self.data.tell(elastic::Event::CopyFailed { object });
            }
            DataSaid::CopiedOut(copy) => self.copied_out(copy, true),
            DataSaid::NotCopiedOut(copy) => self.copied_out(copy, false),
        }
    }

    /// What of data is on the GPU, and was.
    pub(super) fn data_report(&self) -> GpuData {
        let core = &self.core.core;
        let (pool, counts) = (core.store().map(Store::pool), core.data_counts());
        GpuData {
            used: pool.map_or(Bytes::ZERO, Pool::used),
            pool: pool.map_or(Bytes::ZERO, Pool::size),
            migrated: counts.migrated,
            reloaded: counts.reloaded,
            refused: counts.refused,
        }
    }

    /// An object is on the host alone.
    fn left(&mut self, object: ObjectKey) {
        let copy = self.data.books.get_mut(&object).and_then(|book| book.copy.take());
        if let Some(fd) = copy {
            self.data.is_at(object, Place::Host(fd));
        }
        self.unmap(object);
    }

    /// A run ended whose outputs nobody takes any more, though the executor may have kept them.
    pub(super) fn drop_unwanted(&self, run: RunId) {
        if !self.stores(run) {
            self.send(Command::DropOutputs(DropOutputs { run: run.0 }), Vec::new());
        }
    }

    /// The executor is gone. Answers that waited for their outputs to be stored are given without:
    /// whoever takes one asks for it to be made again.
    pub(super) fn lose_data(&mut self) {
        let storing = self.data.lose();
        storing.into_iter().for_each(Storing::answer);
    }
}
