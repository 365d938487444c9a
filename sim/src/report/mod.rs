//! Reports of a run: tables as CSV, plots as SVG, and durations and shares as text.

mod plot;

use std::io::{self, Write};
use std::time::Duration;

pub use plot::{PlotCurve, PlotError, draw_curves};

use crate::outcome::{RequestEnding, RunSummary, SimulationOutcome};

/// Returns a duration as text with three significant digits: in seconds from 1 s, else in milliseconds.
#[must_use]
pub fn format_duration(of: Duration) -> String {
    let seconds = of.as_secs_f64();
    match () {
        () if seconds >= 100.0 => format!("{seconds:.0} s"),
        () if seconds >= 10.0 => format!("{seconds:.1} s"),
        () if seconds >= 1.0 => format!("{seconds:.2} s"),
        () if seconds >= 0.1 => format!("{:.0} ms", seconds * 1e3),
        () => format!("{:.1} ms", seconds * 1e3),
    }
}

/// Returns a share as text in percent, with one decimal.
#[must_use]
pub fn format_percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// Writes a line for every request: arrival, latency and its parts, node, GPU, attempts and error.
///
/// # Errors
/// Returns the errors of the writer.
pub fn requests_csv(outcome: &SimulationOutcome, to: impl Write) -> io::Result<()> {
    let mut csv = csv::Writer::from_writer(to);
    csv.write_record([
        "request",
        "function",
        "arrived_us",
        "latency_us",
        "queue_us",
        "swap_us",
        "run_us",
        "node",
        "gpu",
        "attempts",
        "error",
    ])?;
    for record in &outcome.records {
        let us = |of: Duration| of.as_micros().to_string();
        let mut row = vec![
            record.request.to_string(),
            record.function.to_string(),
            (record.arrived.0 / 1000).to_string(),
            us(record.latency()),
        ];
        match record.ending {
            RequestEnding::Answered { node, gpu, attempts, split } => {
                row.extend([us(split.queue), us(split.swap), us(split.run)]);
                row.extend([node.to_string(), gpu.0.to_string(), attempts.to_string(), String::new()]);
            }
            RequestEnding::Failed { reason } => {
                row.extend(std::iter::repeat_n(String::new(), 6));
                row.push(reason.as_str().to_owned());
            }
        }
        csv.write_record(row)?;
    }
    csv.flush()
}

/// Writes a line for each run: its name, its sums, and the mean error of its cost models.
///
/// # Errors
/// Returns the errors of the writer.
pub fn summary_csv<'a>(
    runs: impl IntoIterator<Item = (&'a str, &'a RunSummary, Option<f64>)>,
    to: impl Write,
) -> io::Result<()> {
    let mut csv = csv::Writer::from_writer(to);
    csv.write_record([
        "policy",
        "requests",
        "failed",
        "mean_us",
        "p50_us",
        "p98_us",
        "p99_us",
        "miss_ratio",
        "false_miss_ratio",
        "estimates_off_ratio",
        "gpu_load",
        "gpu_load_variance",
        "compliant",
        "with_objective",
    ])?;
    for (name, summary, off) in runs {
        let us = |of: Duration| of.as_micros().to_string();
        csv.write_record([
            name.to_owned(),
            summary.requests.to_string(),
            summary.failed.to_string(),
            us(summary.mean),
            us(summary.p50),
            us(summary.p98),
            us(summary.p99),
            summary.miss_ratio.to_string(),
            summary.false_miss_ratio.to_string(),
            off.map(|off| off.to_string()).unwrap_or_default(),
            summary.gpu_load.to_string(),
            summary.gpu_load_variance.to_string(),
            summary.compliant.to_string(),
            summary.with_objective.to_string(),
        ])?;
    }
    csv.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_has_three_significant_digits() {
        let cases =
            [(0.0123, "12.3 ms"), (0.25, "250 ms"), (1.5, "1.50 s"), (12.34, "12.3 s"), (123.4, "123 s")];
        for (seconds, text) in cases {
            assert_eq!(format_duration(Duration::from_secs_f64(seconds)), text);
        }
    }
}
