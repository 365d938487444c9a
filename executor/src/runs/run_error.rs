//! The reasons why a run fails, and the failure kind that the worker learns.

use millrace_device::Error as DeviceError;
use millrace_engine::Error as EngineError;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{RunFailed, RunFailure};
use millrace_proto::frames;

use crate::memory::mapping_state::StepRefusal;
use crate::memory::{kept_outputs, objects};
use crate::runs::batch;
use crate::socket::conversions;
use crate::socket::events::clip;

/// Reason why a run failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Message(#[from] conversions::Error),
    #[error(transparent)]
    Batch(#[from] batch::BatchError),
    #[error("output {name:?} has shape {shape:?}, which is not one row for each of {rows}")]
    OutputRows { name: String, shape: Vec<usize>, rows: usize },
    #[error("input {0:?} is missing")]
    InputMissing(String),
    #[error("the model has no input {0:?}, or the input is given twice")]
    InputUnknown(String),
    #[error("input {name:?} is {found}, but the model takes {due}")]
    InputType { name: String, found: String, due: String },
    #[error("input {0:?}: {1}")]
    Object(String, objects::Error),
    #[error("the model has no output {0:?}")]
    OutputUnknown(String),
    #[error("output {0:?} is to be kept, but is not requested")]
    KeptUnknown(String),
    #[error("cannot keep outputs: {0}")]
    Kept(#[from] kept_outputs::Error),
    #[error("value {0:?} is missing: the launches are inconsistent")]
    ValueMissing(String),
    #[error(transparent)]
    Refused(#[from] StepRefusal),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("cannot send the response: {0}")]
    Answer(#[from] frames::FrameError),
}

impl From<DeviceError> for RunError {
    fn from(error: DeviceError) -> Self {
        Self::Engine(error.into())
    }
}

impl RunError {
    pub(crate) fn kind(&self) -> RunFailure {
        match self {
            Self::Refused(refusal) => run_refused(refusal),
            Self::Object(_, error) | Self::Batch(batch::BatchError::Object(_, error)) => run_without(error),
            // The GPU works, so the run may succeed on another GPU or later.
            Self::Kept(_) => RunFailure::OutOfMemory,
            Self::Engine(EngineError::Device(error)) => run_failure(error),
            _ => RunFailure::Model,
        }
    }
}

/// Returns the event for a failed run.
pub(crate) fn failed(run: u64, failure: RunFailure, message: impl ToString) -> Event {
    Event::RunFailed(RunFailed { run, failure: failure.into(), message: clip(message) })
}

/// Returns the failure kind of a run for a device error.
fn run_failure(error: &DeviceError) -> RunFailure {
    match error {
        DeviceError::NotResident(_) | DeviceError::NotMapped(_) => RunFailure::NotResident,
        DeviceError::OutOfMemory(_) => RunFailure::OutOfMemory,
        DeviceError::BadExtent { .. }
        | DeviceError::Busy
        | DeviceError::CopyFailed(_)
        | DeviceError::PeerLost(_)
        | DeviceError::ContextLost(_)
        | DeviceError::Lost(_)
        | DeviceError::Unsealed { .. }
        | DeviceError::Unsupported(_)
        | DeviceError::Driver(_)
        | DeviceError::Os { .. } => RunFailure::Device,
    }
}

/// Returns the failure kind of a run for a refused step.
fn run_refused(refusal: &StepRefusal) -> RunFailure {
    match refusal {
        StepRefusal::Stale { .. } => RunFailure::StaleGeneration,
        StepRefusal::NotMapped(_)
        | StepRefusal::StillMapped(_)
        | StepRefusal::CopyFailed(_)
        | StepRefusal::Freed(_) => RunFailure::NotResident,
        StepRefusal::Lost(_) => RunFailure::Device,
    }
}

/// Returns the failure kind of a run for an object that cannot be read.
fn run_without(error: &objects::Error) -> RunFailure {
    match error {
        objects::Error::Unknown(_) | objects::Error::NotLoaded { .. } => RunFailure::NotResident,
        objects::Error::Range { .. } => RunFailure::Model,
        objects::Error::Refused(refusal) => run_refused(refusal),
    }
}
