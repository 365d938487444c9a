//! `sim`: runs a workload on a cluster in virtual time, and compares policies.

mod models;
mod results;
mod tenants;
mod workload;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use millrace_device::topology::preset_names;
use millrace_sim::models::{LALB_GPU_MEMORY, TORPOR_GPU_MEMORY, torpor_deadline};
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_types::policy::GpuSharingName;
use millrace_types::{Bytes, Slo};
use millrace_worker::start::{
    EVICTIONS, Eviction, ExecutorIsolation, HOST_LINKS, HostLinks, ISOLATIONS, POLICIES, PolicyConfig,
    SchedulingPolicy,
};

use self::results::PolicyRun;
use self::tenants::SimulatedTenant;
use self::workload::Workload;
use crate::commands::options::{named, one_of, topology};
use crate::failure::CommandFailure;
use crate::output::ListOutput;

/// The default topology: the machine of the Torpor paper.
const TOPOLOGY: &str = "v100x4-pcie-switch";

const EXAMPLES: &str = "\
Examples:
  millrace sim --policy unified,torpor,fifo --functions 480
  millrace sim --functions 480 --deadline 80ms --minutes 15
  millrace sim --topology a10x4 --nodes 3 --models models.yaml --trace azure.csv --rate 325 --out results
  millrace sim --functions 40 --pattern bursty --rate 4000 --policy lb,lalb,lalb-o3
  millrace sim --tenants quiet=80 --tenants noisy=80,times=10,gpus-max=1

A file of models is a list such as
  - {name: encoder, weights: 440MB, memory: 600MB, run: 12ms}
and functions use its models in turn.";

/// Run a workload on a cluster in virtual time, and compare dispatch policies.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The GPUs and links of each node.
    #[arg(long, value_name = "NAME", default_value = TOPOLOGY, value_parser = preset_names())]
    topology: String,
    /// The number of GPUs of each node [default: the topology's].
    #[arg(long, value_name = "N")]
    gpus: Option<NonZeroU32>,
    /// The memory of each GPU for models, such as 16GiB [default: with the default topology that of
    /// the models' paper, 25GiB (torpor) or 8GB (lalb); else the topology's].
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<Bytes>,
    /// The number of nodes.
    #[arg(long, value_name = "N", default_value = "1")]
    nodes: NonZeroU32,
    /// The number of nodes on which each function is kept ready.
    #[arg(long, value_name = "N", default_value = "1")]
    replicas: NonZeroU32,
    /// The policies to compare, separated by commas.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values_t = [PolicyConfig::default()], value_parser = one_of(POLICIES))]
    policy: Vec<PolicyConfig>,
    /// The rule that selects the models to evict from a GPU [default: that of each policy's preset,
    /// and lru for a policy without a preset].
    #[arg(long, value_name = "NAME", value_parser = one_of(EVICTIONS))]
    eviction: Option<Eviction>,
    /// The models that share an executor process: all models of a GPU (gpu), or none, with one
    /// process for each model from its first request on (model) or while it is on the GPU
    /// (resident).
    #[arg(long, value_name = "NAME", default_value_t, value_parser = one_of(ISOLATIONS))]
    isolation: ExecutorIsolation,
    /// The start time of a model's own process, during which its weights are copied.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "260ms")]
    process_start: Duration,
    /// The PCIe links on which models are copied from host memory: each GPU's own (own), or also
    /// idle links of other GPUs, which forward over NVLinks (all).
    #[arg(long, value_name = "WHOSE", default_value_t, value_parser = one_of(HOST_LINKS))]
    host_links: HostLinks,
    /// The sharing of a GPU: a request has the whole GPU while it runs (off), or up to 8 requests run at
    /// once on parts of the SMs (slices). Only ResNet-50 of the Torpor paper's models is known to gain.
    #[arg(long, value_name = "MODE", default_value_t, value_parser = named(GpuSharingName::ALL, GpuSharingName::name))]
    gpu_sharing: GpuSharingName,
    /// The models that functions use in turn: those of the Torpor paper, those of the LALB paper,
    /// or a file.
    #[arg(long, value_name = "torpor|lalb|FILE", default_value = "torpor")]
    models: String,
    /// The number of functions.
    #[arg(long, value_name = "N", default_value = "160")]
    functions: NonZeroU32,
    /// A tenant: its name, the number of its functions, the factor of their requests, and its caps
    /// on each node. Repeated for each tenant; the remaining functions belong to the default
    /// tenant.
    #[arg(long, value_name = "NAME=FUNCTIONS[,times=N][,gpus-max=N][,gpu-share=SHARE][,memory-share=SHARE]")]
    tenants: Vec<SimulatedTenant>,
    #[command(flatten)]
    workload: Workload,
    /// The deadline of each request, for scores of functions: one time for all functions, those of
    /// the Torpor paper (80ms, and 200ms for bert-qa), or none [default: paper with the models of
    /// the Torpor paper, else none].
    #[arg(long, value_name = "TIME|paper|none", value_parser = DeadlineChoice::from_str)]
    deadline: Option<DeadlineChoice>,
    /// The share of a function's requests that must meet the deadline [default: 0.98].
    #[arg(long, value_name = "SHARE")]
    percentile: Option<f64>,
    /// The timeout of the clients.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "60s")]
    timeout: Duration,
    /// The seed of all random choices; equal seeds give equal events.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Also write tables (CSV) and plots (SVG) into this folder, which is created if necessary.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
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
        let eviction = args.eviction.unwrap_or(SchedulingPolicy::around(dispatch).eviction);
        let node = |node: &SimulatedNode| SimulatedNode { dispatch, eviction, ..node.clone() };
        let nodes = base.nodes.iter().map(node).collect();
        ClusterScenario { nodes, ..base.clone() }
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
    let runs = runs.map_err(|error| CommandFailure::failed(error.to_string()))?;
    let runs: Vec<PolicyRun> = policies
        .into_iter()
        .zip(runs)
        .zip(&scenarios)
        .map(|((policy, (summary, tenants, outcome)), scenario)| {
            let settings = scenario.nodes[0].scheduling();
            PolicyRun { policy, settings, summary, outcome, tenants }
        })
        .collect();
    results::print(&runs, args.output.output)?;
    match &args.out {
        None => Ok(()),
        Some(dir) => results::write(&runs, dir),
    }
}

fn plural(count: u32, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// The deadlines of functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeadlineChoice {
    /// The deadlines of the Torpor paper.
    Paper,
    /// One deadline for all functions.
    Each(Duration),
    None,
}

impl FromStr for DeadlineChoice {
    type Err = humantime::DurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "paper" => Ok(Self::Paper),
            "none" => Ok(Self::None),
            time => humantime::parse_duration(time).map(Self::Each),
        }
    }
}

impl Args {
    /// Returns the memory of each GPU, if it differs from the topology's.
    fn memory(&self) -> Option<Bytes> {
        let papers = match self.models.as_str() {
            "torpor" => Some(TORPOR_GPU_MEMORY),
            "lalb" => Some(LALB_GPU_MEMORY),
            _ => None,
        };
        self.gpu_memory.or(papers.filter(|_| self.topology == TOPOLOGY))
    }

    fn deadlines(&self) -> Result<DeadlineChoice, CommandFailure> {
        let is_torpor = self.models == "torpor";
        match self.deadline {
            Some(DeadlineChoice::Paper) if !is_torpor => Err(CommandFailure::usage(
                "--deadline paper has deadlines for --models torpor only: set a time such as 80ms",
            )),
            Some(choice) => Ok(choice),
            None if is_torpor => Ok(DeadlineChoice::Paper),
            None => Ok(DeadlineChoice::None),
        }
    }

    fn scenario(&self) -> Result<ClusterScenario, CommandFailure> {
        let models = models::read(&self.models)?;
        let deadlines = self.deadlines()?;
        if self.percentile.is_some() && deadlines == DeadlineChoice::None {
            return Err(CommandFailure::usage(
                "--percentile needs deadlines, and these functions have none: set --deadline, such as 80ms",
            ));
        }
        let percentile = self.percentile.unwrap_or(0.98);
        if !(percentile > 0.0 && percentile < 1.0) {
            return Err(CommandFailure::usage(
                "--percentile is out of range: write a number between 0 and 1, both excluded",
            ));
        }
        let topology = topology(&self.topology, self.gpus, self.memory())?;
        let functions = self.functions.get() as usize;
        let times = tenants::times(&self.tenants, functions);
        let (counts, arrivals) = self.workload.arrivals(&times, self.seed)?;
        let function = |place: usize| {
            let model = models[place % models.len()].clone();
            let deadline = match deadlines {
                DeadlineChoice::Paper => Some(torpor_deadline(&model)),
                DeadlineChoice::Each(deadline) => Some(deadline),
                DeadlineChoice::None => None,
            };
            let slo = deadline.map(|deadline| Slo { deadline, percentile });
            SimulatedFunction { replicas: self.replicas.get(), ..SimulatedFunction::new(model, slo) }
        };
        // A trace may have fewer functions than requested.
        let mut functions: Vec<_> = (0..counts).map(function).collect();
        tenants::assign(&self.tenants, &mut functions)?;
        let quotas = self.tenants.iter().map(|tenant| (tenant.name.clone(), tenant.quota)).collect();
        let node = SimulatedNode {
            isolation: self.isolation,
            host_links: self.host_links,
            gpu_sharing: self.gpu_sharing,
            ..SimulatedNode::new(topology, self.policy[0])
        };
        let nodes = vec![node; self.nodes.get() as usize];
        let scenario = ClusterScenario::new(nodes, functions, arrivals, self.seed);
        Ok(ClusterScenario { quotas, timeout: self.timeout, process_start: self.process_start, ..scenario })
    }
}
