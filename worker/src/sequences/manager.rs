//! The tables of all sequences, with their counts and their sweep.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_core::ids::RequestKey;
use millrace_scheduling::sequences::{SequenceRefusal, SequenceTotals};
use millrace_types::{Epoch, FunctionKey, InSequence, RevisionKey, Timestamp};
use tokio::sync::{oneshot, watch};

use super::table::{Released, Table, TurnGrant};
use crate::clock::Clock;
use crate::objects::ObjectStore;
use crate::signature::{FunctionState, Signatures};

/// Interval between sweeps for idle sequences and lost state. A request notices at once that its
/// own sequence is idle or lost.
const SWEEP_EVERY: Duration = Duration::from_millis(500);

/// Maximum number of functions with counts of removed revisions. Beyond this number the oldest
/// counts are forgotten, but never the counts of a function that is served here.
pub(super) const BEFORE_MAX: usize = 4096;

/// The sequences of a worker's functions. Clones share the sequences.
#[derive(Clone)]
pub(crate) struct SequenceManager(pub(super) Arc<Inner>);

pub(super) struct Inner {
    signatures: watch::Receiver<Arc<Signatures>>,
    pub(super) objects: ObjectStore,
    pub(super) clock: Arc<dyn Clock>,
    tables: Mutex<Tables>,
}

#[derive(Default)]
pub(super) struct Tables {
    pub(super) revisions: BTreeMap<RevisionKey, Table>,
    /// Counts of removed revisions, by function.
    pub(super) before: BTreeMap<FunctionKey, Before>,
    pub(super) requests: u64,
    /// The worker's registration at the last access.
    epoch: Option<Epoch>,
}

/// The counts of a function's removed revisions.
#[derive(Default)]
pub(super) struct Before {
    tally: SequenceTally,
    /// Number of requests at the removal of the last revision.
    went: u64,
}

/// A request in a table.
pub(super) struct ArrivedRequest {
    revision: RevisionKey,
    /// The first request of the table.
    first: RequestKey,
    pub(super) key: RequestKey,
}

/// Ended tables, which are dropped after the lock is released.
type Over = Vec<(RevisionKey, Table)>;

impl Tables {
    /// Ends all tables if the registration has changed.
    pub(super) fn registered(&mut self, epoch: Option<Epoch>) -> Over {
        let before = std::mem::replace(&mut self.epoch, epoch);
        if before.is_none() || before == epoch {
            return Over::new();
        }
        let over: Over = std::mem::take(&mut self.revisions).into_iter().collect();
        self.end(over)
    }

    /// Ends the tables of functions that are no longer served here.
    pub(super) fn served(&mut self, served: &Signatures) -> Over {
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
    fn of(&mut self, request: &ArrivedRequest) -> Option<&mut Table> {
        self.revisions.get_mut(&request.revision).filter(|table| table.first == request.first)
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

    pub(super) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request to the table of the revision. Returns the request, and the receiver of the turn.
    pub(super) fn arrive(
        &self,
        revision: &RevisionKey,
        state: &FunctionState,
        asked: InSequence,
    ) -> (ArrivedRequest, oneshot::Receiver<Result<TurnGrant, SequenceRefusal>>) {
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
        (ArrivedRequest { revision: revision.clone(), first, key }, turn)
    }

    /// Changes a request's table, if the table still exists.
    pub(super) fn change(
        &self,
        request: &ArrivedRequest,
        change: impl FnOnce(&mut Table, Timestamp) -> Released,
    ) {
        let now = self.0.clock.now();
        let mut tables = self.tables();
        let released = tables.of(request).map(|table| change(table, now));
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

    pub(super) fn sweep_once(&self, served: &Signatures) {
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
