//! `sim`: runs a workload on a cluster in virtual time, and compares policies on it.

mod models;
mod results;
mod tenants;
mod workload;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use millrace_device::topology::names;
use millrace_sim::outcome::TenantSummary;
use millrace_sim::scenario::{Function, NodeSpec, Scenario};
use millrace_sim::{Outcome, Summary};
use millrace_types::{Bytes, Slo};
use millrace_worker::start::{
    EVICTIONS, Eviction, HOST_LINKS, HostLinks, ISOLATIONS, Isolation, POLICIES, PolicyConfig,
};

use self::tenants::Tenant;
use self::workload::Workload;
use crate::commands::options::{one_of, topology};
use crate::failure::Failure;
use crate::output::Output;

const EXAMPLES: &str = "\
Examples:
  millrace sim --policy unified,torpor,fifo --functions 480 --deadline 80ms
  millrace sim --topology a10x4 --nodes 3 --models models.yaml --trace azure.csv --rate 325 --out results
  millrace sim --functions 40 --pattern bursty --rate 4000 --policy lb,lalb,lalb-o3
  millrace sim --tenants quiet=80 --tenants noisy=80,times=10,gpus-max=1

A file of models is a list such as
  - {name: encoder, weights: 440MB, memory: 600MB, run: 12ms}
and functions take its models in turn.";

/// Run a workload on a cluster in virtual time, and compare dispatch policies on it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Which GPUs and links each node has.
    #[arg(long, value_name = "NAME", default_value = "v100x4-pcie-switch", value_parser = names())]
    topology: String,
    /// How many of its GPUs each node has [default: as many as the topology].
    #[arg(long, value_name = "N")]
    gpus: Option<NonZeroU32>,
    /// Each GPU's memory for models, such as 25GiB [default: the topology's].
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<Bytes>,
    /// How many nodes there are.
    #[arg(long, value_name = "N", default_value = "1")]
    nodes: NonZeroU32,
    /// On how many nodes each function is kept ready.
    #[arg(long, value_name = "N", default_value = "1")]
    replicas: NonZeroU32,
    /// The policies to compare, separated by commas.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values_t = [PolicyConfig::default()], value_parser = one_of(POLICIES))]
    policy: Vec<PolicyConfig>,
    /// Which models make room on a GPU first.
    #[arg(long, value_name = "NAME", default_value_t, value_parser = one_of(EVICTIONS))]
    eviction: Eviction,
    /// Which models share an executor process: all of a GPU (gpu), or none, each with its own from its
    /// first request on (model) or while it is on the GPU (resident).
    #[arg(long, value_name = "NAME", default_value_t, value_parser = one_of(ISOLATIONS))]
    isolation: Isolation,
    /// How long the start of a model's own process takes, while its weights are copied.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "260ms")]
    process_start: Duration,
    /// Over whose PCIe links models come from host memory: each GPU's own, or idle ones of other GPUs too,
    /// which forward over NVLinks (all).
    #[arg(long, value_name = "WHOSE", default_value_t, value_parser = one_of(HOST_LINKS))]
    host_links: HostLinks,
    /// The models that functions take in turn: of the Torpor paper, of the LALB paper, or a file.
    #[arg(long, value_name = "torpor|lalb|FILE", default_value = "torpor")]
    models: String,
    /// How many functions there are.
    #[arg(long, value_name = "N", default_value = "160")]
    functions: NonZeroU32,
    /// A tenant: its name, how many of the functions it has, by what their requests are multiplied, and
    /// its caps on each node. Again for each tenant; functions that are left are of the default one.
    #[arg(long, value_name = "NAME=FUNCTIONS[,times=N][,gpus-max=N][,gpu-share=SHARE][,memory-share=SHARE]")]
    tenants: Vec<Tenant>,
    #[command(flatten)]
    workload: Workload,
    /// Within how long a request should be answered; scores functions [default: none].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    deadline: Option<Duration>,
    /// The share of a function's requests that should be.
    #[arg(long, value_name = "SHARE", default_value_t = 0.98, requires = "deadline")]
    percentile: f64,
    /// How long clients wait.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "60s")]
    timeout: Duration,
    /// What everything random begins with: the same seed gives the same events.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Also write tables (CSV) and plots (SVG) into this folder, which is made if need be.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// One policy's run.
struct Run {
    policy: PolicyConfig,
    summary: Summary,
    outcome: Outcome,
    tenants: Vec<TenantSummary>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let base = args.scenario()?;
    let mut policies = args.policy.clone();
    let mut seen = Vec::new();
    policies.retain(|policy| {
        !seen.contains(&policy.to_string()) && {
            seen.push(policy.to_string());
            true
        }
    });
    let scenarios = policies.iter().map(|&dispatch| {
        let nodes = base.nodes.iter().map(|node| NodeSpec { dispatch, ..node.clone() }).collect();
        Scenario { nodes, ..base.clone() }
    });
    let scenarios: Vec<_> = scenarios.collect();
    eprintln!(
        "{} requests of {} functions over {} on {} of {}, for each of {}",
        base.arrivals.len(),
        base.functions.len(),
        humantime::format_duration(args.workload.span()),
        plural(args.nodes.get(), "node"),
        plural(base.nodes[0].topology.gpus.len() as u32, "GPU"),
        seen.join(", "),
    );
    let runs = millrace_sim::run_each(&scenarios, |scenario, outcome| {
        let tenants =
            if args.tenants.is_empty() { Vec::new() } else { outcome.by_tenant(&scenario.functions) };
        (outcome.summary(&scenario.functions), tenants, outcome)
    });
    let runs = runs.map_err(|error| Failure::failed(error.to_string()))?;
    let runs: Vec<Run> = policies
        .into_iter()
        .zip(runs)
        .map(|(policy, (summary, tenants, outcome))| Run { policy, summary, outcome, tenants })
        .collect();
    results::print(&runs, args.output.output)?;
    match &args.out {
        None => Ok(()),
        Some(dir) => results::write(&runs, dir),
    }
}

fn plural(count: u32, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

impl Args {
    fn scenario(&self) -> Result<Scenario, Failure> {
        let models = models::read(&self.models)?;
        let slo = match self.deadline {
            None => None,
            Some(deadline) if self.percentile > 0.0 && self.percentile < 1.0 => {
                Some(Slo { deadline, percentile: self.percentile })
            }
            Some(_) => return Err(Failure::usage("--percentile is between 0 and 1, both excluded")),
        };
        let topology = topology(&self.topology, self.gpus, self.gpu_memory)?;
        let functions = self.functions.get() as usize;
        let times = tenants::times(&self.tenants, functions);
        let (counts, arrivals) = self.workload.arrivals(&times, self.seed)?;
        let function = |place: usize| {
            let model = models[place % models.len()].clone();
            Function { replicas: self.replicas.get(), ..Function::new(model, slo) }
        };
        // A trace may have fewer functions than are asked for.
        let mut functions: Vec<_> = (0..counts).map(function).collect();
        tenants::assign(&self.tenants, &mut functions)?;
        let quotas = self.tenants.iter().map(|tenant| (tenant.name.clone(), tenant.quota)).collect();
        let (eviction, isolation, host_links) = (self.eviction, self.isolation, self.host_links);
        let node = NodeSpec { eviction, isolation, host_links, ..NodeSpec::new(topology, self.policy[0]) };
        let nodes = vec![node; self.nodes.get() as usize];
        let scenario = Scenario::new(nodes, functions, arrivals, self.seed);
        let (timeout, process_start) = (self.timeout, self.process_start);
        Ok(Scenario { quotas, timeout, process_start, ..scenario })
    }
}
