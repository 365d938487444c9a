//! A request inside the worker, and its answer: the types between the gRPC service and the actors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_gpu::SmUse;
use millrace_proto::executor::{Tensor, tensor::Contents};
use millrace_proto::worker::FetchMethod;
use millrace_scheduling::dispatch::InputLocations;
use millrace_types::profile::TrialSetting;
use millrace_types::{Bytes, DataId, GpuIndex, RequestId, RevisionKey};

use crate::object_handle::{HandleLocation, ObjectHandle};
use crate::port::Descriptor;

/// One attempt of a request, checked against the function's declaration.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// Identifier of the request in the cluster.
    pub request_id: RequestId,
    /// Number of times that the request may still be started, this time included; 0 counts as 1.
    pub attempts_left: u32,
    pub revision: RevisionKey,
    /// Remaining part of the client's timeout.
    pub timeout: Duration,
    /// Remaining time to the request's own objective; `None`: the function's objective holds. A
    /// workflow has one objective for all of its steps.
    pub objective: Option<Duration>,
    /// Priority that the client requests: 1 is the highest, 0 leaves the choice to the function. A
    /// request never gets a higher priority than its function's.
    pub priority: u64,
    /// Inputs in the executor's format.
    pub inputs: Vec<Tensor>,
    /// Descriptors that the inputs' `contents_fd` index.
    pub descriptors: Vec<Descriptor>,
    /// The request's data on GPUs.
    pub on_gpus: OnGpus,
    /// Requested outputs; empty requests all.
    pub outputs: Vec<String>,
    /// Functions that are likely to be called with the outputs, and should be on a GPU by then
    /// (D29).
    pub next: Vec<RevisionKey>,
    /// Time that the request has waited here for its model to be loaded into host memory. Part of
    /// its queueing time.
    pub cold: Duration,
    /// Time that the request has waited here behind earlier requests of its sequence. Part of its
    /// queueing time.
    pub behind: Duration,
    /// Whether the request is not counted and charged: it is a request of a trial, or it completed before and its
    /// outputs were lost then.
    pub counted: bool,
    /// The setting of the trial that the request belongs to.
    pub trial: Option<TrialSetting>,
}

impl Attempt {
    /// Returns the bytes of the request's inputs on each GPU. An object in transit counts on its
    /// source GPU until the copy completes, because a run that starts earlier reads the source.
    pub(crate) fn inputs_on_gpus(&self) -> InputLocations {
        let objects = &self.on_gpus.objects;
        if objects.is_empty() {
            return InputLocations::NONE;
        }
        let on_gpu = |input: &Tensor| {
            let Some(Contents::Object(part)) = &input.contents else { return None };
            let object = objects.iter().find(|object| object.key.0 == part.object)?;
            matches!(object.place(), HandleLocation::Gpu(_)).then_some((object.gpu, Bytes(part.bytes)))
        };
        InputLocations::of(self.inputs.iter().filter_map(on_gpu))
    }
}

/// A request's objects on GPUs, and the outputs that may stay there. Empty by default.
#[derive(Debug, Clone, Default)]
pub struct OnGpus {
    /// The objects that inputs name, each once.
    pub(crate) objects: Vec<Arc<ObjectHandle>>,
    /// Names of the outputs that may stay on their GPU for other requests to read.
    pub(crate) keep: Vec<String>,
}

/// The answer to a request.
#[derive(Debug)]
pub struct AttemptOutcome {
    /// The outputs of the run.
    pub outputs: RunOutputs,
    /// The request's time by phase.
    pub split: AttemptTimes,
    /// A process's remarks about outputs, by name.
    pub marks: BTreeMap<String, OutputRemark>,
    /// The GPU of the run; `None`: the run was in a process beside the GPUs.
    pub gpu: Option<GpuIndex>,
    /// The SMs of the run; `None` without a shared GPU.
    pub on: Option<SmUse>,
    /// Number of attempts made here, the answered attempt included.
    pub attempts: u32,
}

/// The outputs of a run, for one of its requests.
#[derive(Debug, Clone, Default)]
pub struct RunOutputs {
    /// Outputs in the executor's format.
    pub tensors: Vec<Tensor>,
    /// Descriptors that the tensors' `contents_fd` index.
    pub descriptors: Vec<Descriptor>,
    /// The objects that the tensors name.
    pub(crate) objects: Vec<Arc<ObjectHandle>>,
    /// Transfers of the inputs that were objects on GPUs.
    pub(crate) fetches: Vec<InputTransfer>,
    /// The request's rows of the outputs, if several requests ran as one; `None`: all rows.
    pub share: Option<BatchShare>,
}

/// The transfer of an input that was an object on a GPU (D04).
#[derive(Debug, Clone)]
pub(crate) struct InputTransfer {
    pub(crate) input: String,
    pub(crate) method: FetchMethod,
    pub(crate) bytes: u64,
    pub(crate) took: Duration,
}

/// A process's remarks about an output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputRemark {
    /// The object that already holds the output on this worker.
    pub object: Option<DataId>,
    /// Whether the output is for the workflow's caller: such an output is answered, and not stored
    /// for the next function (D03).
    pub response: bool,
}

/// A request's rows in the outputs of a run that it shared with other requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShare {
    /// The request's first row.
    pub first: u32,
    /// Number of the request's rows.
    pub rows: u32,
    /// Number of rows in the run.
    pub of: u32,
}

impl BatchShare {
    /// Returns the request's proportional part of a duration of the whole run.
    #[must_use]
    pub fn of(self, whole: Duration) -> Duration {
        whole * self.rows / self.of.max(1)
    }
}

/// The time of a request by phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttemptTimes {
    /// Wait for the model to be loaded from the disk into host memory: a cold start. Zero if the
    /// model was there.
    pub cold: Duration,
    /// Time from acceptance to the start of the request's turn on a GPU, without `cold`. Includes
    /// the wait behind other requests of its sequence.
    pub queue: Duration,
    /// Time in the turn without computing: the wait for the model. Zero if the model was resident.
    pub swap: Duration,
    /// Time of computing.
    pub run: Duration,
    /// Time between the launches of the run in which the run waited for SMs of a shared GPU.
    pub token: Duration,
    /// Time from acceptance to the answer.
    pub total: Duration,
    /// Bytes copied to the GPU for the request.
    pub swapped: Bytes,
}
