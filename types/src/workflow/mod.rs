//! What a workflow is: functions joined into a directed graph, invoked as one model (D01).
//!
//! A *step* runs a function, or another workflow, on tensors that the workflow was given or that
//! other steps made. The graph is drawn by these sources alone: a step runs when all that it takes
//! is there, so that sequence, fan-out and fan-in need no words of their own.
//!
//! | pattern | written as |
//! |---|---|
//! | sequence, fan-out, fan-in | `inputs: {x: detect.crops}` |
//! | an edge of 0..n objects | `each: x`: once for every row of `x`, the outputs joined by rows |
//! | condition | `when: detect.found`: only if an element of it is not zero |
//! | nesting | `workflow: NAME` in place of `function: NAME` |
//!
//! **Empty.** A tensor without elements is how "nothing" travels. A step whose condition does not
//! hold, or one of whose inputs is empty, does not run, and all its outputs are empty. What may be
//! empty is known beforehand, and has a first dimension that says nothing ([`WorkflowSpec::check`]).
//!
//! [`WorkflowSpec::validate`] checks what can be seen without the functions, [`WorkflowSpec::check`]
//! the rest: names, types and shapes along every edge. [`WorkflowSpec::fit`] does it for a workflow that
//! others may run.

mod check;
mod edges;
mod fit;
mod graph;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::function::{DEFAULT_TIMEOUT, Slo};
use crate::ids::{FunctionKey, FunctionName};
use crate::tensor::{Dim, TensorSpec};

pub use check::CheckError;
pub use edges::{EDGE_STEPS_MAX, Edge};
pub use fit::{Fit, FitError, FitRef};
pub use graph::WorkflowError;

/// The most characters in the name of a workflow's input or output.
pub const PORT_LEN_MAX: usize = 256;
/// How deep workflows may lie in workflows.
pub const NESTING_MAX: usize = 4;
/// The most rows that one step runs `each` of.
pub const EACH_ROWS_MAX: u64 = 1024;
/// What stands for the workflow's own inputs in a [`Source`].
const INPUT: &str = "input";

/// A workflow as its owner wants it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkflowSpec {
    /// Whose it is and what it is called, among functions and workflows alike: both are models.
    pub key: FunctionKey,
    /// Free labels, for people and their tools.
    pub labels: BTreeMap<String, String>,
    /// The latency objective, from end to end.
    pub slo: Option<Slo>,
    /// How long a request without a timeout of its own may take.
    pub timeout: Duration,
    /// What it takes, in the order that the protocol shows. Types and shapes are those of the
    /// functions that take them.
    pub inputs: Vec<String>,
    /// What is run.
    pub steps: Vec<Step>,
    /// What it gives, in that order.
    pub outputs: Vec<Output>,
}

/// One run of a function in a workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Its name within the workflow.
    pub name: FunctionName,
    /// What runs.
    pub run: Run,
    /// What each input of it comes from.
    pub inputs: BTreeMap<String, Source>,
    /// The input of which every row is a run of its own.
    pub each: Option<String>,
    /// Runs only if an element of this is not zero.
    pub when: Option<Source>,
    /// Within how long it should be answered, counted from when all that it takes is there and its
    /// condition is known; of one that runs `each`, for each row. The way of its data to it is part of
    /// that: it is the objective of the edges that lead to it (D14).
    #[serde(default)]
    pub deadline: Option<Duration>,
}

/// What a step runs, of the workflow's tenant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Run {
    /// A function, in its newest revision that is ready.
    Function(FunctionName),
    /// Another workflow.
    Workflow(FunctionName),
}

impl Run {
    /// The name of what runs.
    #[must_use]
    pub fn name(&self) -> &FunctionName {
        match self {
            Self::Function(name) | Self::Workflow(name) => name,
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(name) => write!(f, "function {:?}", name.as_str()),
            Self::Workflow(name) => write!(f, "workflow {:?}", name.as_str()),
        }
    }
}

/// What a workflow gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Where it comes from.
    pub from: Source,
}

/// Where a tensor comes from. Written `input.NAME` or `STEP.OUTPUT`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Source {
    /// The workflow was given it.
    Input(String),
    /// A step made it.
    Step {
        /// Which.
        step: FunctionName,
        /// Which of its outputs.
        output: String,
    },
}

/// A text that names no source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no tensor: write input.NAME for what the workflow is given, or STEP.OUTPUT for what a step gives"
)]
pub struct SourceError(String);

impl FromStr for Source {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        let bad = || SourceError(text.to_owned());
        // A step's name has no dot; a tensor's may.
        let (step, tensor) = text.split_once('.').filter(|(_, tensor)| !tensor.is_empty()).ok_or_else(bad)?;
        if step == INPUT {
            return Ok(Self::Input(tensor.to_owned()));
        }
        let step = FunctionName::new(step).map_err(|_| bad())?;
        Ok(Self::Step { step, output: tensor.to_owned() })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(name) => write!(f, "{INPUT}.{name}"),
            Self::Step { step, output } => write!(f, "{step}.{output}"),
        }
    }
}

impl TryFrom<String> for Source {
    type Error = SourceError;
    fn try_from(text: String) -> Result<Self, SourceError> {
        text.parse()
    }
}

impl From<Source> for String {
    fn from(source: Source) -> Self {
        source.to_string()
    }
}

/// What a function or workflow takes and gives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// What it takes.
    pub inputs: Vec<TensorSpec>,
    /// What it gives.
    pub outputs: Vec<TensorSpec>,
}

/// The same, wherever it is kept: checks look at many, and copy none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports<'a> {
    /// What it takes.
    pub inputs: &'a [TensorSpec],
    /// What it gives.
    pub outputs: &'a [TensorSpec],
}

impl<'a> From<&'a Signature> for Ports<'a> {
    fn from(signature: &'a Signature) -> Self {
        Self { inputs: &signature.inputs, outputs: &signature.outputs }
    }
}

/// The shape of a declared tensor that is [empty](self): no rows, and what is not fixed of a row is
/// zero too.
#[must_use]
pub fn empty_shape(spec: &TensorSpec) -> Vec<i64> {
    let fixed = |dim: &Dim| match dim {
        Dim::Fixed(_) => dim.wire(),
        Dim::Symbol(_) => 0,
    };
    std::iter::once(0).chain(spec.shape.iter().skip(1).map(fixed)).collect()
}

impl WorkflowSpec {
    /// A workflow of these steps with every default.
    #[must_use]
    pub fn new(key: FunctionKey, inputs: Vec<String>, steps: Vec<Step>, outputs: Vec<Output>) -> Self {
        let (labels, slo, timeout) = (BTreeMap::new(), None, DEFAULT_TIMEOUT);
        Self { key, labels, slo, timeout, inputs, steps, outputs }
    }

    /// One step.
    #[must_use]
    pub fn step(&self, name: &FunctionName) -> Option<&Step> {
        self.steps.iter().find(|step| step.name == *name)
    }

    /// What it runs, each once.
    #[must_use]
    pub fn runs(&self) -> Vec<&Run> {
        let mut runs: Vec<_> = self.steps.iter().map(|step| &step.run).collect();
        runs.sort_unstable();
        runs.dedup();
        runs
    }
}

impl Step {
    /// Everything it waits for.
    pub fn sources(&self) -> impl Iterator<Item = &Source> {
        self.inputs.values().chain(&self.when)
    }
}
