//! Four nodes (H24, Fig 17a), a server without NVLink (H25, Fig 17b), and DGX-V100's pairs (H26,
//! Fig 6a).

use anyhow::Result;
use millrace_sim::passing::{Costs, DataflowSetup, ServedWorkflow, System, workflow};
use millrace_transfers::paths::{Config, PathPlanner};
use millrace_types::{BytesPerSec, GpuIndex};

use super::measurements::{
    average, figure, gain, header, load, ms, order, outcomes, p99_split, range, spread,
};
use super::setup::{Server, Shape, as_h18, open};
use crate::effort::Effort;
use crate::figures::{Bound, Claim, SeedValues, Unit};
use crate::report::ExperimentReport;

const SYSTEMS: [System; 4] = [System::INFLESS, System::DEEPPLAN, System::STAR, System::FAASTUBE];

/// The cause of lower savings between nodes than in the paper.
const NETWORK: &str = "data takes as long to cross the network in every system, 18 ms for the 55 MB of driving alone at 25 Gbit/s, and all replicas of a node share the network; at 100 Gbit/s (second table) 64% are saved against deepplan+";

/// Measures the p99 without queues of every workflow and system. `network` is the rate in Gbit/s. A figure
/// is the most that is saved on one node, and the mean saving on several nodes.
fn compare(
    report: &mut ExperimentReport,
    server: &Server,
    nodes: usize,
    network: u64,
    paper: Option<[f64; 3]>,
    effort: Effort,
) -> Result<()> {
    let mut rows = Vec::new();
    let mut saved = vec![Vec::new(); 3];
    for workflow in workflow::all() {
        let rate = load(server, &workflow)?;
        let mut p99 = Vec::new();
        for system in SYSTEMS {
            let runs = outcomes(effort, |seed| {
                let arrivals = open(Shape::Bursty, &[rate * nodes as f64], seed, effort);
                let setup = server.setup(&workflow, system, arrivals, seed);
                let is_cut = nodes > 1;
                let app = ServedWorkflow {
                    is_cut,
                    replicas: setup.apps[0].replicas * nodes,
                    ..setup.apps[0].clone()
                };
                let costs = Costs { network: BytesPerSec(network * 125_000_000), ..setup.costs };
                DataflowSetup { nodes, costs, apps: vec![app], ..setup }
            })?;
            p99.push(spread(&runs, p99_split));
        }
        let mut row = vec![workflow.name.to_owned()];
        row.extend(p99.iter().map(ms));
        rows.push(row);
        for (place, theirs) in p99[..3].iter().enumerate() {
            saved[place].push(p99[3].reduction_from(theirs));
        }
        for (pair, systems) in p99.windows(2).zip(SYSTEMS.windows(2)) {
            let on = if nodes > 1 { format!("{network} Gbit/s, ") } else { String::new() };
            let what = format!("{on}{}: {} below {}", workflow.name, systems[1].name, systems[0].name);
            report.orders.push(order(what, pair[0].differences(&pair[1]), None));
        }
    }
    for (place, paper) in paper.into_iter().flatten().enumerate() {
        // The paper has one number for each baseline on four nodes, and the most on A10.
        let (which, ours) =
            if nodes > 1 { ("on average", average(&saved[place])) } else { ("most", range(&saved[place]).1) };
        let what = format!("saved against {}, {which}", SYSTEMS[place].name);
        let ours = (ours, Unit::Percent);
        let cause = (nodes > 1).then_some(NETWORK);
        report.figures.push(figure(what, gain(Unit::Percent, paper), ours, cause));
    }
    let title = if nodes > 1 {
        format!("{nodes} x {}, {network} Gbit/s, p99 without queues:", server.name)
    } else {
        format!("{}, p99 without queues:", server.name)
    };
    let mut columns = header(["workflow"]);
    columns.extend(SYSTEMS.map(|system| system.name.to_owned()));
    report.tables.push((title, columns, rows));
    Ok(())
}

pub(super) fn nodes(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    report.assumed.push(
        "Figures are for a network of 25 Gbit/s, as of p3.16xlarge. Each replica is cut between two nodes where the least data passes. The paper states one number for each baseline and does not call the number the most, so ours is the mean over the workflows (in the first run it was the most)."
            .to_owned(),
    );
    compare(&mut report, &Server::v100()?, 4, 25, Some([0.85, 0.63, 0.39]), effort)?;
    compare(&mut report, &Server::v100()?, 4, 100, None, effort)?;
    Ok(report)
}

pub(super) fn without_nvlink(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    compare(&mut report, &Server::a10()?, 1, 25, Some([0.90, 0.90, 0.75]), effort)?;
    Ok(report)
}

/// Counts the pairs of GPUs by the rate that joins the pair, as the planner reads the topology.
pub(super) fn topology(_effort: Effort) -> Result<ExperimentReport> {
    let topology = Server::v100()?.topology;
    let paths = PathPlanner::new(&topology, Config::default())?;
    let gpus = || (0..topology.gpus.len() as u32).map(GpuIndex);
    let pairs: Vec<_> = gpus().flat_map(|a| gpus().filter(move |&b| b > a).map(move |b| (a, b))).collect();
    let of =
        |rate: u64| pairs.iter().filter(|&&(a, b)| paths.capacity(a, b) == BytesPerSec::gb(rate)).count();
    let mut report = ExperimentReport::default();
    report.assumed.push(
        "The pairs are counted in `device/topology/dgx-v100.yaml` as the planner reads the file; nothing is simulated."
            .to_owned(),
    );
    let mut rows = Vec::new();
    for (what, rate, paper) in
        [("full: 48 GB/s", 48, 0.30), ("half: 24 GB/s", 24, 0.28), ("no NVLink: 7.9 GB/s over PCIe", 0, 0.42)]
    {
        let share = of(rate) as f64 / pairs.len() as f64;
        rows.push(vec![what.to_owned(), of(rate).to_string()]);
        let ours = (SeedValues(vec![share]), Unit::Percent);
        let claim = Claim::paper(Unit::Percent.show(paper), Bound::About(paper));
        report.figures.push(figure(format!("pairs with {what}"), claim, ours, None));
    }
    report.tables.push((format!("{} pairs:", pairs.len()), header(["joined by", "pairs"]), rows));
    Ok(report)
}
