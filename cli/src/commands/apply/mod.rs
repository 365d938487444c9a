//! `apply`: creates functions and workflows, or changes them, and sets tenants' caps and the policy.
//!
//! Everything is checked before anything is stored. Before anything is sent: all manifests and models,
//! workflows beside what they run, and that there is an [order](plan) in which a server that has what
//! this one has takes the whole. What operators [set](rules) goes before it, and is asked about before
//! any model is sent. Then the models that the cluster does not have are sent and, where there are
//! several items, the server is asked about each without storing, as far as it can tell what will be
//! from what is. What others write meanwhile may still have an item refused after those before it were
//! stored.

mod check;
pub(crate) mod manifests;
mod models;
mod order;
mod plan;
mod ready;
mod resource;
pub(crate) mod rules;
mod trial;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use millrace_client::{Applied, AppliedWorkflow, ApplyOptions, Outcome};
use millrace_types::workflow::{Fit, Run};
use millrace_types::{FunctionKey, TenantName};

use self::manifests::{Item, WorkflowItem};
use self::models::Model;
use self::plan::Step;
use self::resource::Resource;
use self::rules::{Change, Rule};
use crate::failure::Failure;
use crate::output::{Format, Output, print};
use crate::session::Session;

/// Create functions and workflows from manifests, or change them; set tenants' caps and the policy.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A manifest, a folder of them, or - for standard input. May be repeated.
    #[arg(short, long, required = true, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Check everything, store nothing.
    #[arg(long)]
    dry_run: bool,
    /// How long to wait until all of them are ready to serve.
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
    /// Do not wait until they are ready.
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    #[command(flatten)]
    output: Output,
}

/// What is asked for, with every model read.
struct Wanted {
    functions: Vec<Function>,
    /// Each after those of them that it runs.
    workflows: Vec<WorkflowItem>,
}

struct Function {
    item: Item,
    model: Model,
}

impl Function {
    /// What it is to a workflow that runs it.
    fn fit(&self) -> Fit {
        let keeps_state = self.item.spec.sequences.is_some();
        Fit { keeps_state, ..Fit::of_function(self.model.signature.clone()) }
    }
}

/// What a workflow runs, and whose.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Callee {
    tenant: TenantName,
    run: Run,
}

impl Callee {
    fn function(key: &FunctionKey) -> Self {
        Self { tenant: key.tenant.clone(), run: Run::Function(key.name.clone()) }
    }

    fn workflow(key: &FunctionKey) -> Self {
        Self { tenant: key.tenant.clone(), run: Run::Workflow(key.name.clone()) }
    }

    /// What a workflow runs is of its tenant.
    fn of(item: &WorkflowItem, run: &Run) -> Self {
        Self { tenant: item.spec.key.tenant.clone(), run: run.clone() }
    }
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let items = manifests::read(&args.file, &session.config.tenant)?;
    let rules: Vec<Rule> = items.rules.into_iter().map(|item| item.rule).collect();
    let functions = models::read(items.functions, &session.admin).await?;
    let wanted = Wanted { functions, workflows: items.workflows };
    let order = check::check(&wanted, &session.admin).await?;
    let changes = rules::compare(rules, &session.admin).await?;
    let several = changes.len() + order.len() > 1;
    if args.dry_run || several {
        rules::check(&changes, &session.admin).await?;
    }
    let missing = models::missing(&wanted.functions, &session.admin).await?;
    if args.dry_run {
        let outcomes = trial::run(&wanted, &order, &missing, session).await?;
        return tell(&changes, &wanted, &order, &outcomes);
    }
    for model in missing.values() {
        models::upload(model, session).await?;
    }
    if several {
        trial::run(&wanted, &order, &BTreeMap::new(), session).await?;
    }
    let mut resources = set(&changes, session, args.output.output).await?;
    resources.extend(store(&wanted, &order, session, args.output.output).await?);
    if !args.no_wait {
        resources = ready::wait(resources, session, args.wait).await?;
    }
    show(resources, args.output.output)
}

/// Says what is done, where no documents are printed.
fn say(line: &str, format: Format) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Wide => print(line),
        Format::Json | Format::Yaml => Ok(()),
    }
}

/// Stores what operators set.
async fn set(changes: &[Change], session: &Session, format: Format) -> Result<Vec<Resource>, Failure> {
    let mut resources = Vec::with_capacity(changes.len());
    for change in changes {
        resources.push(change.store(&session.admin).await?);
        say(&change_line(change, ""), format)?;
    }
    Ok(resources)
}

/// Stores all functions and workflows.
async fn store(
    wanted: &Wanted,
    order: &[Step],
    session: &Session,
    format: Format,
) -> Result<Vec<Resource>, Failure> {
    let mut resources = Vec::with_capacity(order.len());
    for step in order {
        let (resource, outcome) = match *step {
            Step::Function(at) => {
                let applied = apply(&wanted.functions[at], session, ApplyOptions::default()).await?;
                (Resource::Function(applied.function), applied.outcome)
            }
            Step::Workflow(at) => {
                let applied = apply_workflow(&wanted.workflows[at], session, ApplyOptions::default()).await?;
                (Resource::Workflow(applied.workflow), applied.outcome)
            }
        };
        say(&outcome_line(&resource.title(), outcome, ""), format)?;
        resources.push(resource);
    }
    Ok(resources)
}

async fn apply(function: &Function, session: &Session, options: ApplyOptions) -> Result<Applied, Failure> {
    let spec = &function.item.spec;
    let applied = session.admin.apply(spec, function.model.digest, options).await;
    applied.map_err(|error| Failure::from(error).about(format_args!("function/{}", spec.key.name)))
}

async fn apply_workflow(
    item: &WorkflowItem,
    session: &Session,
    options: ApplyOptions,
) -> Result<AppliedWorkflow, Failure> {
    let applied = session.admin.apply_workflow(&item.spec, options).await;
    applied.map_err(|error| Failure::from(error).about(format_args!("workflow/{}", item.spec.key.name)))
}

/// Says what would happen.
fn tell(changes: &[Change], wanted: &Wanted, order: &[Step], outcomes: &[Outcome]) -> Result<(), Failure> {
    for change in changes {
        print(&change_line(change, " (dry run)"))?;
    }
    for (step, &outcome) in order.iter().zip(outcomes) {
        let title = match *step {
            Step::Function(at) => format!("function/{}", wanted.functions[at].item.spec.key.name),
            Step::Workflow(at) => format!("workflow/{}", wanted.workflows[at].spec.key.name),
        };
        print(&outcome_line(&title, outcome, " (dry run)"))?;
    }
    Ok(())
}

fn change_line(change: &Change, suffix: &str) -> String {
    outcome_line(&change.rule.title(), change.outcome, &format!("{}{suffix}", change.told()))
}

fn outcome_line(title: &str, outcome: Outcome, suffix: &str) -> String {
    let word = match outcome {
        Outcome::Created => "created",
        Outcome::Configured => "configured",
        Outcome::Unchanged => "unchanged",
    };
    format!("{title} {word}{suffix}")
}

fn show(resources: Vec<Resource>, format: Format) -> Result<(), Failure> {
    let documents: Vec<_> = resources.into_iter().map(Resource::document).collect();
    let whole = match documents.as_slice() {
        [one] => crate::output::document(format, one)?,
        several => crate::output::document(format, &several)?,
    };
    whole.map_or(Ok(()), |text| print(&text))
}
