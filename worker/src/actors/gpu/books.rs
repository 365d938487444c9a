//! What a Gpu actor knows of the data on its GPU: each object, who reads it, what is on its way, and what
//! its core is to be told of that next.

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

/// The only reader that the store knows of an object: whoever holds its handle.
const READER: usize = 0;

/// What the actor knows of an object.
#[derive(Debug)]
pub(super) struct Book {
    /// Nobody's, where it is a run's own copy.
    pub(super) kept: Weak<Kept>,
    pub(super) bytes: u64,
    /// What it is of which run's outputs, until it is somewhere.
    pub(super) made: Option<OutputPart>,
    /// Runs that read it and copies that are made of it.
    pub(super) claims: u32,
    /// Where the requests that read it wait in the queue.
    queued: BTreeSet<u64>,
    /// What it was copied to, until it is known whether it leaves.
    pub(super) copy: Option<Descriptor>,
    /// Whether the executor knows it.
    pub(super) mapped: bool,
}

impl Book {
    pub(super) fn new(kept: Weak<Kept>, bytes: u64, made: Option<OutputPart>) -> Self {
        Self { kept, bytes, made, claims: 0, queued: BTreeSet::new(), copy: None, mapped: false }
    }

    /// The first of the requests in the queue that read it: their places are their keys.
    pub(super) fn next_reader(&self) -> Option<RequestKey> {
        self.queued.first().copied().map(RequestKey)
    }
}

/// An answer whose outputs are being stored.
pub(super) struct Storing {
    pub(super) work: SharedWork,
    pub(super) outputs: Outputs,
    pub(super) spent: Spent,
    pub(super) attempts: u32,
    pub(super) gpu: GpuIndex,
    pub(super) left: BTreeSet<ObjectKey>,
}

/// A run that waits for inputs, or behind one that does.
pub(super) struct Waiting {
    pub(super) key: RequestKey,
    pub(super) run: Run,
    pub(super) descriptors: Vec<Descriptor>,
    /// Inputs on their way: their places in the run.
    pub(super) missing: Vec<usize>,
    pub(super) began: Timestamp,
}

/// The data of a GPU.
#[derive(Default)]
pub(super) struct Data {
    objects: u64,
    pub(super) books: BTreeMap<ObjectKey, Book>,
    /// Copies to the host that are under way.
    pub(super) outgoing: BTreeMap<TransferId, Outgoing>,
    /// By their runs, which may be of several requests.
    pub(super) storing: BTreeMap<(RunId, RequestKey), Storing>,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) moves: Moves,
    /// The run that waited for room when that was looked at last.
    pub(super) roomless: Option<RequestKey>,
    /// What the core is to be told next.
    pub(super) todo: VecDeque<Event>,
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
    pub(super) fn lose(&mut self) -> Vec<Storing> {
        for kept in self.books.values().filter_map(|book| book.kept.upgrade()) {
            if !matches!(kept.place(), Place::Host(_)) {
                kept.moves_to(Place::Lost);
            }
        }
        self.books.clear();
        // Whoever waits for a copy hears of it as they are dropped.
        self.outgoing.clear();
        self.waiting.clear();
        self.moves.clear();
        self.roomless = None;
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
    pub(super) fn answer(self) {
        let Self { work, outputs, spent, attempts, gpu, .. } = self;
        let key = work.key;
        work.home.post(function::Message::Completed { key, outputs, spent, gpu, attempts });
    }
}
