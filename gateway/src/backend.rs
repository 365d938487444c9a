//! What the front door serves: the seam between the protocol and whoever has the models.
//!
//! In: names, checked tensors, a timeout. Out: outputs and where the time went, or a [`Failure`].
//! Nothing here knows how a request reaches a GPU.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use millrace_types::{
    DataType, Failure, FunctionKey, InSequence, Reason, RequestId, Revision, Runtime, Sequences, Slo,
    TenantName, TensorSpec,
};

use crate::auth::Caller;

/// Who has the models. Every method but the last two answers from memory: they are on the way of
/// each request.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Whether inference can be served at all.
    fn ready(&self) -> bool;

    /// Finds a model: the revision asked for, or the latest. One that is not ready is found too, and
    /// says so in [`Model::availability`].
    ///
    /// # Errors
    /// `FUNCTION_NOT_FOUND` or `REVISION_NOT_FOUND`.
    fn resolve(&self, function: &FunctionKey, revision: Option<Revision>) -> Result<Arc<Model>, Failure>;

    /// Every revision that can be resolved of every function of a tenant, by name and revision.
    fn index(&self, tenant: &TenantName) -> Vec<Arc<Model>>;

    /// Waits for a model that [may come](Availability::may_come): returns it once it can be invoked,
    /// or is not expected to be any more.
    ///
    /// # Errors
    /// `FUNCTION_NOT_FOUND` or `REVISION_NOT_FOUND` when it went meanwhile.
    async fn awaited(&self, model: &Model) -> Result<Arc<Model>, Failure>;

    /// Lets a function serve, or stops it. Returns once that is so everywhere: after
    /// [`Intent::Serve`], once the function is ready.
    ///
    /// # Errors
    /// `FUNCTION_NOT_FOUND`, or why the change cannot be made or the function does not get ready.
    async fn set_intent(
        &self,
        function: &FunctionKey,
        intent: Intent,
        caller: &Caller,
    ) -> Result<(), Failure>;

    /// Runs a model once. Dropping the future cancels the request, and the front door does so when
    /// its timeout passes or its client goes away. The current span is the request's.
    ///
    /// # Errors
    /// Why there is no answer.
    async fn invoke(&self, model: &Model, invocation: Invocation) -> Result<Completion, Failure>;
}

/// One revision of a function as the protocol shows it. Immutable: a change makes another.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Whose it is and its name.
    pub key: FunctionKey,
    /// Which revision this is.
    pub revision: Revision,
    /// Every revision of the function that can be resolved, ascending; this one is among them.
    pub revisions: Vec<Revision>,
    /// What it is.
    pub kind: Kind,
    /// What it takes; its state left out.
    pub inputs: Vec<TensorSpec>,
    /// What it gives; its state left out.
    pub outputs: Vec<TensorSpec>,
    /// How long a request that names no timeout may take.
    pub timeout: Duration,
    /// The objective that the front door scores its requests by. `None` of a function, which its
    /// workers score.
    pub objective: Option<Slo>,
    /// Whether running a request twice does no harm; it does where state is kept.
    pub idempotent: bool,
    /// The state that it keeps from one request of a sequence to the next, if it keeps any.
    pub sequences: Option<Sequences>,
    /// Its weights' size.
    pub weights: millrace_types::Bytes,
    /// Whether it can be invoked now.
    pub availability: Availability,
}

impl Model {
    /// Why it cannot be invoked, as who asks is told.
    #[must_use]
    pub fn refusal(&self) -> Failure {
        let Self { key, revision, availability, .. } = self;
        let (reason, why) = match (availability, availability.obstacle()) {
            (_, None) => (Reason::Internal, "it is ready"),
            (Availability::Disabled, Some(why)) => (Reason::FunctionDisabled, why),
            (_, Some(why)) => (Reason::FunctionNotReady, why),
        };
        Failure::new(reason, format!("function {key} version {revision} cannot serve: {why}"))
    }
}

/// What a model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A function, and how it is run.
    Function(Runtime),
    /// Functions joined into a graph.
    Workflow,
}

impl Kind {
    /// What runs it, as the protocol's configuration says.
    #[must_use]
    pub const fn runtime(self) -> &'static str {
        match self {
            Self::Function(runtime) => runtime.as_str(),
            Self::Workflow => "workflow",
        }
    }
}

/// Whether a model can be invoked, as the repository index tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// It can.
    Ready,
    /// It is being prepared on its workers.
    Preparing,
    /// Its workers are gone, and it is expected to come back: on them, or on others. Where it was.
    Away(String),
    /// It was unloaded.
    Disabled,
    /// It cannot be prepared, and why.
    Unavailable(String),
}

impl Availability {
    /// Whether a request for the model is better kept than refused: it is expected to be ready by
    /// itself, and soon.
    #[must_use]
    pub fn may_come(&self) -> bool {
        matches!(self, Self::Preparing | Self::Away(_))
    }

    /// Why the model cannot be invoked, and what to do; `None` where it can.
    #[must_use]
    pub fn obstacle(&self) -> Option<&str> {
        match self {
            Self::Ready => None,
            Self::Preparing => Some("it is being prepared: try again soon"),
            Self::Disabled => Some("it is unloaded: load it first"),
            Self::Away(why) | Self::Unavailable(why) => Some(why),
        }
    }
}

/// What an owner wants of a function: the protocol's load and unload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Serve requests.
    Serve,
    /// Refuse them.
    Refuse,
}

/// One request to run a model, checked against its declaration.
#[derive(Debug, Clone, PartialEq)]
pub struct Invocation {
    /// The request's id.
    pub request_id: RequestId,
    /// Who asks.
    pub caller: Caller,
    /// One for each input of the model, in the order sent.
    pub inputs: Vec<Tensor>,
    /// The outputs wanted, in this order; empty for every one, in the model's order.
    pub outputs: Vec<String>,
    /// What is left of the request's timeout.
    pub timeout: Duration,
    /// The protocol's priority: 1 is the highest, 0 leaves it to the server.
    pub priority: u64,
    /// The sequence that it is of, where it says so.
    pub sequence: Option<InSequence>,
}

/// A tensor with its contents.
#[derive(Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in the model.
    pub name: String,
    /// Its element type.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its elements, little-endian, rows last. A slice of the buffer they arrived in.
    pub data: Bytes,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, datatype, shape, data } = self;
        write!(f, "{name}: {datatype}{shape:?} of {} bytes", data.len())
    }
}

/// A request answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The outputs asked for, in that order.
    pub outputs: Vec<Tensor>,
    /// Where the time went.
    pub split: Split,
    /// Attempts made, counting the one that answered.
    pub attempts: u32,
}

/// Where the time of one request went, between its backend's taking it and answering.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// Waiting for the model to come into host memory: a cold start. Zero when it was there.
    pub cold: Duration,
    /// Waiting for a GPU.
    pub queue: Duration,
    /// Waiting for the model to come onto the GPU; zero when it was there.
    pub swap: Duration,
    /// Computing.
    pub run: Duration,
}
