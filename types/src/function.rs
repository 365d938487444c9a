//! What a function is: a published model with its objective, runtime and resources.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::FunctionKey;
use crate::limits::{LABEL_LEN_MAX, LABELS_MAX};
use crate::sequences::{Sequences, SequencesError};
use crate::serving::{Residency, Serving, ServingError};
use crate::units::Bytes;

/// The timeout of a request that names none (DESIGN §1).
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest timeout accepted.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(3600);
/// The tail percentile of a function that names none (T17).
pub const DEFAULT_PERCENTILE: f64 = 0.98;
/// The nodes that keep a function's model when it names no number.
pub const DEFAULT_REPLICAS: u32 = 1;
/// The most nodes that keep a function's model.
pub const REPLICAS_MAX: u32 = 64;
/// The processes that each node keeps of a program, when its function names no number.
pub const DEFAULT_PROCESSES: u32 = 1;
/// The most processes that each node keeps of a program.
pub const PROCESSES_MAX: u32 = 64;

/// How a function's model is run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// An ONNX model, cut into launches by `millrace-model`.
    #[default]
    Onnx,
    /// A program of its owner's, kept running in processes beside the GPUs.
    Process,
}

impl Runtime {
    /// The name in manifests.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Onnx => "onnx",
            Self::Process => "process",
        }
    }
}

/// The name of no runtime.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not known: this version has \"onnx\" and \"process\"")]
pub struct UnknownRuntime(pub String);

impl FromStr for Runtime {
    type Err = UnknownRuntime;

    fn from_str(text: &str) -> Result<Self, UnknownRuntime> {
        let known = [Self::Onnx, Self::Process].into_iter().find(|it| it.as_str() == text);
        known.ok_or_else(|| UnknownRuntime(text.to_owned()))
    }
}

/// A latency objective: `percentile` of requests finish within `deadline`. It only scores a
/// function (T17); how long a client waits is the timeout.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// Within how long a request should be answered.
    pub deadline: Duration,
    /// The share of requests that should be, strictly between 0 and 1: at 1 the required request
    /// count (pn-m)/(1-p) is infinite (T18).
    pub percentile: f64,
}

/// What a function asks of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Resources {
    /// GPU memory to hold for a run: weights and activations. `None` lets the model's weights
    /// decide.
    pub gpu_memory: Option<Bytes>,
}

/// A function as its owner wants it: one revision's content, without its model's bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionSpec {
    /// Whose it is and what it is called.
    pub key: FunctionKey,
    /// Free labels, for people and their tools.
    pub labels: BTreeMap<String, String>,
    /// How the model is run.
    pub runtime: Runtime,
    /// The latency objective, if it has one.
    pub slo: Option<Slo>,
    /// How long a request without a timeout of its own may take.
    pub timeout: Duration,
    /// What it asks of a node.
    pub resources: Resources,
    /// Whether running a request twice does no harm: the worker may then run it again when an
    /// executor dies under it (DESIGN §6).
    pub idempotent: bool,
    /// How many nodes keep its model in host memory, so that the loss of one leaves another ready.
    #[serde(default = "default_replicas")]
    pub replicas: u32,
    /// How a node serves it among others.
    #[serde(default)]
    pub serving: Serving,
    /// How many copies of its program each node runs at one time; 1 for a model, which has none.
    #[serde(default = "default_processes")]
    pub processes: u32,
    /// What of its model is state that is kept from one request to the next; `None`: nothing.
    #[serde(default)]
    pub sequences: Option<Sequences>,
}

/// What a function had that was published before there were replicas.
const fn default_replicas() -> u32 {
    DEFAULT_REPLICAS
}

/// What a function had that was published before there were programs.
const fn default_processes() -> u32 {
    DEFAULT_PROCESSES
}

/// Why a spec was refused. Each message says what to write instead.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// A deadline of zero.
    #[error("slo.deadline is zero: give the time a request may take, such as 50ms, or leave slo out")]
    ZeroDeadline,
    /// A deadline beyond [`TIMEOUT_MAX`].
    #[error("slo.deadline {0:?} is longer than the longest timeout, 1h: shorten it")]
    DeadlineTooLong(Duration),
    /// A percentile outside 0 < p < 1.
    #[error(
        "slo.percentile {0} is out of range: write a share strictly between 0 and 1, such as 0.98 for p98"
    )]
    Percentile(f64),
    /// A timeout of zero.
    #[error("timeout is zero: give the time a client may wait, such as 60s, or leave it out")]
    ZeroTimeout,
    /// A timeout beyond [`TIMEOUT_MAX`].
    #[error("timeout {0:?} is longer than 1h: shorten it")]
    TimeoutTooLong(Duration),
    /// A memory request of zero.
    #[error("resources.gpuMemory is zero: give a size such as 256MiB, or leave it out")]
    ZeroMemory,
    /// Too many labels.
    #[error("{0} labels: at most {LABELS_MAX} are kept")]
    TooManyLabels(usize),
    /// A label's key without text, or one of the two beyond [`LABEL_LEN_MAX`].
    #[error(
        "label {key:?} is not valid: a key has 1 to {LABEL_LEN_MAX} bytes and a value at most {LABEL_LEN_MAX}"
    )]
    Label {
        /// How its key begins.
        key: String,
    },
    /// No replica, or more than [`REPLICAS_MAX`].
    #[error("replicas is {0}: write a number from 1 to {REPLICAS_MAX}, or leave it out for 1")]
    Replicas(u32),
    /// No process, or more than [`PROCESSES_MAX`].
    #[error("processes is {0}: write a number from 1 to {PROCESSES_MAX}, or leave it out for 1")]
    Processes(u32),
    /// Something that only a function of the other runtime has.
    #[error("{field} is of functions with runtime {}: leave it out", .of.as_str())]
    Runtime {
        /// What.
        field: &'static str,
        /// Who has it.
        of: Runtime,
    },
    /// How it is to be served.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// The state that it keeps.
    #[error(transparent)]
    Sequences(#[from] SequencesError),
}

/// Checks how many labels there are, and how long each is.
fn validate_labels(labels: &BTreeMap<String, String>) -> Result<(), SpecError> {
    if labels.len() > LABELS_MAX {
        return Err(SpecError::TooManyLabels(labels.len()));
    }
    let is_bad =
        |key: &str, value: &str| !(1..=LABEL_LEN_MAX).contains(&key.len()) || value.len() > LABEL_LEN_MAX;
    match labels.iter().find(|(key, value)| is_bad(key, value)) {
        Some((key, _)) => Err(SpecError::Label { key: beginning(key) }),
        None => Ok(()),
    }
}

/// As much of a name that may be too long as a message needs.
pub(crate) fn beginning(name: &str) -> String {
    name.chars().take(32).collect()
}

impl FunctionSpec {
    /// A spec with every default.
    #[must_use]
    pub fn new(key: FunctionKey) -> Self {
        Self {
            key,
            labels: BTreeMap::new(),
            runtime: Runtime::Onnx,
            slo: None,
            timeout: DEFAULT_TIMEOUT,
            resources: Resources::default(),
            idempotent: true,
            replicas: DEFAULT_REPLICAS,
            serving: Serving::default(),
            processes: DEFAULT_PROCESSES,
            sequences: None,
        }
    }

    /// Checks every field against its range. The one place that does: manifests, the admin API and
    /// the replicated state all call it.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn validate(&self) -> Result<(), SpecError> {
        validate_terms(self.slo, self.timeout, &self.labels)?;
        if self.resources.gpu_memory == Some(Bytes::ZERO) {
            return Err(SpecError::ZeroMemory);
        }
        if !(1..=REPLICAS_MAX).contains(&self.replicas) {
            return Err(SpecError::Replicas(self.replicas));
        }
        if !(1..=PROCESSES_MAX).contains(&self.processes) {
            return Err(SpecError::Processes(self.processes));
        }
        self.validate_runtime()?;
        if let Some(sequences) = &self.sequences {
            sequences.validate(self.replicas, self.serving.batching.is_some())?;
        }
        Ok(self.serving.validate(self.idempotent)?)
    }

    /// A program takes no place on a GPU, and a model has no processes of its own.
    fn validate_runtime(&self) -> Result<(), SpecError> {
        let misplaced = match self.runtime {
            Runtime::Onnx => [("processes", self.processes != DEFAULT_PROCESSES); 4],
            Runtime::Process => [
                ("resources.gpuMemory", self.resources.gpu_memory.is_some()),
                ("residency", self.serving.residency != Residency::default()),
                ("batching", self.serving.batching.is_some()),
                ("sequences", self.sequences.is_some()),
            ],
        };
        let of = if self.runtime == Runtime::Onnx { Runtime::Process } else { Runtime::Onnx };
        match misplaced.into_iter().find(|&(_, is_there)| is_there) {
            Some((field, _)) => Err(SpecError::Runtime { field, of }),
            None => Ok(()),
        }
    }
}

/// Checks what every model has, function or workflow.
///
/// # Errors
/// The first [`SpecError`] found.
pub(crate) fn validate_terms(
    slo: Option<Slo>,
    timeout: Duration,
    labels: &BTreeMap<String, String>,
) -> Result<(), SpecError> {
    if let Some(slo) = slo {
        slo.validate()?;
    }
    if timeout.is_zero() {
        return Err(SpecError::ZeroTimeout);
    }
    if timeout > TIMEOUT_MAX {
        return Err(SpecError::TimeoutTooLong(timeout));
    }
    validate_labels(labels)
}

impl Slo {
    /// Checks its ranges.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn validate(self) -> Result<(), SpecError> {
        if self.deadline.is_zero() {
            return Err(SpecError::ZeroDeadline);
        }
        if self.deadline > TIMEOUT_MAX {
            return Err(SpecError::DeadlineTooLong(self.deadline));
        }
        // Written so that NaN is refused too.
        if !(self.percentile > 0.0 && self.percentile < 1.0) {
            return Err(SpecError::Percentile(self.percentile));
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ids::{FunctionName, TenantName};

    fn spec() -> FunctionSpec {
        FunctionSpec::new(FunctionKey {
            tenant: TenantName::default(),
            name: FunctionName::new("digits").unwrap(),
        })
    }

    fn check_slo(deadline_ms: u64, percentile: f64) -> Result<(), SpecError> {
        let slo = Slo { deadline: Duration::from_millis(deadline_ms), percentile };
        FunctionSpec { slo: Some(slo), ..spec() }.validate()
    }

    #[test]
    fn defaults_are_valid() {
        assert_eq!(spec().validate(), Ok(()));
    }

    #[test]
    fn refuses_each_bad_objective() {
        assert_eq!(check_slo(50, 0.98), Ok(()));
        assert_eq!(check_slo(0, 0.98), Err(SpecError::ZeroDeadline));
        for p in [0.0, 1.0, -0.5, 98.0] {
            assert_eq!(check_slo(50, p), Err(SpecError::Percentile(p)));
        }
        assert!(matches!(check_slo(50, f64::NAN), Err(SpecError::Percentile(_))));
        assert!(matches!(check_slo(4_000_000, 0.5), Err(SpecError::DeadlineTooLong(_))));
    }

    #[test]
    fn refuses_zero_timeout_and_zero_memory() {
        let zero_timeout = FunctionSpec { timeout: Duration::ZERO, ..spec() };
        assert_eq!(zero_timeout.validate(), Err(SpecError::ZeroTimeout));
        let resources = Resources { gpu_memory: Some(Bytes::ZERO) };
        assert_eq!(FunctionSpec { resources, ..spec() }.validate(), Err(SpecError::ZeroMemory));
    }

    #[test]
    fn refuses_labels_without_a_key_and_too_long_ones() {
        let check = |key: usize, value: usize| {
            let labels = [("k".repeat(key), "v".repeat(value))].into();
            FunctionSpec { labels, ..spec() }.validate()
        };
        let refused = |key: usize| Err(SpecError::Label { key: "k".repeat(key) });
        assert_eq!((check(1, 0), check(LABEL_LEN_MAX, LABEL_LEN_MAX)), (Ok(()), Ok(())));
        assert_eq!((check(0, 1), check(1, LABEL_LEN_MAX + 1)), (refused(0), refused(1)));
        assert_eq!(check(LABEL_LEN_MAX + 1, 0), refused(32));
    }

    #[test]
    fn a_program_has_processes_and_nothing_on_gpus() {
        let program = FunctionSpec { runtime: Runtime::Process, processes: PROCESSES_MAX, ..spec() };
        assert_eq!(program.validate(), Ok(()));
        let check = |processes| FunctionSpec { processes, ..program.clone() }.validate();
        for number in [0, PROCESSES_MAX + 1] {
            assert_eq!(check(number), Err(SpecError::Processes(number)));
        }
        let resources = Resources { gpu_memory: Some(Bytes::mib(1)) };
        let memory = FunctionSpec { resources, ..program.clone() }.validate();
        let refused = |field, of| Err(SpecError::Runtime { field, of });
        assert_eq!(memory, refused("resources.gpuMemory", Runtime::Onnx));
        let model = FunctionSpec { runtime: Runtime::Onnx, ..program }.validate();
        assert_eq!(model, refused("processes", Runtime::Process));
    }

    #[test]
    fn refuses_no_replica_and_too_many() {
        let check = |replicas| FunctionSpec { replicas, ..spec() }.validate();
        assert_eq!((check(1), check(REPLICAS_MAX)), (Ok(()), Ok(())));
        assert_eq!(check(0), Err(SpecError::Replicas(0)));
        assert_eq!(check(REPLICAS_MAX + 1), Err(SpecError::Replicas(REPLICAS_MAX + 1)));
    }
}
