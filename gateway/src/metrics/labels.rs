//! The labels of the metrics of functions and workflows.

use prometheus_client::encoding::EncodeLabelSet;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FunctionLabels {
    pub(super) tenant: String,
    pub(super) function: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OutcomeLabels {
    pub(super) tenant: String,
    pub(super) function: String,
    pub(super) reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct WorkflowLabels {
    pub(super) tenant: String,
    pub(super) workflow: String,
}
