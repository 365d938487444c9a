//! The table of the data on a GPU: each object with its readers, the waiting runs, the transfers under way,
//! and the events about data that the core has not handled yet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Weak;

use millrace_policy::elastic::{self, ObjectKey, Standing};
use millrace_policy::gpu::{Event, Spent};
use millrace_policy::ids::{RequestKey, RunId, TransferId};
use millrace_proto::executor::{OutputPart, Run};
use millrace_types::{GpuIndex, Incarnation, Timestamp};

use super::moves::Moves;
use super::outgoing::Outgoing;
use crate::actors::function::{self, Outputs};
use crate::actors::work::SharedWork;
use crate::objects::{Kept, Place};
use crate::port::Descriptor;

/// The index of an object's consumer in the store. All holders of the handle together are one consumer.
const READER: usize = 0;

/// The actor's record of an object.
#[derive(Debug)]
pub(super) struct Book {
    /// The object's handle. Dangling for a run's own copy, which has no handle.
    pub(super) kept: Weak<Kept>,
    pub(super) bytes: u64,
    /// The part of a run's outputs that the object is made of, until the object has been placed.
    pub(super) made: Option<OutputPart>,
    /// The number of runs that read the object and of copies that are made of it.
    pub(super) claims: u32,
    /// The ranks in the node's queue of the requests that read the object.
    queued: BTreeSet<u64>,
    /// The copy on the host, until the store decides whether the object leaves the GPU.
    pub(super) copy: Option<Descriptor>,
    /// Whether the executor has the object mapped.
    pub(super) mapped: bool,
}

impl Book {
    pub(super) fn new(kept: Weak<Kept>, bytes: u64, made: Option<OutputPart>) -> Self {
        Self { kept, bytes, made, claims: 0, queued: BTreeSet::new(), copy: None, mapped: false }
    }

    /// Returns the first request in the queue that reads the object. The rank of a request is its key.
    pub(super) fn next_reader(&self) -> Option<RequestKey> {
        self.queued.first().copied().map(RequestKey)
    }
}

/// An answer that waits until its outputs are stored.
pub(super) struct Storing {
    pub(super) work: SharedWork,
    pub(super) outputs: Outputs,
    pub(super) spent: Spent,
    pub(super) attempts: u32,
    pub(super) gpu: GpuIndex,
    pub(super) left: BTreeSet<ObjectKey>,
}

/// A run that waits for an input, or behind another run that does.
pub(super) struct Waiting {
    pub(super) key: RequestKey,
    pub(super) run: Run,
    pub(super) descriptors: Vec<Descriptor>,
    /// The positions of the inputs that have not arrived.
    pub(super) missing: Vec<usize>,
    pub(super) began: Timestamp,
}

/// The data of a GPU.
#[derive(Default)]
pub(super) struct Data {
    /// The last object key that was given out.
    objects: u64,
    pub(super) books: BTreeMap<ObjectKey, Book>,
    /// Copies to the host that are under way.
    pub(super) outgoing: BTreeMap<TransferId, Outgoing>,
    /// Answers that wait for their outputs to be stored, by run and request: a batch has several requests.
    pub(super) storing: BTreeMap<(RunId, RequestKey), Storing>,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) moves: Moves,
    /// The request whose model waited for memory after the last step.
    pub(super) roomless: Option<RequestKey>,
    /// Events that the core has not handled yet.
    pub(super) todo: VecDeque<Event>,
    /// Objects whose consumer's distance changed. The core hears of these changes before the events in
    /// `todo`, because the store must know the reserved objects before it decides to move any object.
    restand: BTreeSet<ObjectKey>,
}

impl Data {
    /// Removes and returns the next event that the core has to handle.
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

    /// Returns a new object key, unique on the node.
    pub(super) fn new_key(&mut self) -> ObjectKey {
        self.objects += 1;
        ObjectKey(self.objects)
    }

    /// Starts the object keys of an incarnation. An incarnation is unique among all executors of the
    /// node, so the keys of two GPUs differ.
    pub(super) fn begin(&mut self, incarnation: Incarnation) {
        self.objects = incarnation.0 << 32;
    }

    pub(super) fn tell(&mut self, event: elastic::Event) {
        self.todo.push_back(Event::Data(event));
    }

    /// Schedules an event that tells the core the distance of an object's nearest reader.
    fn stands(&mut self, object: ObjectKey) {
        self.restand.insert(object);
    }

    /// Notes that a request that reads the object joined the node's queue at this rank, or left the queue.
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

    /// Releases a reservation of an object. The store may move the object once all reservations are
    /// released.
    pub(super) fn unclaim(&mut self, object: ObjectKey) {
        if let Some(book) = self.books.get_mut(&object) {
            book.claims = book.claims.saturating_sub(1);
            self.stands(object);
        }
    }

    /// Records the place of an object in its handle.
    pub(super) fn is_at(&mut self, object: ObjectKey, place: Place) {
        if let Some(book) = self.books.get_mut(&object) {
            book.made = None;
            if let Some(kept) = book.kept.upgrade() {
                kept.moves_to(place);
            }
        }
    }

    /// Discards an object that no reader needs any longer.
    pub(super) fn discard(&mut self, object: ObjectKey) {
        if self.books.contains_key(&object) {
            self.tell(elastic::Event::Discard { object });
        }
    }

    /// Marks every object as lost that is not on the host, because its executor is gone, and clears the
    /// table. Returns the answers that waited for outputs to be stored.
    pub(super) fn lose(&mut self) -> Vec<Storing> {
        for kept in self.books.values().filter_map(|book| book.kept.upgrade()) {
            if !matches!(kept.place(), Place::Host(_)) {
                kept.moves_to(Place::Lost);
            }
        }
        self.books.clear();
        // Dropping a copy drops its reply, which tells the reader that the bytes are lost.
        self.outgoing.clear();
        self.waiting.clear();
        self.moves.clear();
        self.roomless = None;
        self.todo.clear();
        self.restand.clear();
        std::mem::take(&mut self.storing).into_values().collect()
    }
}

/// If the actor panics, its answers are sent all the same.
impl Drop for Data {
    fn drop(&mut self) {
        self.lose().into_iter().for_each(Storing::answer);
    }
}

impl Storing {
    /// Sends the answer to the request's Function actor.
    pub(super) fn answer(self) {
        let Self { work, outputs, spent, attempts, gpu, .. } = self;
        let key = work.key;
        work.home.post(function::Message::Completed { key, outputs, spent, gpu, attempts });
    }
}
