//! `delete`: deletes functions and workflows, by name or from a file; removes the caps and the
//! policy that a file sets; and removes lost nodes. An item that cannot be deleted does not stop
//! the others: each failure is reported, and the first determines the exit code.

use std::path::PathBuf;

use futures::TryStreamExt as _;
use millrace_client::messages::{self as wire, workflow_step::Run};
use millrace_client::{ApplyOutcome, DeleteOptions, Error};
use millrace_types::{FunctionKey, FunctionName, NodeName, Reason};

use crate::commands::policy;
use crate::failure::{CommandFailure, ExitStatus};
use crate::manifests::rules::{self, Rule};
use crate::manifests::{self, Items};
use crate::output::print;
use crate::session::ClusterSession;
use crate::target::{ModelKind, ResourceKind, ResourceTarget};

/// Delete functions with all their revisions, workflows, or lost nodes.
#[derive(Debug, clap::Args)]
#[command(override_usage = "millrace delete function NAME... | workflow NAME... | node NAME... | -f FILE...")]
pub(crate) struct Args {
    /// The item to delete, such as function/digits, workflow/traffic or node/worker-1.
    #[arg(value_name = "TYPE[/NAME]", required_unless_present = "file", conflicts_with = "file")]
    target: Option<ResourceTarget>,
    /// The names, if the type stands alone.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Delete the functions and workflows of these manifests, of folders of them, or of - for
    /// standard input; for tenants, remove all caps, and for the policy, every setting.
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Check everything, delete nothing.
    #[arg(long)]
    dry_run: bool,
    /// Do not fail if an item does not exist.
    #[arg(long)]
    ignore_not_found: bool,
}

/// The options of a deletion.
#[derive(Debug, Clone, Copy)]
struct DeletionOptions {
    dry_run: bool,
    ignore_not_found: bool,
}

impl DeletionOptions {
    fn suffix(self) -> &'static str {
        if self.dry_run { " (dry run)" } else { "" }
    }
}

/// A function or workflow to delete.
#[derive(Debug, PartialEq, Eq)]
struct DeletionTarget {
    kind: ModelKind,
    key: FunctionKey,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let Args { target, names, file, dry_run, ignore_not_found } = args;
    let manner = DeletionOptions { dry_run, ignore_not_found };
    let mut rules = Vec::new();
    let doomed = match target {
        Some(target) => {
            let kind = target.kind;
            let names = target.names(names)?;
            match kind {
                ResourceKind::Function => named(ModelKind::Function, &names, session)?,
                ResourceKind::Workflow => named(ModelKind::Workflow, &names, session)?,
                ResourceKind::Node if dry_run => {
                    return Err(CommandFailure::usage("a node cannot be deleted in a dry run")
                        .hint("omit --dry-run: only lost nodes are removed"));
                }
                ResourceKind::Node => return nodes(&names, ignore_not_found, session).await,
                ResourceKind::Gpu => {
                    return Err(CommandFailure::usage("a GPU is deleted with its node")
                        .hint("millrace delete node NAME"));
                }
                ResourceKind::Slice => {
                    return Err(CommandFailure::usage("a slice is deleted with its function")
                        .hint("millrace delete function NAME; or apply the function without sm and quotas"));
                }
                ResourceKind::Profile => {
                    return Err(CommandFailure::usage("a profile is deleted with its function's model")
                        .hint(
                            "millrace delete function NAME; 'millrace profile NAME' replaces the profile",
                        ));
                }
                ResourceKind::Tenant => {
                    return Err(CommandFailure::usage("a tenant consists of functions, workflows and caps").hint(
                        "delete the functions and workflows; for the caps: millrace tenant set NAME --no-caps",
                    ));
                }
                ResourceKind::Policy => {
                    return Err(CommandFailure::usage("the policy cannot be deleted")
                        .hint(format!("to restore the default policy: {}", policy::restore_command())));
                }
                ResourceKind::Operation => {
                    return Err(CommandFailure::usage("an operation is removed a day after its end")
                        .hint("to end a running operation: millrace operation cancel ID"));
                }
                ResourceKind::Scaling => {
                    return Err(CommandFailure::usage("the scaling signal is computed, not stored")
                        .hint("to read it: millrace get scaling"));
                }
            }
        }
        None => {
            let mut items = manifests::read(&file, &session.config.tenant)?;
            rules.extend(items.rules.drain(..).map(|item| item.rule.cleared()));
            in_order(items)
        }
    };
    let mut failures = ReportedFailures::default();
    models(doomed, manner, session, &mut failures).await?;
    // Remove rules last, because apply sets them first: functions and workflows ran under these
    // rules.
    take_back(rules, manner, session, &mut failures).await?;
    failures.end()
}

async fn models(
    doomed: Vec<DeletionTarget>,
    manner: DeletionOptions,
    session: &ClusterSession,
    failures: &mut ReportedFailures,
) -> Result<(), CommandFailure> {
    let mut gone = Vec::new();
    for doomed in doomed {
        let DeletionTarget { kind, key } = &doomed;
        match delete(&doomed, manner.dry_run, &gone, session).await {
            Ok(()) => {
                print(&format!("{kind}/{} deleted{}", key.name, manner.suffix()))?;
                gone.push(doomed);
            }
            Err(error) if manner.ignore_not_found && error.reason() == Some(kind.not_found()) => {}
            Err(error) => {
                failures.add(CommandFailure::from(error).about(format_args!("{kind}/{}", key.name)))?
            }
        }
    }
    Ok(())
}

/// Removes the settings of the rules that are set.
async fn take_back(
    rules: Vec<Rule>,
    manner: DeletionOptions,
    session: &ClusterSession,
    failures: &mut ReportedFailures,
) -> Result<(), CommandFailure> {
    for change in rules::compare(rules, &session.admin).await? {
        let title = change.rule.title();
        if change.outcome == ApplyOutcome::Unchanged {
            if !manner.ignore_not_found {
                failures.add(CommandFailure::not_found(format!("{title}: nothing is set")))?;
            }
            continue;
        }
        let taken = match manner.dry_run {
            true => rules::check(std::slice::from_ref(&change), &session.admin).await,
            false => change.store(&session.admin).await.map(|_| ()),
        };
        match taken {
            Ok(()) => print(&format!("{title} deleted{}{}", change.told(), manner.suffix()))?,
            Err(failure) => failures.add(failure)?,
        }
    }
    Ok(())
}

/// The failures that were reported while the command continued.
#[derive(Default)]
struct ReportedFailures {
    first: Option<ExitStatus>,
}

impl ReportedFailures {
    /// Reports a failure. If the server is unreachable, returns an error that ends the command.
    fn add(&mut self, failure: CommandFailure) -> Result<(), CommandFailure> {
        let first = *self.first.get_or_insert(failure.exit);
        failure.report();
        if failure.exit == ExitStatus::Unreachable {
            Err(CommandFailure::already_printed(first))
        } else {
            Ok(())
        }
    }

    fn end(self) -> Result<(), CommandFailure> {
        self.first.map_or(Ok(()), |first| Err(CommandFailure::already_printed(first)))
    }
}

/// Deletes an item, or checks its deletion. In a dry run, the items of `gone` still exist, so a use
/// by these items alone is no obstacle.
async fn delete(
    doomed: &DeletionTarget,
    dry_run: bool,
    gone: &[DeletionTarget],
    session: &ClusterSession,
) -> Result<(), Error> {
    let DeletionTarget { kind, key } = doomed;
    let options = DeleteOptions { dry_run, resource_version: None };
    let deleted = match kind {
        ModelKind::Workflow => session.admin.delete_workflow(key, options).await,
        ModelKind::Function => session.admin.delete(key, options).await,
    };
    match deleted {
        Err(error) if dry_run && error.reason() == Some(Reason::InUse) => {
            let workflows: Vec<_> = session.admin.workflows(Some(&key.tenant)).try_collect().await?;
            if workflows.iter().all(|it| !uses(it, doomed) || is_one_of(gone, it)) {
                Ok(())
            } else {
                Err(error)
            }
        }
        other => other,
    }
}

/// Returns whether a step of the workflow runs the item.
fn uses(workflow: &wire::Workflow, doomed: &DeletionTarget) -> bool {
    let steps = workflow.spec.iter().flat_map(|spec| &spec.steps);
    steps.filter_map(|step| step.run.as_ref()).any(|run| match (run, doomed.kind) {
        (Run::Function(name), ModelKind::Function) | (Run::Workflow(name), ModelKind::Workflow) => {
            *name == doomed.key.name.as_str()
        }
        _ => false,
    })
}

fn is_one_of(gone: &[DeletionTarget], workflow: &wire::Workflow) -> bool {
    let same = |it: &DeletionTarget, spec: &wire::WorkflowSpec| {
        it.kind == ModelKind::Workflow
            && (it.key.tenant.as_str(), it.key.name.as_str()) == (spec.tenant.as_str(), spec.name.as_str())
    };
    workflow.spec.as_ref().is_some_and(|spec| gone.iter().any(|it| same(it, spec)))
}

fn named(
    kind: ModelKind,
    names: &[String],
    session: &ClusterSession,
) -> Result<Vec<DeletionTarget>, CommandFailure> {
    if names.is_empty() {
        return Err(CommandFailure::usage(format!("no {kind} is named"))
            .hint(format!("name it: millrace delete {kind} NAME")));
    }
    let one = |name: &String| {
        let name = FunctionName::new(name).map_err(|error| CommandFailure::usage(error.to_string()))?;
        Ok(DeletionTarget { kind, key: session.key(&name) })
    };
    names.iter().map(one).collect()
}

/// Returns the items in deletion order: a workflow before the items that it runs, because a server
/// refuses to delete an item that a workflow still runs.
fn in_order(items: Items) -> Vec<DeletionTarget> {
    let workflows = items.workflows.into_iter().rev();
    let workflows = workflows.map(|item| DeletionTarget { kind: ModelKind::Workflow, key: item.spec.key });
    let functions = items.functions.into_iter();
    workflows
        .chain(functions.map(|item| DeletionTarget { kind: ModelKind::Function, key: item.spec.key }))
        .collect()
}

/// Removes lost nodes. Their names are free afterwards.
async fn nodes(
    names: &[String],
    ignore_not_found: bool,
    session: &ClusterSession,
) -> Result<(), CommandFailure> {
    if names.is_empty() {
        return Err(CommandFailure::usage("no node is named").hint("name it: millrace delete node NAME"));
    }
    let names = names.iter().map(|name| NodeName::new(name)).collect::<Result<Vec<_>, _>>();
    let mut failures = ReportedFailures::default();
    for name in names.map_err(|error| CommandFailure::usage(error.to_string()))? {
        match session.admin.remove_node(&name).await {
            Ok(()) => print(&format!("node/{name} deleted"))?,
            Err(error) if ignore_not_found && error.reason() == Some(Reason::NodeNotFound) => {}
            Err(error) => failures.add(CommandFailure::from(error).about(format_args!("node/{name}")))?,
        }
    }
    failures.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::TenantName;

    #[test]
    fn a_workflow_is_deleted_before_the_items_it_runs() {
        let folder = tempfile::tempdir().unwrap();
        let workflow = |name: &str, runs: &str| {
            format!(
                "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {{name: {name}}}\nspec:\n  inputs: [x]\n  steps: [{{name: only, {runs}, inputs: {{x: input.x}}}}]\n  outputs: {{y: only.y}}\n---\n"
            )
        };
        let function =
            "apiVersion: millrace/v1\nkind: Function\nmetadata: {name: f}\nspec: {model: {file: m.onnx}}\n";
        let file = folder.path().join("all.yaml");
        let text = workflow("inner", "function: f") + &workflow("outer", "workflow: inner") + function;
        std::fs::write(&file, text).unwrap();
        let doomed = in_order(manifests::read(&[file], &TenantName::default()).unwrap());
        let titles: Vec<_> = doomed.iter().map(|it| format!("{}/{}", it.kind, it.key.name)).collect();
        assert_eq!(titles, ["workflow/outer", "workflow/inner", "function/f"]);
    }
}
