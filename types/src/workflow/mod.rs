//! The specification of a workflow: functions joined into a directed graph and invoked as a single
//! model (D01).
//!
//! A *step* runs a function or another workflow on input tensors of the workflow and on outputs of
//! other steps. These sources alone define the graph. A step runs when all its inputs are ready, so
//! sequences, fan-out and fan-in need no syntax of their own.
//!
//! | pattern | syntax |
//! |---|---|
//! | sequence, fan-out, fan-in | `inputs: {x: detect.crops}` |
//! | an edge of 0..n objects | `each: x`: a run for every row of `x`; the outputs are joined by rows |
//! | condition | `when: detect.found`: a run only if an element of the tensor is not zero |
//! | nesting | `workflow: NAME` in place of `function: NAME` |
//!
//! **Empty tensors.** A tensor without elements stands for an absent value. A step does not run if
//! its condition is false or any of its inputs is empty; all outputs of the step are then empty.
//! The check knows beforehand which tensors may be empty, and gives them a free first dimension
//! ([`WorkflowSpec::check`]).
//!
//! [`WorkflowSpec::validate`] checks the spec without the functions. [`WorkflowSpec::check`] checks
//! names, types and shapes along every edge. [`WorkflowSpec::fit`] does the same for a workflow
//! that other workflows may run.

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

pub use crate::signature::{Signature, SignatureRef};
pub use check::CheckError;
pub use edges::{EDGE_STEPS_MAX, FunctionEdge};
pub use fit::{CompositionError, RunnableSignature, RunnableSignatureRef};
pub use graph::WorkflowError;

/// Maximum length of the name of a workflow's input or output, in characters.
pub const PORT_LEN_MAX: usize = 256;
/// Maximum nesting depth of workflows in workflows.
pub const NESTING_MAX: usize = 4;
/// Maximum number of rows of an input that a step runs `each` of.
pub const EACH_ROWS_MAX: u64 = 1024;
/// The word that stands for the workflow's own inputs in a [`TensorSource`].
const INPUT: &str = "input";

/// The declaration of a workflow by its owner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkflowSpec {
    /// The tenant and the name, unique among functions and workflows alike, because both are
    /// models.
    pub key: FunctionKey,
    /// Free-form labels for people and their tools.
    pub labels: BTreeMap<String, String>,
    /// The latency objective of a whole run.
    pub slo: Option<Slo>,
    /// The timeout of requests that set none of their own.
    pub timeout: Duration,
    /// The names of the inputs, in the order that the protocol shows. Their types and shapes follow
    /// from the functions that read them.
    pub inputs: Vec<String>,
    /// The steps of the graph, in any order.
    pub steps: Vec<Step>,
    /// The outputs, in the order that the protocol shows.
    pub outputs: Vec<WorkflowOutput>,
}

/// A node of a workflow's graph, which runs a function or a workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The name, unique within the workflow.
    pub name: FunctionName,
    /// The function or workflow that the step runs.
    pub run: StepTarget,
    /// The source of each input, by the input's name.
    pub inputs: BTreeMap<String, TensorSource>,
    /// The input whose rows each get a run of their own.
    pub each: Option<String>,
    /// The condition: the step runs only if an element of this tensor is not zero.
    pub when: Option<TensorSource>,
    /// The time within which the step should finish, counted from when all inputs and the condition
    /// are ready. For a step with `each`, the time applies to each row. The transfer of the inputs
    /// to the step is part of that time, so the deadline is the objective of the step's incoming
    /// edges (D14).
    #[serde(default)]
    pub deadline: Option<Duration>,
}

/// The function or workflow, of the workflow's tenant, that a step runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StepTarget {
    /// The newest ready revision of a function.
    Function(FunctionName),
    /// A nested workflow.
    Workflow(FunctionName),
}

impl StepTarget {
    /// Returns the name of the function or workflow.
    #[must_use]
    pub fn name(&self) -> &FunctionName {
        match self {
            Self::Function(name) | Self::Workflow(name) => name,
        }
    }
}

impl fmt::Display for StepTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(name) => write!(f, "function {:?}", name.as_str()),
            Self::Workflow(name) => write!(f, "workflow {:?}", name.as_str()),
        }
    }
}

/// An output of a workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowOutput {
    /// The name of the output.
    pub name: String,
    /// The source of the output's tensor.
    pub from: TensorSource,
}

/// The source of a tensor, written `input.NAME` or `STEP.OUTPUT`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TensorSource {
    /// An input of the workflow.
    Input(String),
    /// An output of a step.
    Step {
        /// The name of the step.
        step: FunctionName,
        /// The name of the step's output.
        output: String,
    },
}

/// The error for a text that is not a source; holds the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no tensor: write input.NAME for an input of the workflow, or STEP.OUTPUT for an output of a step"
)]
pub struct TensorSourceError(String);

impl FromStr for TensorSource {
    type Err = TensorSourceError;

    fn from_str(text: &str) -> Result<Self, TensorSourceError> {
        let bad = || TensorSourceError(text.to_owned());
        // Split at the first dot: the name of a step has no dot, but the name of a tensor may.
        let (step, tensor) = text.split_once('.').filter(|(_, tensor)| !tensor.is_empty()).ok_or_else(bad)?;
        if step == INPUT {
            return Ok(Self::Input(tensor.to_owned()));
        }
        let step = FunctionName::new(step).map_err(|_| bad())?;
        Ok(Self::Step { step, output: tensor.to_owned() })
    }
}

impl fmt::Display for TensorSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(name) => write!(f, "{INPUT}.{name}"),
            Self::Step { step, output } => write!(f, "{step}.{output}"),
        }
    }
}

impl TryFrom<String> for TensorSource {
    type Error = TensorSourceError;
    fn try_from(text: String) -> Result<Self, TensorSourceError> {
        text.parse()
    }
}

impl From<TensorSource> for String {
    fn from(source: TensorSource) -> Self {
        source.to_string()
    }
}

/// Returns the shape of a declared tensor that is [empty](self): zero rows, and zero for every free
/// dimension of a row.
#[must_use]
pub fn empty_shape(spec: &TensorSpec) -> Vec<i64> {
    let fixed = |dim: &Dim| match dim {
        Dim::Fixed(_) => dim.wire(),
        Dim::Symbol(_) => 0,
    };
    std::iter::once(0).chain(spec.shape.iter().skip(1).map(fixed)).collect()
}

impl WorkflowSpec {
    /// Creates a workflow with the default of every other field.
    #[must_use]
    pub fn new(
        key: FunctionKey,
        inputs: Vec<String>,
        steps: Vec<Step>,
        outputs: Vec<WorkflowOutput>,
    ) -> Self {
        Self { key, labels: BTreeMap::new(), slo: None, timeout: DEFAULT_TIMEOUT, inputs, steps, outputs }
    }

    /// Returns the step with this name.
    #[must_use]
    pub fn step(&self, name: &FunctionName) -> Option<&Step> {
        self.steps.iter().find(|step| step.name == *name)
    }

    /// Returns the functions and workflows that the steps run, each once.
    #[must_use]
    pub fn runs(&self) -> Vec<&StepTarget> {
        let mut runs: Vec<_> = self.steps.iter().map(|step| &step.run).collect();
        runs.sort_unstable();
        runs.dedup();
        runs
    }
}

impl Step {
    /// Returns all sources that the step waits for: those of the inputs and of the condition.
    pub fn sources(&self) -> impl Iterator<Item = &TensorSource> {
        self.inputs.values().chain(&self.when)
    }
}
