//! `load`: a load generator for any server of the Open Inference Protocol.
//!
//! A request is encoded once and sent repeatedly, over gRPC or HTTP. In the closed loop, a fixed
//! number of clients each wait for a response before the next request. In the open loop, requests
//! are sent at a fixed rate, independent of the server. The open loop measures a latency from the
//! planned send time, so a stalled server is charged for every request that had to wait (no
//! coordinated omission). The generator runs on one thread, to leave the other cores to the server.
//!
//! | module | content |
//! |---|---|
//! | [`target`] | the server and the protocol |
//! | [`payload`] | the request, encoded once |
//! | [`grpc`], [`http`] | the senders |
//! | [`schedule`], [`timer`] | the send times of the open loop |
//! | [`engine`] | the two loops |
//! | [`sequence`] | requests of functions that keep state |
//! | [`stats`], [`report`] | the measurements |

mod engine;
mod grpc;
mod http;
mod payload;
mod report;
mod schedule;
mod sequence;
mod stats;
mod target;
mod timer;

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use clap::ValueEnum;
use rustix::time::{ClockId, clock_gettime};
use tokio::task::LocalSet;

use crate::config::Config;
use crate::failure::CommandFailure;
use crate::load::engine::{LoadClient, LoadEnd, LoadLoop, LoadPlan};
use crate::load::payload::{HttpTensorEncoding, InputShape};
use crate::load::report::LoadReport;
use crate::load::sequence::ClientSequences;
use crate::load::target::LoadTarget;
use crate::output::{ListFormat, ListOutput, document, print};
use crate::progress;

const EXAMPLES: &str = "\
Examples:
  millrace load digits                                  one client, 10 s, this cluster
  millrace load mlp --concurrency 64 --duration 30s
  millrace load mlp --rate 500 --arrival poisson
  millrace load counter --sequence-length 8             sequences of a function that keeps state
  millrace load --url grpc://127.0.0.1:8101 --model mlp   any other server of the protocol
  millrace load http://127.0.0.1:8100 --model mlp         the same over HTTP";

/// Measure a server of the Open Inference Protocol under load.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A function or workflow of the cluster, or a server's URL (grpc:// or http://) with --model.
    #[arg(value_name = "NAME|URL", required_unless_present = "url")]
    target: Option<String>,
    /// The server, as grpc://HOST:PORT or http://HOST:PORT [default: the cluster's endpoints].
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The name of the model on the server.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The version of the model [default: the latest].
    #[arg(long, value_name = "N", default_value = "", hide_default_value = true)]
    model_version: String,
    /// The number of requests in flight at any time.
    #[arg(short, long, value_name = "N", default_value = "1", conflicts_with = "rate")]
    concurrency: NonZeroU32,
    /// The number of requests per second, sent independently of the server.
    #[arg(long, value_name = "PER-SECOND", value_parser = rate)]
    rate: Option<f64>,
    /// The distribution of the requests at a rate.
    #[arg(long, value_enum, value_name = "KIND", default_value_t, requires = "rate")]
    arrival: ArrivalPattern,
    /// The limit of requests in flight at a rate; requests beyond the limit are counted as not
    /// sent.
    #[arg(long, value_name = "N", default_value_t = 10_000, requires = "rate")]
    max_in_flight: usize,
    /// The sending time after the warm-up.
    #[arg(short, long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s")]
    duration: Duration,
    /// The number of requests to send, in place of a duration.
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    requests: Option<NonZeroU64>,
    /// The sending time before the measurement.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "1s")]
    warm_up: Duration,
    /// The number of gRPC connections that the requests share [default: 1 for each 16 in flight, at
    /// most 4, and 1 for each endpoint]. The connections are spread over the endpoints in turn. A
    /// broken connection fails its requests, and is opened again at the next endpoint that can be
    /// reached. Over HTTP, each request in flight has its own connection.
    #[arg(long, value_name = "N")]
    connections: Option<NonZeroU32>,
    /// Send sequences of N requests, for a function that keeps state. Each client sends one
    /// sequence after another; the first request starts a sequence and the last ends it. A failed
    /// request breaks its sequence.
    #[arg(long, value_name = "N", conflicts_with = "rate")]
    sequence_length: Option<NonZeroU32>,
    /// The shape of an input; by default, 1 for every variable dimension. May be repeated.
    #[arg(long, value_name = "NAME=SHAPE")]
    input_shape: Vec<InputShape>,
    /// The seed of the random input values.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The timeout of a request.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "60s")]
    timeout: Duration,
    /// Send tensors as JSON in place of binary data, over HTTP.
    #[arg(long)]
    http_json: bool,
    #[command(flatten)]
    output: ListOutput,
}

/// The distribution of the requests at a rate over time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArrivalPattern {
    /// Exponential gaps, as from independent users.
    #[default]
    Poisson,
    /// Equal gaps.
    Uniform,
}

pub(crate) fn run(args: &Args, config: &Config) -> Result<(), CommandFailure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CommandFailure::failed(format!("cannot start the async runtime: {error}")))?;
    let report = runtime.block_on(LocalSet::new().run_until(measure(args, config)))?;
    match document(args.output.output, &report)? {
        Some(text) => print(&text)?,
        None => print(&report.text(args.output.output == ListFormat::Wide))?,
    }
    report.verdict()
}

async fn measure(args: &Args, config: &Config) -> Result<LoadReport, CommandFailure> {
    let target = LoadTarget::of(args, config)?;
    let model = target.metadata(config).await?;
    let tensors = payload::tensors(&model, &args.input_shape, args.seed)?;
    let client = LoadClient::connect(&target, &tensors, args).await?;
    let sequences = args.sequence_length.map(|length| ClientSequences::new(length, generator()));
    let plan = LoadPlan { pace: pace(args), timeout: args.timeout, sequences };
    let line = progress::waiting("warming up");
    if !args.warm_up.is_zero() {
        engine::run(&client, &plan, LoadEnd::Elapsed(args.warm_up), args.seed).await?;
    }
    line.set_message("measuring");
    let until = args.requests.map_or(LoadEnd::Elapsed(args.duration), |count| LoadEnd::Sent(count.get()));
    // Draw other random arrivals than the warm-up's.
    let stats = engine::run(&client, &plan, until, args.seed.wrapping_add(1)).await?;
    line.finish_and_clear();
    Ok(LoadReport::new(args, &target, &tensors, client.request_bytes(), &stats))
}

/// Returns a seed that differs between generators: no two processes of a machine share a pid and a
/// moment.
fn generator() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_nsec.cast_unsigned() << 22) ^ u64::from(std::process::id())
}

fn pace(args: &Args) -> LoadLoop {
    match args.rate {
        None => LoadLoop::Closed { concurrency: args.concurrency.get() as usize },
        Some(rate) => LoadLoop::Open { rate, arrival: args.arrival, max_in_flight: args.max_in_flight },
    }
}

impl Args {
    /// Returns the number of gRPC connections to open: at least one per endpoint if as many
    /// requests are in flight.
    fn connections(&self, target: &LoadTarget) -> usize {
        let under_way = match self.rate {
            None => self.concurrency.get() as usize,
            Some(_) => 64,
        };
        let usual = || under_way.div_ceil(16).clamp(1, 4).max(under_way.min(target.addresses.len()));
        self.connections.map_or_else(usual, |said| said.get() as usize)
    }

    fn wire(&self) -> HttpTensorEncoding {
        if self.http_json { HttpTensorEncoding::Json } else { HttpTensorEncoding::Binary }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("write a number of requests per second, such as 500 or 0.5".to_owned()),
    }
}
