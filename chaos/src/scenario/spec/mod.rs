//! A scenario as its file says it: which cluster, which functions and load, which faults, what has to
//! hold. Pure: text in, a [`Spec`] out, or what is wrong with it and where; whatever is refused is
//! refused before anything is started.
//!
//! A file has one of three bodies: a `round` of steps, done `rounds` times; a `storm` of faults, each
//! at its own rate, for as long as it `lasts`; or the name of what is in code and `plays`. The last is done
//! `rounds` times too, or for as long as it `lasts`.

mod check;
mod fault;
mod values;

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use anyhow::{Context as _, anyhow};
use serde::Deserialize;

pub(crate) use self::fault::{Cut, DeviceFault, Direction, Fault, Jump, Side, Slow, Stall, Who};
pub(crate) use self::values::{Size, Span};
use crate::load::Mix;

/// A whole file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) about: String,
    #[serde(default)]
    pub(crate) cluster: Shape,
    pub(crate) functions: Vec<Functions>,
    #[serde(default)]
    pub(crate) workflows: Vec<Workflow>,
    #[serde(default)]
    pub(crate) sequences: Vec<Counter>,
    #[serde(default)]
    pub(crate) load: Mix,
    /// How many times the round is done, or what is in code.
    pub(crate) rounds: Option<NonZeroU32>,
    #[serde(default)]
    pub(crate) round: Vec<Step>,
    pub(crate) lasts: Option<Span>,
    #[serde(default)]
    pub(crate) storm: Vec<Stream>,
    pub(crate) plays: Option<Code>,
    pub(crate) invariants: BTreeSet<Invariant>,
    /// How long the cluster may take to settle once faults and load have ended.
    #[serde(default = "healthy_within")]
    pub(crate) healthy_within: Span,
}

/// The cluster: by default three controllers and two workers, each with one small GPU, so that it
/// starts in seconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Shape {
    pub(crate) controllers: u64,
    pub(crate) workers: u32,
    /// Of each worker.
    pub(crate) gpus: u32,
    pub(crate) gpu_memory: Size,
    pub(crate) host_memory: Size,
    pub(crate) isolation: Option<Isolation>,
}

impl Default for Shape {
    fn default() -> Self {
        let (gpu_memory, host_memory) = (Size(256 << 20), Size(512 << 20));
        Self { controllers: 3, workers: 2, gpus: 1, gpu_memory, host_memory, isolation: None }
    }
}

/// Which models share an executor process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Isolation {
    Gpu,
    Model,
    Resident,
}

impl Isolation {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Model => "model",
            Self::Resident => "resident",
        }
    }
}

/// Functions that stay, of one kind of network. Where there are several, they are numbered, and each
/// has weights of its own.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Functions {
    pub(crate) name: String,
    pub(crate) model: Model,
    #[serde(default = "one")]
    pub(crate) replicas: NonZeroU32,
    #[serde(default = "one")]
    pub(crate) count: NonZeroU32,
}

/// Functions one after the other, each on what the one before gives, invoked as one model.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Workflow {
    pub(crate) name: String,
    /// Functions, by their names; each but the last gives what the next takes.
    pub(crate) steps: Vec<String>,
    /// Rows of a request: with many, what a step gives is too large to be answered, and stays with the
    /// worker that made it.
    #[serde(default = "one")]
    pub(crate) rows: NonZeroU32,
}

/// A function that keeps state, and counts the requests of each of its sequences.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Counter {
    pub(crate) name: String,
    /// The numbers of its state: beyond 16,384 of them it stays on the GPU that made it.
    pub(crate) width: NonZeroU32,
}

/// Networks that `millrace synth` writes and that have one FP32 input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Model {
    Mlp,
    TinyCnn,
    Transformer,
}

impl Model {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::TinyCnn => "tiny-cnn",
            Self::Transformer => "transformer",
        }
    }
}

/// One thing that a round does.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Step {
    /// Breaks something. How soon what follows is measured from here.
    Fault(Fault),
    /// Waits until something is so.
    Await(Await),
    /// The same, within a time that somebody promised.
    Promise(Promise),
    /// Lets the load run on.
    Pause(Span),
    /// Undoes every fault so far that does not undo itself.
    Repair,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Await {
    /// Another controller leads than when the latest fault happened.
    AnotherLeader,
    /// A write that was made after the latest fault is taken, and a request answered.
    Service,
    /// The worker that the latest fault was about counts as lost.
    Lost,
    /// Every function is served.
    Served,
    /// Every executor that was killed is replaced.
    Executors,
    /// Every controller and worker is back.
    Whole,
}

/// A time that somebody promised.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Promise {
    pub(crate) r#await: Await,
    pub(crate) within: Span,
    /// Who promises it, and where.
    pub(crate) source: String,
}

/// One fault of a storm, again and again.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Stream {
    /// From one to the next.
    pub(crate) every: Span,
    pub(crate) fault: Fault,
    /// From one to its repair, where it needs one.
    pub(crate) r#for: Option<Span>,
}

/// What is in code: it looks at what no file could say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Code {
    ClockJump,
    FullDisk,
    HostileClients,
    Partition,
    PoisonRequest,
    TornStore,
}

/// What has to hold: each is a module of [`crate::oracle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Invariant {
    /// No idempotent request is lost.
    Answered,
    /// Every answer is as it was before any fault.
    Right,
    /// No acknowledged write is lost.
    Acknowledged,
    /// Admin reads and writes are linearizable.
    Linearizable,
    /// The cluster is healthy again, and everybody agrees.
    Healthy,
    /// Bills count what was answered, once.
    Billed,
    /// Answers of sequences count their requests, each once, and nothing of sequences is left.
    Counted,
    /// What the worker takes does not grow.
    Flat,
    /// No shared memory is left behind.
    Returned,
    /// No process outlives its parent.
    Gone,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

fn healthy_within() -> Span {
    Span::exactly(std::time::Duration::from_secs(10))
}

impl Spec {
    /// Reads a file. `origin` names it in errors.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub(crate) fn parse(origin: &str, text: &str) -> anyhow::Result<Self> {
        let spec: Self =
            serde_saphyr::from_str(text).map_err(|error| anyhow!("{origin} is no scenario: {error}"))?;
        spec.check().with_context(|| format!("{origin} is no scenario"))?;
        Ok(spec)
    }

    /// Every fault that its body names.
    pub(crate) fn faults(&self) -> impl Iterator<Item = &Fault> {
        let steps = self.round.iter().filter_map(|step| match step {
            Step::Fault(fault) => Some(fault),
            _ => None,
        });
        steps.chain(self.storm.iter().map(|stream| &stream.fault))
    }

    /// Whether links are cut.
    pub(crate) fn cuts(&self) -> bool {
        self.plays == Some(Code::Partition) || self.faults().any(|fault| matches!(fault, Fault::Cut(_)))
    }

    /// Whether links are made slow, which only proxies do.
    pub(crate) fn slows(&self) -> bool {
        self.faults().any(|fault| matches!(fault, Fault::Slow(_)))
    }

    /// Whether it goes on for a time, and not for a number of rounds.
    pub(crate) fn is_timed(&self) -> bool {
        !self.storm.is_empty() || self.plays == Some(Code::HostileClients)
    }

    /// Whether controllers have to serve the fault service.
    pub(crate) fn is_injected(&self) -> bool {
        self.plays == Some(Code::ClockJump)
            || self.faults().any(|fault| matches!(fault, Fault::StallDisk(_) | Fault::MoveClock(_)))
    }

    /// Whether workers have to obey faults of their devices.
    pub(crate) fn fails_devices(&self) -> bool {
        self.faults().any(|fault| matches!(fault, Fault::Device(_)))
    }
}

#[cfg(test)]
mod tests;
