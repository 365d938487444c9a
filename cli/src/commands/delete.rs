//! `delete`: removes functions and workflows, by name or those of a file, takes back the caps and the policy
//! that a file sets, and forgets lost nodes. One that cannot be deleted does not keep the others: each is
//! told of, and the first gives the exit code.

use std::path::PathBuf;

use futures::TryStreamExt as _;
use millrace_client::messages::{self as wire, workflow_step::Run};
use millrace_client::{DeleteOptions, Error, Outcome};
use millrace_types::{FunctionKey, FunctionName, NodeName, Reason};

use crate::commands::apply::manifests::{self, Items};
use crate::commands::apply::rules::{self, Rule};
use crate::commands::target::{Kind, ModelKind, Target};
use crate::failure::{Exit, Failure};
use crate::output::print;
use crate::session::Session;

/// Delete functions with all their revisions, or workflows, or forget nodes that are lost.
#[derive(Debug, clap::Args)]
#[command(override_usage = "millrace delete function NAME... | workflow NAME... | node NAME... | -f FILE...")]
pub(crate) struct Args {
    /// What to delete, such as function/digits, workflow/traffic or node/worker-1.
    #[arg(value_name = "TYPE[/NAME]", required_unless_present = "file", conflicts_with = "file")]
    target: Option<Target>,
    /// Names, where the type stands alone.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Delete the functions and workflows of these manifests, folders of them, or - for standard input;
    /// of tenants take all caps away, and of the policy every setting.
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Check everything, delete nothing.
    #[arg(long)]
    dry_run: bool,
    /// What is not there is no failure.
    #[arg(long)]
    ignore_not_found: bool,
}

/// How to go about it.
#[derive(Debug, Clone, Copy)]
struct Manner {
    dry_run: bool,
    ignore_not_found: bool,
}

impl Manner {
    fn suffix(self) -> &'static str {
        if self.dry_run { " (dry run)" } else { "" }
    }
}

/// What is to be deleted.
#[derive(Debug, PartialEq, Eq)]
struct Doomed {
    kind: ModelKind,
    key: FunctionKey,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let Args { target, names, file, dry_run, ignore_not_found } = args;
    let manner = Manner { dry_run, ignore_not_found };
    let mut rules = Vec::new();
    let doomed = match target {
        Some(target) => {
            let kind = target.kind;
            let names = target.names(names)?;
            match kind {
                Kind::Function => named(ModelKind::Function, &names, session)?,
                Kind::Workflow => named(ModelKind::Workflow, &names, session)?,
                Kind::Node if dry_run => {
                    return Err(Failure::usage("a node cannot be deleted as a trial")
                        .hint("leave --dry-run out: only one that is lost is forgotten"));
                }
                Kind::Node => return nodes(&names, ignore_not_found, session).await,
                Kind::Gpu => {
                    return Err(Failure::usage("GPUs go with their node").hint("millrace delete node NAME"));
                }
                Kind::Tenant => {
                    return Err(Failure::usage("a tenant is its functions, its workflows and its caps")
                        .hint("delete those; for the caps: millrace tenant set NAME --no-caps"));
                }
                Kind::Policy => {
                    return Err(Failure::usage("there is always a policy")
                        .hint("for the default one: millrace policy set --unset preset,dispatch,eviction"));
                }
                Kind::Operation => {
                    return Err(Failure::usage("an operation is forgotten a day after its end")
                        .hint("end one before its time: millrace operation cancel ID"));
                }
                Kind::Scaling => {
                    return Err(Failure::usage("the scaling signal is computed, not kept")
                        .hint("look at it: millrace get scaling"));
                }
            }
        }
        None => {
            let mut items = manifests::read(&file, &session.config.tenant)?;
            rules.extend(items.rules.drain(..).map(|item| item.rule.taken_back()));
            in_order(items)
        }
    };
    let mut failures = Failures::default();
    models(doomed, manner, session, &mut failures).await?;
    // What they ran under goes last, as it came first.
    take_back(rules, manner, session, &mut failures).await?;
    failures.end()
}

async fn models(
    doomed: Vec<Doomed>,
    manner: Manner,
    session: &Session,
    failures: &mut Failures,
) -> Result<(), Failure> {
    let mut gone = Vec::new();
    for doomed in doomed {
        let Doomed { kind, key } = &doomed;
        match delete(&doomed, manner.dry_run, &gone, session).await {
            Ok(()) => {
                print(&format!("{kind}/{} deleted{}", key.name, manner.suffix()))?;
                gone.push(doomed);
            }
            Err(error) if manner.ignore_not_found && error.reason() == Some(kind.not_found()) => {}
            Err(error) => failures.add(Failure::from(error).about(format_args!("{kind}/{}", key.name)))?,
        }
    }
    Ok(())
}

/// Sets nothing where something is set.
async fn take_back(
    rules: Vec<Rule>,
    manner: Manner,
    session: &Session,
    failures: &mut Failures,
) -> Result<(), Failure> {
    for change in rules::compare(rules, &session.admin).await? {
        let title = change.rule.title();
        if change.outcome == Outcome::Unchanged {
            if !manner.ignore_not_found {
                failures.add(Failure::not_found(format!("{title}: nothing is set")))?;
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

/// Those that were told of while the rest went on.
#[derive(Default)]
struct Failures {
    first: Option<Exit>,
}

impl Failures {
    /// Tells of one. One that all the rest would meet too ends the command.
    fn add(&mut self, failure: Failure) -> Result<(), Failure> {
        let first = *self.first.get_or_insert(failure.exit);
        failure.report();
        if failure.exit == Exit::Unreachable { Err(Failure::told(first)) } else { Ok(()) }
    }

    fn end(self) -> Result<(), Failure> {
        self.first.map_or(Ok(()), |first| Err(Failure::told(first)))
    }
}

/// Deletes one, or tries to. In a trial, those of `gone` are still there: that they alone use it is
/// no obstacle.
async fn delete(doomed: &Doomed, dry_run: bool, gone: &[Doomed], session: &Session) -> Result<(), Error> {
    let Doomed { kind, key } = doomed;
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

/// Whether a step of the workflow runs it.
fn uses(workflow: &wire::Workflow, doomed: &Doomed) -> bool {
    let steps = workflow.spec.iter().flat_map(|spec| &spec.steps);
    steps.filter_map(|step| step.run.as_ref()).any(|run| match (run, doomed.kind) {
        (Run::Function(name), ModelKind::Function) | (Run::Workflow(name), ModelKind::Workflow) => {
            *name == doomed.key.name.as_str()
        }
        _ => false,
    })
}

fn is_one_of(gone: &[Doomed], workflow: &wire::Workflow) -> bool {
    let same = |it: &Doomed, spec: &wire::WorkflowSpec| {
        it.kind == ModelKind::Workflow
            && (it.key.tenant.as_str(), it.key.name.as_str()) == (spec.tenant.as_str(), spec.name.as_str())
    };
    workflow.spec.as_ref().is_some_and(|spec| gone.iter().any(|it| same(it, spec)))
}

fn named(kind: ModelKind, names: &[String], session: &Session) -> Result<Vec<Doomed>, Failure> {
    if names.is_empty() {
        return Err(
            Failure::usage(format!("which {kind}?")).hint(format!("name it: millrace delete {kind} NAME"))
        );
    }
    let one = |name: &String| {
        let name = FunctionName::new(name).map_err(|error| Failure::usage(error.to_string()))?;
        Ok(Doomed { kind, key: session.key(&name) })
    };
    names.iter().map(one).collect()
}

/// What runs others before those: a server keeps what a workflow still runs.
fn in_order(items: Items) -> Vec<Doomed> {
    let workflows = items.workflows.into_iter().rev();
    let workflows = workflows.map(|item| Doomed { kind: ModelKind::Workflow, key: item.spec.key });
    let functions = items.functions.into_iter();
    workflows.chain(functions.map(|item| Doomed { kind: ModelKind::Function, key: item.spec.key })).collect()
}

/// Forgets nodes. Their names are free then.
async fn nodes(names: &[String], ignore_not_found: bool, session: &Session) -> Result<(), Failure> {
    if names.is_empty() {
        return Err(Failure::usage("which node?").hint("name it: millrace delete node NAME"));
    }
    let names = names.iter().map(|name| NodeName::new(name)).collect::<Result<Vec<_>, _>>();
    let mut failures = Failures::default();
    for name in names.map_err(|error| Failure::usage(error.to_string()))? {
        match session.admin.remove_node(&name).await {
            Ok(()) => print(&format!("node/{name} deleted"))?,
            Err(error) if ignore_not_found && error.reason() == Some(Reason::NodeNotFound) => {}
            Err(error) => failures.add(Failure::from(error).about(format_args!("node/{name}")))?,
        }
    }
    failures.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::TenantName;

    #[test]
    fn what_runs_others_goes_before_those() {
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
