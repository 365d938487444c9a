//! The interface between the protocol and the component that has the models.
//!
//! The gateway passes names, checked tensors and a timeout. The backend returns outputs and a latency
//! breakdown, or a [`Failure`]. Nothing here knows how a request reaches a GPU.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use millrace_types::{
    DataType, Failure, FunctionKey, Reason, RequestId, Revision, Runtime, SequenceSpec, Slo, TenantName,
    TensorSpec,
};

use crate::authentication::Caller;
pub use crate::parameters::RequestParameters;

/// The component that has the models. The methods up to [`Backend::index`] must answer from memory,
/// because they are on the path of requests.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Returns whether inference can be served at all.
    fn ready(&self) -> bool;

    /// Finds a model: the requested revision, or the latest one. A model that is not ready is also
    /// returned; [`ModelRevision::availability`] has its state.
    ///
    /// # Errors
    /// `FUNCTION_NOT_FOUND` or `REVISION_NOT_FOUND`.
    fn resolve(
        &self,
        function: &FunctionKey,
        revision: Option<Revision>,
    ) -> Result<Arc<ModelRevision>, Failure>;

    /// Returns all revisions of all functions of a tenant that can be resolved, ordered by name and revision.
    fn index(&self, tenant: &TenantName) -> Vec<Arc<ModelRevision>>;

    /// Waits for a model that [may become ready](ModelAvailability::may_become_ready). Returns the model once it
    /// can be invoked, or is no longer expected to become ready.
    ///
    /// # Errors
    /// `FUNCTION_NOT_FOUND` or `REVISION_NOT_FOUND` if the model was deleted in the meantime.
    async fn wait_until_ready(&self, model: &ModelRevision) -> Result<Arc<ModelRevision>, Failure>;

    /// Enables or disables a function. Returns once the change is effective everywhere; after
    /// [`Intent::Serve`], once the function is ready.
    ///
    /// # Errors
    /// `FUNCTION_NOT_FOUND`, or the reason why the change is impossible or the function does not
    /// become ready.
    async fn set_intent(
        &self,
        function: &FunctionKey,
        intent: Intent,
        caller: &Caller,
    ) -> Result<(), Failure>;

    /// Runs a model once. Dropping the future cancels the request. The gateway drops the future when
    /// the timeout expires or the client disconnects. The current span is the request's span.
    ///
    /// # Errors
    /// The reason why there is no response.
    async fn invoke(&self, model: &ModelRevision, invocation: ModelRequest)
    -> Result<ModelResponse, Failure>;
}

/// A revision of a function, as the protocol shows it. Immutable: a change creates a new value.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRevision {
    /// Tenant and name of the function.
    pub key: FunctionKey,
    pub revision: Revision,
    /// All revisions of the function that can be resolved, ascending, including this one.
    pub revisions: Vec<Revision>,
    pub kind: Kind,
    /// Inputs of the model, without the state.
    pub inputs: Vec<TensorSpec>,
    /// Outputs of the model, without the state.
    pub outputs: Vec<TensorSpec>,
    /// Time limit of a request that has no timeout.
    pub timeout: Duration,
    /// SLO against which the gateway counts requests. `None` for a function, because its workers count.
    pub objective: Option<Slo>,
    /// Whether running a request twice is harmless. False if state is kept.
    pub idempotent: bool,
    /// State that the model keeps between the requests of a sequence, if any.
    pub sequences: Option<SequenceSpec>,
    /// Size of the weights.
    pub weights: millrace_types::Bytes,
    /// Whether the model can be invoked now.
    pub availability: ModelAvailability,
}

impl ModelRevision {
    /// Returns the failure for a caller: why the model cannot be invoked.
    #[must_use]
    pub fn refusal(&self) -> Failure {
        let Self { key, revision, availability, .. } = self;
        let (reason, why) = match (availability, availability.obstacle()) {
            (_, None) => (Reason::Internal, "it is ready"),
            (ModelAvailability::Disabled, Some(why)) => (Reason::FunctionDisabled, why),
            (_, Some(why)) => (Reason::FunctionNotReady, why),
        };
        Failure::new(reason, format!("function {key} version {revision} cannot serve: {why}"))
    }
}

/// The kind of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A function with the runtime.
    Function(Runtime),
    /// A graph of functions.
    Workflow,
}

impl Kind {
    /// Returns the runtime, as the protocol's configuration names it.
    #[must_use]
    pub const fn runtime(self) -> &'static str {
        match self {
            Self::Function(runtime) => runtime.as_str(),
            Self::Workflow => "workflow",
        }
    }
}

/// The state of a model, as the repository index shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelAvailability {
    /// The model can be invoked.
    Ready,
    /// The model is being prepared on workers.
    Preparing,
    /// The model's workers are gone, and the model is expected to become ready again on them or on
    /// others. The text tells where the model was.
    Away(String),
    /// The model was unloaded.
    Disabled,
    /// The model cannot be prepared, for this reason.
    Unavailable(String),
}

impl ModelAvailability {
    /// Whether a request for the model should wait instead of being refused, because the model is
    /// expected to become ready soon.
    #[must_use]
    pub fn may_become_ready(&self) -> bool {
        matches!(self, Self::Preparing | Self::Away(_))
    }

    /// Returns why the model cannot be invoked, and the next step. Returns `None` if the model is ready.
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

/// The owner's intent for a function: the protocol's load and unload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// The function should serve requests.
    Serve,
    /// The function should refuse requests.
    Refuse,
}

/// A request to run a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRequest {
    pub request_id: RequestId,
    pub caller: Caller,
    /// Remaining time of the request's timeout.
    pub timeout: Duration,
    pub contents: RequestContents,
}

/// The contents of a request, in either protocol, checked against the model's declaration.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestContents {
    /// Input tensors, one for each input of the model, in the order sent.
    pub inputs: Vec<NamedTensor>,
    /// Names of the requested outputs, in order. Empty selects all outputs in the model's order.
    pub outputs: Vec<String>,
    pub parameters: RequestParameters,
}

/// A tensor with contents.
#[derive(Clone, PartialEq, Eq)]
pub struct NamedTensor {
    /// Name of the tensor in the model.
    pub name: String,
    pub datatype: DataType,
    pub shape: Vec<i64>,
    /// Elements in row-major order, little-endian. A slice of the received buffer.
    pub data: Bytes,
}

impl fmt::Debug for NamedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, datatype, shape, data } = self;
        write!(f, "{name}: {datatype}{shape:?} of {} bytes", data.len())
    }
}

/// The response to a request.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelResponse {
    /// Requested outputs, in the requested order.
    pub outputs: Vec<NamedTensor>,
    /// Latency breakdown of the request.
    pub split: AnswerTimes,
    /// Number of attempts, including the successful one.
    pub attempts: u32,
    /// The worker, and the index and type of its GPU, such as `worker-1/0 V100`. `None` for a
    /// workflow, because the steps may run on several workers.
    pub served_by: Option<Arc<str>>,
}

/// The latency breakdown of a request, from its acceptance by the backend to the response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnswerTimes {
    /// Time waiting for the model to be loaded into host memory (a cold start). Zero if the model was loaded.
    pub cold: Duration,
    /// Time waiting for a GPU.
    pub queue: Duration,
    /// Time waiting for the model to be copied to the GPU. Zero if the model was on the GPU.
    pub swap: Duration,
    /// Time computing.
    pub run: Duration,
    /// Time waiting for SMs of a shared GPU while the model runs. Zero if the model had the whole GPU.
    pub token: Duration,
}
