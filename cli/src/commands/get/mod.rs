//! `get`: lists functions, workflows, nodes, GPUs, slices, profiles, tenants or operations, or shows one of them;
//! shows the scheduling policy and the number of nodes that the cluster needs.

mod functions;
mod nodes;
mod workflows;

use std::time::SystemTime;

use futures::TryStreamExt as _;
use millrace_client::{Admin, messages as wire};
use millrace_types::{FunctionKey, FunctionName, NodeName, TenantName};
use serde::Serialize;

use self::functions::function_table;
use crate::clock;
use crate::failure::CommandFailure;
use crate::output;
use crate::output::table::{TextTable, col};
use crate::output::{ListFormat, ListOutput, document, documents, list, print};
use crate::session::ClusterSession;
use crate::target::{ResourceKind, ResourceTarget};

/// List functions, workflows, nodes, GPUs, slices, profiles, tenants or operations, or show one of
/// them; show the scheduling policy, or the number of nodes that the cluster needs.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// functions, workflows, nodes, gpus, slices, profiles, tenants or operations; a single item, such
    /// as function/digits; policies; or scaling.
    #[arg(value_name = "TYPE[/NAME]")]
    target: ResourceTarget,
    /// The name of a single item; for GPUs and slices, the name of a node; for profiles, of a function.
    name: Option<String>,
    /// List the functions, workflows or profiles of every tenant.
    #[arg(short = 'A', long)]
    all_tenants: bool,
    /// Read the answering controller's own state, which may be out of date; works while no
    /// controller leads.
    #[arg(long)]
    stale: bool,
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let kind = args.target.kind;
    let name = args.target.name(args.name)?;
    let format = args.output.output;
    let admin = if args.stale { session.admin.clone().with_stale_reads() } else { session.admin.clone() };
    let shown = ModelListing { session, admin: &admin, all_tenants: args.all_tenants, format };
    match kind {
        ResourceKind::Function => shown.functions(name).await,
        ResourceKind::Workflow => shown.workflows(name).await,
        ResourceKind::Node => {
            nodes::nodes(nodes::named(&admin, name.as_deref()).await?, name.is_some(), format)
        }
        ResourceKind::Gpu => nodes::gpus(&nodes::named(&admin, name.as_deref()).await?, format),
        ResourceKind::Slice => slices(&admin, name.as_deref(), format).await,
        ResourceKind::Profile => shown.profiles(name).await,
        ResourceKind::Tenant => tenants(&admin, name.as_deref(), format).await,
        ResourceKind::Operation => operations(&admin, name.as_deref(), format).await,
        ResourceKind::Policy => {
            nameless("policies", name.filter(|name| name != "cluster"))?;
            policy(admin.policy().await?, format)
        }
        ResourceKind::Scaling => {
            nameless("scaling", name)?;
            scaling(admin.scaling_signal().await?, format)
        }
    }
}

/// Prints one function or workflow, or all of a tenant, or all.
struct ModelListing<'a> {
    session: &'a ClusterSession,
    admin: &'a Admin,
    all_tenants: bool,
    format: ListFormat,
}

impl ModelListing<'_> {
    async fn functions(&self, name: Option<String>) -> Result<(), CommandFailure> {
        match name {
            Some(name) => {
                let function = self.admin.function(&self.key(&name)?).await?;
                one::<_, documents::FunctionDocument>(function, function_table, self.format)
            }
            None => {
                let functions = self.admin.functions(self.tenant()).try_collect().await?;
                self.all::<_, documents::FunctionDocument>("functions", functions, function_table)
            }
        }
    }

    async fn workflows(&self, name: Option<String>) -> Result<(), CommandFailure> {
        match name {
            Some(name) => {
                let workflow = self.admin.workflow(&self.key(&name)?).await?;
                one::<_, documents::WorkflowDocument>(workflow, workflows::table, self.format)
            }
            None => {
                let workflows = self.admin.workflows(self.tenant()).try_collect().await?;
                self.all::<_, documents::WorkflowDocument>("workflows", workflows, workflows::table)
            }
        }
    }

    async fn profiles(&self, name: Option<String>) -> Result<(), CommandFailure> {
        let name = name.map(|name| FunctionName::new(&name)).transpose();
        let name = name.map_err(|error| CommandFailure::usage(error.to_string()))?;
        let profiles = self.admin.profiles(self.tenant(), name.as_ref()).await?;
        let table = output::profiles::table(&profiles);
        let documents: Vec<_> = profiles.into_iter().map(output::profiles::ProfileDocument::from).collect();
        let none = match &name {
            Some(name) => format!("function {name} was not profiled"),
            None => "no function was profiled".to_owned(),
        };
        list(
            self.format,
            &documents,
            &table,
            &format!("{none}: profile one with 'millrace profile FUNCTION'"),
        )
    }

    fn key(&self, name: &str) -> Result<FunctionKey, CommandFailure> {
        let name = FunctionName::new(name).map_err(|error| CommandFailure::usage(error.to_string()))?;
        Ok(self.session.key(&name))
    }

    fn tenant(&self) -> Option<&TenantName> {
        (!self.all_tenants).then_some(&self.session.config.tenant)
    }

    fn all<W, D: From<W> + Serialize>(
        &self,
        kinds: &str,
        items: Vec<W>,
        table: impl Fn(&[W], SystemTime) -> TextTable,
    ) -> Result<(), CommandFailure> {
        let table = table(&items, clock::wall());
        let documents: Vec<_> = items.into_iter().map(D::from).collect();
        let none = match self.tenant() {
            Some(tenant) => format!("tenant {tenant} has no {kinds}"),
            None => format!("there are no {kinds}"),
        };
        list(self.format, &documents, &table, &format!("{none}: publish one with 'millrace apply -f FILE'"))
    }
}

fn one<W, D: From<W> + Serialize>(
    item: W,
    table: impl Fn(&[W], SystemTime) -> TextTable,
    format: ListFormat,
) -> Result<(), CommandFailure> {
    let table = table(std::slice::from_ref(&item), clock::wall());
    match document(format, &D::from(item))? {
        Some(text) => print(&text),
        None => print(&table.render(format)),
    }
}

async fn slices(admin: &Admin, node: Option<&str>, format: ListFormat) -> Result<(), CommandFailure> {
    let node = node.map(NodeName::new).transpose();
    let node = node.map_err(|error| CommandFailure::usage(error.to_string()))?;
    let slices = admin.slices(node.as_ref()).await?;
    let table = output::slices::table(&slices);
    let documents: Vec<_> = slices.into_iter().map(output::slices::SliceDocument::from).collect();
    let empty = "no function asks for slices of GPUs: write resources.sm or a quota in its manifest";
    list(format, &documents, &table, empty)
}

async fn tenants(admin: &Admin, name: Option<&str>, format: ListFormat) -> Result<(), CommandFailure> {
    let mut tenants: Vec<_> = admin.tenants().try_collect().await?;
    if let Some(name) = name {
        tenants.retain(|tenant| tenant.name == name);
        if tenants.is_empty() {
            return Err(CommandFailure::not_found(format!("tenant {name:?} has neither caps nor functions"))
                .hint("list the tenants: millrace get tenants"));
        }
    }
    let table = output::tenants::table(&tenants);
    let documents: Vec<_> = tenants.into_iter().map(output::tenants::TenantDocument::from).collect();
    list(format, &documents, &table, "no tenant has functions or caps")
}

/// Refuses a name for a resource that exists only once.
fn nameless(what: &str, name: Option<String>) -> Result<(), CommandFailure> {
    match name {
        None => Ok(()),
        Some(name) => Err(CommandFailure::usage(format!("{what} has no names, such as {name:?}"))
            .hint(format!("write: millrace get {what}"))),
    }
}

async fn operations(admin: &Admin, id: Option<&str>, format: ListFormat) -> Result<(), CommandFailure> {
    let operations = match id {
        Some(id) => vec![admin.operation(id).await?],
        None => admin.operations().await?,
    };
    let table = output::operations::table(&operations);
    let documents: Vec<_> = operations.into_iter().map(output::operations::OperationDocument::from).collect();
    list(format, &documents, &table, "no operation is running, and none ended in the last day")
}

fn policy(policy: wire::Policy, format: ListFormat) -> Result<(), CommandFailure> {
    let table = output::policies::table(&policy);
    match document(format, &output::policies::PolicyDocument::from(policy))? {
        Some(text) => print(&text),
        None => print(&table.render(format)),
    }
}

fn scaling(signal: wire::ScalingSignal, format: ListFormat) -> Result<(), CommandFailure> {
    let table = scaling_table(&signal);
    match document(format, &documents::ScalingDocument::from(signal))? {
        Some(text) => print(&text),
        None => print(&table.render(format)),
    }
}

/// Returns a table with a row for each reason.
fn scaling_table(signal: &wire::ScalingSignal) -> TextTable {
    let mut table = TextTable::new([col("NEEDED"), col("NODES"), col("REASON"), col("WHY")]);
    let needed = signal.nodes_needed.to_string();
    let now = signal.nodes_now.to_string();
    for it in &signal.reasons {
        table.row([needed.clone(), now.clone(), it.reason.clone(), it.message.clone()]);
    }
    if signal.reasons.is_empty() {
        table.row([needed, now, String::new(), "no function needs a node".to_owned()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaling_lists_the_reasons_for_the_number_of_nodes() {
        let reason = wire::ScalingReason { reason: "Replicas".into(), message: "a reason".into() };
        let signal = wire::ScalingSignal { nodes_needed: 3, nodes_now: 2, reasons: vec![reason] };
        let expected = "\
NEEDED   NODES   REASON     WHY
3        2       Replicas   a reason
";
        assert_eq!(scaling_table(&signal).render(ListFormat::Table), expected);
        let idle = "\
NEEDED   NODES   REASON   WHY
0        0       -        no function needs a node
";
        assert_eq!(scaling_table(&wire::ScalingSignal::default()).render(ListFormat::Table), idle);
    }
}
