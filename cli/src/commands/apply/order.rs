//! The order in which workflows are applied: each after those of them that it runs.

use millrace_types::FunctionKey;
use millrace_types::workflow::Run;

use super::manifests::WorkflowItem;
use crate::failure::Failure;

/// The workflows in such an order, else in the one they have. Those that run each other are refused
/// by name.
pub(super) fn in_order(mut waiting: Vec<WorkflowItem>) -> Result<Vec<WorkflowItem>, Failure> {
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

/// The first of these workflows that one runs.
fn first_it_runs<'a>(item: &WorkflowItem, among: &'a [WorkflowItem]) -> Option<&'a WorkflowItem> {
    item.spec.steps.iter().find_map(|step| match &step.run {
        Run::Function(_) => None,
        Run::Workflow(name) => {
            let key = FunctionKey { tenant: item.spec.key.tenant.clone(), name: name.clone() };
            among.iter().find(|other| other.spec.key == key)
        }
    })
}

/// Each of these runs another of them: following that leads to where one was before.
fn cycle(stuck: &[WorkflowItem]) -> Failure {
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
    let failure = Failure::usage(format!("workflows run each other: {}", names.join(" -> ")));
    let failure = match way.first() {
        Some(first) => failure.about(first.source.display()),
        None => failure,
    };
    failure.hint("take one of these steps out: workflows end")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use millrace_types::workflow::{Output, Step};
    use millrace_types::{FunctionName, TenantName, WorkflowSpec};

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn item(tenant: &str, of: &str, runs: &[&str]) -> WorkflowItem {
        let step = |run: &&str| Step {
            name: name(run),
            run: Run::Workflow(name(run)),
            inputs: BTreeMap::new(),
            each: None,
            when: None,
            deadline: None,
        };
        let key = FunctionKey { tenant: TenantName::new(tenant).unwrap(), name: name(of) };
        let spec = WorkflowSpec::new(key, vec![], runs.iter().map(step).collect(), Vec::<Output>::new());
        WorkflowItem { spec, source: format!("{of}.yaml").into() }
    }

    fn names(items: &[WorkflowItem]) -> Vec<&str> {
        items.iter().map(|item| item.spec.key.name.as_str()).collect()
    }

    #[test]
    fn a_workflow_follows_those_it_runs_and_the_rest_keep_their_places() {
        let items = vec![
            item("a", "top", &["middle", "leaf"]),
            item("a", "middle", &["leaf", "elsewhere"]),
            item("a", "alone", &[]),
            item("a", "leaf", &[]),
        ];
        assert_eq!(names(&in_order(items).unwrap()), ["alone", "leaf", "middle", "top"]);
    }

    #[test]
    fn another_tenants_workflow_is_not_the_one_that_is_run() {
        let items = vec![item("a", "top", &["leaf"]), item("b", "leaf", &["top"])];
        assert_eq!(names(&in_order(items).unwrap()), ["top", "leaf"]);
    }

    #[test]
    fn a_cycle_is_said_by_name() {
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
