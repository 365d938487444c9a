//! The objects of this worker: the index, the expiry, and the counts of stored and fetched objects.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_nodes::index::{DataIndex, IndexCapacity, IndexUsage, LookupCounts, LookupOrder, OBJECTS_MAX};
use millrace_proto::worker::FetchMethod;
use millrace_types::{DataId, Epoch};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Notify;

use super::contents::Contents;
use super::directory::DirectoryClient;
use super::peers::PeerConnections;
use crate::clock::Clock;
use crate::index_feed::IndexFeed;

/// Default maximum memory of a worker's objects.
pub const OBJECT_MEMORY: millrace_types::Bytes = millrace_types::Bytes::gib(1);
/// Longest lifetime of an object; longer requests are shortened.
pub(super) const KEEP_MAX: Duration = Duration::from_secs(3600);
/// Interval between sweeps of expired objects.
const SWEEP_EVERY: Duration = Duration::from_millis(500);
/// Maximum bytes of one copy step.
pub(super) const PIECE: usize = millrace_proto::parts::CHUNK_BYTES_MAX;

/// Divisor of the process's file descriptors: objects get one part in this number. Connections get
/// half of the descriptors, and executors, programs and files the rest.
const DESCRIPTOR_SHARE: u64 = 4;

/// Raises the process's limit of file descriptors to the system's maximum, and returns the limit.
/// Each object that is not small needs a descriptor.
fn descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // If the system refuses, the limit stays as it was.
    match setrlimit(Resource::Nofile, most) {
        Ok(()) => limit.maximum,
        Err(_refused) => limit.current,
    }
    .unwrap_or(u64::MAX)
}

/// The methods of transferring objects to requests (D04).
pub(crate) const METHODS: [FetchMethod; 4] =
    [FetchMethod::IntraGpu, FetchMethod::InterGpu, FetchMethod::Host, FetchMethod::InterNode];

/// Returns the name of a method in metrics and messages.
pub(crate) const fn method_name(method: FetchMethod) -> &'static str {
    match method {
        FetchMethod::Unspecified => "none",
        FetchMethod::Host => "host",
        FetchMethod::IntraGpu => "intra-gpu",
        FetchMethod::InterGpu => "inter-gpu",
        FetchMethod::InterNode => "inter-node",
    }
}

/// The counts of stored and fetched objects.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ObjectTally {
    pub(crate) usage: IndexUsage,
    /// Fetches by method, in the order of [`METHODS`].
    pub(crate) fetched: [FetchCounts; METHODS.len()],
    /// Calls of fetches by name, by destination; a fetch of a local object makes none (D09).
    pub(crate) asked: LookupCounts,
    /// Number of address queries to controllers: one for each worker, and another whenever an
    /// object was not found at the known address.
    pub(crate) addresses: u64,
}

/// The fetches by one method.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FetchCounts {
    pub(crate) fetches: u64,
    pub(crate) bytes: u64,
}

/// Counters of the fetches by one method, updated from any thread.
#[derive(Debug, Default)]
struct FetchCounters {
    fetches: AtomicU64,
    bytes: AtomicU64,
}

/// The objects of a worker. Clones share the objects.
#[derive(Clone)]
pub(crate) struct ObjectStore(pub(super) Arc<Inner>);

pub(super) struct Inner {
    /// Accessed from any thread that serves a request, for the duration of a map lookup. A message
    /// to an actor would add a wake-up to each request.
    index: Mutex<DataIndex<Contents>>,
    /// The first place to ask for an object that is not here.
    pub(super) order: LookupOrder,
    pub(super) feed: IndexFeed,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) peers: PeerConnections,
    /// Counters in the order of [`METHODS`].
    fetched: [FetchCounters; METHODS.len()],
    /// Calls of fetches by name, by destination.
    pub(super) asked: Mutex<LookupCounts>,
    /// Notified when an object is dropped.
    dropped: Notify,
    /// Notified when an object ended before its expiry.
    pub(super) over: Notify,
    pub(super) whereabouts: DirectoryClient,
    /// The service's runtime: checksums and copies of large data would delay actors.
    pub(super) threads: tokio::runtime::Handle,
}

impl std::fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectStore").field("tally", &self.tally()).finish_non_exhaustive()
    }
}

impl ObjectStore {
    /// Returns an empty store with capacity for `bytes`. Object names belong to the registration
    /// that `feed` knows, and long-lived objects are reported to `feed`. Remote fetches run on the
    /// caller's runtime and search in this order.
    pub(crate) fn new(
        bytes: millrace_types::Bytes,
        feed: IndexFeed,
        whereabouts: DirectoryClient,
        order: LookupOrder,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let limit = IndexCapacity { bytes, files: descriptors() / DESCRIPTOR_SHARE, objects: OBJECTS_MAX };
        Self(Arc::new(Inner {
            index: Mutex::new(DataIndex::new(feed.node.clone(), limit)),
            order,
            feed,
            clock,
            peers: PeerConnections::default(),
            fetched: Default::default(),
            asked: Mutex::default(),
            dropped: Notify::new(),
            over: Notify::new(),
            whereabouts,
            threads: tokio::runtime::Handle::current(),
        }))
    }

    /// Returns this worker's registration; `None` before the first.
    pub(crate) fn registration(&self) -> Option<Epoch> {
        self.0.feed.registration.borrow().current
    }

    pub(super) fn index(&self) -> MutexGuard<'_, DataIndex<Contents>> {
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an object for `time` and returns its name. Returns the contents on a lack of
    /// capacity, or if no controller has registered this worker yet.
    pub(crate) async fn keep(&self, contents: Contents, time: Duration) -> Result<DataId, Contents> {
        let Some(epoch) = self.registration() else { return Err(contents) };
        // The permit comes first, so that storing and reporting are not separated by a wait.
        let Some(place) = self.0.feed.reserve().await else { return Err(contents) };
        let bytes = millrace_types::Bytes(contents.len());
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        let id = self.index().put(epoch, contents, until)?;
        place.stored(id.clone(), bytes);
        Ok(id)
    }

    /// Returns the contents of an object or copy on this worker.
    pub(crate) fn find(&self, id: &DataId) -> Option<Contents> {
        self.index().get(id).cloned()
    }

    /// Drops objects.
    pub(crate) async fn release(&self, ids: &[DataId]) {
        for id in ids {
            let Some(place) = self.0.feed.reserve().await else { return };
            let mut index = self.index();
            let was_here = index.remove(id);
            if was_here {
                // Report while the index is locked: otherwise the object could be stored and
                // reported again first.
                place.dropped(id.clone());
            }
            drop(index);
            if was_here {
                self.0.dropped.notify_waiters();
            }
        }
    }

    /// Waits until no object is stored. The wait is bounded, because objects expire.
    pub(crate) async fn wait_until_empty(&self) {
        loop {
            // Subscribe before the check, so that a drop in between is noticed.
            let dropped = self.0.dropped.notified();
            if self.index().usage().objects == 0 {
                return;
            }
            dropped.await;
        }
    }

    /// Returns the counts of stored and fetched objects.
    pub(crate) fn tally(&self) -> ObjectTally {
        let read = |counted: &FetchCounters| FetchCounts {
            fetches: counted.fetches.load(Ordering::Relaxed),
            bytes: counted.bytes.load(Ordering::Relaxed),
        };
        let asked = *self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let usage = self.index().usage();
        let fetched = self.0.fetched.each_ref().map(read);
        ObjectTally { usage, fetched, asked, addresses: self.0.whereabouts.asked_for() }
    }

    /// Counts an input that was transferred by a method.
    pub(crate) fn count(&self, method: FetchMethod, bytes: u64) {
        let Some(place) = METHODS.iter().position(|&one| one == method) else { return };
        let counted = &self.0.fetched[place];
        counted.fetches.fetch_add(1, Ordering::Relaxed);
        counted.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Drops expired objects, until the future is dropped.
    pub(crate) async fn sweep(self) {
        loop {
            // A timeout and a notification have the same effect.
            drop(tokio::time::timeout(SWEEP_EVERY, self.0.over.notified()).await);
            let now = self.0.clock.now();
            let (expired, gone) = {
                let mut index = self.index();
                (index.expire(now), index.take_gone(now))
            };
            for id in &expired {
                tracing::debug!(%id, "an object expired");
            }
            for id in expired.into_iter().chain(gone) {
                self.0.dropped.notify_waiters();
                let place = self.0.feed.reserve().await;
                let index = self.index();
                // The object may have been stored again, which was already reported.
                if let Some(place) = place.filter(|_| index.get(&id).is_none()) {
                    place.dropped(id);
                }
            }
        }
    }
}

#[cfg(test)]
impl ObjectStore {
    /// Returns an empty store of a worker that is registered under epoch 1, and the receiver of its
    /// reports.
    pub(crate) fn registered(
        limit: millrace_types::Bytes,
    ) -> (Self, tokio::sync::mpsc::Receiver<millrace_nodes::checkpoint::Event>) {
        let (feed, told) = IndexFeed::heard(millrace_types::Epoch(1));
        let attached = tokio::sync::watch::Sender::default().subscribe();
        let whereabouts = DirectoryClient::new(Vec::new(), attached);
        let clock = Arc::new(crate::clock::MonotonicClock);
        (Self::new(limit, feed, whereabouts, LookupOrder::default(), clock), told)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use millrace_nodes::checkpoint::Event;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_expired_object_stored_again_as_a_copy_is_not_reported_as_dropped() {
        let (objects, mut told) = ObjectStore::registered(millrace_types::Bytes::mib(1));
        let contents = || Contents::Inline(vec![7u8; 4].into());
        let id = objects.keep(contents(), Duration::ZERO).await.unwrap();
        let stored = told.recv().await;
        assert_eq!(stored, Some(Event::DataStored { id: id.clone(), bytes: millrace_types::Bytes(4) }));
        let mut places = Vec::new();
        while let Some(place) = objects.0.feed.reserve().now_or_never() {
            places.push(place);
            // tokio would make a task wait that took so many permits without yielding, although
            // permits are left.
            tokio::task::yield_now().await;
        }
        let sweep = tokio::spawn(objects.clone().sweep());
        objects.0.over.notify_one();
        while objects.find(&id).is_some() {
            tokio::task::yield_now().await;
        }
        // The object is fetched before its end could be reported.
        let until = objects.0.clock.now() + KEEP_MAX;
        assert!(objects.index().put_copy(&id, contents(), until));
        drop(places);
        let later = objects.keep(contents(), Duration::ZERO).await.unwrap();
        let bytes = millrace_types::Bytes(4);
        assert_eq!(told.recv().await, Some(Event::DataStored { id: later.clone(), bytes }));
        // This object expired after the other, so no report about the other follows.
        assert_eq!(told.recv().await, Some(Event::DataDropped { id: later }));
        sweep.abort();
    }
}
