//! The inputs of a run, in the plan's order.

use std::collections::BTreeMap;

use millrace_types::workflow::TensorSource;
use millrace_workflow::{GraphTensor, WorkflowGraph};

use super::values::RunTensor;

/// Returns the inputs of a run in the plan's order; `None` if an input is missing.
pub(super) fn in_order(
    plan: &WorkflowGraph,
    given: impl IntoIterator<Item = (String, RunTensor)>,
) -> Option<Vec<RunTensor>> {
    let mut given: BTreeMap<String, RunTensor> = given.into_iter().collect();
    let input = |slot: &GraphTensor| match &slot.source {
        TensorSource::Input(name) => given.remove(name),
        TensorSource::Step { .. } => None,
    };
    plan.inputs().iter().map(input).collect()
}
