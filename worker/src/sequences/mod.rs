//! The state of functions that keep state from one request of a sequence to the next (T11). The core
//! ([`millrace_scheduling::sequences`]) decides about turns; this module stores the state.
//!
//! ```text
//! request ─► turn: waits for earlier requests ─► state goes in as inputs ─► run ─► state outputs are
//!                                                                                  stored for the next
//! ```
//! State is stored in the form of the run's output, and goes in as any other input. Large state is
//! an object in the memory of the GPU that made it, in the elastic store that also has the
//! intermediate data of workflows. The next run there reads it in place, and dispatch knows its
//! GPU. If models or other objects need the memory, state is written back to the host, as a region
//! that is marked mutable; models are never copied back (T10). Smaller state travels in the
//! messages of answers and requests, as every tensor of that size. State has no object name, no
//! expiry, and no entry in the index. State is dropped with its last handle, which is here or with
//! a request.
//!
//! State on a GPU is lost with its executor, and so are its sequences: the next request of such a
//! sequence is told to start again. A function that moves to another worker has no sequences there.
//! A worker that was declared lost drops its sequences when it returns, because other sequences may
//! have used the names meanwhile.
//!
//! Requests on any thread share the tables under a lock. The lock is held while the core decides and
//! never across an await. The core bounds the sequences, and object memory bounds their state: each
//! stored or expected state reserves its size. A request that ends its sequence expects none.

mod table;
#[cfg(test)]
mod tests;
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_core::ids::RequestKey;
use millrace_proto::trace::{self, FinishedSpan};
use millrace_scheduling::sequences::{SequenceRefusal, SequenceTotals};
use millrace_types::{
    Bytes, Epoch, Failure, FunctionKey, InSequence, Reason, RevisionKey, SequenceId, Timestamp,
};
use tokio::sync::{oneshot, watch};
use tracing::Span;

pub(crate) use self::turn::SequenceTurn;

use self::table::{Released, Table, TurnGrant};
use self::turn::SequenceTicket;
use crate::clock::Clock;
use crate::objects::{ObjectReservation, ObjectStore};
use crate::signature::{FunctionState, Signatures};

/// Interval between sweeps for idle sequences and lost state. A request notices at once that its
/// own sequence is idle or lost.
const SWEEP_EVERY: Duration = Duration::from_millis(500);

/// Maximum number of functions with counts of removed revisions. Beyond this number the oldest
/// counts are forgotten, but never the counts of a function that is served here.
const BEFORE_MAX: usize = 4096;

/// The sequences of a worker's functions. Clones share the sequences.
#[derive(Clone)]
pub(crate) struct SequenceManager(Arc<Inner>);

struct Inner {
    signatures: watch::Receiver<Arc<Signatures>>,
    objects: ObjectStore,
    clock: Arc<dyn Clock>,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    revisions: BTreeMap<RevisionKey, Table>,
    /// Counts of removed revisions, by function.
    before: BTreeMap<FunctionKey, Before>,
    requests: u64,
    /// The worker's registration at the last access.
    epoch: Option<Epoch>,
}

/// The counts of a function's removed revisions.
#[derive(Default)]
struct Before {
    tally: SequenceTally,
    /// Number of requests at the removal of the last revision.
    went: u64,
}

/// Ended tables, which are dropped after the lock is released.
type Over = Vec<(RevisionKey, Table)>;

impl Tables {
    /// Ends all tables if the registration has changed.
    fn registered(&mut self, epoch: Option<Epoch>) -> Over {
        let before = std::mem::replace(&mut self.epoch, epoch);
        if before.is_none() || before == epoch {
            return Over::new();
        }
        let over: Over = std::mem::take(&mut self.revisions).into_iter().collect();
        self.end(over)
    }

    /// Ends the tables of functions that are no longer served here.
    fn served(&mut self, served: &Signatures) -> Over {
        let gone = self.revisions.extract_if(.., |revision, _| !served.contains_key(revision));
        let gone: Over = gone.collect();
        let gone = self.end(gone);
        self.forget(served);
        gone
    }

    /// Forgets the oldest counts of removed functions beyond the bound. Functions that are served
    /// here keep theirs, so that no counter decreases.
    fn forget(&mut self, served: &Signatures) {
        let too_many = self.before.len().saturating_sub(BEFORE_MAX);
        if too_many == 0 {
            return;
        }
        let here: BTreeSet<_> = served.keys().map(|revision| &revision.function).collect();
        let gone = self.before.iter().filter(|(function, _)| !here.contains(function));
        let mut gone: Vec<_> = gone.map(|(function, before)| (before.went, function.clone())).collect();
        gone.sort_unstable();
        for (_, function) in gone.iter().take(too_many) {
            self.before.remove(function);
        }
    }

    /// Adds the counts of ended tables to their functions. Their live sequences count as lost.
    fn end(&mut self, over: Over) -> Over {
        for (revision, table) in &over {
            let SequenceTotals { idle, lost } = table.counts();
            let ended = SequenceTotals { idle, lost: lost + table.live() as u64 };
            let before = self.before.entry(revision.function.clone()).or_default();
            before.tally = before.tally.plus(SequenceTally { live: 0, ended });
            before.went = self.requests;
        }
        over
    }

    /// Returns a request's table if it still exists. A later table of the same revision is not
    /// returned.
    fn of(&mut self, place: &SequenceTicket) -> Option<&mut Table> {
        self.revisions.get_mut(&place.revision).filter(|table| table.first == place.first)
    }
}

impl fmt::Debug for SequenceManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceManager").field("tallies", &self.tallies()).finish_non_exhaustive()
    }
}

/// The counts of a function's sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SequenceTally {
    /// Number of live sequences.
    pub(crate) live: u64,
    /// Number of ended sequences, by reason.
    pub(crate) ended: SequenceTotals,
}

impl SequenceTally {
    pub(crate) fn plus(self, other: Self) -> Self {
        let ended = SequenceTotals {
            idle: self.ended.idle + other.ended.idle,
            lost: self.ended.lost + other.ended.lost,
        };
        Self { live: self.live + other.live, ended }
    }
}

impl SequenceManager {
    /// Returns an empty set of sequences, for the functions that keep state according to
    /// `signatures`. State is stored among `objects`.
    pub(crate) fn new(signatures: watch::Receiver<Arc<Signatures>>, objects: ObjectStore) -> Self {
        let clock = Arc::clone(objects.clock());
        Self(Arc::new(Inner { signatures, objects, clock, tables: Mutex::default() }))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a request's turn in its sequence, at most for `timeout`.
    ///
    /// # Errors
    /// [`Reason::SequenceNotFound`] if the sequence does not exist and the request starts none;
    /// [`Reason::QueueFull`] beyond a bound, which the message names; [`Reason::TimedOut`];
    /// [`Reason::FunctionNotReady`] if the function leaves this worker.
    pub(crate) async fn turn(
        &self,
        revision: &RevisionKey,
        state: &FunctionState,
        asked: InSequence,
        timeout: Duration,
    ) -> Result<SequenceTurn, Failure> {
        let id = asked.id.clone();
        let ends = asked.end;
        let came = self.0.clock.now();
        let (place, turn) = self.arrive(revision, state, asked);
        let given = tokio::time::timeout(self.0.clock.sleep_for(timeout), turn).await;
        let waited = self.0.clock.now().since(came);
        trace::record_finished(
            &Span::current(),
            "turn",
            FinishedSpan { ago: Duration::ZERO, took: waited },
            Vec::new,
        );
        let given = match given {
            Ok(Ok(Ok(given))) => given,
            Ok(Ok(Err(why))) => return Err(refused(why, revision, &id, state)),
            // The table was dropped because its function left this worker.
            Ok(Err(_gone)) => {
                let message = format!("{revision} is leaving this worker: ask another worker");
                return Err(Failure::new(Reason::FunctionNotReady, message));
            }
            Err(_elapsed) => {
                let message = format!(
                    "earlier requests of sequence {id} did not end within {timeout:?}: allow more time"
                );
                return Err(Failure::new(Reason::TimedOut, message));
            }
        };
        // A request that ends its sequence leaves no state, so the request runs even if memory is
        // full, and frees memory.
        let claim = if ends { None } else { Some(self.claim(revision, state)?) };
        SequenceTurn::new(place, id, came, waited, given, Arc::clone(&state.tensors), claim)
    }

    /// Reserves memory for another state.
    fn claim(&self, revision: &RevisionKey, state: &FunctionState) -> Result<ObjectReservation, Failure> {
        let bytes = Bytes(state.tensors.iter().map(|tensor| tensor.bytes as u64).sum());
        self.0.objects.claim(bytes, state.tensors.len() as u64).ok_or_else(|| {
            let message = format!(
                "the worker's object memory has no room for {bytes} of state of {revision}: \
                 end sequences, or start the worker with more --object-memory"
            );
            Failure::new(Reason::QueueFull, message)
        })
    }

    fn arrive(
        &self,
        revision: &RevisionKey,
        state: &FunctionState,
        asked: InSequence,
    ) -> (SequenceTicket, oneshot::Receiver<Result<TurnGrant, SequenceRefusal>>) {
        let (told, turn) = oneshot::channel();
        let now = self.0.clock.now();
        let mut tables = self.tables();
        let over = tables.registered(self.0.objects.registration());
        tables.requests += 1;
        let key = RequestKey(tables.requests);
        let table = tables.revisions.entry(revision.clone()).or_insert_with(|| Table::new(state, key));
        let first = table.first;
        let released = table.arrive(now, key, asked, told);
        drop(tables);
        drop((over, released));
        (SequenceTicket { sequences: self.clone(), revision: revision.clone(), first, key }, turn)
    }

    /// Changes a request's table, if the table still exists.
    fn change(&self, place: &SequenceTicket, change: impl FnOnce(&mut Table, Timestamp) -> Released) {
        let now = self.0.clock.now();
        let mut tables = self.tables();
        let released = tables.of(place).map(|table| change(table, now));
        drop(tables);
        // Drop after the lock is released, because the last handle of an object sends a message to
        // its GPU.
        drop(released);
    }

    /// Sweeps until the host tier ends: ends idle sequences, finds lost state, and drops the tables
    /// of functions that are no longer served here.
    pub(crate) async fn sweep(self) {
        let mut signatures = self.0.signatures.clone();
        loop {
            // A timeout and a change have the same effect. Without a host tier no further change
            // comes.
            drop(tokio::time::timeout(SWEEP_EVERY, signatures.changed()).await);
            if signatures.has_changed().is_err() {
                return;
            }
            let served = Arc::clone(&signatures.borrow_and_update());
            self.sweep_once(&served);
        }
    }

    fn sweep_once(&self, served: &Signatures) {
        let now = self.0.clock.now();
        let mut tables = self.tables();
        let over = tables.registered(self.0.objects.registration());
        let gone = tables.served(served);
        let released: Vec<_> = tables.revisions.values_mut().map(|table| table.sweep(now)).collect();
        drop(tables);
        drop((over, gone, released));
    }

    /// Returns the counts of each function that keeps or kept state.
    pub(crate) fn tallies(&self) -> BTreeMap<FunctionKey, SequenceTally> {
        let served = Arc::clone(&self.0.signatures.borrow());
        let keeping = served.iter().filter(|(_, signature)| signature.state.is_some());
        let mut tallies: BTreeMap<_, SequenceTally> =
            keeping.map(|(revision, _)| (revision.function.clone(), SequenceTally::default())).collect();
        let tables = self.tables();
        let before = tables.before.iter().map(|(function, before)| (function, before.tally));
        let now = tables.revisions.iter().map(|(revision, table)| {
            let tally = SequenceTally { live: table.live() as u64, ended: table.counts() };
            (&revision.function, tally)
        });
        for (function, tally) in before.chain(now) {
            let sum = tallies.entry(function.clone()).or_default();
            *sum = sum.plus(tally);
        }
        tallies
    }
}

/// Returns the failure for a client that has to start its sequence again.
fn lost(id: &SequenceId) -> Failure {
    let message = format!(
        "the state of sequence {id} was lost with its executor or GPU: start it again with sequence_start"
    );
    Failure::new(Reason::SequenceNotFound, message)
}

fn refused(why: SequenceRefusal, revision: &RevisionKey, id: &SequenceId, state: &FunctionState) -> Failure {
    match why {
        SequenceRefusal::Lost => lost(id),
        SequenceRefusal::Unknown => {
            let message = format!(
                "{revision} has no sequence {id} on this worker: it never began, ended, was idle for {:?}, or \
                 lost its state when the function moved to another worker or revision; start it again with \
                 sequence_start",
                state.idle
            );
            Failure::new(Reason::SequenceNotFound, message)
        }
        SequenceRefusal::TableFull => {
            let message = format!(
                "{revision} has reached its limit of {} sequences (sequences.max): end some with \
                 sequence_end, or wait until one was idle for {:?}",
                state.max, state.idle
            );
            Failure::new(Reason::QueueFull, message)
        }
        SequenceRefusal::QueueFull => {
            let message = format!(
                "{} requests of sequence {id} of {revision} wait already: send the next when one is answered",
                millrace_scheduling::sequences::WAITING_MAX
            );
            Failure::new(Reason::QueueFull, message)
        }
    }
}
