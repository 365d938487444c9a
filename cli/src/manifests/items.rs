//! The functions, workflows and rules of manifests, each with its file.

use std::path::PathBuf;

use millrace_types::workflow::Signature;
use millrace_types::{Digest, FunctionSpec, WorkflowSpec};

use super::rules::Rule;

/// The content of all manifests.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Items {
    /// The functions, in the order of the files.
    pub(crate) functions: Vec<FunctionItem>,
    /// The workflows, each after the workflows of the list that it runs.
    pub(crate) workflows: Vec<WorkflowItem>,
    /// The rules, tenants before the policy.
    pub(crate) rules: Vec<RuleItem>,
}

/// A rule that an operator sets.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RuleItem {
    pub(crate) rule: Rule,
    /// The file with the manifest, for messages.
    pub(super) source: PathBuf,
}

/// A function, and the location of the model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FunctionItem {
    pub(crate) spec: FunctionSpec,
    pub(crate) model: ModelLocation,
    /// The file with the manifest, for messages.
    pub(crate) source: PathBuf,
}

/// The location of a function's model or program.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ModelLocation {
    File {
        path: PathBuf,
        /// The inputs and outputs of a program. `None` for a model, because its file declares them.
        declared: Option<Signature>,
    },
    /// The cluster has the file with this digest.
    Cluster(Digest),
}

/// A workflow, and the manifest's file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WorkflowItem {
    pub(crate) spec: WorkflowSpec,
    /// The file with the manifest, for messages.
    pub(crate) source: PathBuf,
}
