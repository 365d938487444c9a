//! What was seen from outside during one run. The invariants are checked on this and nothing else.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Applied, Command, ControllerId, State};
use millrace_raft_store::{ClusterConfig, LogId};
use millrace_types::{Epoch, NodeDelta, NodeName, SyncBatch};
use openraft::Entry;

/// One run.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) seed: u64,
    /// Who believed to lead in which term, at any millisecond or by an entry of its own.
    pub(crate) leaders: BTreeMap<u64, BTreeSet<u64>>,
    /// States after an entry, as controllers had them.
    pub(crate) states: Vec<Seen>,
    /// Logs as they were on disk, whenever a controller was down and at the end. What a snapshot
    /// covers may be missing.
    pub(crate) logs: Vec<Log>,
    /// The log as it was applied: each entry by its index, as the first controller that applied it
    /// had it, and when.
    pub(crate) applied: BTreeMap<u64, (Duration, Entry<ClusterConfig>)>,
    /// The state of every controller at the end, when all were up and had been for a while.
    pub(crate) ends: BTreeMap<u64, State>,
    /// Functions that were each created once.
    pub(crate) creations: Vec<Call<String, Created>>,
    /// Functions that were written, read and deleted by several clients.
    pub(crate) registers: Vec<Call<RegisterAsked, RegisterAnswer>>,
    /// What was proposed for nodes.
    pub(crate) nodes: Vec<Call<Command, NodeAnswer>>,
    /// Under which epochs which processes were known, as they were told.
    pub(crate) registered: BTreeSet<Registered>,
    /// What workers were told to serve, in the order in which they heard it.
    pub(crate) told: Vec<Told>,
    /// The checkpoints that workers made, by node, epoch and number.
    pub(crate) sent: Sent,
    /// Which of them they were told are safe.
    pub(crate) acknowledged: Vec<Acknowledged>,
    /// The processes that left in order.
    pub(crate) goodbyes: BTreeSet<String>,
    /// When a controller heard of a node.
    pub(crate) heard: Vec<Heard>,
    /// Since when a controller did what a leader does, by controller and term.
    pub(crate) on_duty: BTreeMap<(u64, u64), Duration>,
    /// Whom leaders found lost.
    pub(crate) found_lost: Vec<FoundLost>,
    /// The workers at the end.
    pub(crate) workers: Vec<WorkerEnd>,
    /// Whether workers and state agreed at the end, within the time there was.
    pub(crate) settled: bool,
    /// Snapshots that were taken or came; and how often one brought what the log did not.
    pub(crate) snapshots: usize,
    pub(crate) installed: usize,
    /// Changes of the group that were acknowledged.
    pub(crate) regrouped: usize,
    /// Simulated time.
    pub(crate) elapsed: Duration,
    /// Logs that halted though nothing was the matter with their disk.
    pub(crate) halts: Vec<String>,
    /// The faults, in order.
    pub(crate) faults: Vec<String>,
}

/// A state that a controller had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) controller: ControllerId,
    pub(crate) last: LogId,
    /// Of the state's bytes.
    pub(crate) digest: u64,
}

/// A function's name and revision.
pub(crate) type Served = (String, u64);

pub(crate) type Sent = BTreeMap<(NodeName, Epoch, u64), Arc<SyncBatch>>;

/// A process and an epoch under which it was told to be known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Registered {
    pub(crate) epoch: Epoch,
    pub(crate) node: NodeName,
    pub(crate) instance: String,
}

/// What a controller told a worker to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) node: NodeName,
    pub(crate) instance: String,
    pub(crate) controller: u64,
    /// Counted by the process.
    pub(crate) stream: u64,
    /// (term, index).
    pub(crate) stamp: (u64, u64),
    pub(crate) functions: BTreeSet<Served>,
    pub(crate) obeyed: bool,
}

/// A checkpoint that is safe, as its worker was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Acknowledged {
    pub(crate) node: NodeName,
    pub(crate) epoch: Epoch,
    pub(crate) seq: u64,
}

/// A sign of life that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) at: Duration,
    pub(crate) controller: u64,
    pub(crate) node: NodeName,
    /// As that controller knew it.
    pub(crate) epoch: Epoch,
}

/// A leader's judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundLost {
    pub(crate) at: Duration,
    pub(crate) controller: u64,
    pub(crate) term: u64,
    pub(crate) node: NodeName,
    pub(crate) epoch: Epoch,
}

/// A worker at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerEnd {
    pub(crate) node: NodeName,
    pub(crate) epoch: Option<Epoch>,
    /// Whether everything was acknowledged.
    pub(crate) settled: bool,
    /// What it has to tell.
    pub(crate) everything: NodeDelta,
    pub(crate) serves: BTreeSet<Served>,
}

/// The log of one controller.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) controller: ControllerId,
    pub(crate) entries: Vec<Entry<ClusterConfig>>,
}

/// One request, from the moment it was made. Moments are counted, not measured: of two, the lesser
/// came first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call<Q, A> {
    pub(crate) asked: Q,
    pub(crate) began: u64,
    /// `None` when no answer came, or one that does not say: it may take effect at any time after
    /// it began, or never.
    pub(crate) ended: Option<(u64, A)>,
}

/// How creating a function ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Created {
    Acknowledged,
    /// With the word that nothing was changed.
    Refused,
}

/// What a client asked of a function that others use too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RegisterAsked {
    pub(crate) function: String,
    pub(crate) op: RegisterOp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RegisterOp {
    Put(u64),
    Delete,
    Get,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RegisterAnswer {
    Done,
    /// There is no such function.
    Absent,
    Value(u64),
    /// With the word that nothing was changed, or nothing read.
    Refused,
}

/// What a command about a node answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeAnswer {
    Applied(Applied),
    /// The state refused it.
    Refused,
    /// It never came so far.
    NotProposed,
}

/// Why an invariant does not hold.
pub(crate) struct Violation(pub(crate) String);

impl fmt::Debug for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<String> for Violation {
    fn from(text: String) -> Self {
        Self(text)
    }
}

pub(crate) type Verdict = Result<(), Violation>;

/// Counts moments. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Moments(Rc<Cell<u64>>);

impl Moments {
    pub(crate) fn next(&self) -> u64 {
        self.0.set(self.0.get() + 1);
        self.0.get()
    }
}

/// Where calls are written down as they begin and end. Clones share it.
#[derive(Debug)]
pub(crate) struct Journal<Q, A> {
    calls: Rc<RefCell<Vec<Call<Q, A>>>>,
    moments: Moments,
}

impl<Q, A> Clone for Journal<Q, A> {
    fn clone(&self) -> Self {
        Self { calls: Rc::clone(&self.calls), moments: self.moments.clone() }
    }
}

impl<Q, A> Journal<Q, A> {
    pub(crate) fn new(moments: Moments) -> Self {
        Self { calls: Rc::default(), moments }
    }

    /// Notes that a call begins.
    pub(crate) fn begin(&self, asked: Q) -> usize {
        let mut calls = self.calls.borrow_mut();
        calls.push(Call { asked, began: self.moments.next(), ended: None });
        calls.len() - 1
    }

    /// Notes its answer.
    pub(crate) fn end(&self, call: usize, answer: A) {
        self.calls.borrow_mut()[call].ended = Some((self.moments.next(), answer));
    }

    pub(crate) fn take(&self) -> Vec<Call<Q, A>> {
        self.calls.take()
    }
}
