//! `get`: lists functions, nodes, GPUs or tenants, or shows one; shows how many nodes are needed.

use std::time::SystemTime;

use futures::TryStreamExt as _;
use millrace_client::{Admin, messages as wire};
use millrace_types::{Digest, FunctionName};

use crate::clock;
use crate::commands::target::{Kind, Target};
use crate::failure::Failure;
use crate::output;
use crate::output::table::{Table, col, wide};
use crate::output::{Format, Output, document, documents, list, print, text};
use crate::session::Session;

/// List functions, nodes, GPUs or tenants, or show one; show how many nodes the cluster needs.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// functions, nodes, gpus or tenants; or one of them, such as function/digits; or scaling.
    #[arg(value_name = "TYPE[/NAME]")]
    target: Target,
    /// Only the one of this name; for GPUs a node's name.
    name: Option<String>,
    /// Functions of every tenant.
    #[arg(short = 'A', long)]
    all_tenants: bool,
    /// What the controller that answers has, perhaps not the newest: also while none leads.
    #[arg(long)]
    stale: bool,
    #[command(flatten)]
    output: Output,
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    let kind = args.target.kind;
    let name = args.target.name(args.name)?;
    let format = args.output.output;
    let admin = if args.stale { session.admin.clone().stale() } else { session.admin.clone() };
    match kind {
        Kind::Function => match name {
            Some(name) => one_function(&name, session, &admin, format).await,
            None => functions(session, &admin, args.all_tenants, format).await,
        },
        Kind::Node => nodes(named(&admin, name.as_deref()).await?, name.is_some(), format),
        Kind::Gpu => gpus(&named(&admin, name.as_deref()).await?, format),
        Kind::Tenant => tenants(&admin, name.as_deref(), format).await,
        Kind::Scaling => match name {
            Some(name) => Err(Failure::usage(format!("scaling has no names, such as {name:?}"))
                .hint("write: millrace get scaling")),
            None => scaling(admin.scaling_signal().await?, format),
        },
    }
}

async fn one_function(name: &str, session: &Session, admin: &Admin, format: Format) -> Result<(), Failure> {
    let name = FunctionName::new(name).map_err(|error| Failure::usage(error.to_string()))?;
    let function = admin.function(&session.key(&name)).await?;
    let table = function_table(std::slice::from_ref(&function), clock::wall());
    match document(format, &documents::Function::from(function))? {
        Some(text) => print(&text),
        None => print(&table.render(format)),
    }
}

async fn functions(
    session: &Session,
    admin: &Admin,
    all_tenants: bool,
    format: Format,
) -> Result<(), Failure> {
    let tenant = (!all_tenants).then_some(&session.config.tenant);
    let functions: Vec<_> = admin.functions(tenant).try_collect().await?;
    let table = function_table(&functions, clock::wall());
    let documents: Vec<_> = functions.into_iter().map(documents::Function::from).collect();
    let empty = match tenant {
        Some(tenant) => {
            format!("tenant {tenant} has no functions: publish one with 'millrace apply -f FILE'")
        }
        None => "there are no functions: publish one with 'millrace apply -f FILE'".to_owned(),
    };
    list(format, &documents, &table, &empty)
}

async fn named(admin: &Admin, name: Option<&str>) -> Result<Vec<wire::Node>, Failure> {
    let mut nodes = admin.nodes().await?;
    if let Some(name) = name {
        nodes.retain(|node| node.name == name);
        if nodes.is_empty() {
            return Err(Failure::not_found(format!("there is no node {name:?}"))
                .hint("see the nodes: millrace get nodes"));
        }
    }
    Ok(nodes)
}

fn nodes(nodes: Vec<wire::Node>, one: bool, format: Format) -> Result<(), Failure> {
    let table = node_table(&nodes);
    let documents: Vec<_> = nodes.into_iter().map(documents::Node::from).collect();
    if let [node] = documents.as_slice()
        && one
        && let Some(text) = document(format, node)?
    {
        return print(&text);
    }
    list(format, &documents, &table, "no node has joined: start one with 'millrace up'")
}

fn gpus(nodes: &[wire::Node], format: Format) -> Result<(), Failure> {
    let all = || nodes.iter().flat_map(|node| node.gpus.iter().map(|gpu| (node.name.as_str(), gpu)));
    let documents: Vec<_> = all().map(|(node, gpu)| documents::Gpu::new(node, gpu.clone())).collect();
    list(format, &documents, &gpu_table(all()), "there are no GPUs: see 'millrace get nodes'")
}

async fn tenants(admin: &Admin, name: Option<&str>, format: Format) -> Result<(), Failure> {
    let mut tenants: Vec<_> = admin.tenants().try_collect().await?;
    if let Some(name) = name {
        tenants.retain(|tenant| tenant.name == name);
        if tenants.is_empty() {
            return Err(Failure::not_found(format!("tenant {name:?} has neither caps nor functions"))
                .hint("see the others: millrace get tenants"));
        }
    }
    let table = output::tenants::table(&tenants);
    let documents: Vec<_> = tenants.into_iter().map(output::tenants::Tenant::from).collect();
    list(format, &documents, &table, "no tenant has functions or caps")
}

fn scaling(signal: wire::ScalingSignal, format: Format) -> Result<(), Failure> {
    let table = scaling_table(&signal);
    match document(format, &documents::Scaling::from(signal))? {
        Some(text) => print(&text),
        None => print(&table.render(format)),
    }
}

/// One row for each reason.
fn scaling_table(signal: &wire::ScalingSignal) -> Table {
    let mut table = Table::new([col("NEEDED"), col("NODES"), col("REASON"), col("WHY")]);
    let (needed, now) = (signal.nodes_needed.to_string(), signal.nodes_now.to_string());
    for it in &signal.reasons {
        table.row([needed.clone(), now.clone(), it.reason.clone(), it.message.clone()]);
    }
    if signal.reasons.is_empty() {
        table.row([needed, now, String::new(), "nothing is wanted".to_owned()]);
    }
    table
}

/// A function's Ready condition, in a word.
pub(crate) fn readiness(function: &wire::Function) -> &'static str {
    let ready = function.conditions.iter().find(|condition| condition.r#type == "Ready");
    ready.map_or("Unknown", documents::status_word)
}

fn function_table(functions: &[wire::Function], now: SystemTime) -> Table {
    let mut table = Table::new([
        wide("TENANT"),
        col("NAME"),
        col("READY"),
        col("REVISION"),
        col("MODEL"),
        col("SLO"),
        wide("TIMEOUT"),
        wide("PARAMETERS"),
        wide("DIGEST"),
        wide("LABELS"),
        col("AGE"),
    ]);
    for function in functions {
        let spec = function.spec.clone().unwrap_or_default();
        let latest = function.revisions.iter().max_by_key(|revision| revision.number);
        let artifact = latest.and_then(|revision| revision.artifact.as_ref());
        let model = latest.and_then(|revision| revision.model.as_ref());
        let labels: std::collections::BTreeMap<_, _> = spec.labels.iter().collect();
        table.row([
            spec.tenant,
            spec.name,
            readiness(function).to_owned(),
            function.generation.to_string(),
            artifact.map(|artifact| text::size(artifact.bytes)).unwrap_or_default(),
            spec.slo.map(|slo| objective(&slo)).unwrap_or_default(),
            spec.timeout.and_then(documents::span).unwrap_or_default(),
            model.map(|model| text::count(model.parameters)).unwrap_or_default(),
            artifact.map(|artifact| short(&artifact.digest)).unwrap_or_default(),
            labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(","),
            text::age_of(function.created_at, now),
        ]);
    }
    table
}

/// An objective as people say it: `p98 50ms`.
pub(crate) fn objective(slo: &wire::Slo) -> String {
    // A share such as 0.999 is p99.9; rounding hides that 0.98 * 100 is not quite 98.
    let percentile = (slo.percentile * 1e6).round() / 1e4;
    format!("p{percentile} {}", slo.deadline.and_then(documents::span).unwrap_or_default())
}

/// The digits of a digest that people compare; the text itself if it is none.
pub(crate) fn short(digest: &str) -> String {
    digest.parse::<Digest>().map_or_else(|_| digest.to_owned(), |digest| digest.short())
}

fn node_table(nodes: &[wire::Node]) -> Table {
    let mut table = Table::new([
        col("NAME"),
        col("STATUS"),
        col("GPUS"),
        col("GPU-MEMORY"),
        col("HOST-TIER"),
        col("FUNCTIONS"),
        col("QUEUED"),
        wide("TOPOLOGY"),
        wide("ADDRESS"),
        wide("EPOCH"),
        wide("CHECKPOINT"),
        wide("INDEXED"),
        wide("STORAGE"),
        wide("COLD-STARTS"),
        wide("GROUP"),
    ]);
    for node in nodes {
        let used: u64 = node.gpus.iter().map(|gpu| gpu.used_bytes).sum();
        let memory: u64 = node.gpus.iter().map(|gpu| gpu.memory_bytes).sum();
        let up = node.gpus.iter().filter(|gpu| gpu.health == "Up").count();
        table.row([
            node.name.clone(),
            node_status(node),
            format!("{up}/{}", node.gpus.len()),
            format!("{}/{}", text::size(used), text::size(memory)),
            format!("{}/{}", text::size(node.host_tier_bytes), text::size(host_budget(node))),
            node.placements.to_string(),
            node.queued.to_string(),
            node.topology.clone(),
            node.address.clone(),
            node.epoch.to_string(),
            node.checkpoint_seq.to_string(),
            node.index_entries.to_string(),
            text::size(node.host_memory_bytes),
            node.cold_starts.to_string(),
            if node.group_bytes > 0 { text::size(node.group_bytes) } else { String::new() },
        ]);
    }
    table
}

/// Host memory for models; of a node that says nothing, all that may be placed there.
fn host_budget(node: &wire::Node) -> u64 {
    if node.host_budget_bytes > 0 { node.host_budget_bytes } else { node.host_memory_bytes }
}

/// What is known of a node and what is wished of it, as `kubectl` says it.
fn node_status(node: &wire::Node) -> String {
    let known = match (node.status(), node.lease()) {
        (wire::NodeStatus::Lost, _) => "Lost",
        (_, wire::NodeLease::Fenced) => "Silent",
        _ if node.connected => "Connected",
        _ => "Disconnected",
    };
    match node.scheduling() {
        wire::NodeScheduling::Cordoned => format!("{known},Cordoned"),
        wire::NodeScheduling::Draining => format!("{known},Draining"),
        wire::NodeScheduling::Schedulable | wire::NodeScheduling::Unspecified => known.to_owned(),
    }
}

fn gpu_table<'a>(gpus: impl Iterator<Item = (&'a str, &'a wire::Gpu)>) -> Table {
    let mut table = Table::new([
        col("NODE"),
        col("GPU"),
        col("TYPE"),
        col("HEALTH"),
        col("USED"),
        col("MEMORY"),
        col("MODELS"),
        col("RUNNING"),
        wide("BUSY"),
        wide("SWAPS"),
        wide("PEER-SWAPS"),
        wide("EVICTIONS"),
        wide("RESTARTS"),
        wide("PID"),
    ]);
    for (node, gpu) in gpus {
        table.row([
            node.to_owned(),
            gpu.index.to_string(),
            gpu.gpu_type.clone(),
            gpu.health.clone(),
            text::size(gpu.used_bytes),
            text::size(gpu.memory_bytes),
            gpu.models.len().to_string(),
            gpu.running.clone(),
            gpu.busy.and_then(|busy| busy.try_into().ok()).map(text::age).unwrap_or_default(),
            gpu.swaps.to_string(),
            gpu.peer_swaps.to_string(),
            gpu.evictions.to_string(),
            gpu.restarts.to_string(),
            pids(gpu),
        ]);
    }
    table
}

/// Processes that a table names; of more it says how many.
const PIDS_SHOWN: usize = 4;

/// A GPU's executor, or those of its models where each has its own.
fn pids(gpu: &wire::Gpu) -> String {
    let pids: Vec<_> = gpu.executor_pids.iter().take(PIDS_SHOWN).map(u32::to_string).collect();
    match gpu.executor_pids.len() {
        0 if gpu.executor_pid == 0 => String::new(),
        // A worker of another build names only the one.
        0 => gpu.executor_pid.to_string(),
        all if all > PIDS_SHOWN => format!("{} (+{})", pids.join(","), all - PIDS_SHOWN),
        _ => pids.join(","),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objectives_read_as_percentiles() {
        let deadline = prost_types::Duration { seconds: 0, nanos: 50_000_000 };
        for (percentile, expected) in [(0.98, "p98 50ms"), (0.999, "p99.9 50ms"), (0.5, "p50 50ms")] {
            let slo = wire::Slo { deadline: Some(deadline), percentile };
            assert_eq!(objective(&slo), expected);
        }
    }

    #[test]
    fn a_function_without_status_is_of_unknown_readiness() {
        let function = wire::Function {
            spec: Some(wire::FunctionSpec { name: "digits".into(), ..Default::default() }),
            generation: 1,
            ..Default::default()
        };
        let table = function_table(&[function], SystemTime::UNIX_EPOCH);
        let expected = "NAME     READY     REVISION   MODEL   SLO   AGE\ndigits   Unknown   1          -       -     -\n";
        assert_eq!(table.render(Format::Table), expected);
    }

    #[test]
    fn a_node_shows_what_is_known_and_what_is_wished() {
        let base = wire::Node { connected: true, ..Default::default() };
        for (node, expected) in [
            (base.clone(), "Connected"),
            (wire::Node { connected: false, ..base.clone() }, "Disconnected"),
            (wire::Node { lease: wire::NodeLease::Fenced.into(), ..base.clone() }, "Silent"),
            (wire::Node { status: wire::NodeStatus::Lost.into(), connected: false, ..base.clone() }, "Lost"),
            (
                wire::Node { scheduling: wire::NodeScheduling::Draining.into(), ..base.clone() },
                "Connected,Draining",
            ),
            (wire::Node { scheduling: wire::NodeScheduling::Schedulable.into(), ..base }, "Connected"),
        ] {
            assert_eq!(node_status(&node), expected);
        }
    }

    #[test]
    fn scaling_says_what_asks_for_so_many() {
        let reason = wire::ScalingReason { reason: "Replicas".into(), message: "a reason".into() };
        let signal = wire::ScalingSignal { nodes_needed: 3, nodes_now: 2, reasons: vec![reason] };
        let expected = "\
NEEDED   NODES   REASON     WHY
3        2       Replicas   a reason
";
        assert_eq!(scaling_table(&signal).render(Format::Table), expected);
        let idle = "\
NEEDED   NODES   REASON   WHY
0        0       -        nothing is wanted
";
        assert_eq!(scaling_table(&wire::ScalingSignal::default()).render(Format::Table), idle);
    }

    #[test]
    fn a_gpu_names_its_executors_and_not_all_of_many() {
        let gpu = |executor_pid, executor_pids: &[u32]| wire::Gpu {
            executor_pid,
            executor_pids: executor_pids.to_vec(),
            ..Default::default()
        };
        assert_eq!(pids(&gpu(7, &[7])), "7");
        assert_eq!(pids(&gpu(7, &[])), "7");
        assert_eq!(pids(&gpu(0, &[])), "");
        assert_eq!(pids(&gpu(0, &[7, 8, 9])), "7,8,9");
        assert_eq!(pids(&gpu(0, &[1, 2, 3, 4, 5, 6])), "1,2,3,4 (+2)");
    }

    #[test]
    fn gpus_show_what_they_hold() {
        let gpu = wire::Gpu {
            index: 1,
            gpu_type: "emulated".into(),
            health: "Up".into(),
            memory_bytes: 4 << 30,
            used_bytes: 64 << 20,
            models: vec![wire::ResidentModel::default()],
            ..Default::default()
        };
        let expected = "\
NODE   GPU   TYPE       HEALTH   USED       MEMORY    MODELS   RUNNING
n0     1     emulated   Up       64.0 MiB   4.0 GiB   1        -
";
        assert_eq!(gpu_table([("n0", &gpu)].into_iter()).render(Format::Table), expected);
    }
}
