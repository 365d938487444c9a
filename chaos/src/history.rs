//! The history of the clients' admin operations, each with its invocation, its return and its
//! answer. The oracle judges this history. An operation without an answer is unknown, never absent,
//! because it may still take effect.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// An operation on a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Create the function, or its next revision, with this value. No two applies have the same
    /// value.
    Apply(u64),
    /// Delete the function.
    Delete,
    /// Start or stop serving the function.
    Enable(bool),
    /// Read the function.
    Read,
}

/// A function as a reader sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seen {
    /// The value that the apply of the latest revision wrote.
    pub value: u64,
    /// Whether the function serves requests.
    pub enabled: bool,
    /// Number of revisions so far, revisions before a deletion included.
    pub generation: u64,
}

/// The result of an acknowledged operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ret {
    /// An apply found no function.
    Created,
    /// An apply found another revision.
    Configured,
    /// An apply found the same revision.
    Unchanged,
    /// The function was deleted.
    Deleted,
    /// The function was enabled or disabled.
    Set,
    /// The function does not exist.
    Absent,
    /// A read found the function.
    Found(Seen),
}

/// The answer to an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The operation was acknowledged.
    Done(Ret),
    /// An error guarantees that the operation has no effect.
    Refused(String),
    /// The operation was not answered, or an error leaves its effect open.
    Unknown(String),
}

/// An operation of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// The name of the function.
    pub key: String,
    /// The number of the client.
    pub client: u32,
    pub op: Op,
    /// Time of the invocation, since the start of the run.
    pub invoked: Duration,
    /// Time at which the client stopped waiting, since the start of the run.
    pub returned: Duration,
    pub answer: Answer,
}

impl Operation {
    /// Returns the harness's own last read, as an operation on a function.
    pub(crate) fn last_read(key: &str, seen: Option<Seen>, invoked: Duration, returned: Duration) -> Self {
        let answer = Answer::Done(seen.map_or(Ret::Absent, Ret::Found));
        Self { key: key.to_owned(), client: 0, op: Op::Read, invoked, returned, answer }
    }

    /// Whether the operation can change the function.
    #[must_use]
    pub fn is_write(&self) -> bool {
        self.op != Op::Read
    }

    /// Whether the operation was acknowledged.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.answer, Answer::Done(_))
    }

    /// Returns the latest time by which the operation took effect, or `None` if the operation has
    /// no effect. An unanswered operation may take effect at any time, or never.
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
        let from = self.invoked.as_secs_f64();
        let to = self.returned.as_secs_f64();
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
    /// Adds an operation that has returned.
    pub fn record(&self, operation: Operation) {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner).push(operation);
    }

    /// Returns every operation, by key, in the order of invocation.
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
