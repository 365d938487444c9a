//! The messages to a Function actor.

use millrace_core::ids::RequestKey;
use millrace_types::{Failure, Reason};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::request_update::RequestUpdate;
use super::work::SharedWork;
use crate::request::AttemptOutcome;
use crate::snapshot::SnapshotSender;

/// A message to a Function actor.
pub(crate) enum Message {
    /// A request arrived.
    Invoke(NewRequest),
    /// The client of a request went away.
    Cancel(RequestKey),
    /// An admitted request made progress or ended.
    Update(RequestUpdate),
    /// The Node actor, or the process pool, was lost with all its requests.
    NodeLost(Reason),
    /// The function stops accepting requests.
    Retire,
    /// A request for the function's part of a snapshot.
    Report { parts: SnapshotSender },
}

impl From<RequestUpdate> for Message {
    fn from(update: RequestUpdate) -> Self {
        Self::Update(update)
    }
}

/// A request that waits for admission.
#[derive(Debug)]
pub(crate) struct NewRequest {
    pub(crate) work: SharedWork,
    pub(crate) answer: oneshot::Sender<Result<AttemptOutcome, Failure>>,
    /// The request's permit among all requests of the worker, released with the answer.
    pub(crate) permit: OwnedSemaphorePermit,
}
