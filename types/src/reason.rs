//! The stable reasons that errors carry, on every interface: `ErrorInfo.reason` in gRPC,
//! `reason` in REST error bodies, `millrace_*_total{reason=…}` in metrics. A reason never changes
//! its meaning; new ones may be added.

use std::fmt;
use std::str::FromStr;

use crate::limits::beginning;

/// The domain of every [`Reason`] in a gRPC `ErrorInfo`.
pub const DOMAIN: &str = "millrace.dev";

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $text:literal, retryable: $retryable:literal;)*) => {
        /// Why something was refused or failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($(#[$doc])* $variant,)* }

        impl Reason {
            /// Every reason there is.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The reason's stable text.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// Whether the same request may succeed when sent again unchanged.
            #[must_use]
            pub const fn retryable(self) -> bool {
                match self { $(Self::$variant => $retryable,)* }
            }
        }
    };
}

reasons! {
    /// No function of that name.
    FunctionNotFound = "FUNCTION_NOT_FOUND", retryable: false;
    /// No workflow of that name.
    WorkflowNotFound = "WORKFLOW_NOT_FOUND", retryable: false;
    /// The name is another resource's.
    NameTaken = "NAME_TAKEN", retryable: false;
    /// A workflow runs it.
    InUse = "IN_USE", retryable: false;
    /// The function has no such revision.
    RevisionNotFound = "REVISION_NOT_FOUND", retryable: false;
    /// The function was unloaded; load it first.
    FunctionDisabled = "FUNCTION_DISABLED", retryable: false;
    /// The function is being prepared on its workers.
    FunctionNotReady = "FUNCTION_NOT_READY", retryable: true;
    /// An input is missing, misnamed, of another type, shape or size, or given twice.
    InvalidInput = "INVALID_INPUT", retryable: false;
    /// A requested output does not exist.
    InvalidOutput = "INVALID_OUTPUT", retryable: false;
    /// The request is not well formed.
    MalformedRequest = "MALFORMED_REQUEST", retryable: false;
    /// A manifest, spec or name fails its checks.
    InvalidSpec = "INVALID_SPEC", retryable: false;
    /// The model file is not one we can serve.
    InvalidModel = "INVALID_MODEL", retryable: false;
    /// The model uses an operator we do not have.
    UnsupportedOperator = "UNSUPPORTED_OPERATOR", retryable: false;
    /// The model needs more memory than any GPU has.
    ModelTooLarge = "MODEL_TOO_LARGE", retryable: false;
    /// Uploaded or stored bytes do not match their digest.
    DigestMismatch = "DIGEST_MISMATCH", retryable: false;
    /// No artifact of that digest.
    ArtifactNotFound = "ARTIFACT_NOT_FOUND", retryable: false;
    /// The resource changed since it was read.
    Conflict = "CONFLICT", retryable: false;
    /// Another live node has this name.
    NodeNameTaken = "NODE_NAME_TAKEN", retryable: false;
    /// No node of that name.
    NodeNotFound = "NODE_NOT_FOUND", retryable: false;
    /// Nobody keeps a span of the request or trace.
    TraceNotFound = "TRACE_NOT_FOUND", retryable: false;
    /// No operation of that name, or one that ended too long ago.
    OperationNotFound = "OPERATION_NOT_FOUND", retryable: false;
    /// The operation cannot be ended before its time.
    OperationState = "OPERATION_STATE", retryable: false;
    /// The node is lost, cordoned or draining, or lives where it must not.
    NodeState = "NODE_STATE", retryable: false;
    /// What the node says belongs to a registration that is over: it has to register again.
    Fenced = "FENCED", retryable: false;
    /// Too few controllers hold the model's file yet.
    ArtifactNotHeld = "ARTIFACT_NOT_HELD", retryable: true;
    /// The object store that the controllers share does not answer, or is not the cluster's.
    StoreUnavailable = "STORE_UNAVAILABLE", retryable: true;
    /// A controller's disk has too little space.
    StorageFull = "STORAGE_FULL", retryable: true;
    /// A peer of another cluster or protocol version.
    PeerMismatch = "PEER_MISMATCH", retryable: false;
    /// A change of the controller group that would be unsafe, or names no member.
    MembershipRefused = "MEMBERSHIP_REFUSED", retryable: false;
    /// A queue or budget is full.
    QueueFull = "QUEUE_FULL", retryable: true;
    /// The replicated state holds a limit of something: delete some of it first.
    StateFull = "STATE_FULL", retryable: false;
    /// The bytes of requests in flight exceed the budget, or one message its limit.
    ByteBudgetExceeded = "BYTE_BUDGET_EXCEEDED", retryable: true;
    /// The request's timeout passed.
    TimedOut = "TIMED_OUT", retryable: true;
    /// The client went away.
    Cancelled = "CANCELLED", retryable: true;
    /// The request was running in two executors as they died, and is kept from others.
    Quarantined = "QUARANTINED", retryable: false;
    /// A piece of intermediate data is gone, and could not be made again.
    DataLost = "DATA_LOST", retryable: true;
    /// No such sequence: it never began, ended, was idle for too long, or its state was lost. Begin it anew.
    SequenceNotFound = "SEQUENCE_NOT_FOUND", retryable: false;
    /// Every attempt failed.
    AttemptsExhausted = "ATTEMPTS_EXHAUSTED", retryable: true;
    /// The executor died while running a request that must not run twice.
    ExecutorLost = "EXECUTOR_LOST", retryable: true;
    /// The model itself failed on this input.
    ModelFailed = "MODEL_FAILED", retryable: false;
    /// No worker can take the request now.
    NoWorker = "NO_WORKER", retryable: true;
    /// No GPU can take the model now: what would make room is in use.
    NoGpuMemory = "NO_GPU_MEMORY", retryable: true;
    /// There is no leader, or it cannot reach a majority.
    NoLeader = "NO_LEADER", retryable: true;
    /// The server is going down.
    ShuttingDown = "SHUTTING_DOWN", retryable: true;
    /// The caller is not known.
    Unauthenticated = "UNAUTHENTICATED", retryable: false;
    /// The caller may not do this.
    PermissionDenied = "PERMISSION_DENIED", retryable: false;
    /// The server has no such feature.
    Unimplemented = "UNIMPLEMENTED", retryable: false;
    /// Our own bug.
    Internal = "INTERNAL", retryable: false;
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A text that is no reason this build knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown reason {0:?}")]
pub struct UnknownReason(pub String);

impl FromStr for Reason {
    type Err = UnknownReason;
    fn from_str(text: &str) -> Result<Self, UnknownReason> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.as_str() == text)
            .ok_or_else(|| UnknownReason(text.to_owned()))
    }
}

/// A request that did not succeed, as every layer passes it on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The stable reason.
    pub reason: Reason,
    /// What happened, and what the caller can do about it.
    pub message: String,
    /// Whether the same request may succeed when sent again unchanged.
    pub retryable: bool,
    /// Whether the function may have run: a caller that must not run it twice has to look.
    pub may_have_executed: bool,
}

/// The most bytes of a failure's message, which may repeat what a client wrote: gRPC puts the message into
/// headers twice, and clients take 8 KiB of them.
pub const FAILURE_MESSAGE_BYTES_MAX: usize = 2 << 10;

impl Failure {
    /// A failure of something that has not begun to execute, retryable as its reason says. Of a longer
    /// message, the first [`FAILURE_MESSAGE_BYTES_MAX`] are kept.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > FAILURE_MESSAGE_BYTES_MAX {
            message = beginning(&message, FAILURE_MESSAGE_BYTES_MAX).to_owned();
        }
        Self { reason, message, retryable: reason.retryable(), may_have_executed: false }
    }

    /// A request that says what no request may, or lacks what each has: [`Reason::MalformedRequest`].
    #[must_use]
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(Reason::MalformedRequest, message)
    }

    /// The same, of something that may have executed.
    #[must_use]
    pub fn after_execution(self) -> Self {
        Self { may_have_executed: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_at_a_whole_character() {
        let failure = Failure::malformed("é".repeat(FAILURE_MESSAGE_BYTES_MAX));
        assert_eq!(failure.message, "é".repeat(FAILURE_MESSAGE_BYTES_MAX / 2));
        assert!(failure.message.capacity() < 2 * FAILURE_MESSAGE_BYTES_MAX);
    }

    #[test]
    fn texts_are_unique_and_round_trip() {
        for &reason in Reason::ALL {
            assert_eq!(reason.as_str().parse(), Ok(reason));
        }
    }
}
