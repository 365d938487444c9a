//! A request as the worker sees it, and its answer: the types between the gRPC service and the
//! actors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_policy::dispatch::Inputs;
use millrace_proto::executor::{Tensor, tensor::Contents};
use millrace_proto::worker::FetchMethod;
use millrace_types::{Bytes, DataId, GpuIndex, RequestId, RevisionKey, Timestamp};

use crate::objects::{Kept, Place};
use crate::port::Descriptor;

/// One attempt of one request, checked against the function's declaration.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// The cluster's name for the request.
    pub request_id: RequestId,
    /// How often the request may still be started, counting this time; 0 counts as 1.
    pub attempts_left: u32,
    /// What to run.
    pub revision: RevisionKey,
    /// What is left of the client's timeout.
    pub timeout: Duration,
    /// What is left of the time by which its answer is wanted, where that is not its function's own
    /// objective: a workflow has one for all of its steps.
    pub objective: Option<Duration>,
    /// What its client asks for: 1 goes first, 0 leaves it to the function, which it may not go
    /// before.
    pub priority: u64,
    /// The inputs, as the executor takes them.
    pub inputs: Vec<Tensor>,
    /// What the inputs' `contents_fd` count.
    pub descriptors: Vec<Descriptor>,
    /// What of its data is on GPUs.
    pub on_gpus: OnGpus,
    /// The outputs asked for; empty asks for all.
    pub outputs: Vec<String>,
    /// What is likely to be asked for with its outputs, and should be on a GPU then (D29).
    pub next: Vec<RevisionKey>,
    /// How long it has waited here for its model to come into host memory: that counts as well.
    pub cold: Duration,
    /// How long it has waited here behind others of its sequence: that counts too.
    pub behind: Duration,
    /// Whether it completed before and is counted and charged; what it gave was lost then.
    pub counted: bool,
}

impl Invocation {
    /// How many bytes of its inputs each GPU has now. One that is on its way counts where it was until all
    /// of it is there: who claims it before that reads it where it was.
    pub(crate) fn inputs_on_gpus(&self) -> Inputs {
        let objects = &self.on_gpus.objects;
        if objects.is_empty() {
            return Inputs::NONE;
        }
        let on_gpu = |input: &Tensor| {
            let Some(Contents::Object(part)) = &input.contents else { return None };
            let object = objects.iter().find(|object| object.key.0 == part.object)?;
            matches!(object.place(), Place::Gpu(_)).then_some((object.gpu, Bytes(part.bytes)))
        };
        Inputs::of(self.inputs.iter().filter_map(on_gpu))
    }
}

/// A request that is not in the node's queue, as far as bytes are to cross for it: by when they are wanted
/// depends on it all the same.
#[derive(Debug)]
pub(crate) struct Asker {
    /// What it runs.
    pub(crate) revision: RevisionKey,
    /// When it came here.
    pub(crate) came: Timestamp,
    /// Within how long from then on its answer is wanted, where that is known here or is not its function's
    /// own objective.
    pub(crate) objective: Option<Duration>,
}

impl Asker {
    /// By when its answer is wanted, as far as that is known without asking the node for its function's
    /// objective.
    pub(crate) fn wanted_by(&self) -> Option<Timestamp> {
        Some(self.came + self.objective?)
    }
}

/// What of a request's data is on GPUs, and may stay there. Nothing, by default.
#[derive(Debug, Clone, Default)]
pub struct OnGpus {
    /// The objects that inputs name, each once.
    pub(crate) objects: Vec<Arc<Kept>>,
    /// The outputs that may stay where they are made, for others to read.
    pub(crate) keep: Vec<String>,
}

/// An answer.
#[derive(Debug)]
pub struct Completion {
    /// The outputs, as the executor gave them.
    pub outputs: Vec<Tensor>,
    /// What the outputs' `contents_fd` count.
    pub descriptors: Vec<Descriptor>,
    /// The objects that outputs name.
    pub(crate) kept: Vec<Arc<Kept>>,
    /// How inputs that were objects came.
    pub(crate) brought: Vec<Brought>,
    /// Which of the outputs' rows are this request's; `None`: all.
    pub share: Option<Share>,
    /// Where the time went.
    pub split: Split,
    /// What is said of outputs besides their bytes, by name.
    pub marks: BTreeMap<String, Mark>,
    /// Where it ran; `None`: in a process beside the GPUs.
    pub gpu: Option<GpuIndex>,
    /// Attempts made here, counting the answered one.
    pub attempts: u32,
}

/// How an input came that was an object on a GPU (D04).
#[derive(Debug, Clone)]
pub(crate) struct Brought {
    pub(crate) input: String,
    pub(crate) method: FetchMethod,
    pub(crate) bytes: u64,
    pub(crate) took: Duration,
}

/// What a process said of an output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mark {
    /// It is an object here already.
    pub object: Option<DataId>,
    /// It is for the workflow's caller: answered, and not kept for the next function (D03).
    pub response: bool,
}

/// A request's part of the outputs of a run that it shared with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Its first row.
    pub first: u32,
    /// How many are its.
    pub rows: u32,
    /// How many there are.
    pub of: u32,
}

impl Share {
    /// Its part of what the whole run took.
    #[must_use]
    pub fn of(self, whole: Duration) -> Duration {
        whole * self.rows / self.of.max(1)
    }
}

/// Where the time of a request went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// Waiting for the model to come into host memory from the disk: a cold start. Zero where it was
    /// there.
    pub cold: Duration,
    /// Accepted until its turn on a GPU, but for that; behind others of its sequence too.
    pub queue: Duration,
    /// Its turn until done, without computing: waiting for the model. Zero where it was resident.
    pub swap: Duration,
    /// Computing.
    pub run: Duration,
    /// Accepted until answered.
    pub total: Duration,
    /// Copied to the GPU for it.
    pub swapped: Bytes,
}
