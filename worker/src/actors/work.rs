//! What travels with a request from actor to actor.

use std::sync::Arc;

use millrace_policy::ids::{FunctionIndex, RequestKey};
use millrace_types::{ModelId, Priority, Timestamp};

use crate::actors::function;
use crate::request::Invocation;
use crate::seams::Mailbox;

/// A request and where its answer goes. Shared by its present owner and the Node, which gives it
/// to another GPU when one is lost.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) key: RequestKey,
    pub(crate) function: FunctionIndex,
    pub(crate) model: ModelId,
    /// Before whom it goes.
    pub(crate) priority: Priority,
    pub(crate) accepted: Timestamp,
    pub(crate) invocation: Invocation,
    /// The Function actor that admitted it: it alone answers.
    pub(crate) home: Mailbox<function::Message>,
    /// The caller's span.
    pub(crate) span: tracing::Span,
}

pub(crate) type SharedWork = Arc<Work>;
