//! Creates a workflow, or changes the workflow if the spec differs. The workflow has to fit the functions and
//! workflows that it runs, and every workflow that runs it has to fit the new spec (D01).

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_types::workflow::StepTarget;
use millrace_types::{FunctionKey, FunctionName, WorkflowSpec};

use super::{check_expected, next_number};
use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::{ModelKind, WorkflowRecord};
use crate::state::{State, WORKFLOWS_MAX, WORKFLOWS_PER_TENANT_MAX};
use crate::workflows::{ChangedFits, workflow_run};

pub(crate) fn apply_workflow(
    state: &mut State,
    context: CommandContext<'_>,
    spec: &WorkflowSpec,
    expected: Option<u64>,
) -> CommandOutcome {
    let key = &spec.key;
    if state.functions.contains_key(key) {
        return Err(CommandRefusal::NameTaken { key: key.clone(), by: ModelKind::Function });
    }
    let current = state.workflows.get(key);
    check_expected(key, expected, current.map(|workflow| workflow.resource_version))?;
    spec.validate().map_err(|problem| CommandRefusal::InvalidSpec { problem: problem.to_string() })?;
    if current.is_some_and(|workflow| workflow.spec == *spec) {
        return Ok(CommandEffect::Unchanged);
    }
    if current.is_none() && state.workflows.len() >= WORKFLOWS_MAX {
        return Err(CommandRefusal::Full { what: "workflows".into(), limit: WORKFLOWS_MAX as u64 });
    }
    if current.is_none() && state.workflows_of(&key.tenant).count() >= WORKFLOWS_PER_TENANT_MAX {
        let what = format!("workflows of tenant {}", key.tenant);
        return Err(CommandRefusal::Full { what, limit: WORKFLOWS_PER_TENANT_MAX as u64 });
    }
    check_acyclic(state, spec)?;
    let fit = state
        .fit(spec, &ChangedFits::new())
        .map_err(|problem| CommandRefusal::InvalidSpec { problem: problem.to_string() })?;
    let fits = state.fits_after(key, workflow_run(key), fit.clone())?;

    let created_at = current.map_or(context.now, |workflow| workflow.created_at);
    let is_new = current.is_none();
    let generation = next_number(state, key);
    let version = state.next_version();
    let workflow = WorkflowRecord {
        key: key.clone(),
        resource_version: version,
        generation,
        spec: spec.clone(),
        signature: fit.signature,
        nesting: fit.nesting,
        created_at,
        updated_at: context.now,
        updated_by: context.caller.clone(),
    };
    state.workflows.insert(key.clone(), Arc::new(workflow));
    state.store_fits(&key.tenant, fits);
    Ok(if is_new { CommandEffect::Created { version } } else { CommandEffect::Changed { version } })
}

/// Refuses a workflow that would run itself through others, because such a workflow never ends.
fn check_acyclic(state: &State, spec: &WorkflowSpec) -> Result<(), CommandRefusal> {
    let Some(way) = path_to(state, spec, &spec.key, &mut BTreeSet::new()) else { return Ok(()) };
    let names: Vec<_> = std::iter::once(&spec.key.name).chain(way).map(FunctionName::as_str).collect();
    let problem = format!(
        "workflows run each other: {}: take one of these steps out, for workflows end",
        names.join(" -> ")
    );
    Err(CommandRefusal::InvalidSpec { problem })
}

/// Returns the names on the path from a workflow, itself excluded, to a workflow that it runs
/// through others. Stored workflows are nested at most
/// [`NESTING_MAX`](millrace_types::workflow::NESTING_MAX) deep, which bounds the recursion. Each
/// workflow is visited once.
fn path_to<'a>(
    state: &'a State,
    from: &'a WorkflowSpec,
    to: &FunctionKey,
    seen: &mut BTreeSet<&'a FunctionName>,
) -> Option<Vec<&'a FunctionName>> {
    for run in from.runs() {
        let StepTarget::Workflow(name) = run else { continue };
        if *name == to.name {
            return Some(vec![name]);
        }
        let key = FunctionKey { tenant: to.tenant.clone(), name: name.clone() };
        let Some(inner) = state.workflows.get(&key).filter(|_| seen.insert(name)) else { continue };
        if let Some(mut way) = path_to(state, &inner.spec, to, seen) {
            way.insert(0, name);
            return Some(way);
        }
    }
    None
}

#[cfg(test)]
mod tests;
