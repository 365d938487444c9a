//! `apply`: creates or changes functions and workflows, and sets tenants' caps and the policy.
//!
//! ```text
//!   manifests, model files ─▶ the server's dry run ─▶ upload of missing models ─▶ apply, in server order
//!   checked here              of all, stores nothing
//! ```
//!
//! Everything is checked before anything is stored. The server's [dry run](dry_run) alone decides
//! about functions and workflows: it creates, changes or refuses an item, and it gives the order.
//! The dry run describes models that the cluster does not have. Their files are uploaded
//! afterwards. An apply of several items then repeats the dry run, because the server now knows the
//! models itself and an upload may last an hour. [Rules](crate::manifests::rules) of operators are
//! tried and stored before functions and workflows. If another client writes meanwhile, an item may
//! be refused after earlier items were stored.

mod dry_run;
mod models;
mod ready;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use millrace_client::{AppliedFunction, AppliedWorkflow, ApplyOptions, ApplyOutcome};

use self::dry_run::{ApplyStep, ItemPosition, LoadedItems};
use self::models::LoadedFunction;
use crate::failure::CommandFailure;
use crate::manifests::resource::AppliedResource;
use crate::manifests::rules::{self, Rule, RuleChange};
use crate::manifests::{self, WorkflowItem};
use crate::output::{ListFormat, ListOutput, print};
use crate::session::ClusterSession;

/// Create or change functions and workflows from manifests; set tenants' caps and the policy.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A manifest, a folder of manifests, or - for standard input; may be repeated.
    #[arg(short, long, required = true, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Check everything, store nothing.
    #[arg(long)]
    dry_run: bool,
    /// The longest time to wait until all items are ready to serve.
    #[arg(
        long,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_value = "30s",
        default_missing_value = "30s",
        value_parser = humantime::parse_duration
    )]
    wait: Duration,
    /// Do not wait until the items are ready.
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let items = manifests::read(&args.file, &session.config.tenant)?;
    let rules: Vec<Rule> = items.rules.into_iter().map(|item| item.rule).collect();
    let items = LoadedItems { functions: models::read(items.functions)?, workflows: items.workflows };
    let missing = models::missing(&items.functions, &session.admin).await?;
    let mut steps = dry_run::run(&items, &missing, session).await?;
    let changes = rules::compare(rules, &session.admin).await?;
    let several = changes.len() + steps.len() > 1;
    if args.dry_run || several {
        rules::check(&changes, &session.admin).await?;
    }
    if args.dry_run {
        return tell(&changes, &items, &steps);
    }
    for model in missing.values() {
        models::upload(&model.file, session).await?;
    }
    if several && !missing.is_empty() {
        steps = dry_run::run(&items, &BTreeMap::new(), session).await?;
    }
    let mut resources = set(&changes, session, args.output.output).await?;
    resources.extend(store(&items, &steps, session, args.output.output).await?);
    if !args.no_wait {
        resources = ready::wait(resources, session, args.wait).await?;
    }
    show(resources, args.output.output)
}

/// Prints a line, unless the output is documents.
fn say(line: &str, format: ListFormat) -> Result<(), CommandFailure> {
    match format {
        ListFormat::Table | ListFormat::Wide => print(line),
        ListFormat::Json | ListFormat::Yaml => Ok(()),
    }
}

/// Stores the rules.
async fn set(
    changes: &[RuleChange],
    session: &ClusterSession,
    format: ListFormat,
) -> Result<Vec<AppliedResource>, CommandFailure> {
    let mut resources = Vec::with_capacity(changes.len());
    for change in changes {
        resources.push(change.store(&session.admin).await?);
        say(&change_line(change, ""), format)?;
    }
    Ok(resources)
}

/// Stores all functions and workflows.
async fn store(
    items: &LoadedItems,
    steps: &[ApplyStep],
    session: &ClusterSession,
    format: ListFormat,
) -> Result<Vec<AppliedResource>, CommandFailure> {
    let mut resources = Vec::with_capacity(steps.len());
    for step in steps {
        let (resource, outcome) = match step.item {
            ItemPosition::Function(at) => {
                let applied = apply(&items.functions[at], session).await?;
                (AppliedResource::Function(applied.function), applied.outcome)
            }
            ItemPosition::Workflow(at) => {
                let applied = apply_workflow(&items.workflows[at], session).await?;
                (AppliedResource::Workflow(applied.workflow), applied.outcome)
            }
        };
        say(&outcome_line(&resource.title(), outcome, ""), format)?;
        resources.push(resource);
    }
    Ok(resources)
}

async fn apply(
    function: &LoadedFunction,
    session: &ClusterSession,
) -> Result<AppliedFunction, CommandFailure> {
    let spec = &function.item.spec;
    let applied = session.admin.apply(spec, function.model.digest(), ApplyOptions::default()).await;
    applied.map_err(|error| CommandFailure::from(error).about(format_args!("function/{}", spec.key.name)))
}

async fn apply_workflow(
    item: &WorkflowItem,
    session: &ClusterSession,
) -> Result<AppliedWorkflow, CommandFailure> {
    let applied = session.admin.apply_workflow(&item.spec, ApplyOptions::default()).await;
    applied
        .map_err(|error| CommandFailure::from(error).about(format_args!("workflow/{}", item.spec.key.name)))
}

/// Prints the outcomes of a dry run.
fn tell(changes: &[RuleChange], items: &LoadedItems, steps: &[ApplyStep]) -> Result<(), CommandFailure> {
    for change in changes {
        print(&change_line(change, " (dry run)"))?;
    }
    for step in steps {
        let title = match step.item {
            ItemPosition::Function(at) => format!("function/{}", items.functions[at].item.spec.key.name),
            ItemPosition::Workflow(at) => format!("workflow/{}", items.workflows[at].spec.key.name),
        };
        print(&outcome_line(&title, step.outcome, " (dry run)"))?;
    }
    Ok(())
}

fn change_line(change: &RuleChange, suffix: &str) -> String {
    outcome_line(&change.rule.title(), change.outcome, &format!("{}{suffix}", change.told()))
}

fn outcome_line(title: &str, outcome: ApplyOutcome, suffix: &str) -> String {
    let word = match outcome {
        ApplyOutcome::Created => "created",
        ApplyOutcome::Configured => "configured",
        ApplyOutcome::Unchanged => "unchanged",
    };
    format!("{title} {word}{suffix}")
}

fn show(resources: Vec<AppliedResource>, format: ListFormat) -> Result<(), CommandFailure> {
    let documents: Vec<_> = resources.into_iter().map(AppliedResource::document).collect();
    let whole = match documents.as_slice() {
        [one] => crate::output::document(format, one)?,
        several => crate::output::document(format, &several)?,
    };
    whole.map_or(Ok(()), |text| print(&text))
}
