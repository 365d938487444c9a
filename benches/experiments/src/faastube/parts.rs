//! The gain of each part of `FaaSTube`: H19 (Fig 13), H20 (Fig 14), H21 (Fig 15a), and the text's
//! interference (Fig 5a).

use anyhow::Result;
use millrace_sim::passing::system::{FaasTubeParts, Pinning};
use millrace_sim::passing::{
    ArrivalProcess, DataflowOutcome, DataflowSetup, ServedWorkflow, SimulatedWorkflow, System, workflow,
};

use super::measurements::{
    figure, gain, header, load, most, ms, order, outcomes, p99_split, range, spread, throughput,
};
use super::setup::{Server, Shape, as_h18, open};
use crate::effort::Effort;
use crate::figures::{Bound, Claim, SeedValues, Unit};
use crate::report::ExperimentReport;

/// The parts, in the order in which the paper turns the parts on.
const STEPS: [(&str, FaasTubeParts); 5] = [
    ("faastube*", FaasTubeParts::NONE),
    ("+ UI", FaasTubeParts { interface: true, ..FaasTubeParts::NONE }),
    ("+ PS", FaasTubeParts { interface: true, pcie: true, ..FaasTubeParts::NONE }),
    ("+ NS", FaasTubeParts { interface: true, pcie: true, nvlink: true, store: false }),
    ("+ ES", FaasTubeParts::ALL),
];

pub(super) fn ablation(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    report.assumed.push(
        "The saving of a part is the reduction of the p99 without queues when the part is turned on, as a share of the p99 of FaaSTube*. Arrivals are bursty. The paper's ranges for all parts are over the workflows; the figure of a part is the most over the workflows.".to_owned(),
    );
    for (server, total, parts) in [
        (Server::v100()?, (0.46, 0.65), [0.025, 0.20, 0.23, 0.19]),
        (Server::a100()?, (0.57, 0.72), [0.032, 0.30, 0.0, 0.39]),
    ] {
        let mut rows = Vec::new();
        let mut totals = Vec::new();
        let mut by_part = vec![Vec::new(); 4];
        for workflow in workflow::all() {
            let rate = load(&server, &workflow)?;
            let mut steps = Vec::new();
            for (name, on) in STEPS {
                let runs = outcomes(effort, |seed| {
                    let arrivals = open(Shape::Bursty, &[rate], seed, effort);
                    server.setup(&workflow, System::with(name, on), arrivals, seed)
                })?;
                steps.push(spread(&runs, p99_split));
            }
            let ring = System { pinning: Pinning::Ring, ..System::with("+ the ring alone", STEPS[1].1) };
            let runs = outcomes(effort, |seed| {
                let arrivals = open(Shape::Bursty, &[rate], seed, effort);
                server.setup(&workflow, ring, arrivals, seed)
            })?;
            let mut row = vec![workflow.name.to_owned()];
            row.extend(steps.iter().map(ms));
            row.push(ms(&spread(&runs, p99_split)));
            rows.push(row);
            totals.push(steps[4].reduction_from(&steps[0]));
            for (part, pair) in steps.windows(2).enumerate() {
                let saved = pair[0].differences(&pair[1]);
                by_part[part].push(SeedValues(saved.0.iter().zip(&steps[0].0).map(|(a, b)| a / b).collect()));
            }
        }
        let mut columns = header(["workflow"]);
        columns.extend(STEPS.map(|(name, _)| name.to_owned()));
        columns.push("(UI and the ring)".to_owned());
        report.tables.push((format!("{}, p99 without queues:", server.name), columns, rows));
        let (least, most) = range(&totals);
        for (which, ours, paper) in [("least", least, total.0), ("most", most, total.1)] {
            let what = format!("{}, all parts save, {which}", server.name);
            let cause = ablation_cause(server.name, "all");
            report.figures.push(figure(what, gain(Unit::Percent, paper), (ours, Unit::Percent), cause));
        }
        for (part, (name, paper)) in ["UI", "PS", "NS", "ES"].into_iter().zip(parts).enumerate() {
            let what = format!("{}, {name} saves, most", server.name);
            let ours = (range(&by_part[part]).1, Unit::Percent);
            let cause = ablation_cause(server.name, name);
            report.figures.push(figure(what, gain(Unit::Percent, paper), ours, cause));
        }
    }
    Ok(report)
}

/// The cause of a higher saving by PCIe scheduling than in the paper.
const RING: &str = "the pinned ring (last column) saves 20 of the 24 ms of video on V100, and the whole saving of the other workflows: pinning 72 MB and then 48 MB takes 21 ms of the p99 of video even with four threads. The copies from and to the host are so large because of their share of infless+";
/// The cause of a higher saving by the interface on A100 than in the paper.
const CALLS: &str = "a remote call is assumed to take 0.3 ms; social makes six of them in 20 ms";
/// The cause of a lower saving by the store on A100 than in the paper.
const NATIVE: &str = "a native call takes 1 ms on either server here, so an output costs 2.3 ms without a pool; the paper mentions high costs on A100 without a figure";

fn ablation_cause(server: &str, part: &str) -> Option<&'static str> {
    match (server, part) {
        (_, "PS") => Some(RING),
        ("8xA100", "UI") => Some(CALLS),
        ("8xA100", "ES") => Some(NATIVE),
        _ => None,
    }
}

/// Returns a setup of driving and another workflow on one server, with a replica of each.
fn beside(
    server: &Server,
    other: &millrace_sim::passing::ModelledWorkflow,
    system: System,
    arrivals: ArrivalProcess,
    seed: u64,
) -> DataflowSetup {
    let app = |workflow: &millrace_sim::passing::ModelledWorkflow| ServedWorkflow {
        workflow: workflow.clone(),
        replicas: 1,
        is_cut: false,
    };
    let setup = server.setup(other, system, arrivals, seed);
    DataflowSetup { apps: vec![app(&workflow::driving()), app(other)], ..setup }
}

/// The cause of equal throughput with more NVLinks.
const COMPUTES: &str = "the limiting functions compute most of their time: the face detectors of video read nothing from other GPUs, and yolo-det fetches for 1.3 ms over one double NVLink and computes for 9 ms";

/// The cause of workflows in which UCX is not behind.
const PATHS: &str = "one transfer at a time ends at each instance, so the fixed paths of UCX seldom meet, and three paths carry more than the single NVLink of mapa";

fn latency(record: &SimulatedWorkflow) -> f64 {
    record.latency().as_secs_f64()
}

pub(super) fn isolation(effort: Effort) -> Result<ExperimentReport> {
    let server = Server::v100()?;
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    report.assumed.push(
        "One replica of each workflow, with bursty arrivals of both: driving at 40% and the other workflow at 80% of FaaSTube's capacity. At the load of the other experiments, which INFless+ can still serve, their copies rarely meet. *In time* means within 1.5 times the shortest run of driving, without queues (§9.2.2). FaaSTube-PS shares PCIe evenly and keeps the pinned ring.".to_owned(),
    );
    let mut rows = Vec::new();
    for (other, paper) in [(workflow::video(), 0.32), (workflow::image(), 0.0)] {
        // Capacities are measured with two replicas of a workflow, but run here with one.
        let rates = [
            most(&server, &workflow::driving(), System::FAASTUBE)? / 2.0 * 0.4,
            most(&server, &other, System::FAASTUBE)? / 2.0 * 0.8,
        ];
        let mut p99 = Vec::new();
        for system in [System::PS_OFF, System::FAASTUBE] {
            let runs = outcomes(effort, |seed| {
                beside(&server, &other, system, open(Shape::Bursty, &rates, seed, effort), seed)
            })?;
            let slo = 1.5
                * runs
                    .iter()
                    .map(|it| {
                        it.records
                            .iter()
                            .filter(|it| it.app == 0)
                            .map(|it| it.split.total())
                            .fold(f64::MAX, f64::min)
                    })
                    .fold(f64::MAX, f64::min);
            let tail = spread(&runs, |it| it.p99(0, |record| record.split.total()));
            rows.push(vec![
                other.name.to_owned(),
                system.name.to_owned(),
                ms(&tail),
                ms(&spread(&runs, |it| it.p99(0, latency))),
                ms(&spread(&runs, |it| it.mean(0, |record| record.loading))),
                Unit::Percent.show(
                    spread(&runs, |it| it.mean(0, |record| f64::from(u8::from(record.split.total() <= slo))))
                        .mean(),
                ),
                ms(&spread(&runs, |it| it.p99(1, |record| record.split.total()))),
            ]);
            p99.push(tail);
        }
        let saved = p99[1].reduction_from(&p99[0]);
        let what = format!("driving beside {}: p99 without queues, saved", other.name);
        let cause = (other.name == "video").then_some(LITTLE);
        report.figures.push(figure(what, gain(Unit::Percent, paper), (saved, Unit::Percent), cause));
        if other.name == "video" {
            let what = "driving beside video: p99 below FaaSTube-PS's".to_owned();
            report.orders.push(order(what, p99[0].differences(&p99[1]), None));
        }
    }
    let columns = header([
        "beside",
        "system",
        "driving's p99 without queues",
        "p99",
        "loads",
        "in time",
        "the other's p99 without queues",
    ]);
    report.tables.push(("8xV100:".to_owned(), columns, rows));
    Ok(report)
}

/// The cause of a lower saving by sharing PCIe by objectives than in the paper.
const LITTLE: &str = "from the pinned ring and over four links, the copies of driving from and to the host take 2.4 of its 27 ms (H18), so there is little to lose: beside video its p99 is 29 ms with even shares";

pub(super) fn interference(effort: Effort) -> Result<ExperimentReport> {
    let server = Server::v100()?;
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    report.assumed.push(
        "The time of driving's loads from the host on DeepPlan+ without pinning (Fig 5b includes pinning), alone and with video at 90% of the system's capacity. The figure is the p99, because the paper does not state the statistic, and the mean at a lower load, which was measured first, shows less.".to_owned(),
    );
    let video = workflow::video();
    let driving = load(&server, &workflow::driving())? / 2.0;
    let mut rows = Vec::new();
    for (name, system) in [
        ("for each copy", System::DEEPPLAN),
        ("before", System { pinning: Pinning::Ring, ..System::DEEPPLAN }),
    ] {
        let busy = most(&server, &video, system)? / 2.0 * 0.9;
        let mut loads = Vec::new();
        for (what, rates) in [("alone", &[driving][..]), ("with video", &[driving, busy])] {
            let runs = outcomes(effort, |seed| {
                let arrivals = open(Shape::Bursty, rates, seed, effort);
                beside(&server, &video, system, arrivals, seed)
            })?;
            let tail = spread(&runs, |it| it.p99(0, |record| record.loading));
            rows.push(vec![
                name.to_owned(),
                what.to_owned(),
                ms(&spread(&runs, |it: &DataflowOutcome| it.mean(0, |record| record.loading))),
                ms(&tail),
            ]);
            loads.push(tail);
        }
        let by = SeedValues(loads[1].0.iter().zip(&loads[0].0).map(|(with, alone)| with / alone).collect());
        if system == System::DEEPPLAN {
            let what = "driving's loads, with video relative to alone".to_owned();
            report.figures.push(figure(
                what,
                Claim::paper("5×", Bound::About(5.0)),
                (by, Unit::Times),
                Some(APART),
            ));
        }
    }
    let columns = header(["memory is pinned", "driving", "mean load", "p99"]);
    report.tables.push(("DeepPlan+, 8xV100:".to_owned(), columns, rows));
    Ok(report)
}

/// The cause of less interference between loads than in the paper.
const APART: &str = "each function of video pins for 10 ms and copies for 4 ms, so their copies rarely meet; if memory is pinned before (table) the ratio is 3.4×";

pub(super) fn nvlink(effort: Effort) -> Result<ExperimentReport> {
    let server = Server::v100()?;
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    let mut rows = Vec::new();
    for (workflow, paper) in
        [(workflow::video(), 0.18), (workflow::image(), 0.13), (workflow::traffic(), 0.17)]
    {
        let mut by_system = Vec::new();
        for system in [System::FAASTUBE, System::MAPA, System::UCX] {
            let served = throughput(&server, &workflow, system, effort)?;
            rows.push(vec![
                workflow.name.to_owned(),
                system.name.to_owned(),
                format!("{:.1}/s", served.mean()),
            ]);
            by_system.push(served);
        }
        let [ours, mapa, ucx] = &by_system[..] else { continue };
        let more = SeedValues(ours.0.iter().zip(&mapa.0).map(|(ours, mapa)| ours / mapa - 1.0).collect());
        let what = format!("{}: throughput above mapa's", workflow.name);
        report.figures.push(figure(what, gain(Unit::Percent, paper), (more, Unit::Percent), Some(COMPUTES)));
        report.orders.push(order(
            format!("{}: faastube above mapa", workflow.name),
            ours.differences(mapa),
            None,
        ));
        report.orders.push(order(
            format!("{}: mapa above ucx", workflow.name),
            mapa.differences(ucx),
            Some(PATHS),
        ));
    }
    report.tables.push((
        "8xV100, closed loop:".to_owned(),
        header(["workflow", "system", "throughput"]),
        rows,
    ));
    Ok(report)
}
