//! What was seen from outside during one run. The invariants are checked on this and nothing else.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;

use millrace_cluster_state::{Applied, Command, ControllerId, State};
use millrace_raft_store::{ClusterConfig, LogId};
use openraft::Entry;

/// One run.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) seed: u64,
    /// Who believed to lead in which term, at any millisecond or by an entry of its own.
    pub(crate) leaders: BTreeMap<u64, BTreeSet<u64>>,
    /// States after an entry, as controllers had them.
    pub(crate) states: Vec<Seen>,
    /// Logs as they were on disk, whenever a controller was down and at the end.
    pub(crate) logs: Vec<Log>,
    /// The state of every controller at the end, when all were up and had been for a while.
    pub(crate) ends: BTreeMap<u64, State>,
    /// Functions that were each created once.
    pub(crate) creations: Vec<Call<String, Created>>,
    /// Functions that were written, read and deleted by several clients.
    pub(crate) registers: Vec<Call<RegisterAsked, RegisterAnswer>>,
    /// What workers had proposed.
    pub(crate) nodes: Vec<Call<Command, NodeAnswer>>,
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
