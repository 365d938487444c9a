//! The table of the data on a GPU: each object with its readers, the waiting runs, the transfers under way,
//! and the events about data that the core has not handled yet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Weak;

use millrace_core::ids::ObjectKey;
use millrace_core::ids::{RequestKey, RunId, TransferId};
use millrace_gpu::{Event, GpuTimes};
use millrace_memory::elastic::{self, ConsumerDistance};
use millrace_proto::executor::{OutputPart, Run};
use millrace_types::{GpuIndex, Incarnation, Timestamp};

use super::transfers::{ObjectTransfers, OutgoingTransfer};
use crate::messages::request_update::RequestUpdate;
use crate::messages::work::SharedWork;
use crate::object_handle::{HandleLocation, ObjectHandle};
use crate::port::Descriptor;
use crate::request::RunOutputs;

/// The index of an object's consumer in the store. All holders of the handle together are one consumer.
const READER: usize = 0;

/// The actor's record of an object.
#[derive(Debug)]
pub(super) struct ObjectRecord {
    /// The object's handle. Dangling for a run's own copy, which has no handle.
    pub(super) kept: Weak<ObjectHandle>,
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

impl ObjectRecord {
    pub(super) fn new(kept: Weak<ObjectHandle>, bytes: u64, made: Option<OutputPart>) -> Self {
        Self { kept, bytes, made, claims: 0, queued: BTreeSet::new(), copy: None, mapped: false }
    }

    /// Returns the first request in the queue that reads the object. The rank of a request is its key.
    pub(super) fn next_reader(&self) -> Option<RequestKey> {
        self.queued.first().copied().map(RequestKey)
    }
}

/// An answer that waits until its outputs are stored.
pub(super) struct PendingAnswer {
    pub(super) work: SharedWork,
    pub(super) outputs: RunOutputs,
    pub(super) spent: GpuTimes,
    pub(super) attempts: u32,
    pub(super) gpu: GpuIndex,
    pub(super) left: BTreeSet<ObjectKey>,
}

/// A run that waits for an input, or behind another run of its seat that does.
pub(super) struct WaitingRun {
    pub(super) key: RequestKey,
    pub(super) run: Run,
    pub(super) descriptors: Vec<Descriptor>,
    /// The positions of the inputs that have not arrived.
    pub(super) missing: Vec<usize>,
    pub(super) began: Timestamp,
}

/// The data of a GPU.
#[derive(Default)]
pub(super) struct GpuObjects {
    /// The last object key that was given out.
    objects: u64,
    pub(super) records: BTreeMap<ObjectKey, ObjectRecord>,
    /// Copies to the host that are under way.
    pub(super) outgoing: BTreeMap<TransferId, OutgoingTransfer>,
    /// Answers that wait for their outputs to be stored, by run and request: a batch has several requests.
    pub(super) storing: BTreeMap<(RunId, RequestKey), PendingAnswer>,
    pub(super) waiting: VecDeque<WaitingRun>,
    pub(super) moves: ObjectTransfers,
    /// The request whose model waited for memory after the last step.
    pub(super) waiting_for_memory: Option<RequestKey>,
    /// Events that the core has not handled yet.
    pub(super) pending_events: VecDeque<Event>,
    /// Objects whose consumer's distance changed. The core hears of these changes before the events in
    /// `pending_events`, because the store must know the reserved objects before it decides to move any object.
    changed_distances: BTreeSet<ObjectKey>,
}

impl GpuObjects {
    /// Removes and returns the next event that the core has to handle.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        if let Some(object) = self.changed_distances.pop_first() {
            let Some(book) = self.records.get(&object) else { return self.next_event() };
            let distance = match (book.claims, book.queued.first()) {
                (0, None) => ConsumerDistance::Unqueued,
                (0, Some(&place)) => ConsumerDistance::Queued(place),
                _ => ConsumerDistance::Claimed,
            };
            return Some(Event::Data(elastic::Event::ConsumerMoved { object, consumer: READER, distance }));
        }
        let event = self.pending_events.pop_front();
        if let Some(Event::Data(elastic::Event::Store { object, .. })) = event {
            self.changed_distances.insert(object);
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
    pub(super) fn start_keys(&mut self, incarnation: Incarnation) {
        self.objects = incarnation.0 << 32;
    }

    pub(super) fn push_store_event(&mut self, event: elastic::Event) {
        self.pending_events.push_back(Event::Data(event));
    }

    /// Schedules an event that tells the core the distance of an object's nearest reader.
    fn schedule_distance(&mut self, object: ObjectKey) {
        self.changed_distances.insert(object);
    }

    /// Notes that a request that reads the object joined the node's queue at this rank, or left the queue.
    pub(super) fn queued(&mut self, object: ObjectKey, place: u64, waits: bool) {
        if let Some(book) = self.records.get_mut(&object) {
            if waits {
                book.queued.insert(place)
            } else {
                book.queued.remove(&place)
            };
            self.schedule_distance(object);
        }
    }

    pub(super) fn reserve(&mut self, object: ObjectKey) {
        if let Some(book) = self.records.get_mut(&object) {
            book.claims += 1;
            self.schedule_distance(object);
        }
    }

    /// Releases a reservation of an object. The store may move the object once all reservations are
    /// released.
    pub(super) fn release(&mut self, object: ObjectKey) {
        if let Some(book) = self.records.get_mut(&object) {
            book.claims = book.claims.saturating_sub(1);
            self.schedule_distance(object);
        }
    }

    /// Records the place of an object in its handle.
    pub(super) fn set_location(&mut self, object: ObjectKey, place: HandleLocation) {
        if let Some(book) = self.records.get_mut(&object) {
            book.made = None;
            if let Some(kept) = book.kept.upgrade() {
                kept.moves_to(place);
            }
        }
    }

    /// Discards an object that no reader needs any longer.
    pub(super) fn discard(&mut self, object: ObjectKey) {
        if self.records.contains_key(&object) {
            self.push_store_event(elastic::Event::Discard { object });
        }
    }

    /// Marks every object as lost that is not on the host, because its executor is gone, and clears the
    /// table. Returns the answers that waited for outputs to be stored.
    pub(super) fn clear_lost(&mut self) -> Vec<PendingAnswer> {
        for kept in self.records.values().filter_map(|book| book.kept.upgrade()) {
            if !matches!(kept.place(), HandleLocation::Host(_)) {
                kept.moves_to(HandleLocation::Lost);
            }
        }
        self.records.clear();
        // Dropping a copy drops its reply, which tells the reader that the bytes are lost.
        self.outgoing.clear();
        self.waiting.clear();
        self.moves.clear();
        self.waiting_for_memory = None;
        self.pending_events.clear();
        self.changed_distances.clear();
        std::mem::take(&mut self.storing).into_values().collect()
    }
}

/// If the actor panics, its answers are sent all the same.
impl Drop for GpuObjects {
    fn drop(&mut self) {
        self.clear_lost().into_iter().for_each(PendingAnswer::answer);
    }
}

impl PendingAnswer {
    /// Sends the answer to the request's Function actor.
    pub(super) fn answer(self) {
        let Self { work, outputs, spent, attempts, gpu, .. } = self;
        let key = work.key;
        work.home.post(RequestUpdate::Completed { key, outputs, spent, gpu, attempts });
    }
}
