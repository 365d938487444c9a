//! The printed and written results of simulated runs.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use millrace_proto::convert::policy_spec_wire;
use millrace_sim::outcome::TenantSummary;
use millrace_sim::report::{PlotCurve, draw_curves, requests_csv, summary_csv};
use millrace_sim::{RunSummary, SimulatedRequest, SimulationOutcome};
use millrace_worker::start::{PolicyConfig, SchedulingPolicy};
use serde::Serialize;

use crate::failure::CommandFailure;
use crate::output::policies::PolicySpecDocument;
use crate::output::table::{TextTable, col, wide};
use crate::output::{self, ListFormat, text};

/// The run of a policy.
pub(super) struct PolicyRun {
    pub(super) policy: PolicyConfig,
    pub(super) settings: SchedulingPolicy,
    pub(super) summary: RunSummary,
    pub(super) outcome: SimulationOutcome,
    pub(super) tenants: Vec<TenantSummary>,
}

/// The row of a policy in `-o json`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    policy: String,
    /// The settings in force, as `get policy` shows those of a node.
    settings: PolicySpecDocument,
    requests: u64,
    failed: u64,
    mean_ms: f64,
    p50_ms: f64,
    p98_ms: f64,
    p99_ms: f64,
    miss_ratio: f64,
    false_miss_ratio: f64,
    gpu_load: f64,
    gpu_load_variance: f64,
    compliant: u64,
    with_objective: u64,
    /// The errors of the cost model.
    predictions: Vec<PredictionRow>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tenants: Vec<TenantRow>,
}

/// The predictions for turns of a kind on GPUs of a type.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PredictionRow {
    gpu_type: String,
    turn: &'static str,
    count: u64,
    /// The mean relative error of the predictions.
    error_ratio: f64,
}

/// A tenant's share of a run.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct TenantRow {
    tenant: String,
    requests: u64,
    failed: u64,
    mean_ms: f64,
    p50_ms: f64,
    p98_ms: f64,
    p99_ms: f64,
    gpu_time_ms: f64,
}

fn millis(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e6).round() / 1e3
}

fn row(run: &PolicyRun) -> Row {
    let summary = &run.summary;
    Row {
        policy: run.policy.to_string(),
        settings: policy_spec_wire(&run.settings.spec()).into(),
        requests: summary.requests,
        failed: summary.failed,
        mean_ms: millis(summary.mean),
        p50_ms: millis(summary.p50),
        p98_ms: millis(summary.p98),
        p99_ms: millis(summary.p99),
        miss_ratio: summary.miss_ratio,
        false_miss_ratio: summary.false_miss_ratio,
        gpu_load: summary.gpu_load,
        gpu_load_variance: summary.gpu_load_variance,
        compliant: summary.compliant,
        with_objective: summary.with_objective,
        predictions: predictions(run),
        tenants: run.tenants.iter().map(tenant_row).collect(),
    }
}

fn predictions(run: &PolicyRun) -> Vec<PredictionRow> {
    let row = |((gpu_type, turn), (count, error_ratio))| PredictionRow { gpu_type, turn, count, error_ratio };
    run.outcome.predictions().into_iter().map(row).collect()
}

fn tenant_row(tenant: &TenantSummary) -> TenantRow {
    TenantRow {
        tenant: tenant.tenant.to_string(),
        requests: tenant.requests,
        failed: tenant.failed,
        mean_ms: millis(tenant.mean),
        p50_ms: millis(tenant.p50),
        p98_ms: millis(tenant.p98),
        p99_ms: millis(tenant.p99),
        gpu_time_ms: millis(tenant.gpu_time),
    }
}

/// Prints the comparison.
pub(super) fn print(runs: &[PolicyRun], format: ListFormat) -> Result<(), CommandFailure> {
    let rows: Vec<Row> = runs.iter().map(row).collect();
    if let Some(document) = output::document(format, &rows)? {
        return output::print(&document);
    }
    let mut table = TextTable::new([
        col("POLICY"),
        col("REQUESTS"),
        col("FAILED"),
        col("MEAN"),
        col("P50"),
        col("P98"),
        col("P99"),
        col("MISSES"),
        wide("FALSE-MISSES"),
        wide("ESTIMATES-OFF"),
        col("GPU-LOAD"),
        col("COMPLIANT"),
    ]);
    for run in runs {
        let summary = &run.summary;
        let compliant = match summary.with_objective {
            0 => String::new(),
            functions => format!("{}/{functions}", summary.compliant),
        };
        table.row([
            run.policy.to_string(),
            text::count(summary.requests),
            text::count(summary.failed),
            text::latency(summary.mean),
            text::latency(summary.p50),
            text::latency(summary.p98),
            text::latency(summary.p99),
            percent(summary.miss_ratio),
            percent(summary.false_miss_ratio),
            run.outcome.mean_prediction_error().map(percent).unwrap_or_default(),
            percent(summary.gpu_load),
            compliant,
        ]);
    }
    output::print(&table.render(format))?;
    let tenants = tenants(runs);
    if tenants.is_empty() { Ok(()) } else { output::print(&format!("\n{}", tenants.render(format))) }
}

/// Returns a table of each tenant's share of each run, if tenants are named.
fn tenants(runs: &[PolicyRun]) -> TextTable {
    let mut table = TextTable::new([
        col("POLICY"),
        col("TENANT"),
        col("REQUESTS"),
        col("FAILED"),
        col("MEAN"),
        col("P50"),
        col("P98"),
        col("P99"),
        col("GPU-TIME"),
    ]);
    for (run, tenant) in runs.iter().flat_map(|run| run.tenants.iter().map(move |tenant| (run, tenant))) {
        table.row([
            run.policy.to_string(),
            tenant.tenant.to_string(),
            text::count(tenant.requests),
            text::count(tenant.failed),
            text::latency(tenant.mean),
            text::latency(tenant.p50),
            text::latency(tenant.p98),
            text::latency(tenant.p99),
            text::latency(tenant.gpu_time),
        ]);
    }
    table
}

fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// Writes the requests of every run, the comparison, the distribution of latencies, and the load of
/// the GPUs.
pub(super) fn write(runs: &[PolicyRun], dir: &Path) -> Result<(), CommandFailure> {
    let wrong = |path: &Path| {
        let path = path.display().to_string();
        move |error: std::io::Error| CommandFailure::failed(format!("cannot write {path}: {error}"))
    };
    fs::create_dir_all(dir).map_err(wrong(dir))?;
    let mut written = Vec::new();
    for run in runs {
        let path = dir.join(format!("requests-{}.csv", run.policy));
        let file = File::create(&path).map_err(wrong(&path))?;
        requests_csv(&run.outcome, std::io::BufWriter::new(file)).map_err(wrong(&path))?;
        written.push(path);
    }
    let path = dir.join("summary.csv");
    let file = File::create(&path).map_err(wrong(&path))?;
    let names: Vec<String> = runs.iter().map(|run| run.policy.to_string()).collect();
    let told = names.iter().zip(runs);
    let told = told.map(|(name, run)| (name.as_str(), &run.summary, run.outcome.mean_prediction_error()));
    summary_csv(told, file).map_err(wrong(&path))?;
    written.push(path);
    let path = dir.join("summary.json");
    let rows: Vec<Row> = runs.iter().map(row).collect();
    let text =
        serde_json::to_string_pretty(&rows).map_err(|error| CommandFailure::failed(error.to_string()))?;
    fs::write(&path, text + "\n").map_err(wrong(&path))?;
    written.push(path);
    for (name, title, axes, line) in [
        (
            "latency.svg",
            "Latency of answers",
            ("share of answers, in percent", "latency, in ms"),
            curve as fn(&PolicyRun) -> PlotCurve,
        ),
        ("gpus.svg", "GPUs by load", ("GPU, the most loaded first", "time it computed, in percent"), loads),
    ] {
        let path = dir.join(name);
        let drawn: Vec<PlotCurve> = runs.iter().map(line).collect();
        draw_curves(&path, title, axes, &drawn).map_err(|error| CommandFailure::failed(error.to_string()))?;
        written.push(path);
    }
    for path in written {
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

/// Returns the busy share of each GPU's time, the most loaded first.
fn loads(run: &PolicyRun) -> PlotCurve {
    let mut loads = run.outcome.gpu_loads();
    loads.sort_unstable_by(|a, b| b.total_cmp(a));
    let points = (1..).map(f64::from).zip(loads.iter().map(|load| load * 100.0));
    PlotCurve { name: run.policy.to_string(), points: points.collect() }
}

/// Returns the latency percentiles up to 99.
fn curve(run: &PolicyRun) -> PlotCurve {
    let mut latencies: Vec<Duration> =
        run.outcome.records.iter().filter(|it| it.answered()).map(SimulatedRequest::latency).collect();
    latencies.sort_unstable();
    let at = |percent: u32| {
        let span = millrace_sim::outcome::percentile(&latencies, f64::from(percent));
        (f64::from(percent), span.as_secs_f64() * 1e3)
    };
    PlotCurve { name: run.policy.to_string(), points: (1..=99).map(at).collect() }
}
