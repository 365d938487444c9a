//! The specification of a function: a published model with its objective, runtime and resources.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::FunctionKey;
use crate::limits::{LABEL_LEN_MAX, LABELS_MAX};
use crate::sequences::{SequenceSpec, SequenceSpecError};
use crate::serving::{ResidencyOptions, SchedulingOptions, SchedulingOptionsError};
use crate::slices::{ASKED_SLICES_MAX, AskedSlices};
use crate::units::Bytes;

/// The timeout of a request that sets none.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest accepted timeout.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(3600);
/// The default percentile of a latency objective (T17).
pub const DEFAULT_PERCENTILE: f64 = 0.98;
/// The default number of nodes that keep a function's model.
pub const DEFAULT_REPLICAS: u32 = 1;
/// Maximum number of nodes that keep a function's model.
pub const REPLICAS_MAX: u32 = 64;
/// The default number of processes of a program on each node.
pub const DEFAULT_PROCESSES: u32 = 1;
/// Maximum number of processes of a program on each node.
pub const PROCESSES_MAX: u32 = 64;

/// The runtime that executes a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runtime {
    /// An ONNX model, which `millrace-model` cuts into launches.
    #[default]
    Onnx,
    /// A program of the function's owner, which runs in processes beside the GPUs.
    Process,
}

impl Runtime {
    /// Returns the runtime's name in manifests.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Onnx => "onnx",
            Self::Process => "process",
        }
    }
}

/// The error for an unknown runtime; holds the name.
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

/// A latency objective: a share `percentile` of the requests finishes within `deadline`. The
/// objective only scores a function (T17); the timeout limits how long a client waits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// The time within which a request should be answered.
    pub deadline: Duration,
    /// The share of requests that should meet the deadline, strictly between 0 and 1. At 1 the
    /// required request count (pn-m)/(1-p) would be infinite (T18).
    pub percentile: f64,
}

/// The resources that a function needs on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ResourceRequest {
    /// GPU memory reserved for a run: weights and activations. With `None`, the size of the model's
    /// weights decides.
    pub gpu_memory: Option<Bytes>,
}

/// The content of a revision of a function as its owner declared it, without the bytes of the
/// model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionSpec {
    /// The tenant and the name of the function.
    pub key: FunctionKey,
    /// Free-form labels for people and their tools.
    pub labels: BTreeMap<String, String>,
    /// The runtime that executes the function.
    pub runtime: Runtime,
    /// The latency objective, if there is one.
    pub slo: Option<Slo>,
    /// The timeout of requests that set none of their own.
    pub timeout: Duration,
    /// The resources that the function needs on a node.
    pub resources: ResourceRequest,
    /// Whether a request may safely run twice. If so, the worker may run a request again after the
    /// executor of its first run died.
    pub idempotent: bool,
    /// The number of nodes that keep the model in host memory. With more than one, a lost node
    /// leaves another node ready.
    #[serde(default = "default_replicas")]
    pub replicas: u32,
    /// Scheduling options of the function on a node.
    #[serde(default)]
    pub serving: SchedulingOptions,
    /// The number of processes of the program that each node runs at once; 1 for a model, which has
    /// no process.
    #[serde(default = "default_processes")]
    pub processes: u32,
    /// The model's state that is carried from a request to the next; `None` for a function without
    /// state.
    #[serde(default)]
    pub sequences: Option<SequenceSpec>,
    /// The slices of GPUs in which the function computes; `None` for a function that computes on any
    /// SMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<AskedSlices>,
}

/// Returns the replica count of specs that were stored without one.
const fn default_replicas() -> u32 {
    DEFAULT_REPLICAS
}

/// Returns the process count of specs that were stored without one.
const fn default_processes() -> u32 {
    DEFAULT_PROCESSES
}

/// The fault of a refused spec. Each message names the correction.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// The deadline is zero.
    #[error("slo.deadline is zero: give the time a request may take, such as 50ms, or leave slo out")]
    ZeroDeadline,
    /// The deadline exceeds [`TIMEOUT_MAX`].
    #[error("slo.deadline {0:?} is longer than the longest timeout, 1h: shorten it")]
    DeadlineTooLong(Duration),
    /// The percentile is outside 0 < p < 1.
    #[error(
        "slo.percentile {0} is out of range: write a share strictly between 0 and 1, such as 0.98 for p98"
    )]
    Percentile(f64),
    /// The timeout is zero.
    #[error("timeout is zero: give the time a client may wait, such as 60s, or leave it out")]
    ZeroTimeout,
    /// The timeout exceeds [`TIMEOUT_MAX`].
    #[error("timeout {0:?} is longer than 1h: shorten it")]
    TimeoutTooLong(Duration),
    /// The requested memory is zero.
    #[error("resources.gpuMemory is zero: give a size such as 256MiB, or leave it out")]
    ZeroMemory,
    /// There are more than [`LABELS_MAX`] labels.
    #[error("{0} labels: at most {LABELS_MAX} are allowed")]
    TooManyLabels(usize),
    /// A label's key is empty, or the key or the value exceeds [`LABEL_LEN_MAX`].
    #[error(
        "label {key:?} is not valid: a key has 1 to {LABEL_LEN_MAX} bytes and a value at most {LABEL_LEN_MAX}"
    )]
    Label {
        /// The beginning of the label's key.
        key: String,
    },
    /// The number of replicas is zero or exceeds [`REPLICAS_MAX`].
    #[error("replicas is {0}: write a number from 1 to {REPLICAS_MAX}, or leave replicas out for 1")]
    Replicas(u32),
    /// The number of processes is zero or exceeds [`PROCESSES_MAX`].
    #[error("processes is {0}: write a number from 1 to {PROCESSES_MAX}, or leave processes out for 1")]
    Processes(u32),
    /// The number of slices is zero or exceeds [`ASKED_SLICES_MAX`].
    #[error(
        "slices.min or slices.max is {0}: write a number from 1 to {ASKED_SLICES_MAX}, or leave slices out for 1"
    )]
    Slices(u32),
    /// The greatest number of slices is below the least.
    #[error("slices.max {max} is below slices.min {min}: write a max of at least {min}")]
    SlicesMax {
        /// The least number.
        min: u32,
        /// The greatest number.
        max: u32,
    },
    /// The spec sets a field that only functions with the other runtime have.
    #[error("{field} applies only to functions with runtime {}: leave it out", .of.as_str())]
    Runtime {
        /// The name of the field.
        field: &'static str,
        /// The runtime that has the field.
        of: Runtime,
    },
    /// A scheduling option is refused.
    #[error(transparent)]
    Serving(#[from] SchedulingOptionsError),
    /// The declaration of state is refused.
    #[error(transparent)]
    Sequences(#[from] SequenceSpecError),
}

/// Checks the number of labels and their lengths.
fn validate_labels(labels: &BTreeMap<String, String>) -> Result<(), SpecError> {
    if labels.len() > LABELS_MAX {
        return Err(SpecError::TooManyLabels(labels.len()));
    }
    let is_bad =
        |key: &str, value: &str| !(1..=LABEL_LEN_MAX).contains(&key.len()) || value.len() > LABEL_LEN_MAX;
    match labels.iter().find(|(key, value)| is_bad(key, value)) {
        Some((key, _)) => Err(SpecError::Label { key: name_prefix(key) }),
        None => Ok(()),
    }
}

/// Returns the first 32 characters of a name that may be too long for a message.
pub(crate) fn name_prefix(name: &str) -> String {
    name.chars().take(32).collect()
}

impl FunctionSpec {
    /// Creates a spec with the default of every other field.
    #[must_use]
    pub fn new(key: FunctionKey) -> Self {
        Self {
            key,
            labels: BTreeMap::new(),
            runtime: Runtime::Onnx,
            slo: None,
            timeout: DEFAULT_TIMEOUT,
            resources: ResourceRequest::default(),
            idempotent: true,
            replicas: DEFAULT_REPLICAS,
            serving: SchedulingOptions::default(),
            processes: DEFAULT_PROCESSES,
            sequences: None,
            slices: None,
        }
    }

    /// Checks every field against its range. Manifests, the admin API and the replicated state all
    /// call this function, so that the ranges are checked in a single place.
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
        if let Some(AskedSlices { min, max, .. }) = self.slices {
            for count in [min, max.unwrap_or(min)] {
                if !(1..=ASKED_SLICES_MAX).contains(&count) {
                    return Err(SpecError::Slices(count));
                }
            }
            if let Some(max) = max.filter(|&max| max < min) {
                return Err(SpecError::SlicesMax { min, max });
            }
        }
        self.validate_runtime()?;
        if let Some(sequences) = &self.sequences {
            sequences.validate(self.replicas, self.serving.batching.is_some())?;
        }
        Ok(self.serving.validate(self.idempotent)?)
    }

    /// Refuses a program that uses a place on a GPU, and a model that has processes of its own.
    fn validate_runtime(&self) -> Result<(), SpecError> {
        let misplaced = match self.runtime {
            Runtime::Onnx => [("processes", self.processes != DEFAULT_PROCESSES); 5],
            Runtime::Process => [
                ("resources.gpuMemory", self.resources.gpu_memory.is_some()),
                ("residency", self.serving.residency != ResidencyOptions::default()),
                ("batching", self.serving.batching.is_some()),
                ("sequences", self.sequences.is_some()),
                ("slices, resources.sm, quotaRequest or quotaLimit", self.slices.is_some()),
            ],
        };
        let of = if self.runtime == Runtime::Onnx { Runtime::Process } else { Runtime::Onnx };
        match misplaced.into_iter().find(|&(_, is_there)| is_there) {
            Some((field, _)) => Err(SpecError::Runtime { field, of }),
            None => Ok(()),
        }
    }
}

/// Checks the fields that functions and workflows share.
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
    /// Checks the ranges of the deadline and the percentile.
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
        // Written so that NaN is refused too: NaN fails both comparisons.
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
    fn bad_objectives_are_refused() {
        assert_eq!(check_slo(50, 0.98), Ok(()));
        assert_eq!(check_slo(0, 0.98), Err(SpecError::ZeroDeadline));
        for p in [0.0, 1.0, -0.5, 98.0] {
            assert_eq!(check_slo(50, p), Err(SpecError::Percentile(p)));
        }
        assert!(matches!(check_slo(50, f64::NAN), Err(SpecError::Percentile(_))));
        assert!(matches!(check_slo(4_000_000, 0.5), Err(SpecError::DeadlineTooLong(_))));
    }

    #[test]
    fn a_zero_timeout_and_zero_memory_are_refused() {
        let zero_timeout = FunctionSpec { timeout: Duration::ZERO, ..spec() };
        assert_eq!(zero_timeout.validate(), Err(SpecError::ZeroTimeout));
        let resources = ResourceRequest { gpu_memory: Some(Bytes::ZERO) };
        assert_eq!(FunctionSpec { resources, ..spec() }.validate(), Err(SpecError::ZeroMemory));
    }

    #[test]
    fn labels_without_a_key_and_labels_over_the_limit_are_refused() {
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
    fn a_program_has_processes_and_no_gpu_resources() {
        let program = FunctionSpec { runtime: Runtime::Process, processes: PROCESSES_MAX, ..spec() };
        assert_eq!(program.validate(), Ok(()));
        let check = |processes| FunctionSpec { processes, ..program.clone() }.validate();
        for number in [0, PROCESSES_MAX + 1] {
            assert_eq!(check(number), Err(SpecError::Processes(number)));
        }
        let resources = ResourceRequest { gpu_memory: Some(Bytes::mib(1)) };
        let memory = FunctionSpec { resources, ..program.clone() }.validate();
        let refused = |field, of| Err(SpecError::Runtime { field, of });
        assert_eq!(memory, refused("resources.gpuMemory", Runtime::Onnx));
        let model = FunctionSpec { runtime: Runtime::Onnx, ..program }.validate();
        assert_eq!(model, refused("processes", Runtime::Process));
    }

    #[test]
    fn slices_are_counted_from_one_and_a_program_has_none() {
        let whole = crate::Permille::ALL;
        let terms = crate::Terms::new(whole, whole, crate::Permille::ZERO, whole).unwrap();
        let check = |min| FunctionSpec { slices: Some(AskedSlices::fixed(terms, min)), ..spec() }.validate();
        assert_eq!((check(1), check(ASKED_SLICES_MAX)), (Ok(()), Ok(())));
        assert_eq!(check(0), Err(SpecError::Slices(0)));
        assert_eq!(check(ASKED_SLICES_MAX + 1), Err(SpecError::Slices(ASKED_SLICES_MAX + 1)));
        let slices = Some(AskedSlices::fixed(terms, 1));
        let program = FunctionSpec { runtime: Runtime::Process, slices, ..spec() };
        let refused = SpecError::Runtime {
            field: "slices, resources.sm, quotaRequest or quotaLimit",
            of: Runtime::Onnx,
        };
        assert_eq!(program.validate(), Err(refused));
    }

    #[test]
    fn zero_replicas_and_replicas_over_the_limit_are_refused() {
        let check = |replicas| FunctionSpec { replicas, ..spec() }.validate();
        assert_eq!((check(1), check(REPLICAS_MAX)), (Ok(()), Ok(())));
        assert_eq!(check(0), Err(SpecError::Replicas(0)));
        assert_eq!(check(REPLICAS_MAX + 1), Err(SpecError::Replicas(REPLICAS_MAX + 1)));
    }
}
