//! The stable reasons of errors on every interface: `ErrorInfo.reason` in gRPC, `reason` in REST
//! error bodies, `millrace_*_total{reason=…}` in metrics. A reason never changes its meaning; new
//! reasons may be added.

use std::fmt;
use std::str::FromStr;

use crate::limits::text_prefix;

/// The domain of every [`Reason`] in a gRPC `ErrorInfo`.
pub const DOMAIN: &str = "millrace.dev";

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $text:literal, retryable: $retryable:literal;)*) => {
        /// The stable reason of a refusal or failure.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($(#[$doc])* $variant,)* }

        impl Reason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the reason's stable text.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// Returns whether the same request may succeed when sent again unchanged.
            #[must_use]
            pub const fn retryable(self) -> bool {
                match self { $(Self::$variant => $retryable,)* }
            }
        }
    };
}

reasons! {
    /// No function has this name.
    FunctionNotFound = "FUNCTION_NOT_FOUND", retryable: false;
    /// No workflow has this name.
    WorkflowNotFound = "WORKFLOW_NOT_FOUND", retryable: false;
    /// Another resource has this name.
    NameTaken = "NAME_TAKEN", retryable: false;
    /// A workflow uses the resource.
    InUse = "IN_USE", retryable: false;
    /// The function has no such revision.
    RevisionNotFound = "REVISION_NOT_FOUND", retryable: false;
    /// The function was unloaded: load the function first.
    FunctionDisabled = "FUNCTION_DISABLED", retryable: false;
    /// No worker has the function ready now.
    FunctionNotReady = "FUNCTION_NOT_READY", retryable: true;
    /// An input is missing, misnamed, sent twice, or of the wrong type, shape or size.
    InvalidInput = "INVALID_INPUT", retryable: false;
    /// A requested output does not exist, JSON cannot represent an output (NaN, infinity), or the outputs of a
    /// workflow's step have shapes or numbers of rows that do not fit together.
    InvalidOutput = "INVALID_OUTPUT", retryable: false;
    /// The request is malformed.
    MalformedRequest = "MALFORMED_REQUEST", retryable: false;
    /// A manifest, spec or name is invalid.
    InvalidSpec = "INVALID_SPEC", retryable: false;
    /// The model file is not a model that Millrace can serve.
    InvalidModel = "INVALID_MODEL", retryable: false;
    /// The model uses an operator that Millrace does not support.
    UnsupportedOperator = "UNSUPPORTED_OPERATOR", retryable: false;
    /// The model needs more memory than any GPU has.
    ModelTooLarge = "MODEL_TOO_LARGE", retryable: false;
    /// Uploaded or stored bytes do not match their digest.
    DigestMismatch = "DIGEST_MISMATCH", retryable: false;
    /// No artifact has this digest.
    ArtifactNotFound = "ARTIFACT_NOT_FOUND", retryable: false;
    /// The resource changed since it was read.
    Conflict = "CONFLICT", retryable: false;
    /// Another live node has this name.
    NodeNameTaken = "NODE_NAME_TAKEN", retryable: false;
    /// No node has this name.
    NodeNotFound = "NODE_NOT_FOUND", retryable: false;
    /// No process stores a span of the request or trace.
    TraceNotFound = "TRACE_NOT_FOUND", retryable: false;
    /// No operation has this name, or the operation ended too long ago.
    OperationNotFound = "OPERATION_NOT_FOUND", retryable: false;
    /// The operation cannot be cancelled in its present state.
    OperationState = "OPERATION_STATE", retryable: false;
    /// The node is lost, cordoned or draining, or is not in the state that the change needs.
    NodeState = "NODE_STATE", retryable: false;
    /// The node's message belongs to an expired registration: the node has to register again.
    Fenced = "FENCED", retryable: false;
    /// Too few controllers store the model file so far.
    ArtifactNotHeld = "ARTIFACT_NOT_HELD", retryable: true;
    /// The object store that the controllers share does not answer, or belongs to another cluster.
    StoreUnavailable = "STORE_UNAVAILABLE", retryable: true;
    /// A controller's disk has too little space.
    StorageFull = "STORAGE_FULL", retryable: true;
    /// The peer belongs to another cluster or speaks another protocol version.
    PeerMismatch = "PEER_MISMATCH", retryable: false;
    /// The change of the controller group would be unsafe, or names no member.
    MembershipRefused = "MEMBERSHIP_REFUSED", retryable: false;
    /// A queue or budget is full.
    QueueFull = "QUEUE_FULL", retryable: true;
    /// The replicated state is at one of its limits: delete some items first.
    StateFull = "STATE_FULL", retryable: false;
    /// The bytes of requests in flight exceed the budget, or a message exceeds its limit.
    ByteBudgetExceeded = "BYTE_BUDGET_EXCEEDED", retryable: true;
    /// The request's timeout passed.
    TimedOut = "TIMED_OUT", retryable: true;
    /// The client disconnected or cancelled the request.
    Cancelled = "CANCELLED", retryable: true;
    /// The request was running in two executors when they died, and is not run again.
    Quarantined = "QUARANTINED", retryable: false;
    /// A piece of intermediate data is lost and could not be recomputed.
    DataLost = "DATA_LOST", retryable: true;
    /// The sequence does not exist: it never began, ended, was idle for too long, or lost its
    /// state. Begin the sequence again.
    SequenceNotFound = "SEQUENCE_NOT_FOUND", retryable: false;
    /// Every attempt failed.
    AttemptsExhausted = "ATTEMPTS_EXHAUSTED", retryable: true;
    /// The executor died or the run failed, and a request that must not run twice may have run.
    ExecutorLost = "EXECUTOR_LOST", retryable: true;
    /// The model itself failed on this input.
    ModelFailed = "MODEL_FAILED", retryable: false;
    /// No worker can accept the request now.
    NoWorker = "NO_WORKER", retryable: true;
    /// No GPU can load the model now, because the memory to be freed is in use.
    NoGpuMemory = "NO_GPU_MEMORY", retryable: true;
    /// There is no leader, or the leader cannot reach a majority.
    NoLeader = "NO_LEADER", retryable: true;
    /// The server is shutting down.
    ShuttingDown = "SHUTTING_DOWN", retryable: true;
    /// The caller is unknown.
    Unauthenticated = "UNAUTHENTICATED", retryable: false;
    /// The caller lacks the permission.
    PermissionDenied = "PERMISSION_DENIED", retryable: false;
    /// The server has no such feature.
    Unimplemented = "UNIMPLEMENTED", retryable: false;
    /// A bug in Millrace.
    Internal = "INTERNAL", retryable: false;
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The error for a text that is not a reason of this build; holds the text.
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

/// A request that failed, in the form that all layers share.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The stable reason.
    pub reason: Reason,
    /// The fault and the caller's next step.
    pub message: String,
    /// Whether the same request may succeed when sent again unchanged.
    pub retryable: bool,
    /// Whether the function may have run. A caller that must not run the function twice has to
    /// check first.
    pub may_have_executed: bool,
}

/// Maximum size of a failure's message, in bytes. The message may repeat text of a client, gRPC
/// puts the message into headers twice, and clients accept 8 KiB of headers.
pub const FAILURE_MESSAGE_BYTES_MAX: usize = 2 << 10;

impl Failure {
    /// Creates a failure of a request that has not begun to execute. The reason decides whether the
    /// failure is retryable. A message longer than [`FAILURE_MESSAGE_BYTES_MAX`] is cut.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > FAILURE_MESSAGE_BYTES_MAX {
            message = text_prefix(&message, FAILURE_MESSAGE_BYTES_MAX).to_owned();
        }
        Self { reason, message, retryable: reason.retryable(), may_have_executed: false }
    }

    /// Creates the failure of a request with forbidden content or without required content:
    /// [`Reason::MalformedRequest`].
    #[must_use]
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(Reason::MalformedRequest, message)
    }

    /// Marks the failure as one of a request that may have executed.
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
    fn texts_of_reasons_are_unique_and_round_trip() {
        for &reason in Reason::ALL {
            assert_eq!(reason.as_str().parse(), Ok(reason));
        }
    }
}
