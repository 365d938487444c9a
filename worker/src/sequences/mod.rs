//! The state of functions that keep some from one request of a sequence to the next (T11): whose turn it
//! is ([`millrace_policy::sequences`]), and where the state lies.
//!
//! ```text
//! request ─► turn: waits for those before it ─► its state goes in as inputs ─► run ─► what comes out for it
//!                                                                               is held: the next one's
//! ```
//! State is held as whatever a run gave it as, and goes in as any input. What is larger than travels in a
//! message is kept as an object in the memory of the GPU that made it, of the elastic store that has the
//! intermediate data of workflows too: the next run there reads it in place, dispatch knows where it is,
//! and where models or other objects need its room it is written back to the host: a region marked
//! mutable, while of models nothing is ever copied back (T10). Smaller state comes in the answer's message
//! and goes in the next request's, as every tensor of that size. Nobody else has names for state, so it
//! neither expires nor is in the index: it goes with its last handle, which is here or with a request.
//!
//! With an executor what it has of state is lost, and so are the sequences that it is of: whoever asks for
//! them is told to begin anew. A function that is placed on another worker has none there; and a worker
//! that was taken for lost has none left once it is back, for other sequences may have had their names.
//!
//! Shared by requests on any thread: a lock, held for as long as the core decides, never across a wait.
//! Bounded as the core is, and by the memory of objects, of which each state that is held or may come
//! takes its size: none comes of a request that ends its sequence.

mod table;
#[cfg(test)]
mod tests;
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_policy::ids::RequestKey;
use millrace_policy::sequences::{Counts, Refusal};
use millrace_proto::trace::{self, Past};
use millrace_types::{
    Bytes, Epoch, Failure, FunctionKey, InSequence, Reason, RevisionKey, SequenceId, Timestamp,
};
use tokio::sync::{oneshot, watch};
use tracing::Span;

pub(crate) use self::turn::Turn;

use self::table::{Given, Released, Table};
use self::turn::Place;
use crate::clock::Clock;
use crate::host_tier::{Signatures, State};
use crate::objects::{Claim, Objects};

/// How often idle sequences and lost state are looked for. A sequence that a request asks for is known to
/// be idle or lost at once.
const SWEEP_EVERY: Duration = Duration::from_millis(500);

/// For how many functions it is kept what sequences of revisions that are gone came to. Beyond these, those
/// that went first are forgotten, and never one that is served here.
const BEFORE_MAX: usize = 4096;

/// The sequences of a worker's functions. Clones share them.
#[derive(Clone)]
pub(crate) struct Sequences(Arc<Inner>);

struct Inner {
    signatures: watch::Receiver<Arc<Signatures>>,
    objects: Objects,
    clock: Arc<dyn Clock>,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    revisions: BTreeMap<RevisionKey, Table>,
    /// What revisions counted that are gone, by function.
    before: BTreeMap<FunctionKey, Before>,
    requests: u64,
    /// The worker's registration when it was last looked at.
    epoch: Option<Epoch>,
}

/// What revisions of a function counted that are gone.
#[derive(Default)]
struct Before {
    tally: Tally,
    /// How many requests had come when the last of them went.
    went: u64,
}

/// Tables that are over, to be dropped without the lock.
type Over = Vec<(RevisionKey, Table)>;

impl Tables {
    /// Under another registration all that there was is over.
    fn registered(&mut self, epoch: Option<Epoch>) -> Over {
        let before = std::mem::replace(&mut self.epoch, epoch);
        if before.is_none() || before == epoch {
            return Over::new();
        }
        let over: Over = std::mem::take(&mut self.revisions).into_iter().collect();
        self.end(over)
    }

    /// Functions that are not served here any more are over.
    fn served(&mut self, served: &Signatures) -> Over {
        let gone = self.revisions.extract_if(.., |revision, _| !served.contains_key(revision));
        let gone: Over = gone.collect();
        let gone = self.end(gone);
        self.forget(served);
        gone
    }

    /// Forgets what functions came to that went long ago. Of one that is here nothing is: no count of it falls.
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

    /// Remembers what they counted, and that what is in them is lost.
    fn end(&mut self, over: Over) -> Over {
        for (revision, table) in &over {
            let Counts { idle, lost } = table.counts();
            let ended = Counts { idle, lost: lost + table.live() as u64 };
            let before = self.before.entry(revision.function.clone()).or_default();
            before.tally = before.tally.plus(Tally { live: 0, ended });
            before.went = self.requests;
        }
        over
    }

    /// The table that a request is of, if it is here still: not another that came after it.
    fn of(&mut self, place: &Place) -> Option<&mut Table> {
        self.revisions.get_mut(&place.revision).filter(|table| table.first == place.first)
    }
}

impl fmt::Debug for Sequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequences").field("tallies", &self.tallies()).finish_non_exhaustive()
    }
}

/// What is shown of a function's sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// How many there are.
    pub(crate) live: u64,
    /// What became of others.
    pub(crate) ended: Counts,
}

impl Tally {
    /// Both together.
    pub(crate) fn plus(self, other: Self) -> Self {
        let ended =
            Counts { idle: self.ended.idle + other.ended.idle, lost: self.ended.lost + other.ended.lost };
        Self { live: self.live + other.live, ended }
    }
}

impl Sequences {
    /// None yet, of the functions that keep state by these signatures. Their state lies among `objects`.
    pub(crate) fn new(signatures: watch::Receiver<Arc<Signatures>>, objects: Objects) -> Self {
        let (clock, tables) = (Arc::clone(objects.clock()), Mutex::default());
        Self(Arc::new(Inner { signatures, objects, clock, tables }))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a request's turn in its sequence, for so long at most.
    ///
    /// # Errors
    /// [`Reason::SequenceNotFound`] where there is none and it begins none; [`Reason::QueueFull`] beyond
    /// a bound, which is named; [`Reason::TimedOut`]; [`Reason::FunctionNotReady`] where its function
    /// goes.
    pub(crate) async fn turn(
        &self,
        revision: &RevisionKey,
        state: &State,
        asked: InSequence,
        timeout: Duration,
    ) -> Result<Turn, Failure> {
        let (id, ends, came) = (asked.id.clone(), asked.end, self.0.clock.now());
        let (place, turn) = self.arrive(revision, state, asked);
        let given = tokio::time::timeout(self.0.clock.sleep_for(timeout), turn).await;
        let waited = self.0.clock.now().since(came);
        trace::tell(&Span::current(), "turn", Past { ago: Duration::ZERO, took: waited }, Vec::new);
        let given = match given {
            Ok(Ok(Ok(given))) => given,
            Ok(Ok(Err(why))) => return Err(refused(why, revision, &id, state)),
            // The table went with its function.
            Ok(Err(_gone)) => {
                let message = format!("{revision} is going from this worker: ask another");
                return Err(Failure::new(Reason::FunctionNotReady, message));
            }
            Err(_elapsed) => {
                let message = format!(
                    "earlier requests of sequence {id} did not end within {timeout:?}: allow more time"
                );
                return Err(Failure::new(Reason::TimedOut, message));
            }
        };
        // What ends its sequence leaves no state: where there is no room for any, that makes some.
        let claim = if ends { None } else { Some(self.claim(revision, state)?) };
        Turn::new((place, id), (came, waited), given, Arc::clone(&state.tensors), claim)
    }

    /// Takes room for another state.
    fn claim(&self, revision: &RevisionKey, state: &State) -> Result<Claim, Failure> {
        let bytes = Bytes(state.tensors.iter().map(|tensor| tensor.bytes as u64).sum());
        self.0.objects.claim(bytes, state.tensors.len() as u64).ok_or_else(|| {
            let message = format!(
                "what objects may take of the worker's memory has no room for {bytes} of state of {revision}: \
                 end sequences, or start the worker with more --object-memory"
            );
            Failure::new(Reason::QueueFull, message)
        })
    }

    fn arrive(
        &self,
        revision: &RevisionKey,
        state: &State,
        asked: InSequence,
    ) -> (Place, oneshot::Receiver<Result<Given, Refusal>>) {
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
        (Place { sequences: self.clone(), revision: revision.clone(), first, key }, turn)
    }

    /// Changes a request's table, if that is here still.
    fn change(&self, place: &Place, change: impl FnOnce(&mut Table, Timestamp) -> Released) {
        let now = self.0.clock.now();
        let mut tables = self.tables();
        let released = tables.of(place).map(|table| change(table, now));
        drop(tables);
        // With the lock given back: the last handle of an object tells its GPU.
        drop(released);
    }

    /// Ends what is idle, finds what is lost, and lets go of functions that are not served here any more;
    /// from now on.
    pub(crate) async fn sweep(self) {
        let mut signatures = self.0.signatures.clone();
        loop {
            // Whichever it is; without a host tier nothing changes any more.
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

    /// What there is of each function that keeps state, and was.
    pub(crate) fn tallies(&self) -> BTreeMap<FunctionKey, Tally> {
        let served = Arc::clone(&self.0.signatures.borrow());
        let keeping = served.iter().filter(|(_, signature)| signature.state.is_some());
        let mut tallies: BTreeMap<_, Tally> =
            keeping.map(|(revision, _)| (revision.function.clone(), Tally::default())).collect();
        let tables = self.tables();
        let before = tables.before.iter().map(|(function, before)| (function, before.tally));
        let now = tables.revisions.iter().map(|(revision, table)| {
            let tally = Tally { live: table.live() as u64, ended: table.counts() };
            (&revision.function, tally)
        });
        for (function, tally) in before.chain(now) {
            let sum = tallies.entry(function.clone()).or_default();
            *sum = sum.plus(tally);
        }
        tallies
    }
}

/// What a client is told that has to begin anew.
fn lost(id: &SequenceId) -> Failure {
    let message = format!(
        "the state of sequence {id} was lost with the executor or GPU that had it: begin anew with sequence_start"
    );
    Failure::new(Reason::SequenceNotFound, message)
}

fn refused(why: Refusal, revision: &RevisionKey, id: &SequenceId, state: &State) -> Failure {
    match why {
        Refusal::Lost => lost(id),
        Refusal::Unknown => {
            let message = format!(
                "{revision} has no sequence {id} on this worker: it never began, ended, was idle for {:?}, or \
                 its state was lost as the function came to another worker or revision: begin anew with \
                 sequence_start",
                state.idle
            );
            Failure::new(Reason::SequenceNotFound, message)
        }
        Refusal::TableFull => {
            let message = format!(
                "{revision} has its limit of {} sequences (sequences.max): end some with sequence_end, or wait \
                 until one was idle for {:?}",
                state.max, state.idle
            );
            Failure::new(Reason::QueueFull, message)
        }
        Refusal::QueueFull => {
            let message = format!(
                "{} requests of sequence {id} of {revision} wait: send the next when one is answered",
                millrace_policy::sequences::WAITING_MAX
            );
            Failure::new(Reason::QueueFull, message)
        }
    }
}
