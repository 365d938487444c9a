//! The server's dry run of an apply: the order in which the functions and workflows are stored, and
//! the outcome of each. The server decides. This module sends the request, and relates a refusal to
//! its manifest.

use std::collections::BTreeMap;

use millrace_client::{ApplyItem, ApplyOutcome, BrokenWorkflow, DryRun, Error, ItemRefusal, PendingModel};
use millrace_types::{Digest, Reason};

use super::models::{self, LoadedFunction, LocalModel};
use crate::failure::CommandFailure;
use crate::manifests::{FunctionItem, ModelLocation, WorkflowItem};
use crate::session::ClusterSession;

/// The functions and workflows of the manifests, with every model read.
pub(super) struct LoadedItems {
    pub(super) functions: Vec<LoadedFunction>,
    /// The workflows, each after the workflows of the list that it runs.
    pub(super) workflows: Vec<WorkflowItem>,
}

/// A function or workflow, by its position in its list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ItemPosition {
    Function(usize),
    Workflow(usize),
}

/// An item that the server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ApplyStep {
    pub(super) item: ItemPosition,
    pub(super) outcome: ApplyOutcome,
}

/// Returns all items in the order in which the server accepts them. `missing` holds the models that
/// are not uploaded yet.
pub(super) async fn run(
    items: &LoadedItems,
    missing: &BTreeMap<Digest, LocalModel>,
    session: &ClusterSession,
) -> Result<Vec<ApplyStep>, CommandFailure> {
    let functions = items.functions.iter().map(|function| ApplyItem::Function {
        spec: function.item.spec.clone(),
        artifact: function.model.digest(),
    });
    let workflows = items.workflows.iter().map(|item| ApplyItem::Workflow(item.spec.clone()));
    let wire: Vec<ApplyItem> = functions.chain(workflows).collect();
    if wire.is_empty() {
        return Ok(Vec::new());
    }
    let pending = missing.iter().map(|(&digest, model)| PendingModel { digest, model: model.summary() });
    match session.admin.dry_run_apply(&wire, pending.collect()).await.map_err(failed)? {
        DryRun::Taken(steps) => {
            let steps = steps.into_iter();
            Ok(steps
                .map(|step| ApplyStep { item: items.position(step.item), outcome: step.outcome })
                .collect())
        }
        DryRun::Refused(refusal) => Err(refused(items, refusal)),
    }
}

/// Returns the failure of the call. The refusal of an item is not a failure of the call, so a
/// malformed request means a request that is too large.
fn failed(error: Error) -> CommandFailure {
    let hint = match error.reason() {
        Some(Reason::Unimplemented) => {
            "the controller is of an older build without a dry run of several items: update it, or apply with the millrace of its own build"
        }
        Some(Reason::MalformedRequest | Reason::ByteBudgetExceeded) => {
            "there are too many functions and workflows for one command: apply them with several, functions before the workflows that run them"
        }
        _ => return error.into(),
    };
    CommandFailure::from(error).hint(hint)
}

impl LoadedItems {
    /// Returns the item at a position of the dry run, where functions precede workflows.
    fn position(&self, item: usize) -> ItemPosition {
        match item.checked_sub(self.functions.len()) {
            None => ItemPosition::Function(item),
            Some(workflow) => ItemPosition::Workflow(workflow),
        }
    }
}

fn refused(items: &LoadedItems, refusal: ItemRefusal) -> CommandFailure {
    match items.position(refusal.item) {
        ItemPosition::Function(at) => refused_function(&items.functions[at].item, refusal),
        ItemPosition::Workflow(at) => refused_workflow(&items.workflows[at], refusal),
    }
}

fn refused_function(item: &FunctionItem, refusal: ItemRefusal) -> CommandFailure {
    let ItemRefusal { failure, broken, .. } = refusal;
    match (broken, &item.model) {
        (Some(broken), _) => breaks(broken).about(models::subject(item)),
        (None, ModelLocation::Cluster(digest)) if failure.reason == Reason::ArtifactNotFound => {
            models::unknown(item, *digest)
        }
        (None, _) => CommandFailure::from(Error::Refused(failure))
            .about(format_args!("function/{}", item.spec.key.name)),
    }
}

fn refused_workflow(item: &WorkflowItem, refusal: ItemRefusal) -> CommandFailure {
    let ItemRefusal { failure, broken, .. } = refusal;
    let name = &item.spec.key.name;
    let subject = format!("{}: workflow {name}", item.source.display());
    match broken {
        Some(broken) => breaks(broken).about(subject),
        // The user must correct the manifest, as after any other refusal with this exit code.
        None if failure.reason == Reason::InvalidSpec => {
            CommandFailure::usage(failure.message).about(subject)
        }
        None => CommandFailure::from(Error::Refused(failure)).about(format_args!("workflow/{name}")),
    }
}

fn breaks(BrokenWorkflow { workflow, problem }: BrokenWorkflow) -> CommandFailure {
    CommandFailure::usage(format!(
        "the stored workflow {workflow} runs this item and could no longer run it: {problem}"
    ))
    .hint(format!(
        "apply the item under another name and let the workflow run that one, or delete the workflow first: millrace delete workflow {workflow}"
    ))
}

#[cfg(test)]
mod tests {
    use millrace_types::manifest::{self, Manifest};
    use millrace_types::{Failure as Refusal, FunctionKey, FunctionName, FunctionSpec, TenantName};

    use super::super::models::FunctionModel;
    use super::*;
    use crate::failure::ExitStatus;

    /// Returns a function `f`, with a model of the cluster, and a workflow `w`.
    fn items() -> LoadedItems {
        let key = FunctionKey { tenant: TenantName::default(), name: FunctionName::new("f").unwrap() };
        let digest = Digest::of(b"model");
        let item = FunctionItem {
            spec: FunctionSpec::new(key),
            model: ModelLocation::Cluster(digest),
            source: "f.yaml".into(),
        };
        let text = "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {name: w}\nspec:\n  inputs: [x]\n  steps: [{name: s, function: f, inputs: {x: input.x}}]\n  outputs: {y: s.y}\n";
        let Manifest::Workflow(spec) = manifest::parse(text).unwrap().remove(0) else {
            panic!("not a workflow")
        };
        LoadedItems {
            functions: vec![LoadedFunction { item, model: FunctionModel::Cluster(digest) }],
            workflows: vec![WorkflowItem { spec, source: "w.yaml".into() }],
        }
    }

    fn refusal(item: usize, reason: Reason, broken: Option<&str>) -> CommandFailure {
        let broken =
            broken.map(|workflow| BrokenWorkflow { workflow: workflow.into(), problem: "why".into() });
        refused(&items(), ItemRefusal { item, failure: Refusal::new(reason, "a problem"), broken })
    }

    #[test]
    fn a_dry_run_lists_functions_before_workflows() {
        let items = items();
        assert_eq!(items.position(0), ItemPosition::Function(0));
        assert_eq!(items.position(1), ItemPosition::Workflow(0));
    }

    #[test]
    fn a_refusal_names_its_manifest_or_its_resource() {
        let digest = Digest::of(b"model");
        for (item, reason, message, exit) in [
            (0, Reason::InvalidSpec, "function/f: a problem (INVALID_SPEC)".to_owned(), ExitStatus::Failed),
            (1, Reason::InvalidSpec, "w.yaml: workflow w: a problem".to_owned(), ExitStatus::Usage),
            (1, Reason::NameTaken, "workflow/w: a problem (NAME_TAKEN)".to_owned(), ExitStatus::Failed),
            (
                0,
                Reason::ArtifactNotFound,
                format!("f.yaml: function f: the cluster does not have {digest}"),
                ExitStatus::NotFound,
            ),
        ] {
            let failure = refusal(item, reason, None);
            assert_eq!((failure.message, failure.exit), (Some(message), exit));
        }
    }

    #[test]
    fn a_broken_workflow_is_named_with_the_command_that_deletes_it() {
        for (item, subject) in [(0, "f.yaml: function f"), (1, "w.yaml: workflow w")] {
            let failure = refusal(item, Reason::InvalidSpec, Some("user"));
            let says = "the stored workflow user runs this item and could no longer run it: why";
            assert_eq!(failure.message, Some(format!("{subject}: {says}")));
            assert!(failure.hint.unwrap().ends_with("millrace delete workflow user"));
            assert_eq!(failure.exit, ExitStatus::Usage);
        }
    }

    #[test]
    fn a_failed_call_has_a_hint_for_an_old_controller_and_for_a_large_apply() {
        for (reason, hint) in [
            (Reason::Unimplemented, "the controller is of an older build"),
            (Reason::MalformedRequest, "too many functions and workflows for one command"),
            (Reason::ByteBudgetExceeded, "too many functions and workflows for one command"),
            (Reason::NoLeader, "list the controllers that are up"),
        ] {
            let failure = failed(Error::Refused(Refusal::new(reason, "a problem")));
            assert!(failure.hint.unwrap().contains(hint), "{reason}");
        }
    }
}
