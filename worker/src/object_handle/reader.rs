//! The requests that wait for the bytes of a transfer. The deadlines of the requests decide the rate of the
//! transfer.

use std::sync::Arc;
use std::time::Duration;

use millrace_core::ids::{FunctionIndex, RequestKey};
use millrace_types::{RevisionKey, Timestamp};

/// The request that waits for the bytes of a transfer.
#[derive(Debug, Clone)]
pub(crate) enum TransferReader {
    /// No request waits for the bytes.
    None,
    /// The request's run reads the bytes, or the request's model needs the memory that the bytes leave.
    Run(RequestKey),
    /// The request has run, and is answered once the bytes have arrived.
    Answer(AnsweredRequest),
    /// The bytes are an input of the request, which is enqueued once all its inputs have arrived.
    Inputs(Arc<TransferRequester>),
    /// The request is not in the node's queue: a program reads the bytes for the request, or the bytes
    /// are part of its answer.
    Outside(Arc<TransferRequester>),
    /// A request on another worker, which needs the bytes by this time.
    Elsewhere(Timestamp),
}

impl TransferReader {
    /// Returns the reader for a request's run. Without a request, no request waits.
    pub(crate) fn run(key: Option<RequestKey>) -> Self {
        key.map_or(Self::None, Self::Run)
    }
}

/// A request that has run and waits for its answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnsweredRequest {
    pub(crate) function: FunctionIndex,
    pub(crate) accepted: Timestamp,
    /// Time from `accepted` to the wanted answer; `None`: the function's objective holds.
    pub(crate) objective: Option<Duration>,
}

/// A request outside the node's queue that transfers bytes. The request's deadline decides the rate
/// of its transfers.
#[derive(Debug)]
pub(crate) struct TransferRequester {
    pub(crate) revision: RevisionKey,
    /// Time at which the request arrived on this worker.
    pub(crate) came: Timestamp,
    /// Time from `came` to the wanted answer. `None` if only the function's objective, which the
    /// node knows, gives it.
    pub(crate) objective: Option<Duration>,
}

impl TransferRequester {
    /// Returns the deadline of the answer; `None` if only the node knows the function's objective.
    pub(crate) fn wanted_by(&self) -> Option<Timestamp> {
        Some(self.came + self.objective?)
    }
}
