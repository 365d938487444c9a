//! Every admin operation that clients made, with when it was invoked, when it returned and what came
//! of it: what the oracle judges. An operation that was not answered is unknown, never absent: it
//! may still come into force.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What a client asked of one function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Create it, or make its next revision, with this value: no two applies have the same.
    Apply(u64),
    /// Delete it.
    Delete,
    /// Start or stop serving it.
    Enable(bool),
    /// Read it.
    Read,
}

/// A function as a reader sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seen {
    /// What the apply of its latest revision wrote.
    pub value: u64,
    /// Whether it is served.
    pub enabled: bool,
    /// Its revisions so far, those before a deletion included.
    pub generation: u64,
}

/// What an operation answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ret {
    /// An apply that found nothing.
    Created,
    /// An apply that found another revision.
    Configured,
    /// An apply that found the same.
    Unchanged,
    /// A deletion.
    Deleted,
    /// The function is enabled, or disabled, as asked.
    Set,
    /// There is no such function.
    Absent,
    /// A read.
    Found(Seen),
}

/// What became of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Acknowledged.
    Done(Ret),
    /// An error that says that nothing was done.
    Refused(String),
    /// No answer, or an error that says that it may have been done.
    Unknown(String),
}

/// One operation of one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// The function's name.
    pub key: String,
    /// Which client.
    pub client: u32,
    /// What it asked.
    pub op: Op,
    /// When it asked.
    pub invoked: Duration,
    /// When it stopped waiting.
    pub returned: Duration,
    /// What it heard.
    pub answer: Answer,
}

impl Operation {
    /// The harness's own read at the end, as an operation on one function.
    pub(crate) fn last_read(key: &str, seen: Option<Seen>, invoked: Duration, returned: Duration) -> Self {
        let answer = Answer::Done(seen.map_or(Ret::Absent, Ret::Found));
        Self { key: key.to_owned(), client: 0, op: Op::Read, invoked, returned, answer }
    }

    /// Whether it changes anything.
    #[must_use]
    pub fn is_write(&self) -> bool {
        self.op != Op::Read
    }

    /// Whether it was acknowledged.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.answer, Answer::Done(_))
    }

    /// Whether it may have been carried out, and before when at the latest: an unanswered one never
    /// has to have been.
    #[must_use]
    pub fn took_effect_by(&self) -> Option<Duration> {
        match self.answer {
            Answer::Done(_) => Some(self.returned),
            Answer::Unknown(_) => Some(Duration::MAX),
            Answer::Refused(_) => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (self.invoked.as_secs_f64(), self.returned.as_secs_f64());
        write!(f, "{from:>9.3} .. {to:>9.3}  client {:<3} {:?} -> ", self.client, self.op)?;
        match &self.answer {
            Answer::Done(ret) => write!(f, "{ret:?}"),
            Answer::Refused(why) => write!(f, "refused: {why}"),
            Answer::Unknown(why) => write!(f, "unknown: {why}"),
        }
    }
}

/// All operations of a run.
#[derive(Debug, Default)]
pub struct History {
    operations: Mutex<Vec<Operation>>,
}

impl History {
    /// Adds one that is over.
    pub fn record(&self, operation: Operation) {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner).push(operation);
    }

    /// Every operation, by key, in the order of invocation.
    #[must_use]
    pub fn by_key(&self) -> BTreeMap<String, Vec<Operation>> {
        let mut keys: BTreeMap<String, Vec<Operation>> = BTreeMap::new();
        for operation in self.operations.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            keys.entry(operation.key.clone()).or_default().push(operation.clone());
        }
        for operations in keys.values_mut() {
            operations.sort_by_key(|operation| operation.invoked);
        }
        keys
    }
}
