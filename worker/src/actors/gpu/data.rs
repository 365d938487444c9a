//! Intermediate data on a GPU, as its actor carries it out: outputs that stay there as objects, runs
//! that read objects where they lie, and copies of them to host memory for everybody else.
//!
//! ```text
//! RunDone, outputs kept ─► Store ─► Place ─► PlaceObject ─► ObjectPlaced ─┐
//!                                └► Refuse ─► CopyOut ────► CopiedOut ────┴► answered, by name
//! run whose input is an object: here ─► read in place; on the host ─► Fetch ─► Brought ─► sent;
//!                               on another GPU ─► brought here, where it can be (`moves`)
//! ```
//! Who reads an object is counted here: the store never moves one that a run reads or that is copied
//! for somebody. A run that waits for its inputs keeps those behind it waiting, so that the executor
//! has them in the order of the core; its model comes meanwhile.
//!
//! Bounded by the store's objects, the GPU's requests and their inputs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::{self, Write as _};
use std::sync::{Arc, Weak};

use millrace_policy::attempts::Progress;
use millrace_policy::elastic::{self, ObjectKey, Pool, Standing, Store};
use millrace_policy::gpu::{DataAction, Event, RunFailure, Spent};
use millrace_policy::ids::{RequestKey, RunId};
use millrace_policy::memory::Run as BlockRun;
use millrace_policy::paths::Hops;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::copy_out::Source;
use millrace_proto::executor::tensor::Contents;
use millrace_proto::executor::{CopyOut, DropOutputs, FreeObject, ObjectPart, OutputPart, PlaceObject, Run};
use millrace_proto::worker::FetchMethod;
use millrace_types::{Bytes, GpuIndex, Incarnation, Timestamp};

use super::moves::Moves;
use super::{Entry, Gpu, Message};
use crate::actors::extents;
use crate::actors::function::{self, Outputs};
use crate::actors::work::SharedWork;
use crate::objects::{Contents as Held, Kept, Lost, OnHost, Place, Reply, memory, size_of_memory};
use crate::port::Descriptor;
use crate::request::Brought;
use crate::seams::Mailbox;
use crate::snapshot::GpuData;

/// The only reader that the store knows of an object: whoever holds its handle.
const READER: usize = 0;

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

/// What the actor knows of an object.
#[derive(Debug)]
pub(super) struct Book {
    /// Nobody's, where it is a run's own copy.
    pub(super) kept: Weak<Kept>,
    pub(super) bytes: u64,
    /// The run that made it, and as which output, until it is somewhere.
    made: Option<(RunId, String)>,
    /// Runs that read it and copies that are made of it.
    pub(super) claims: u32,
    /// Where the requests that read it wait in the queue.
    queued: BTreeSet<u64>,
    /// What it was copied to, until it is known whether it leaves.
    copy: Option<Descriptor>,
    /// Whether the executor knows it.
    pub(super) mapped: bool,
}

impl Book {
    pub(super) fn new(kept: Weak<Kept>, bytes: u64, made: Option<(RunId, String)>) -> Self {
        Self { kept, bytes, made, claims: 0, queued: BTreeSet::new(), copy: None, mapped: false }
    }
}

/// Why something is copied to the host.
#[derive(Debug)]
enum Purpose {
    /// The store has no room for it.
    Refused(ObjectKey),
    /// The store does not take it, and knows nothing of it.
    Declined(ObjectKey),
    /// The store wants its room.
    Migrate(ObjectKey),
    /// Somebody reads it elsewhere.
    Fetch(ObjectKey, Reply),
}

/// An answer whose outputs are being stored.
struct Storing {
    work: SharedWork,
    outputs: Outputs,
    spent: Spent,
    attempts: u32,
    gpu: GpuIndex,
    left: BTreeSet<ObjectKey>,
}

/// A run that waits for inputs, or behind one that does.
pub(super) struct Waiting {
    pub(super) key: RequestKey,
    pub(super) run: Run,
    descriptors: Vec<Descriptor>,
    /// Inputs on their way: their places in the run.
    pub(super) missing: Vec<usize>,
    pub(super) began: Timestamp,
}

/// The data of a GPU.
#[derive(Default)]
pub(super) struct Data {
    objects: u64,
    copied: u64,
    pub(super) books: BTreeMap<ObjectKey, Book>,
    copies: BTreeMap<u64, (Purpose, Descriptor)>,
    storing: BTreeMap<RunId, Storing>,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) moves: Moves,
    /// What the core is to be told next.
    todo: VecDeque<Event>,
    /// Objects of which it is to be told first how near their readers are: what is claimed stays, so
    /// that must be known before anything else is decided.
    restand: BTreeSet<ObjectKey>,
}

impl Data {
    pub(super) fn next_event(&mut self) -> Option<Event> {
        if let Some(object) = self.restand.pop_first() {
            let Some(book) = self.books.get(&object) else { return self.next_event() };
            let standing = match (book.claims, book.queued.first()) {
                (0, None) => Standing::Unqueued,
                (0, Some(&place)) => Standing::Queued(place),
                _ => Standing::Claimed,
            };
            return Some(Event::Data(elastic::Event::Stands { object, consumer: READER, standing }));
        }
        let event = self.todo.pop_front();
        if let Some(Event::Data(elastic::Event::Store { object, .. })) = event {
            self.restand.insert(object);
        }
        event
    }

    /// A name for another object: the node's, so those of its GPUs are apart.
    pub(super) fn new_key(&mut self) -> ObjectKey {
        self.objects += 1;
        ObjectKey(self.objects)
    }

    /// Names objects after this executor: no other on the node has its number, before or after.
    pub(super) fn begin(&mut self, incarnation: Incarnation) {
        self.objects = incarnation.0 << 32;
    }

    pub(super) fn tell(&mut self, event: elastic::Event) {
        self.todo.push_back(Event::Data(event));
    }

    /// The core is to be told how near an object's first reader is.
    fn stands(&mut self, object: ObjectKey) {
        self.restand.insert(object);
    }

    /// A request that reads it waits in the queue at this place, or does no more.
    pub(super) fn queued(&mut self, object: ObjectKey, place: u64, waits: bool) {
        if let Some(book) = self.books.get_mut(&object) {
            if waits {
                book.queued.insert(place)
            } else {
                book.queued.remove(&place)
            };
            self.stands(object);
        }
    }

    pub(super) fn claim(&mut self, object: ObjectKey) {
        if let Some(book) = self.books.get_mut(&object) {
            book.claims += 1;
            self.stands(object);
        }
    }

    /// What somebody read may move again.
    pub(super) fn unclaim(&mut self, object: ObjectKey) {
        if let Some(book) = self.books.get_mut(&object) {
            book.claims = book.claims.saturating_sub(1);
            self.stands(object);
        }
    }

    /// Notes where an object is.
    pub(super) fn is_at(&mut self, object: ObjectKey, place: Place) {
        if let Some(book) = self.books.get_mut(&object) {
            book.made = None;
            if let Some(kept) = book.kept.upgrade() {
                kept.moves_to(place);
            }
        }
    }

    /// Nobody holds an object any more.
    pub(super) fn discard(&mut self, object: ObjectKey) {
        if self.books.contains_key(&object) {
            self.tell(elastic::Event::Discard { object });
        }
    }

    /// Whatever is not on the host is lost, with the executor that had it.
    fn lose(&mut self) -> Vec<Storing> {
        for kept in self.books.values().filter_map(|book| book.kept.upgrade()) {
            if !matches!(kept.place(), Place::Host(_)) {
                kept.moves_to(Place::Lost);
            }
        }
        self.books.clear();
        // Whoever waits for a copy hears of it as they are dropped.
        self.copies.clear();
        self.waiting.clear();
        self.moves.clear();
        self.todo.clear();
        self.restand.clear();
        std::mem::take(&mut self.storing).into_values().collect()
    }
}

/// With the actor, if it panics: whoever waits is told all the same.
impl Drop for Data {
    fn drop(&mut self) {
        self.lose().into_iter().for_each(Storing::answer);
    }
}

impl Storing {
    fn answer(self) {
        let Self { work, outputs, spent, attempts, gpu, .. } = self;
        let key = work.key;
        work.home.post(function::Message::Completed { key, outputs, spent, gpu, attempts });
    }
}

impl Gpu {
    /// Which outputs of a request the executor is to keep. What runs as one with others is cut up by
    /// rows on the host.
    pub(super) fn kept_outputs(&self, entry: &Entry) -> Vec<String> {
        let alone = entry.works.len() == 1 && self.core.core.keeps_data();
        if alone && self.data.storing.len() < STORING_MAX {
            entry.work().invocation.on_gpus.keep.clone()
        } else {
            Vec::new()
        }
    }

    /// Hands a run to the executor, once all that it reads is at hand.
    pub(super) fn start_run(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        run: Run,
        descriptors: Vec<Descriptor>,
    ) {
        if let Some(entry) = self.entries.get(&key).filter(|_| !run.kept.is_empty()) {
            self.data.tell(elastic::Event::Requested { function: entry.work().function });
        }
        let mut waiting = Waiting { key, run, descriptors, missing: Vec::new(), began: now };
        if self.find_inputs(now, &mut waiting) {
            self.data.waiting.push_back(waiting);
            self.send_ready();
        } else {
            let run = RunId(waiting.run.run);
            self.drop_inputs(run);
            self.data.todo.push_back(input_lost(run));
        }
    }

    /// Finds a run's objects, or asks for what is elsewhere. False where one is lost.
    fn find_inputs(&mut self, now: Timestamp, waiting: &mut Waiting) -> bool {
        let Some(entry) = self.entries.get(&waiting.key) else { return false };
        let objects = entry.works.iter().flat_map(|work| &work.invocation.on_gpus.objects);
        let objects: BTreeMap<_, _> = objects.map(|object| (object.key.0, Arc::clone(object))).collect();
        for place in 0..waiting.run.inputs.len() {
            let Some(Contents::Object(part)) = waiting.run.inputs[place].contents else { continue };
            let (Some(object), Some(own)) = (objects.get(&part.object), self.peers.own.mailbox()) else {
                return false;
            };
            match object.place() {
                Place::Lost => return false,
                Place::Gpu(incarnation) if object.gpu == self.index() && incarnation == self.incarnation => {
                    self.data.claim(object.key);
                    self.brought(now, waiting.key, place, (FetchMethod::IntraGpu, &[]), now);
                }
                Place::Gpu(_) if part.bytes > 0 && self.can_bring(object) => {
                    self.bring_here(waiting, place, object, part);
                }
                Place::Coming | Place::Gpu(_) | Place::Host(_) => {
                    waiting.missing.push(place);
                    let (run, ObjectPart { offset, bytes, .. }) = (RunId(waiting.run.run), part);
                    object.ask(offset, bytes, Reply::new(move |found| bring(found, bytes, own, run, place)));
                }
            }
        }
        true
    }

    /// Notes how an input came.
    pub(super) fn brought(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        place: usize,
        (method, routes): (FetchMethod, &[Hops]),
        began: Timestamp,
    ) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let inputs = entry.works.iter().flat_map(|work| {
            let inputs = work.invocation.inputs.iter();
            inputs.map(move |input| (work.key, input))
        });
        let Some((work, input)) = inputs.into_iter().nth(place) else { return };
        let Some(Contents::Object(part)) = &input.contents else { return };
        let (object, bytes, took) = (ObjectKey(part.object), part.bytes, now.since(began));
        let input = input.name.clone();
        entry.spans.fetched((method, routes), &input, bytes, took);
        if method == FetchMethod::IntraGpu {
            entry.claimed.push(object);
        }
        entry.brought.push((work, Brought { input, method, bytes, took }));
    }

    /// An input came, or will not.
    pub(super) fn input_brought(&mut self, now: Timestamp, run: RunId, place: usize, found: OnHost) {
        let Some(at) = self.data.waiting.iter().position(|it| it.run.run == run.0) else { return };
        match found {
            // It has the tensor's bytes and no others: `bring` saw to that.
            Ok((fd, _)) => {
                let waiting = &mut self.data.waiting[at];
                waiting.missing.retain(|&missing| missing != place);
                let number = u32::try_from(waiting.descriptors.len()).unwrap_or(u32::MAX);
                waiting.descriptors.push(fd);
                waiting.run.inputs[place].contents = Some(Contents::ContentsFd(number));
                let (key, began) = (waiting.key, waiting.began);
                self.brought(now, key, place, (FetchMethod::Host, &[]), began);
            }
            Err(Lost) => {
                self.data.waiting.remove(at);
                self.drop_inputs(run);
                self.data.todo.push_back(input_lost(run));
            }
        }
        self.send_ready();
    }

    /// Sends runs whose inputs are there, in their order.
    pub(super) fn send_ready(&mut self) {
        while self.data.waiting.front().is_some_and(|first| first.missing.is_empty()) {
            if let Some(Waiting { run, descriptors, .. }) = self.data.waiting.pop_front() {
                self.send(Command::Run(run), descriptors);
            }
        }
    }

    /// Takes a run back that was not sent. False where it was.
    pub(super) fn take_run_back(&mut self, run: RunId) -> bool {
        let Some(at) = self.data.waiting.iter().position(|it| it.run.run == run.0) else { return false };
        self.data.waiting.remove(at);
        self.drop_inputs(run);
        self.send_ready();
        self.data.todo.push_back(Event::RunCancelled { run });
        true
    }

    /// Has the outputs that an executor kept stored, and answers once each is somewhere.
    pub(super) fn store_outputs(
        &mut self,
        run: RunId,
        work: &SharedWork,
        mut outputs: Outputs,
        (spent, attempts): (Spent, u32),
    ) {
        let mut left = BTreeSet::new();
        for tensor in &mut outputs.tensors {
            let Some(Contents::KeptBytes(bytes)) = tensor.contents else { continue };
            let Some(own) = self.peers.own.mailbox() else { continue };
            let object = self.data.new_key();
            let kept = Arc::new(Kept::new(self.index(), object, bytes, own));
            let made = Some((run, tensor.name.clone()));
            self.data.books.insert(object, Book::new(Arc::downgrade(&kept), bytes, made));
            tensor.contents = Some(Contents::Object(ObjectPart { object: object.0, offset: 0, bytes }));
            outputs.kept.push(kept);
            let (function, size, consumers) = (work.function, Bytes(bytes), vec![Standing::Unqueued]);
            self.data.tell(elastic::Event::Store { object, function, size, consumers });
            left.insert(object);
        }
        let (work_, gpu) = (SharedWork::clone(work), self.index());
        let storing = Storing { work: work_, outputs, spent, attempts, gpu, left };
        if storing.left.is_empty() {
            return storing.answer();
        }
        self.data.tell(elastic::Event::Executed { function: work.function });
        self.data.storing.insert(run, storing);
    }

    /// An output is where it will be found, or lost.
    fn settled(&mut self, object: ObjectKey) {
        let storing = self.data.storing.iter_mut().find(|(_, storing)| storing.left.contains(&object));
        let Some((&run, storing)) = storing else { return };
        storing.left.remove(&object);
        if storing.left.is_empty()
            && let Some(storing) = self.data.storing.remove(&run)
        {
            self.send(Command::DropOutputs(DropOutputs { run: run.0 }), Vec::new());
            storing.answer();
        }
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
        let Some(((run, output), book)) = made else { return self.place_coming(object, blocks) };
        book.mapped = true;
        let bytes = book.bytes;
        let output = Some(OutputPart { run: run.0, output, offset: 0, bytes });
        let extents = extents::of_program(blocks, Bytes(bytes));
        let place = PlaceObject { object: object.0, bytes, extents, output, ..PlaceObject::default() };
        self.send(Command::PlaceObject(place), Vec::new());
    }

    fn copy_whole(&mut self, object: ObjectKey, purpose: Purpose) {
        let Some(book) = self.data.books.get(&object) else { return };
        let (offset, bytes) = (0, book.bytes);
        let source = match &book.made {
            Some((run, output)) => {
                Source::Output(OutputPart { run: run.0, output: output.clone(), offset, bytes })
            }
            None => Source::Object(ObjectPart { object: object.0, offset, bytes }),
        };
        self.copy_out(source, purpose);
    }

    fn copy_out(&mut self, source: Source, purpose: Purpose) {
        match memory("millrace-object") {
            Ok(file) => {
                self.data.copied += 1;
                let (copy, fd) = (self.data.copied, Descriptor::new(file.into()));
                self.data.copies.insert(copy, (purpose, Arc::clone(&fd)));
                let copy_out = CopyOut { copy, contents_fd: 0, source: Some(source) };
                self.send(Command::CopyOut(copy_out), vec![fd]);
            }
            Err(error) => {
                tracing::warn!(gpu = self.index().0, %error, "no memory for a copy of an object");
                self.not_copied(purpose);
            }
        }
    }

    /// Copies a part of an object for somebody.
    pub(super) fn fetch(&mut self, object: ObjectKey, offset: u64, bytes: u64, reply: Reply) {
        let place =
            self.data.books.get(&object).and_then(|book| book.kept.upgrade()).map(|kept| kept.place());
        match place {
            Some(Place::Host(fd)) => reply.send(Ok((fd, offset))),
            Some(Place::Gpu(_)) => {
                self.data.claim(object);
                let source = Source::Object(ObjectPart { object: object.0, offset, bytes });
                self.copy_out(source, Purpose::Fetch(object, reply));
            }
            // Nobody has the name of one that is still coming.
            Some(Place::Coming | Place::Lost) | None => reply.send(Err(Lost)),
        }
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
            DataSaid::CopiedOut(copy) => {
                if let Some((purpose, fd)) = self.data.copies.remove(&copy) {
                    self.copied(purpose, fd);
                }
            }
            DataSaid::NotCopiedOut(copy) => {
                if let Some((purpose, _)) = self.data.copies.remove(&copy) {
                    self.not_copied(purpose);
                }
            }
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
            Purpose::Fetch(object, reply) => {
                self.data.unclaim(object);
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
            Purpose::Fetch(object, reply) => {
                self.data.unclaim(object);
                reply.send(Err(Lost));
            }
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

    /// A run ended whose outputs nobody takes, though the executor may have kept them.
    pub(super) fn drop_unwanted(&self, run: RunId) {
        if !self.data.storing.contains_key(&run) {
            self.send(Command::DropOutputs(DropOutputs { run: run.0 }), Vec::new());
        }
    }

    /// How far requests were that were lost: what waited for its inputs was not handed over yet.
    pub(super) fn not_begun(&self, lost: Vec<(RequestKey, Progress)>) -> Vec<(RequestKey, Progress)> {
        let waits = |key| self.data.waiting.iter().any(|waiting| waiting.key == key);
        let told = |(key, progress)| (key, if waits(key) { Progress::Preparing } else { progress });
        lost.into_iter().map(told).collect()
    }

    /// The executor is gone. Answers that waited for their outputs to be stored are given without:
    /// whoever takes one asks for it to be made again.
    pub(super) fn lose_data(&mut self) {
        let storing = self.data.lose();
        storing.into_iter().for_each(Storing::answer);
    }
}

/// Passes on what was found for a run. A part of a larger piece of memory is copied out of it first, on a
/// thread that may take its time.
pub(super) fn bring(found: OnHost, bytes: u64, own: Mailbox<Message>, run: RunId, place: usize) {
    let exactly = |(fd, offset): &(Descriptor, u64)| {
        *offset == 0 && size_of_memory(fd).is_ok_and(|size| size as u64 == bytes)
    };
    match found {
        Ok((fd, offset)) if !exactly(&(Arc::clone(&fd), offset)) => {
            tokio::task::spawn_blocking(move || {
                let found = part_of(fd, offset, bytes).map_err(|error| {
                    tracing::warn!(%error, "no memory for a part of an object");
                    Lost
                });
                own.post(Message::Brought { run, place, found: found.map(|fd| (fd, 0)) });
            });
        }
        found => own.post(Message::Brought { run, place, found }),
    }
}

fn part_of(fd: Descriptor, offset: u64, bytes: u64) -> io::Result<Descriptor> {
    let whole = Held::Memory { bytes: size_of_memory(&fd)? as u64, fd };
    let mut file: File = memory("millrace-object")?;
    file.write_all(&whole.read(offset, usize::try_from(bytes).unwrap_or(usize::MAX))?)?;
    Ok(Descriptor::new(file.into()))
}

fn input_lost(run: RunId) -> Event {
    Event::RunFailed { run, why: RunFailure::InputLost }
}
