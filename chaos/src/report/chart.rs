//! The plots of a run, as SVG for a page: the latency and the results of requests over time, with a
//! line at each fault.

use std::error::Error;

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::cluster_usage::{ClusterUsage, UsageSum};
use super::run_report::RunReport;
use super::series::RequestSecond;
use crate::timeline::EventSource;

/// The name of a curve, its colour, and its value in a second.
type Curve<T> = (&'static str, RGBColor, fn(&RequestSecond) -> T);

const SIZE: (u32, u32) = (1060, 260);
const MARGIN: u32 = 8;
const X_LABELS: u32 = 34;
/// The width of the labels, which is the same for both plots, so that their time axes are aligned.
const Y_LABELS: u32 = 72;
const FONT: (&str, u32) = ("sans-serif", 13);

const FAULT: RGBColor = RGBColor(214, 60, 60);
const MEDIAN: RGBColor = RGBColor(33, 102, 172);
const P99: RGBColor = RGBColor(230, 145, 20);
const SLOWEST: RGBColor = RGBColor(150, 150, 160);
const ANSWERED: RGBColor = RGBColor(120, 180, 140);
const RETRIED: RGBColor = RGBColor(230, 165, 40);
const LOST: RGBColor = RGBColor(190, 20, 40);
const GRID: RGBColor = RGBColor(232, 232, 236);

/// Minimum of the logarithmic axis of latencies, in milliseconds, even if every request is faster.
const LATENCY_MIN_MS: f64 = 1.0;

/// The curves of resources, by kind of process.
type Kinds = [(&'static str, RGBColor, fn(&ClusterUsage) -> UsageSum); 3];
const KINDS: Kinds = [
    ("executors", SLOWEST, |it| it.executors),
    ("workers", P99, |it| it.workers),
    ("controllers", MEDIAN, |it| it.controllers),
];
/// Factor of the highest value that leaves room for the legend.
const LEGEND_ROOM: f64 = 1.4;
const MIB: f64 = 1048576.0;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;
type Counts<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Draws the latency of requests, by the time of their end.
pub(super) fn latency(report: &RunReport) -> anyhow::Result<String> {
    draw(|area| draw_latency(area, report))
}

/// Draws the number of requests that ended in each second, by result.
pub(super) fn outcomes(report: &RunReport) -> anyhow::Result<String> {
    draw(|area| draw_outcomes(area, report))
}

/// Draws the private memory of the processes, by kind.
pub(super) fn memory(report: &RunReport) -> anyhow::Result<String> {
    draw(|area| draw_taken(area, report, "MiB of their own", |sum| sum.private_bytes as f64 / MIB))
}

/// Draws the number of open descriptors of the processes, by kind.
pub(super) fn descriptors(report: &RunReport) -> anyhow::Result<String> {
    draw(|area| draw_taken(area, report, "descriptors", |sum| sum.descriptors as f64))
}

fn draw(carry_out: impl FnOnce(&Area<'_>) -> Drawn) -> anyhow::Result<String> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    carry_out(&area).map_err(|error| anyhow!("a plot cannot be drawn: {error}"))?;
    drop(area);
    Ok(svg)
}

fn draw_latency(area: &Area<'_>, report: &RunReport) -> Drawn {
    let busy: Vec<RequestSecond> =
        report.requests.seconds.iter().copied().filter(|it| it.ended() > 0).collect();
    let most = busy.iter().map(|it| it.max_ms).fold(LATENCY_MIN_MS * 10.0, f64::max) * LEGEND_ROOM.powi(3);
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .x_label_area_size(X_LABELS)
        .y_label_area_size(Y_LABELS)
        .build_cartesian_2d(begin(report)..end(report), (LATENCY_MIN_MS..most).log_scale())?;
    chart
        .configure_mesh()
        .label_style(FONT)
        .x_label_formatter(&|at| format!("{at:.0}"))
        .axis_style(GRID)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .y_desc("ms, from the first try")
        .y_label_formatter(&|ms| format!("{ms:.0}"))
        .draw()?;
    let faults = faults(report);
    chart.draw_series(faults.iter().map(|&at| line(at, LATENCY_MIN_MS, most)))?;
    let lines: [Curve<f64>; 3] =
        [("slowest", SLOWEST, |it| it.max_ms), ("p99", P99, |it| it.p99_ms), ("p50", MEDIAN, |it| it.p50_ms)];
    for (name, colour, of) in lines {
        // A line across seconds without requests would show values that were never measured.
        for stretch in busy.chunk_by(|one, next| one.at + 1 == next.at) {
            let points = stretch.iter().map(|it| (it.at as f64 + 0.5, of(it).max(LATENCY_MIN_MS)));
            let points: Vec<_> = points.collect();
            // A single second is drawn as a dot, because a single point makes no line.
            let dot = points.first().filter(|_| points.len() == 1).copied();
            chart.draw_series(dot.map(|at| Circle::new(at, 2, colour.filled())))?;
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        }
        chart
            .draw_series(LineSeries::new(std::iter::empty(), colour))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    legend(&mut chart)?;
    Ok(area.present()?)
}

fn draw_outcomes(area: &Area<'_>, report: &RunReport) -> Drawn {
    let seconds = &report.requests.seconds;
    let most = seconds.iter().map(RequestSecond::ended).max().unwrap_or(0).max(1) as f64 * LEGEND_ROOM;
    let mut chart = counts(area, report, "requests a second", most)?;
    // Each part is drawn on top of the parts before.
    let parts: [Curve<(u64, u64)>; 3] = [
        ("answered", ANSWERED, |it| (0, it.answered - it.retried)),
        ("answered after another try", RETRIED, |it| (it.answered - it.retried, it.answered)),
        ("lost or wrong", LOST, |it| (it.answered, it.ended())),
    ];
    for (name, colour, of) in parts {
        let bars = seconds.iter().filter_map(|it| {
            let (from, to) = of(it);
            let left = it.at as f64 + 0.05;
            let right = it.at as f64 + 0.95;
            (to > from).then(|| Rectangle::new([(left, from as f64), (right, to as f64)], colour.filled()))
        });
        chart
            .draw_series(bars)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart.draw_series(faults(report).iter().map(|&at| line(at, 0.0, most)))?;
    legend(&mut chart)?;
    Ok(area.present()?)
}

fn draw_taken(area: &Area<'_>, report: &RunReport, what: &str, of: fn(UsageSum) -> f64) -> Drawn {
    let values = KINDS.iter().flat_map(|(_, _, kind)| report.taken.iter().map(|it| of(kind(it))));
    let most = values.fold(1.0, f64::max) * LEGEND_ROOM;
    let mut chart = counts(area, report, what, most)?;
    let from = begin(report);
    let to = end(report);
    for (name, colour, kind) in KINDS {
        let points = report.taken.iter().map(|it| (it.at.as_secs_f64(), of(kind(it))));
        chart
            .draw_series(LineSeries::new(
                points.filter(|(at, _)| (from..=to).contains(at)),
                colour.stroke_width(2),
            ))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart.draw_series(faults(report).iter().map(|&at| line(at, 0.0, most)))?;
    legend(&mut chart)?;
    Ok(area.present()?)
}

/// Returns axes for counts, from 0 on, over seconds.
fn counts<'a, 'b>(
    area: &'a Area<'b>,
    report: &RunReport,
    what: &str,
    most: f64,
) -> Result<Counts<'a, 'b>, Box<dyn Error>> {
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .x_label_area_size(X_LABELS)
        .y_label_area_size(Y_LABELS)
        .build_cartesian_2d(begin(report)..end(report), 0.0..most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .label_style(FONT)
        .x_label_formatter(&|at| format!("{at:.0}"))
        .axis_style(GRID)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .x_desc("seconds")
        .y_desc(what)
        .y_label_formatter(&|count| format!("{count:.0}"))
        .draw()?;
    Ok(chart)
}

fn legend<'a, 'b: 'a, X, Y>(chart: &mut ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>) -> Drawn
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(FONT)
        .background_style(WHITE.mix(0.8))
        .border_style(GRID)
        .draw()?;
    Ok(())
}

fn line(at: f64, from: f64, to: f64) -> PathElement<(f64, f64)> {
    PathElement::new([(at, from), (at, to)], FAULT.mix(0.55).stroke_width(1))
}

fn faults(report: &RunReport) -> Vec<f64> {
    let faults = report.timeline.iter().filter(|event| event.kind == EventSource::Fault);
    faults.map(|event| event.at.as_secs_f64()).collect()
}

/// Returns the start of both plots: the first request, because a cluster takes a while to start.
fn begin(report: &RunReport) -> f64 {
    report.requests.seconds.first().map_or(0.0, |it| it.at as f64)
}

/// Returns the end of both plots: the last request, or the last fault.
fn end(report: &RunReport) -> f64 {
    let last = report.requests.seconds.last().map_or(1.0, |it| it.at as f64 + 1.0);
    faults(report).into_iter().fold(last, f64::max)
}
