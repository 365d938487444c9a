//! The gain of copying models also over idle PCIe links of other GPUs (D05, `--host-links all`), and the
//! cost for other transfers: `transfers::fabric` in whole nodes, with models that are swapped all the time.

use std::time::Duration;

use anyhow::Result;
use millrace_device::topology::TopologyDescription;
use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_sim::models::{self, ModelFigures, SharedSpeed};
use millrace_sim::report::format_percent;
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_sim::workload::{MINUTE, RequestArrival};
use millrace_sim::{RunSummary, SimulatedRequest, SimulationOutcome, run_each};
use millrace_transfers::paths::HostLinks;
use millrace_types::topology::{LinkKind, Topology};
use millrace_types::{Bytes, Timestamp};

use crate::effort::Effort;
use crate::experiment::Experiment;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::overload::{OBJECTIVE, in_time_of};
use crate::report::ExperimentReport;

pub const EXPERIMENTS: [Experiment; 1] = [Experiment {
    id: "HOSTLINKS",
    title: "Models over neighbours' links: own against all",
    run: host_links,
}];

/// The number of functions: twice as many models as the eight GPUs hold.
const FUNCTIONS: usize = 1000;
const POLICIES: [&str; 2] = ["unified", "torpor"];
/// The loads, in percent of the four uplinks' capacity if every request copied its model.
const LOADS: [u32; 3] = [10, 50, 90];
/// The size of a model whose copy lasts much longer than its run.
const LONE: Bytes = Bytes(6_000_000_000);

fn dgx() -> Result<Topology> {
    Ok(TopologyDescription::preset("dgx-v100")?.build())
}

fn node(dispatch: PolicyConfig, host_links: HostLinks) -> Result<SimulatedNode> {
    Ok(SimulatedNode { eviction: Eviction::Torpor, host_links, ..SimulatedNode::new(dgx()?, dispatch) })
}

/// Returns a scenario of one request for one large model on an idle DGX-V100.
///
/// # Errors
/// Returns an error if the topology cannot be read.
pub fn lone(host_links: HostLinks) -> Result<ClusterScenario> {
    let model = ModelFigures {
        shared: SharedSpeed::PROPORTIONAL,
        name: "lone".to_owned(),
        weights: LONE,
        memory: LONE,
        run: Duration::from_millis(5),
        tail: Duration::from_millis(1),
        start: Duration::ZERO,
    };
    let arrivals = vec![RequestArrival { at: Timestamp::ZERO, function: 0 }];
    let nodes = vec![node(PolicyConfig::default(), host_links)?];
    Ok(ClusterScenario {
        traced: true,
        ..ClusterScenario::new(nodes, vec![SimulatedFunction::new(model, None)], arrivals, 1)
    })
}

/// Returns a scenario of equally popular functions over Torpor's models, with requests at random times.
fn swapping(
    dispatch: PolicyConfig,
    host_links: HostLinks,
    load: u32,
    seed: u64,
    effort: Effort,
) -> Result<ClusterScenario> {
    let table = models::torpor();
    let node = node(dispatch, host_links)?;
    let functions = if effort.short { FUNCTIONS / 10 } else { FUNCTIONS };
    let mean = table.iter().map(|model| model.weights.get()).sum::<u64>() as f64 / table.len() as f64;
    let uplinks = pcie_uplinks(&node.topology).map(|link| node.topology.links[link].rate.0);
    let rate = uplinks.sum::<u64>() as f64 / mean * f64::from(load) / 100.0;
    let mean_gap = Duration::from_secs_f64(functions as f64 / rate);
    let span = if effort.short { MINUTE / 60 } else { MINUTE };
    let arrivals = patterns::arrivals(&vec![WorkloadPattern::Sporadic { mean_gap }; functions], span, seed);
    let function = |place: usize| SimulatedFunction::new(table[place % table.len()].clone(), Some(OBJECTIVE));
    let published = (0..functions).map(function).collect();
    let scenario = ClusterScenario::new(vec![node], published, arrivals, seed);
    Ok(ClusterScenario { timeout: MINUTE, warmed: !effort.short, ..scenario })
}

/// Returns the indexes of the PCIe uplinks.
fn pcie_uplinks(topology: &Topology) -> impl Iterator<Item = usize> {
    let links = topology.links.iter().enumerate();
    links.filter(|(_, link)| link.kind == LinkKind::PcieUplink).map(|(place, _)| place)
}

/// Returns the load of each uplink of a run's machine, towards the GPUs.
///
/// # Errors
/// Returns an error if the topology cannot be read.
pub fn uplink_loads(outcome: &SimulationOutcome) -> Result<Vec<f64>> {
    let loads = outcome.link_loads();
    let of = |link: usize| loads.iter().filter_map(move |node| node.get(link).copied());
    Ok(pcie_uplinks(&dgx()?).flat_map(of).collect())
}

fn nvlink_loads(outcome: &SimulationOutcome) -> Result<Vec<f64>> {
    let topology = dgx()?;
    let loads = outcome.link_loads();
    let joins = |link: &usize| matches!(topology.links[*link].kind, LinkKind::NvLink { .. });
    let places = (0..topology.links.len()).filter(joins);
    Ok(places.flat_map(|link| loads.iter().filter_map(move |node| node.get(link).copied())).collect())
}

fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len().max(1) as f64
}

/// The results of one setup with every seed.
#[derive(Debug, Default)]
struct HostLinksResult {
    mean_ms: SeedValues,
    p98_ms: SeedValues,
    in_time: SeedValues,
    misses: SeedValues,
    uplinks: SeedValues,
    busiest: SeedValues,
    nvlinks: SeedValues,
}

fn measure(policy: &str, host_links: HostLinks, load: u32, effort: Effort) -> Result<HostLinksResult> {
    let dispatch = crate::lalb::policy(policy)?;
    let setups = effort.each_seed().map(|seed| swapping(dispatch, host_links, load, seed, effort));
    let each = run_each(&setups.collect::<Result<Vec<_>>>()?, |scenario, outcome| {
        let loads = uplink_loads(&outcome).and_then(|uplinks| Ok((uplinks, nvlink_loads(&outcome)?)));
        (outcome.summary(&scenario.functions), in_time_of(&outcome), loads)
    })?;
    let mut measured = HostLinksResult::default();
    for (summary, in_time, loads) in each {
        let (uplinks, nvlinks) = loads?;
        let RunSummary { mean: latency, p98, miss_ratio, .. } = summary;
        measured.mean_ms.0.push(latency.as_secs_f64() * 1e3);
        measured.p98_ms.0.push(p98.as_secs_f64() * 1e3);
        measured.in_time.0.push(in_time);
        measured.misses.0.push(miss_ratio);
        measured.uplinks.0.push(mean(&uplinks));
        measured.busiest.0.push(uplinks.iter().copied().fold(0.0, f64::max));
        measured.nvlinks.0.push(mean(&nvlinks));
    }
    Ok(measured)
}

fn host_links(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "DGX-V100 (eight GPUs of 16 GiB, four uplinks of 12 GB/s). *A lone swap*: one model of {LONE} on an idle machine. *Swapping*: {FUNCTIONS} functions over Torpor's eight models, 266 GB in all, twice the memory of the GPUs. Requests arrive at random times for a minute, with a deadline of 200 ms. The load is the share of the uplinks' capacity that would be used if every request copied its model."
    ));
    report.assumed.push(
        "A forwarded batch crosses all links of its route at once, except for the time of one chunk (2 MiB) for each further link. The batch takes no memory and no time of the GPUs between. The next batch on the same route begins when the end of the last batch is reported, in the simulator up to a quarter of a millisecond later. A batch takes 0.87 ms.".to_owned(),
    );
    lone_swap(&mut report)?;
    swaps(effort, &mut report)?;
    Ok(report)
}

fn lone_swap(report: &mut ExperimentReport) -> Result<()> {
    let setups = [lone(HostLinks::Own)?, lone(HostLinks::All)?];
    let took = run_each(&setups, |_, outcome| {
        outcome.records.first().map_or(Duration::ZERO, SimulatedRequest::latency).as_secs_f64()
    })?;
    let [own, all] = took[..] else { anyhow::bail!("two setups have {} outcomes", took.len()) };
    let row = vec![Unit::Millis.show(own * 1e3), Unit::Millis.show(all * 1e3), Unit::Times.show(own / all)];
    report.tables.push((
        "A lone swap:".to_owned(),
        ["own", "all", "ratio"].map(String::from).to_vec(),
        vec![row],
    ));
    report.figures.push(Figure {
        what: "a lone swap: time with own relative to all".to_owned(),
        claim: Claim::goal("4.00×, the rate of four links", Bound::About(4.0)),
        ours: SeedValues(vec![own / all]),
        unit: Unit::Times,
        cause: None,
    });
    Ok(())
}

fn swaps(effort: Effort, report: &mut ExperimentReport) -> Result<()> {
    let mut rows = Vec::new();
    for policy in POLICIES {
        for &load in if effort.short { &LOADS[..1] } else { &LOADS[..] } {
            let own = measure(policy, HostLinks::Own, load, effort)?;
            let all = measure(policy, HostLinks::All, load, effort)?;
            for (links, it) in [(HostLinks::Own, &own), (HostLinks::All, &all)] {
                rows.push(vec![
                    policy.to_owned(),
                    format!("{load}%"),
                    links.to_string(),
                    Unit::Millis.show(it.mean_ms.mean()),
                    Unit::Millis.show(it.p98_ms.mean()),
                    format_percent(it.in_time.mean()),
                    format_percent(it.misses.mean()),
                    format_percent(it.uplinks.mean()),
                    format_percent(it.busiest.mean()),
                    format_percent(it.nvlinks.mean()),
                ]);
            }
            let orders = [
                ("mean latency: all at most own", own.mean_ms.differences(&all.mean_ms)),
                ("p98: all at most own", own.p98_ms.differences(&all.p98_ms)),
                ("requests in time: all at least own", all.in_time.differences(&own.in_time)),
            ];
            report.orders.extend(orders.map(|(what, by)| {
                let what = format!("{policy}, load {load}%, {what}");
                PolicyOrder { what, by, cause: None }
            }));
        }
    }
    let header = [
        "policy",
        "load",
        "host links",
        "mean latency",
        "p98",
        "in time",
        "misses",
        "uplinks busy",
        "the busiest",
        "NVLinks busy",
    ];
    report.tables.push(("Swapping:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(())
}
