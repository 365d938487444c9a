//! The history of the clients' admin operations, each with its invocation, its return and its
//! answer. The oracle judges this history. An operation without an answer is unknown, never absent,
//! because it may still take effect.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// An operation on a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AdminOp {
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
pub struct FunctionReading {
    /// The value that the apply of the latest revision wrote.
    pub value: u64,
    /// Whether the function serves requests.
    pub enabled: bool,
    /// Number of revisions so far, revisions before a deletion included.
    pub generation: u64,
}

/// The result of an acknowledged operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AdminResult {
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
    Found(FunctionReading),
}

/// The answer to an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminAnswer {
    /// The operation was acknowledged.
    Done(AdminResult),
    /// An error guarantees that the operation has no effect.
    Refused(String),
    /// The operation was not answered, or an error leaves its effect open.
    Unknown(String),
}

/// An operation of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminOperation {
    /// The name of the function.
    pub key: String,
    /// The number of the client.
    pub client: u32,
    pub op: AdminOp,
    /// Time of the invocation, since the start of the run.
    pub invoked: Duration,
    /// Time at which the client stopped waiting, since the start of the run.
    pub returned: Duration,
    pub answer: AdminAnswer,
}

impl AdminOperation {
    /// Returns the harness's own last read, as an operation on a function.
    pub(crate) fn last_read(
        key: &str,
        seen: Option<FunctionReading>,
        invoked: Duration,
        returned: Duration,
    ) -> Self {
        let answer = AdminAnswer::Done(seen.map_or(AdminResult::Absent, AdminResult::Found));
        Self { key: key.to_owned(), client: 0, op: AdminOp::Read, invoked, returned, answer }
    }

    /// Whether the operation can change the function.
    #[must_use]
    pub fn is_write(&self) -> bool {
        self.op != AdminOp::Read
    }

    /// Whether the operation was acknowledged.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.answer, AdminAnswer::Done(_))
    }

    /// Returns the latest time by which the operation took effect, or `None` if the operation has
    /// no effect. An unanswered operation may take effect at any time, or never.
    #[must_use]
    pub fn took_effect_by(&self) -> Option<Duration> {
        match self.answer {
            AdminAnswer::Done(_) => Some(self.returned),
            AdminAnswer::Unknown(_) => Some(Duration::MAX),
            AdminAnswer::Refused(_) => None,
        }
    }
}

impl fmt::Display for AdminOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = self.invoked.as_secs_f64();
        let to = self.returned.as_secs_f64();
        let client = match self.client {
            0 => "the end".to_owned(),
            number => format!("client {number}"),
        };
        write!(f, "{from:>9.3} .. {to:>9.3}  {client:<9} {:?} -> ", self.op)?;
        match &self.answer {
            AdminAnswer::Done(ret) => write!(f, "{ret:?}"),
            AdminAnswer::Refused(why) => write!(f, "refused: {why}"),
            AdminAnswer::Unknown(why) => write!(f, "unknown: {why}"),
        }
    }
}

/// All operations of a run.
#[derive(Debug, Default)]
pub struct AdminHistory {
    operations: Mutex<Vec<AdminOperation>>,
}

impl AdminHistory {
    /// Adds an operation that has returned.
    pub fn record(&self, operation: AdminOperation) {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner).push(operation);
    }

    /// Returns every operation, by key, in the order of invocation.
    #[must_use]
    pub fn by_key(&self) -> BTreeMap<String, Vec<AdminOperation>> {
        let mut keys: BTreeMap<String, Vec<AdminOperation>> = BTreeMap::new();
        for operation in self.operations.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            keys.entry(operation.key.clone()).or_default().push(operation.clone());
        }
        for operations in keys.values_mut() {
            operations.sort_by_key(|operation| operation.invoked);
        }
        keys
    }
}
