//! Intermediate data of workflows that this worker holds, and what it takes from others: tier 1 of
//! the index (DESIGN §5; [`millrace_policy::index`]), the truth about what the node has.
//!
//! An answer that its caller wants kept stays here as an *object* and only its name travels; a
//! request that takes it as input finds it by that name. It stays in the memory of the GPU that made
//! it, where the next run on that GPU reads it, and dispatch is told that it is there
//! (`policy::dispatch`); where there is no room, in host memory that executors map. Of requests that ran
//! as one each has its rows so. For other GPUs it is copied to where their runs read it, over the NVLinks
//! that lead there, or else to the host.
//! From another node its bytes come from worker to worker, checked as they come, and go on from
//! where a broken connection left off.
//!
//! An object lives until its last consumer has it (D28), or until the time is over for which it was
//! asked to be kept: whoever asked may be gone. Where there is no room for one, its bytes are
//! answered instead.
//!
//! | module | holds |
//! |---|---|
//! | [`contents`] | a tensor's bytes, wherever they are |
//! | [`named`] | objects that functions' processes name themselves |
//! | [`gather`] | a request's inputs put together from objects |
//! | [`kept`] | objects that stay in the memory of the GPU that made them |
//! | [`peers`] | objects of other workers |
//! | [`elsewhere`] | the same where nothing is known but the name |
//! | [`whereabouts`] | what controllers say of where things are |
//! | [`claimed`] | room that functions' state takes beside them |
//! | [`given`] | data as programs are given it |
//! | [`serve`] | this worker's objects for them |

mod claimed;
mod contents;
mod elsewhere;
mod gather;
mod given;
mod kept;
mod named;
mod peers;
mod serve;
mod whereabouts;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_policy::index::{Calls, Index, Limit, LookupOrder, OBJECTS_MAX, Usage};
use millrace_proto::worker::FetchMethod;
use millrace_types::{DataId, Epoch};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::Notify;

use crate::clock::Clock;
use crate::control::index::IndexFeed;

pub(crate) use claimed::Claim;
pub(crate) use contents::{Contents, memory, size_of_memory};
pub(crate) use elsewhere::FetchError;
pub(crate) use gather::{GatherError, Gathered, fetched, size_of};
pub(crate) use given::{Given, seal, sealed};
pub(crate) use kept::{Kept, Lost, OnHost, Part, Place, Reply};
pub(crate) use named::NotKept;
pub(crate) use peers::Peers;
pub(crate) use serve::Chunks;
pub(crate) use whereabouts::Whereabouts;

/// The most bytes of objects a worker holds when it is not told.
pub const OBJECT_MEMORY: millrace_types::Bytes = millrace_types::Bytes::gib(1);
/// The longest that an object is kept, whatever its caller says.
pub(crate) const KEEP_MAX: Duration = Duration::from_secs(3600);
/// How often what nobody came for is dropped.
const SWEEP_EVERY: Duration = Duration::from_millis(500);
/// How much is copied at a time.
const PIECE: usize = millrace_proto::parts::CHUNK_BYTES_MAX;

/// Share of the process's descriptors that objects may take: one in this many. Connections have half of
/// them, and the rest is for executors, programs and files.
const DESCRIPTOR_SHARE: u64 = 4;

/// How many descriptors this process may have, which is as many as the system lets it: each object that
/// is not small takes one.
fn descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Where that is refused, it is as it was.
    match setrlimit(Resource::Nofile, most) {
        Ok(()) => limit.maximum,
        Err(_refused) => limit.current,
    }
    .unwrap_or(u64::MAX)
}

/// The ways by which objects come to requests (D04).
pub(crate) const METHODS: [FetchMethod; 4] =
    [FetchMethod::IntraGpu, FetchMethod::InterGpu, FetchMethod::Host, FetchMethod::InterNode];

/// A method as people read it.
pub(crate) const fn method_name(method: FetchMethod) -> &'static str {
    match method {
        FetchMethod::Unspecified => "none",
        FetchMethod::Host => "host",
        FetchMethod::IntraGpu => "intra-gpu",
        FetchMethod::InterGpu => "inter-gpu",
        FetchMethod::InterNode => "inter-node",
    }
}

/// What is held, and what was fetched.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) usage: Usage,
    /// By [`METHODS`].
    pub(crate) fetched: [Fetched; METHODS.len()],
    /// Whom fetches by name asked: nobody for what was here (D09).
    pub(crate) asked: Calls,
    /// How often a controller was asked for a worker's address: once for each, and again where that had
    /// not what was sought.
    pub(crate) addresses: u64,
}

/// What came by one method.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Fetched {
    pub(crate) fetches: u64,
    pub(crate) bytes: u64,
}

/// The same, counted by whoever fetches.
#[derive(Debug, Default)]
struct Counted {
    fetches: AtomicU64,
    bytes: AtomicU64,
}

/// The objects of a worker. Clones share them.
#[derive(Clone)]
pub(crate) struct Objects(Arc<Inner>);

struct Inner {
    /// Looked at by whichever thread serves a request, for as long as a map's lookup takes: a message
    /// to an actor would cost a wake-up on the way of each.
    index: Mutex<Index<Contents>>,
    /// Who is asked first for what is not here.
    order: LookupOrder,
    feed: IndexFeed,
    clock: Arc<dyn Clock>,
    peers: Peers,
    /// By [`METHODS`].
    fetched: [Counted; METHODS.len()],
    /// Whom fetches by name asked.
    asked: Mutex<Calls>,
    /// Told when an object goes.
    dropped: Notify,
    /// Told when something is over before its time.
    over: Notify,
    whereabouts: Whereabouts,
    /// The threads of the service: sums and copies of large data would hold actors up.
    threads: tokio::runtime::Handle,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("tally", &self.tally()).finish_non_exhaustive()
    }
}

impl Objects {
    /// None yet, and room for so many bytes. Their names are those of the registration that `feed`
    /// knows, and what lives long is told to it. On the runtime that is to fetch what is elsewhere, which
    /// is looked for in this order.
    pub(crate) fn new(
        bytes: millrace_types::Bytes,
        feed: IndexFeed,
        whereabouts: Whereabouts,
        order: LookupOrder,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let limit = Limit { bytes, files: descriptors() / DESCRIPTOR_SHARE, objects: OBJECTS_MAX };
        Self(Arc::new(Inner {
            index: Mutex::new(Index::new(feed.node.clone(), limit)),
            order,
            feed,
            clock,
            peers: Peers::default(),
            fetched: Default::default(),
            asked: Mutex::default(),
            dropped: Notify::new(),
            over: Notify::new(),
            whereabouts,
            threads: tokio::runtime::Handle::current(),
        }))
    }

    /// The registration under which this worker is known; `None` before the first.
    pub(crate) fn registration(&self) -> Option<Epoch> {
        self.0.feed.registration.borrow().current
    }

    fn index(&self) -> MutexGuard<'_, Index<Contents>> {
        self.0.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an object for so long, and names it. Gives it back where there is no room, or no
    /// controller has named this worker yet.
    pub(crate) async fn keep(&self, contents: Contents, time: Duration) -> Result<DataId, Contents> {
        let Some(epoch) = self.registration() else { return Err(contents) };
        // First, so that nothing is between putting it there and saying so.
        let Some(place) = self.0.feed.place().await else { return Err(contents) };
        let bytes = millrace_types::Bytes(contents.len());
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        let id = self.index().put(epoch, contents, until)?;
        place.stored(id.clone(), bytes);
        Ok(id)
    }

    /// An object that is here, its own or a copy.
    pub(crate) fn find(&self, id: &DataId) -> Option<Contents> {
        self.index().get(id).cloned()
    }

    /// Lets go of objects.
    pub(crate) async fn release(&self, ids: &[DataId]) {
        for id in ids {
            let Some(place) = self.0.feed.place().await else { return };
            let mut index = self.index();
            let was_here = index.remove(id);
            if was_here {
                // Before it can be back, and that be said.
                place.dropped(id.clone());
            }
            drop(index);
            if was_here {
                self.0.dropped.notify_waiters();
            }
        }
    }

    /// Returns once nothing is held any more. Nobody waits for long: what nobody comes for goes.
    pub(crate) async fn emptied(&self) {
        loop {
            // Before it is looked at, so that what comes between is noticed.
            let dropped = self.0.dropped.notified();
            if self.index().usage().objects == 0 {
                return;
            }
            dropped.await;
        }
    }

    /// What is held, and what was fetched.
    pub(crate) fn tally(&self) -> Tally {
        let read = |counted: &Counted| Fetched {
            fetches: counted.fetches.load(Ordering::Relaxed),
            bytes: counted.bytes.load(Ordering::Relaxed),
        };
        let asked = *self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let (usage, fetched) = (self.index().usage(), self.0.fetched.each_ref().map(read));
        Tally { usage, fetched, asked, addresses: self.0.whereabouts.asked_for() }
    }

    /// Counts an input that came by a method.
    pub(crate) fn count(&self, method: FetchMethod, bytes: u64) {
        let Some(place) = METHODS.iter().position(|&one| one == method) else { return };
        let counted = &self.0.fetched[place];
        counted.fetches.fetch_add(1, Ordering::Relaxed);
        counted.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Drops what nobody came for, from now on.
    pub(crate) async fn sweep(self) {
        loop {
            // Whichever it is.
            drop(tokio::time::timeout(SWEEP_EVERY, self.0.over.notified()).await);
            let now = self.0.clock.now();
            let (expired, gone) = {
                let mut index = self.index();
                (index.expire(now), index.take_gone(now))
            };
            for id in &expired {
                tracing::debug!(%id, "nobody came for an object in its time");
            }
            for id in expired.into_iter().chain(gone) {
                self.0.dropped.notify_waiters();
                let place = self.0.feed.place().await;
                let index = self.index();
                // It may be back, which is said already.
                if let Some(place) = place.filter(|_| index.get(&id).is_none()) {
                    place.dropped(id);
                }
            }
        }
    }
}

#[cfg(test)]
impl Objects {
    /// None yet, of a worker that is registered under epoch 1; and what they tell the index, until that is
    /// dropped.
    pub(crate) fn registered(
        limit: millrace_types::Bytes,
    ) -> (Self, tokio::sync::mpsc::Receiver<millrace_policy::checkpoint::Event>) {
        let (feed, told) = IndexFeed::heard(millrace_types::Epoch(1));
        let attached = tokio::sync::watch::Sender::default().subscribe();
        let whereabouts = Whereabouts::new(Vec::new(), attached);
        let clock = Arc::new(crate::clock::MonotonicClock);
        (Self::new(limit, feed, whereabouts, LookupOrder::default(), clock), told)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use millrace_policy::checkpoint::Event;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_expired_and_is_back_as_a_copy_is_not_told_as_dropped() {
        let (objects, mut told) = Objects::registered(millrace_types::Bytes::mib(1));
        let contents = || Contents::Inline(vec![7u8; 4].into());
        let id = objects.keep(contents(), Duration::ZERO).await.unwrap();
        let stored = told.recv().await;
        assert_eq!(stored, Some(Event::DataStored { id: id.clone(), bytes: millrace_types::Bytes(4) }));
        let mut places = Vec::new();
        while let Some(place) = objects.0.feed.place().now_or_never() {
            places.push(place);
            // A task that took so many at one go would be told to wait though there is room.
            tokio::task::yield_now().await;
        }
        let sweep = tokio::spawn(objects.clone().sweep());
        objects.0.over.notify_one();
        while objects.find(&id).is_some() {
            tokio::task::yield_now().await;
        }
        // It is fetched before its end could be said.
        let until = objects.0.clock.now() + KEEP_MAX;
        assert!(objects.index().put_copy(&id, contents(), until));
        drop(places);
        let later = objects.keep(contents(), Duration::ZERO).await.unwrap();
        let bytes = millrace_types::Bytes(4);
        assert_eq!(told.recv().await, Some(Event::DataStored { id: later.clone(), bytes }));
        // It expired after the other: nothing is said of that any more.
        assert_eq!(told.recv().await, Some(Event::DataDropped { id: later }));
        sweep.abort();
    }
}
