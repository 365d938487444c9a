//! The observations of a run from outside. The invariants are checked on these observations alone.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{CommandEffect, ControllerId, State, StateCommand};
use millrace_raft_store::{ClusterConfig, LogId};
use millrace_types::{Epoch, NodeDelta, NodeName, SyncBatch};
use openraft::Entry;

/// The observations of a run.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) seed: u64,
    /// The controllers that believed to lead in each term, seen once per millisecond.
    pub(crate) leaders: BTreeMap<u64, BTreeSet<u64>>,
    /// States of controllers after an entry.
    pub(crate) states: Vec<Seen>,
    /// Logs as found on disk, whenever a controller was down and at the end. Entries covered by a
    /// snapshot may be missing.
    pub(crate) logs: Vec<Log>,
    /// The applied log: each entry by index, from the first controller that applied it, with the time.
    pub(crate) applied: BTreeMap<u64, (Duration, Entry<ClusterConfig>)>,
    /// The final state of every controller, after all were up for a while.
    pub(crate) ends: BTreeMap<u64, State>,
    /// Functions that were each created once.
    pub(crate) creations: Vec<Call<String, Created>>,
    /// Functions that several clients wrote, read and deleted.
    pub(crate) registers: Vec<Call<RegisterAsked, RegisterAnswer>>,
    /// Proposals about nodes.
    pub(crate) nodes: Vec<Call<StateCommand, NodeAnswer>>,
    /// The epochs of processes, as the processes were told.
    pub(crate) registered: BTreeSet<Registered>,
    /// The desired states of workers, in the order of arrival.
    pub(crate) told: Vec<Told>,
    /// The checkpoints that workers made, by node, epoch and number.
    pub(crate) sent: Sent,
    /// The checkpoints that were acknowledged to the workers.
    pub(crate) acknowledged: Vec<Acknowledged>,
    /// The processes that said goodbye.
    pub(crate) goodbyes: BTreeSet<String>,
    /// The times at which controllers heard nodes.
    pub(crate) heard: Vec<Heard>,
    /// The times since when controllers performed the leader's duties, by controller and term.
    pub(crate) on_duty: BTreeMap<(u64, u64), Duration>,
    /// The nodes that leaders found lost.
    pub(crate) found_lost: Vec<FoundLost>,
    /// The workers at the end.
    pub(crate) workers: Vec<WorkerEnd>,
    /// Whether workers and state agreed at the end, within the time limit.
    pub(crate) settled: bool,
    /// Snapshots taken or received.
    pub(crate) snapshots: usize,
    /// Received snapshots that covered entries missing in the receiver's log.
    pub(crate) installed: usize,
    /// Acknowledged membership changes.
    pub(crate) regrouped: usize,
    /// The simulated duration.
    pub(crate) elapsed: Duration,
    /// Logs that halted despite a healthy disk.
    pub(crate) halts: Vec<String>,
    /// The faults, in order.
    pub(crate) faults: Vec<String>,
}

/// A state of a controller after an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) controller: ControllerId,
    pub(crate) last: LogId,
    /// The digest of the state's bytes.
    pub(crate) digest: u64,
}

/// A function's name and revision.
pub(crate) type Served = (String, u64);

pub(crate) type Sent = BTreeMap<(NodeName, Epoch, u64), Arc<SyncBatch>>;

/// A process, and an epoch that the process was given.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Registered {
    pub(crate) epoch: Epoch,
    pub(crate) node: NodeName,
    pub(crate) instance: String,
}

/// A desired state that a controller sent to a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) node: NodeName,
    pub(crate) instance: String,
    pub(crate) controller: u64,
    /// The number of the stream, counted by the process.
    pub(crate) stream: u64,
    /// The stamp as (term, index).
    pub(crate) stamp: (u64, u64),
    pub(crate) functions: BTreeSet<Served>,
    pub(crate) obeyed: bool,
}

/// A checkpoint that was acknowledged to the worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Acknowledged {
    pub(crate) node: NodeName,
    pub(crate) epoch: Epoch,
    pub(crate) seq: u64,
}

/// A received sign of life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) at: Duration,
    pub(crate) controller: u64,
    pub(crate) node: NodeName,
    /// The epoch of the node, as known to that controller.
    pub(crate) epoch: Epoch,
}

/// A leader's decision that a node is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundLost {
    pub(crate) at: Duration,
    pub(crate) controller: u64,
    pub(crate) term: u64,
    pub(crate) node: NodeName,
    pub(crate) epoch: Epoch,
}

/// A worker at the end of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerEnd {
    pub(crate) node: NodeName,
    pub(crate) epoch: Option<Epoch>,
    /// Whether every checkpoint was acknowledged.
    pub(crate) settled: bool,
    /// All data of the worker that checkpoints report.
    pub(crate) everything: NodeDelta,
    pub(crate) serves: BTreeSet<Served>,
}

/// The log of one controller.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) controller: ControllerId,
    pub(crate) entries: Vec<Entry<ClusterConfig>>,
}

/// A request of a client. Times are counted, not measured: the smaller of two numbers came first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call<Q, A> {
    pub(crate) asked: Q,
    pub(crate) began: u64,
    /// The time and the answer. `None` for no answer or an unknown outcome: the request may take effect
    /// at any time after the beginning, or never.
    pub(crate) ended: Option<(u64, A)>,
}

/// The outcome of creating a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Created {
    Acknowledged,
    /// The answer says that nothing was changed.
    Refused,
}

/// A client's request about a shared function.
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
    /// The function does not exist.
    Absent,
    Value(u64),
    /// The answer says that nothing was changed or read.
    Refused,
}

/// The outcome of a command about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeAnswer {
    Applied(CommandEffect),
    /// The state refused the command.
    Refused,
    /// The command was not proposed.
    NotProposed,
}

/// The reason why an invariant does not hold.
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

/// A counter of moments. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Moments(Rc<Cell<u64>>);

impl Moments {
    pub(crate) fn next(&self) -> u64 {
        self.0.set(self.0.get() + 1);
        self.0.get()
    }
}

/// A journal of the beginnings and ends of calls. Clones share it.
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

    /// Records the beginning of a call. Returns the call's number.
    pub(crate) fn begin(&self, asked: Q) -> usize {
        let mut calls = self.calls.borrow_mut();
        calls.push(Call { asked, began: self.moments.next(), ended: None });
        calls.len() - 1
    }

    /// Records a call's answer.
    pub(crate) fn end(&self, call: usize, answer: A) {
        self.calls.borrow_mut()[call].ended = Some((self.moments.next(), answer));
    }

    pub(crate) fn take(&self) -> Vec<Call<Q, A>> {
        self.calls.take()
    }
}
