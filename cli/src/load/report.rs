//! The results of a run, for people and for programs.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_client::Tensor;
use serde::Serialize;

use crate::failure::CommandFailure;
use crate::load::args::{Args, ArrivalPattern};
use crate::load::stats::{LoadStats, ServerHistograms, TimeHistogram};
use crate::load::target::{LoadTarget, Protocol};
use crate::output::table::{TextTable, col};
use crate::output::{ListFormat, text};

/// The results of a run. Times are in microseconds.
#[derive(Debug, Serialize)]
pub(super) struct LoadReport {
    server: String,
    protocol: &'static str,
    model: String,
    #[serde(flatten)]
    pace: PaceReport,
    connections: Option<usize>,
    inputs: BTreeMap<String, Vec<i64>>,
    request_bytes: usize,
    seconds: f64,
    answered: u64,
    failed: u64,
    throughput: f64,
    answer_bytes: u64,
    latency_us: TimesReport,
    /// The delay between a request's planned and actual send time, caused by the generator. Open
    /// loop only.
    #[serde(skip_serializing_if = "Option::is_none")]
    lag_us: Option<TimesReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    server_us: Option<ServerReport>,
    errors: BTreeMap<String, ErrorReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequences: Option<SequencesReport>,
    /// The number of processors that the generator kept busy. One thread can use at most one.
    client_cpus: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "loop")]
enum PaceReport {
    Closed { concurrency: u32 },
    Open { rate: f64, arrival: &'static str },
}

#[derive(Debug, Serialize)]
struct TimesReport {
    min: f64,
    mean: f64,
    stdev: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    #[serde(rename = "p99.9")]
    p99_9: f64,
    max: f64,
}

/// The server's latency breakdown, and the client's latency without the model's run.
#[derive(Debug, Serialize)]
struct ServerReport {
    queue: TimesReport,
    swap: TimesReport,
    run: TimesReport,
    token: TimesReport,
    total: TimesReport,
    added: TimesReport,
}

/// The sequences that ended. Sequences that were open at the end of the run are not counted.
#[derive(Debug, Serialize)]
struct SequencesReport {
    length: u32,
    whole: u64,
    broken: u64,
}

#[derive(Debug, Serialize)]
struct ErrorReport {
    count: u64,
    example: String,
}

impl LoadReport {
    pub(super) fn new(
        args: &Args,
        target: &LoadTarget,
        tensors: &[Tensor],
        request_bytes: usize,
        stats: &LoadStats,
    ) -> Self {
        let errors = stats.problems.iter().map(|(kind, (count, example))| {
            (kind.clone(), ErrorReport { count: *count, example: example.clone() })
        });
        let grpc = target.protocol == Protocol::Grpc;
        Self {
            server: target.names(),
            protocol: if grpc { "grpc" } else { "http" },
            model: target.model.clone(),
            pace: PaceReport::of(args),
            connections: grpc.then(|| args.connections(target.addresses.len())),
            inputs: tensors
                .iter()
                .map(|tensor| (tensor.name().to_owned(), tensor.shape().to_vec()))
                .collect(),
            request_bytes,
            seconds: stats.elapsed.as_secs_f64(),
            answered: stats.latency.count(),
            failed: stats.failed(),
            throughput: stats.throughput(),
            answer_bytes: stats.answer_bytes,
            latency_us: TimesReport::of(&stats.latency),
            lag_us: args.rate.map(|_| TimesReport::of(&stats.lag)),
            server_us: stats.server.as_deref().map(ServerReport::of),
            errors: errors.collect(),
            sequences: args.sequence_length.map(|length| SequencesReport {
                length: length.get(),
                whole: stats.sequences.whole,
                broken: stats.sequences.broken,
            }),
            client_cpus: stats.cpu.as_secs_f64() / stats.elapsed.as_secs_f64().max(f64::MIN_POSITIVE),
        }
    }

    /// Returns a failure if no request was answered.
    pub(super) fn verdict(&self) -> Result<(), CommandFailure> {
        if self.answered > 0 {
            return Ok(());
        }
        let first = self.errors.iter().next();
        let why = first
            .map_or("no request was sent".to_owned(), |(kind, error)| format!("{kind}: {}", error.example));
        Err(CommandFailure::failed(format!("no request was answered: {why}")))
    }

    /// Returns the results as text, with `details` in full.
    pub(super) fn text(&self, details: bool) -> String {
        let pace = match &self.pace {
            PaceReport::Closed { concurrency } => format!("{concurrency} at a time"),
            PaceReport::Open { rate, arrival } => format!("{rate} a second ({arrival})"),
        };
        let inputs: Vec<_> =
            self.inputs.iter().map(|(name, shape)| format!("{name} {}", text::shape(shape))).collect();
        let mut lines = vec![
            format!("{} at {}://{}, {pace}, {}", self.model, self.protocol, self.server, inputs.join(", ")),
            format!(
                "{} answered in {:.1} s: {:.1} a second",
                text::count(self.answered),
                self.seconds,
                self.throughput
            ),
        ];
        if let Some(SequencesReport { length, whole, broken }) = self.sequences {
            let whole = text::count(whole);
            let broken = text::count(broken);
            lines.push(format!("{whole} sequences of {length} whole, {broken} broken"));
        }
        for (kind, error) in &self.errors {
            lines.push(format!("{} failed, {kind}: {}", text::count(error.count), error.example));
        }
        lines.push(String::new());
        lines.push(self.times_table(details).render(ListFormat::Table));
        let mut text = lines.join("\n");
        text += &format!("client: {:.2} processors busy\n", self.client_cpus);
        text
    }

    fn times_table(&self, details: bool) -> TextTable {
        let mut table = TextTable::new([
            col(""),
            col("p50"),
            col("p90"),
            col("p99"),
            col("p99.9"),
            col("max"),
            col("mean"),
        ]);
        let mut row = |name: &str, times: &TimesReport| {
            let time = |micros: f64| text::latency(Duration::from_nanos((micros * 1e3) as u64));
            let cells = [times.p50, times.p90, times.p99, times.p99_9, times.max, times.mean].map(time);
            let [p50, p90, p99, p99_9, max, mean] = cells;
            table.row([name.to_owned(), p50, p90, p99, p99_9, max, mean]);
        };
        row("latency", &self.latency_us);
        if let Some(server) = &self.server_us {
            row("run", &server.run);
            row("added to the run", &server.added);
            if details {
                row("queue", &server.queue);
                row("swap", &server.swap);
                row("wait for SMs", &server.token);
                row("server total", &server.total);
            }
        }
        if let Some(lag) = &self.lag_us {
            row("sent late by", lag);
        }
        table
    }
}

impl PaceReport {
    fn of(args: &Args) -> Self {
        match args.rate {
            None => Self::Closed { concurrency: args.concurrency.get() },
            Some(rate) => Self::Open {
                rate,
                arrival: match args.arrival {
                    ArrivalPattern::Poisson => "poisson",
                    ArrivalPattern::Uniform => "uniform",
                },
            },
        }
    }
}

impl TimesReport {
    fn of(times: &TimeHistogram) -> Self {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        Self {
            min: micros(times.min()),
            mean: micros(times.mean()),
            stdev: micros(times.deviation()),
            p50: micros(times.quantile(0.5)),
            p90: micros(times.quantile(0.9)),
            p99: micros(times.quantile(0.99)),
            p99_9: micros(times.quantile(0.999)),
            max: micros(times.max()),
        }
    }
}

impl ServerReport {
    fn of(times: &ServerHistograms) -> Self {
        Self {
            queue: TimesReport::of(&times.queue),
            swap: TimesReport::of(&times.swap),
            run: TimesReport::of(&times.run),
            token: TimesReport::of(&times.token),
            total: TimesReport::of(&times.total),
            added: TimesReport::of(&times.added),
        }
    }
}
