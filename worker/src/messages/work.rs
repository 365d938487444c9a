//! The data of a request that travels from actor to actor.

use std::sync::Arc;

use millrace_core::ids::{FunctionIndex, RequestKey};
use millrace_types::{ModelId, Priority, Timestamp};

use super::request_update::RequestUpdate;
use crate::actor_runtime::Mailbox;
use crate::object_handle::AnsweredRequest;
use crate::request::Attempt;

/// A request and the address of its answer. The request's present owner and the Node share it, because the
/// Node assigns the request to another GPU when one is lost.
#[derive(Debug)]
pub(crate) struct RequestWork {
    pub(crate) key: RequestKey,
    pub(crate) function: FunctionIndex,
    pub(crate) model: ModelId,
    pub(crate) priority: Priority,
    pub(crate) accepted: Timestamp,
    pub(crate) invocation: Attempt,
    /// The Function actor that admitted the request, and the only actor that answers it.
    pub(crate) home: Mailbox<RequestUpdate>,
    /// The caller's span.
    pub(crate) span: tracing::Span,
}

pub(crate) type SharedWork = Arc<RequestWork>;

impl RequestWork {
    /// Returns the request as the reader of bytes that belong to its answer.
    pub(crate) fn answered(&self) -> AnsweredRequest {
        let Self { function, accepted, .. } = *self;
        AnsweredRequest { function, accepted, objective: self.invocation.objective }
    }
}
