//! Parsing and checks of `kind: Function`.

use std::fmt;
use std::time::Duration;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer};

use super::field::{FieldFault, Metadata, SloText, duration, timeout};
use super::program::ProgramText;
use super::source::{ModelSource, in_cluster};
use crate::function::{
    DEFAULT_PROCESSES, DEFAULT_REPLICAS, FunctionSpec, ResourceRequest, Runtime, SpecError,
};
use crate::sequences::{IDLE_DEFAULT, SEQUENCES_DEFAULT, SequenceSpec, StatePair};
use crate::serving::{BatchingOptions, Priority, ResidencyOptions, SchedulingOptions};
use crate::slices::{AskedSlices, Permille, Terms};
use crate::units::{Bytes, ParseBytesError};

/// The manifest of a function.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionManifest {
    /// The declared spec of the function.
    pub spec: FunctionSpec,
    /// The source of the function's model or program.
    pub model: ModelSource,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FunctionText {
    runtime: Option<String>,
    model: Option<Model>,
    program: Option<ProgramText>,
    slo: Option<SloText>,
    timeout: Option<String>,
    #[serde(default)]
    resources: ResourcesText,
    idempotent: Option<bool>,
    replicas: Option<u32>,
    priority: Option<u64>,
    #[serde(default)]
    residency: ResidencyText,
    batching: Option<BatchingText>,
    sequences: Option<SequencesText>,
    slices: Option<SlicesText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    file: Option<String>,
    digest: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ResourcesText {
    gpu_memory: Option<String>,
    sm: Option<ShareText>,
    quota_request: Option<ShareText>,
    quota_limit: Option<ShareText>,
}

/// A share: a number, or text such as `12%` or `12%..50%`.
struct ShareText(String);

impl<'de> Deserialize<'de> for ShareText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShareVisitor)
    }
}

struct ShareVisitor;

impl Visitor<'_> for ShareVisitor {
    type Value = ShareText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a share, such as 12% or 0.3")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ShareText, E> {
        Ok(ShareText(text.to_owned()))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<ShareText, E> {
        Ok(ShareText(number.to_string()))
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<ShareText, E> {
        Ok(ShareText(number.to_string()))
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<ShareText, E> {
        Ok(ShareText(number.to_string()))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SlicesText {
    #[serde(default = "one")]
    min: u32,
    #[serde(default)]
    max: Option<u32>,
}

const fn one() -> u32 {
    1
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ResidencyText {
    #[serde(default)]
    pin: bool,
    #[serde(default)]
    min_warm: u32,
    evict_after: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct BatchingText {
    max_size: u32,
    max_wait: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SequencesText {
    state: Vec<StateText>,
    idle: Option<String>,
    max: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StateText {
    input: String,
    output: String,
}

impl FunctionText {
    pub(super) fn check(self, metadata: Metadata) -> Result<FunctionManifest, FieldFault> {
        let runtime = runtime(self.runtime.as_deref())?;
        let (model, processes) = source(runtime, self.model, self.program)?;
        let spec = FunctionSpec {
            key: metadata.key()?,
            labels: metadata.labels,
            runtime,
            slo: self.slo.map(SloText::check).transpose()?,
            timeout: timeout(self.timeout)?,
            slices: self.resources.slices(self.slices)?,
            resources: self.resources.check()?,
            idempotent: self.idempotent.unwrap_or(true),
            replicas: self.replicas.unwrap_or(DEFAULT_REPLICAS),
            serving: SchedulingOptions {
                priority: self.priority.map_or(Ok(Priority::default()), priority)?,
                residency: self.residency.check()?,
                batching: self.batching.map(BatchingText::check).transpose()?,
            },
            processes: processes.unwrap_or(DEFAULT_PROCESSES),
            sequences: self.sequences.map(SequencesText::check).transpose()?,
        };
        spec.validate().map_err(|e: SpecError| ("spec", e.to_string()))?;
        Ok(FunctionManifest { spec, model })
    }
}

/// Returns the source of a function's model or program, and the number of processes of a program.
fn source(
    runtime: Runtime,
    model: Option<Model>,
    program: Option<ProgramText>,
) -> Result<(ModelSource, Option<u32>), FieldFault> {
    match (runtime, model, program) {
        (Runtime::Onnx, Some(model), None) => Ok((model.check()?, None)),
        (Runtime::Process, None, Some(program)) => program.check(),
        (Runtime::Onnx, ..) => {
            let problem = "a function with runtime onnx has model: {file: FILE}, and no program";
            Err(("spec.model", problem.into()))
        }
        (Runtime::Process, ..) => {
            let problem = "a function with runtime process has program: {file: FILE, inputs: [...], outputs: [...]}, and no model";
            Err(("spec.program", problem.into()))
        }
    }
}

impl Model {
    fn check(self) -> Result<ModelSource, FieldFault> {
        match (self.file, self.digest) {
            (Some(path), None) if path.is_empty() => {
                Err(("spec.model.file", "is empty: name the model's file, relative to this one".into()))
            }
            (Some(path), None) => Ok(ModelSource::File { path, declared: None }),
            (None, Some(digest)) => in_cluster("spec.model.digest", &digest),
            (Some(_), Some(_)) | (None, None) => {
                let problem =
                    "a model has either a file or the digest of a stored model: write model: {file: FILE}";
                Err(("spec.model", problem.into()))
            }
        }
    }
}

impl ResourcesText {
    fn check(self) -> Result<ResourceRequest, FieldFault> {
        let parse = |text: String| {
            text.parse::<Bytes>().map_err(|e: ParseBytesError| ("spec.resources.gpuMemory", e.to_string()))
        };
        Ok(ResourceRequest { gpu_memory: self.gpu_memory.map(parse).transpose()? })
    }

    /// Returns the slices that a function asks for: its SM partition and quotas, with a FaSTPod's defaults of
    /// the whole GPU and no request.
    fn slices(&self, slices: Option<SlicesText>) -> Result<Option<AskedSlices>, FieldFault> {
        let Self { gpu_memory: _, sm, quota_request, quota_limit } = self;
        if sm.is_none() && quota_request.is_none() && quota_limit.is_none() {
            let unasked = "has an effect only with resources.sm, resources.quotaRequest or \
                           resources.quotaLimit: add one of them, or write residency.minWarm to keep copies of \
                           the model on GPUs";
            return slices.map_or(Ok(None), |_| Err(("spec.slices", unasked.into())));
        }
        let (least, most) = sm.as_ref().map_or(Ok((Permille::ALL, Permille::ALL)), sm_range)?;
        let quota = |field, text: &Option<ShareText>, default| {
            let parse = |text: &ShareText| Permille::parse_quota(&text.0);
            text.as_ref().map_or(Ok(default), parse).map_err(|error| (field, error.to_string()))
        };
        let request = quota("spec.resources.quotaRequest", quota_request, Permille::ZERO)?;
        let limit = quota("spec.resources.quotaLimit", quota_limit, Permille::ALL)?;
        let terms = Terms::new(least, most, request, limit);
        let terms = terms.map_err(|error| ("spec.resources", error.to_string()))?;
        let SlicesText { min, max } = slices.unwrap_or(SlicesText { min: 1, max: None });
        Ok(Some(AskedSlices { terms, min, max }))
    }
}

/// Parses the SMs of a slice: a share, or the least and the greatest share.
fn sm_range(text: &ShareText) -> Result<(Permille, Permille), FieldFault> {
    let text = &text.0;
    let share = |text: &str| Permille::parse_sm(text).map_err(|e| ("spec.resources.sm", e.to_string()));
    match text.split_once("..") {
        Some((least, most)) => Ok((share(least)?, share(most)?)),
        None => share(text).map(|share| (share, share)),
    }
}

impl ResidencyText {
    fn check(self) -> Result<ResidencyOptions, FieldFault> {
        let after = self.evict_after.map(|text| duration("spec.residency.evictAfter", &text));
        Ok(ResidencyOptions { pin: self.pin, min_warm: self.min_warm, evict_after: after.transpose()? })
    }
}

impl BatchingText {
    fn check(self) -> Result<BatchingOptions, FieldFault> {
        let wait = self.max_wait.map(|text| duration("spec.batching.maxWait", &text));
        Ok(BatchingOptions { max_size: self.max_size, max_wait: wait.unwrap_or(Ok(Duration::ZERO))? })
    }
}

impl SequencesText {
    fn check(self) -> Result<SequenceSpec, FieldFault> {
        let idle = self.idle.map(|text| duration("spec.sequences.idle", &text));
        let pair = |StateText { input, output }| StatePair { input, output };
        Ok(SequenceSpec {
            state: self.state.into_iter().map(pair).collect(),
            idle: idle.unwrap_or(Ok(IDLE_DEFAULT))?,
            max: self.max.unwrap_or(SEQUENCES_DEFAULT),
        })
    }
}

fn priority(level: u64) -> Result<Priority, FieldFault> {
    let first = Priority::FIRST;
    let last = Priority::LAST;
    let problem = || format!("{level} is not a priority: write a number from {first} (goes first) to {last}");
    Priority::new(level).ok_or_else(|| ("spec.priority", problem()))
}

fn runtime(text: Option<&str>) -> Result<Runtime, FieldFault> {
    let named = text.map(str::parse::<Runtime>).transpose();
    named.map(Option::unwrap_or_default).map_err(|error| ("spec.runtime", error.to_string()))
}
