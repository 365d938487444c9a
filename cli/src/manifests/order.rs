//! The order in which workflows are applied: each after the workflows of the list that it runs.

use millrace_types::FunctionKey;
use millrace_types::workflow::StepTarget;

use super::items::WorkflowItem;
use crate::failure::CommandFailure;

/// Returns the workflows in that order, and otherwise in their given order. Workflows that run each
/// other are refused by name.
pub(super) fn in_order(mut waiting: Vec<WorkflowItem>) -> Result<Vec<WorkflowItem>, CommandFailure> {
    let mut ordered = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let next = waiting.iter().position(|item| first_it_runs(item, &waiting).is_none());
        match next {
            Some(next) => ordered.push(waiting.remove(next)),
            None => return Err(cycle(&waiting)),
        }
    }
    Ok(ordered)
}

/// Returns the first workflow of `among` that a workflow runs.
fn first_it_runs<'a>(item: &WorkflowItem, among: &'a [WorkflowItem]) -> Option<&'a WorkflowItem> {
    item.spec.steps.iter().find_map(|step| match &step.run {
        StepTarget::Function(_) => None,
        StepTarget::Workflow(name) => {
            let key = FunctionKey { tenant: item.spec.key.tenant.clone(), name: name.clone() };
            among.iter().find(|other| other.spec.key == key)
        }
    })
}

/// Returns the failure for workflows that run each other. Each of `stuck` runs another one of them,
/// so following the steps leads back to an earlier workflow.
fn cycle(stuck: &[WorkflowItem]) -> CommandFailure {
    let mut way: Vec<&WorkflowItem> = stuck.iter().take(1).collect();
    while let Some(next) = way.last().and_then(|last| first_it_runs(last, stuck)) {
        let before = way.iter().position(|item| item.spec.key == next.spec.key);
        way.push(next);
        if let Some(before) = before {
            way.drain(..before);
            break;
        }
    }
    let names: Vec<_> = way.iter().map(|item| item.spec.key.name.as_str()).collect();
    let failure = CommandFailure::usage(format!("workflows run each other: {}", names.join(" -> ")));
    let failure = match way.first() {
        Some(first) => failure.about(first.source.display()),
        None => failure,
    };
    failure.hint("remove one of these steps: a workflow must end")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use millrace_types::workflow::{Step, WorkflowOutput};
    use millrace_types::{FunctionName, TenantName, WorkflowSpec};

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn item(tenant: &str, of: &str, runs: &[&str]) -> WorkflowItem {
        let step = |run: &&str| Step {
            name: name(run),
            run: StepTarget::Workflow(name(run)),
            inputs: BTreeMap::new(),
            each: None,
            when: None,
            deadline: None,
        };
        let key = FunctionKey { tenant: TenantName::new(tenant).unwrap(), name: name(of) };
        let spec =
            WorkflowSpec::new(key, vec![], runs.iter().map(step).collect(), Vec::<WorkflowOutput>::new());
        WorkflowItem { spec, source: format!("{of}.yaml").into() }
    }

    fn names(items: &[WorkflowItem]) -> Vec<&str> {
        items.iter().map(|item| item.spec.key.name.as_str()).collect()
    }

    #[test]
    fn workflows_follow_their_dependencies_and_otherwise_keep_their_order() {
        let items = vec![
            item("a", "top", &["middle", "leaf"]),
            item("a", "middle", &["leaf", "elsewhere"]),
            item("a", "alone", &[]),
            item("a", "leaf", &[]),
        ];
        assert_eq!(names(&in_order(items).unwrap()), ["alone", "leaf", "middle", "top"]);
    }

    #[test]
    fn a_workflow_of_another_tenant_is_no_dependency() {
        let items = vec![item("a", "top", &["leaf"]), item("b", "leaf", &["top"])];
        assert_eq!(names(&in_order(items).unwrap()), ["top", "leaf"]);
    }

    #[test]
    fn a_cycle_is_refused_with_the_names_of_its_workflows() {
        let items = vec![
            item("a", "into", &["one"]),
            item("a", "one", &["two"]),
            item("a", "two", &["three"]),
            item("a", "three", &["one"]),
        ];
        let failure = in_order(items).unwrap_err();
        assert_eq!(
            failure.message.unwrap(),
            "one.yaml: workflows run each other: one -> two -> three -> one"
        );
    }
}
