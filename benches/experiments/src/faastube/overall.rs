//! The text's shares of data passing in INFless+ (Fig 3), and H18: latency, its parts and throughput of
//! six workflows against three baselines (Fig 11, 12).

use anyhow::Result;
use millrace_sim::passing::system::Pinning;
use millrace_sim::passing::{Outcome, System, workflow};
use millrace_sim::report::percent;

use super::{
    LOAD, SLACK, Server, Shape, as_h18, assumed, figure, header, load, ms, open, order, outcomes,
    p99_latency, p99_passing, p99_split, range, requests, spread, throughput,
};
use crate::Effort;
use crate::figures::{Spread, Unit};
use crate::report::Report;

/// What data passing takes of each workflow's latency without queues.
pub(super) fn shares(effort: Effort) -> Result<Report> {
    let server = Server::v100()?;
    let mut report = Report { assumed: as_h18(), ..Report::default() };
    report.assumed.push(
        "This is what sizes and times were calibrated on, so it shows only that they are. The paper gives the highest share; how it is among the other workflows is in a figure that is not at hand: we took 86% and more, since none could save the 86% of H18 otherwise. So what H18 saves against INFless+ follows from this, but for queues.".to_owned(),
    );
    let (mut rows, mut highest) = (Vec::new(), Vec::new());
    for workflow in workflow::all() {
        let rate = load(&server, &workflow)? / LOAD * 0.1;
        let runs = outcomes(effort, |seed| {
            let arrivals = open(Shape::Periodic, &[rate], (seed, effort));
            server.setup(&workflow, System::INFLESS, arrivals, seed)
        })?;
        let total = |outcome: &Outcome| outcome.mean(0, |record| record.split.total());
        let host = spread(&runs, |it| it.mean(0, |record| record.split.host) / total(it));
        let functions = spread(&runs, |it| it.mean(0, |record| record.split.functions) / total(it));
        let passing = spread(&runs, |it| it.mean(0, |record| record.split.passing()) / total(it));
        rows.push(vec![
            workflow.name.to_owned(),
            ms(&spread(&runs, total)),
            percent(host.mean()),
            percent(functions.mean()),
            percent(passing.mean()),
        ]);
        if workflow.name == "driving" {
            let of = |what: &str| format!("driving, {what}");
            let share = |what, paper, ours, band| figure(of(what), paper, (ours, Unit::Percent), band, None);
            report.figures.push(share("between host and functions", "29%", host, (0.27, 0.31)));
            report.figures.push(share("between functions", "63%", functions, (0.61, 0.65)));
        }
        highest.push(passing);
    }
    let what = "the highest share of data passing".to_owned();
    report.figures.push(figure(what, "92%", (range(&highest).1, Unit::Percent), (0.91, 0.93), None));
    let columns = header(["workflow", "latency without queues", "host-gFunc", "gFunc-gFunc", "data passing"]);
    report.tables.push(("INFless+, 8xV100, a tenth of its load:".to_owned(), columns, rows));
    Ok(report)
}

/// A system with a reading.
fn systems() -> [System; 6] {
    let whole = |name, system: System| System { name, pinning: Pinning::Whole, ..system };
    [
        System::INFLESS,
        System::DEEPPLAN,
        whole("deepplan+ whole", System::DEEPPLAN),
        System::STAR,
        whole("faastube* whole", System::STAR),
        System::FAASTUBE,
    ]
}

/// What was measured of one system on one cell.
struct Cell {
    workflow: &'static str,
    system: &'static str,
    latency: Vec<Spread>,
    passing: Spread,
    throughput: Spread,
}

/// The least and the most.
type Range = (f64, f64);

/// The paper's ranges, by baseline: latency, passing, throughput.
const PAPER: [(&str, Range, Range, Range); 3] = [
    ("infless+", (0.86, 0.90), (0.93, 0.98), (2.4, 12.0)),
    ("deepplan+", (0.62, 0.79), (0.90, 0.94), (1.7, 3.9)),
    ("faastube*", (0.43, 0.63), (0.70, 0.88), (1.3, 2.7)),
];

pub(super) fn overall(effort: Effort) -> Result<Report> {
    let mut report = Report { assumed: assumed(), ..Report::default() };
    report.assumed.push(
        "A figure is the least, or the most, over the six workflows (and over the three shapes of arrivals, for the latency); bands are the paper's range with 5 points, or 20% for throughput, on either side. Throughput is of a closed loop with three requests under way for each function.".to_owned(),
    );
    let shapes = if effort.short { &Shape::ALL[2..] } else { &Shape::ALL[..] };
    for server in [Server::v100()?, Server::a100()?] {
        let (mut rows, mut cells) = (Vec::new(), Vec::new());
        for workflow in workflow::all() {
            let rate = load(&server, &workflow)?;
            let mut of_workflow = Vec::new();
            for system in systems() {
                let mut latency = Vec::new();
                let mut passing = Spread::default();
                let mut row = vec![workflow.name.to_owned(), system.name.to_owned()];
                for &shape in shapes {
                    let runs = outcomes(effort, |seed| {
                        let arrivals = open(shape, &[rate], (seed, effort));
                        server.setup(&workflow, system, arrivals, seed)
                    })?;
                    latency.push(spread(&runs, p99_latency));
                    row.push(ms(&spread(&runs, p99_latency)));
                    if shape == Shape::Bursty {
                        passing = spread(&runs, p99_passing);
                        row.extend([ms(&passing), ms(&spread(&runs, p99_split))]);
                    }
                }
                let throughput = throughput(&server, &workflow, system, effort)?;
                row.push(format!("{:.0}/s", throughput.mean()));
                rows.push(row);
                of_workflow.push(Cell {
                    workflow: workflow.name,
                    system: system.name,
                    latency,
                    passing,
                    throughput,
                });
            }
            cells.push(of_workflow);
        }
        let names = shapes.iter().map(|shape| format!("p99, {}", shape.name()));
        let mut columns = header(["workflow", "system"]);
        columns.extend(names);
        columns.extend(header(["passing", "without queues", "throughput"]));
        report.tables.push((format!("{}, {} requests:", server.name, requests(effort)), columns, rows));
        judge(&mut report, &server, &cells);
    }
    Ok(report)
}

fn of<'a>(cells: &'a [Cell], name: &str) -> Option<&'a Cell> {
    cells.iter().find(|cell| cell.system == name)
}

fn judge(report: &mut Report, server: &Server, cells: &[Vec<Cell>]) {
    for (name, latency, passing, throughput) in PAPER {
        let (mut latencies, mut passings, mut throughputs) = (Vec::new(), Vec::new(), Vec::new());
        for cells in cells {
            let (Some(ours), Some(theirs)) = (of(cells, "faastube"), of(cells, name)) else { continue };
            let reductions = ours.latency.iter().zip(&theirs.latency);
            latencies.extend(reductions.map(|(ours, theirs)| ours.reduction_from(theirs)));
            passings.push(ours.passing.reduction_from(&theirs.passing));
            let by = ours.throughput.0.iter().zip(&theirs.throughput.0);
            throughputs.push(Spread(by.map(|(ours, theirs)| ours / theirs).collect()));
        }
        let mut add = |what: &str, spreads: &[Spread], unit: Unit, paper: Range, band: Range| {
            let (least, most) = range(spreads);
            for (which, ours, paper) in [("least", least, paper.0), ("most", most, paper.1)] {
                let cause = cause(server.name, what);
                let what = format!("{}, {what} against {name}, {which}", server.name);
                report.figures.push(figure(what, &unit.show(paper), (ours, unit), band, cause));
            }
        };
        let wide = |(low, high): Range| (low - SLACK, (high + SLACK).min(1.0));
        add("p99 latency saved", &latencies, Unit::Percent, latency, wide(latency));
        add("passing saved", &passings, Unit::Percent, passing, wide(passing));
        let band = (throughput.0 * 0.8, throughput.1 * 1.2);
        add("throughput", &throughputs, Unit::Times, throughput, band);
    }
    for pair in ["faastube", "faastube*", "deepplan+", "infless+"].windows(2) {
        for cells in cells {
            let (Some(first), Some(then)) = (of(cells, pair[0]), of(cells, pair[1])) else { continue };
            let less: Vec<_> = first.latency.iter().zip(&then.latency).map(|(a, b)| b.less(a)).collect();
            let by = range(&less).0;
            let what = format!("{}, {}: p99 of {} below {}", server.name, first.workflow, pair[0], pair[1]);
            report.orders.push(order(what, by, None));
        }
    }
}

/// Why more latency is saved in bursts.
const QUEUES: &str = "in bursts a request waits for those before it at each function, longer where each takes longer; without queues (table) it is at most 92% against infless+, 74% against deepplan+ and 63% against faastube*";
/// Why more latency is saved on A100.
const FASTER: &str = "queues, as on V100; and inference takes half as long there (assumed) while pinning takes what it does: data passing is 96% of infless+, without queues (table) 93% to 96% are saved against it, and at most 85% and 67% against the others";
/// Why more is served on A100.
const BUSY: &str = "an instance of a baseline is busy with pinning for as long as on V100, one of FaaSTube with inference for half as long (assumed): with V100's times it is 7.1× to 10.9× against infless+, and at most 3.4× and 2.3× against the others. The paper does not say on which server it measured";

/// Why a figure is elsewhere, for those that are.
fn cause(server: &str, what: &str) -> Option<&'static str> {
    match (server, what) {
        ("8xV100", "p99 latency saved") => Some(QUEUES),
        ("8xA100", "p99 latency saved" | "passing saved") => Some(FASTER),
        ("8xA100", "throughput") => Some(BUSY),
        _ => None,
    }
}
