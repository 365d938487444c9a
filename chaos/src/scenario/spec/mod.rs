//! A scenario as its file defines it: the cluster, the functions, the load, the faults and the
//! invariants. Pure: text in; a [`ScenarioSpec`] out, or the fault and its position. An invalid file is
//! refused before anything is started.
//!
//! A file has any of three bodies. A `round` of steps is repeated `rounds` times. A `storm` of
//! faults, each at its own rate, lasts for the time `lasts`. A scenario in code is named by
//! `plays`, and has `rounds` or `lasts`.

mod check;
mod fault;
mod values;

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use anyhow::{Context as _, anyhow};
use serde::Deserialize;

pub(crate) use self::fault::{
    ClockJumpSpec, CutSide, CutSpec, DeviceFault, DiskStallSpec, FaultSpec, FaultTarget, JumpDirection,
    SlowLinksSpec,
};
pub(crate) use self::values::{DurationRange, MemorySize};
use crate::load::LoadMix;

/// A whole scenario file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ScenarioSpec {
    pub(crate) name: String,
    pub(crate) about: String,
    #[serde(default)]
    pub(crate) cluster: ClusterShape,
    pub(crate) functions: Vec<FunctionGroup>,
    #[serde(default)]
    pub(crate) workflows: Vec<WorkflowChain>,
    #[serde(default)]
    pub(crate) sequences: Vec<CounterSpec>,
    #[serde(default)]
    pub(crate) load: LoadMix,
    /// Number of repetitions of the round, or of the scenario in code.
    pub(crate) rounds: Option<NonZeroU32>,
    #[serde(default)]
    pub(crate) round: Vec<RoundStep>,
    pub(crate) lasts: Option<DurationRange>,
    #[serde(default)]
    pub(crate) storm: Vec<FaultStream>,
    pub(crate) plays: Option<CodedScenario>,
    pub(crate) invariants: BTreeSet<Invariant>,
    /// Maximum time in which the cluster settles after the end of faults and load.
    #[serde(default = "healthy_within")]
    pub(crate) healthy_within: DurationRange,
}

/// The cluster. By default, there are three controllers and two workers with one small GPU each, so
/// that the cluster starts in seconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct ClusterShape {
    pub(crate) controllers: u64,
    pub(crate) workers: u32,
    /// Number of GPUs of each worker.
    pub(crate) gpus: u32,
    pub(crate) gpu_memory: MemorySize,
    pub(crate) host_memory: MemorySize,
    pub(crate) isolation: Option<IsolationName>,
}

impl Default for ClusterShape {
    fn default() -> Self {
        let gpu_memory = MemorySize(256 << 20);
        let host_memory = MemorySize(512 << 20);
        Self { controllers: 3, workers: 2, gpus: 1, gpu_memory, host_memory, isolation: None }
    }
}

/// The models that share an executor process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum IsolationName {
    Gpu,
    Model,
    Resident,
}

impl IsolationName {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Model => "model",
            Self::Resident => "resident",
        }
    }
}

/// Functions that stay, with one kind of network. If the count is above one, the functions are
/// numbered, and each has its own weights.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FunctionGroup {
    pub(crate) name: String,
    pub(crate) model: SynthKind,
    #[serde(default = "one")]
    pub(crate) replicas: NonZeroU32,
    #[serde(default = "one")]
    pub(crate) count: NonZeroU32,
}

/// A chain of functions, each with the output of the one before as its input, invoked as one model.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct WorkflowChain {
    pub(crate) name: String,
    /// The names of the functions. Each output, except for the last, has to fit the next function's
    /// input.
    pub(crate) steps: Vec<String>,
    /// Number of rows of a request. With many rows, a step's output is too large to be returned,
    /// and stays on the worker that made it.
    #[serde(default = "one")]
    pub(crate) rows: NonZeroU32,
}

/// A function that keeps state, and counts the requests of each of its sequences.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct CounterSpec {
    pub(crate) name: String,
    /// Number of values in the state: above 16,384, the state stays on the GPU that made it.
    pub(crate) width: NonZeroU32,
}

/// Networks of `millrace synth` with one FP32 input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SynthKind {
    Mlp,
    TinyCnn,
    Transformer,
}

impl SynthKind {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::TinyCnn => "tiny-cnn",
            Self::Transformer => "transformer",
        }
    }
}

/// A step of a round.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RoundStep {
    /// Injects a fault, from which the times of later steps are measured.
    Fault(FaultSpec),
    /// Waits for a condition.
    Await(AwaitCondition),
    /// Waits for a condition, within a promised time.
    Promise(PromiseSpec),
    /// Lets the load run for a while.
    Pause(DurationRange),
    /// Undoes every open fault that does not end by itself.
    Repair,
}

/// The condition for which a step waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AwaitCondition {
    /// A controller other than the leader at the latest fault leads.
    AnotherLeader,
    /// A write and a request succeed that were made after the latest fault.
    Service,
    /// The worker that the latest fault concerned counts as lost.
    Lost,
    /// Every function is served.
    Served,
    /// Every killed executor is replaced.
    Executors,
    /// Every controller and worker is back.
    Whole,
}

/// A promised time.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct PromiseSpec {
    pub(crate) r#await: AwaitCondition,
    pub(crate) within: DurationRange,
    /// The document that contains the promise.
    pub(crate) source: String,
}

/// A fault of a storm, repeated at a rate.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FaultStream {
    /// Interval between two faults.
    pub(crate) every: DurationRange,
    pub(crate) fault: FaultSpec,
    /// Time from a fault to its repair, if the fault needs one.
    pub(crate) r#for: Option<DurationRange>,
}

/// A scenario in code, which makes observations that no file could describe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CodedScenario {
    ClockJump,
    FullDisk,
    HostileClients,
    Partition,
    PoisonRequest,
    TornStore,
}

/// An invariant that has to hold; each is a module of [`crate::oracle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Invariant {
    /// No idempotent request is lost.
    Answered,
    /// Every answer equals the answer from before the faults.
    Right,
    /// No acknowledged write is lost.
    Acknowledged,
    /// Admin reads and writes are linearizable.
    Linearizable,
    /// The cluster is healthy again, and its controllers agree.
    Healthy,
    /// Bills count every answer once.
    Billed,
    /// Every answer of a sequence counts each of its requests once, and no sequence is left at the
    /// end.
    Counted,
    /// The resources of the worker do not grow.
    Flat,
    /// No shared memory is left behind.
    Returned,
    /// No process outlives its parent.
    Gone,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

fn healthy_within() -> DurationRange {
    DurationRange::exactly(std::time::Duration::from_secs(10))
}

impl ScenarioSpec {
    /// Parses a file. `origin` names the file in errors.
    ///
    /// # Errors
    /// The fault in the file, and its position.
    pub(crate) fn parse(origin: &str, text: &str) -> anyhow::Result<Self> {
        let spec: Self =
            serde_saphyr::from_str(text).map_err(|error| anyhow!("{origin} is not a scenario: {error}"))?;
        spec.check().with_context(|| format!("{origin} is not a scenario"))?;
        Ok(spec)
    }

    /// Returns every fault in the body.
    pub(crate) fn faults(&self) -> impl Iterator<Item = &FaultSpec> {
        let steps = self.round.iter().filter_map(|step| match step {
            RoundStep::Fault(fault) => Some(fault),
            _ => None,
        });
        steps.chain(self.storm.iter().map(|stream| &stream.fault))
    }

    /// Whether the scenario cuts links.
    pub(crate) fn cuts(&self) -> bool {
        self.plays == Some(CodedScenario::Partition)
            || self.faults().any(|fault| matches!(fault, FaultSpec::Cut(_)))
    }

    /// Whether the scenario slows links, which only proxies can do.
    pub(crate) fn slows(&self) -> bool {
        self.faults().any(|fault| matches!(fault, FaultSpec::Slow(_)))
    }

    /// Whether the scenario lasts for a time rather than a number of rounds.
    pub(crate) fn is_timed(&self) -> bool {
        !self.storm.is_empty() || self.plays == Some(CodedScenario::HostileClients)
    }

    /// Whether controllers have to run the fault service.
    pub(crate) fn is_injected(&self) -> bool {
        self.plays == Some(CodedScenario::ClockJump)
            || self.faults().any(|fault| matches!(fault, FaultSpec::StallDisk(_) | FaultSpec::MoveClock(_)))
    }

    /// Whether workers have to accept faults of their devices.
    pub(crate) fn fails_devices(&self) -> bool {
        self.faults().any(|fault| matches!(fault, FaultSpec::Device(_)))
    }
}

#[cfg(test)]
mod tests;
