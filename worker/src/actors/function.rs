//! The Function actor: one per function revision hosted here.

use millrace_policy::ids::RequestKey;
use millrace_types::Failure;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::actors::work::SharedWork;
use crate::handle::Parts;
use crate::request::Completion;

/// A request at the door.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) work: SharedWork,
    /// Where its answer goes.
    pub(crate) answer: oneshot::Sender<Result<Completion, Failure>>,
    /// Its place among the worker's requests, given back with the answer.
    pub(crate) permit: OwnedSemaphorePermit,
}

/// What a Function actor is told.
pub(crate) enum Message {
    /// A request came.
    Invoke(Arrival),
    /// Its client went away.
    Cancel(RequestKey),
    /// Tell what the function looks like.
    Report { parts: Parts },
}
