//! `load`: a load generator for any server of the Open Inference Protocol.
//!
//! One request is encoded once and sent again and again, over gRPC or HTTP, either by a fixed
//! number of clients that each wait for their answer (closed loop) or at a fixed rate whatever the
//! server does (open loop). In the open loop a latency is counted from when the request was meant
//! to be sent, so a server that stalls is charged for every request that had to wait (no
//! coordinated omission). Everything runs on one thread, to leave the server its cores.
//!
//! | module | holds |
//! |---|---|
//! | [`target`] | which server, which protocol |
//! | [`payload`] | the request, encoded once |
//! | [`grpc`], [`http`] | sending it |
//! | [`schedule`], [`timer`] | when, in the open loop |
//! | [`engine`] | the two loops |
//! | [`sequence`] | requests of functions that keep state |
//! | [`stats`], [`report`] | what came of it |

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
use crate::failure::Failure;
use crate::load::engine::{Client, Pace, Plan, Until};
use crate::load::payload::{Shape, Wire};
use crate::load::report::Report;
use crate::load::sequence::Sequences;
use crate::load::target::Target;
use crate::output::{Format, Output, document, print};
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
    /// The server, as grpc://HOST:PORT or http://HOST:PORT; the cluster's endpoints otherwise.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The model.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// A version other than the latest.
    #[arg(long, value_name = "N", default_value = "", hide_default_value = true)]
    model_version: String,
    /// How many requests are under way at any time.
    #[arg(short, long, value_name = "N", default_value = "1", conflicts_with = "rate")]
    concurrency: NonZeroU32,
    /// Requests a second, sent whatever the server does.
    #[arg(long, value_name = "PER-SECOND", value_parser = rate)]
    rate: Option<f64>,
    /// How the requests of a rate are spread.
    #[arg(long, value_enum, value_name = "KIND", default_value_t, requires = "rate")]
    arrival: Arrival,
    /// The most requests under way at a rate; those beyond are counted as not sent.
    #[arg(long, value_name = "N", default_value_t = 10_000, requires = "rate")]
    max_in_flight: usize,
    /// How long to send, after the warm-up.
    #[arg(short, long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s")]
    duration: Duration,
    /// How many requests to send, in place of a duration.
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    requests: Option<NonZeroU64>,
    /// How long to send before measuring.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "1s")]
    warm_up: Duration,
    /// gRPC connections the requests share [default: 1 for each 16 under way, at most 4, and 1 for
    /// each endpoint]. They are spread over the endpoints in turn; one that breaks fails the requests
    /// on it, and is opened again at the next endpoint that can be reached. Over HTTP each request
    /// under way has its own.
    #[arg(long, value_name = "N")]
    connections: Option<NonZeroU32>,
    /// Send sequences, for a function that keeps state: each of the requests under way is of one, and
    /// of so many requests each has the first begins it and the last ends it. One of which a request
    /// fails counts as broken.
    #[arg(long, value_name = "N", conflicts_with = "rate")]
    sequence_length: Option<NonZeroU32>,
    /// The shape of an input; 1 stands in for every dimension a model leaves free. May be repeated.
    #[arg(long, value_name = "NAME=SHAPE")]
    input_shape: Vec<Shape>,
    /// What the inputs' random values are made from.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// How long to wait for an answer.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "60s")]
    timeout: Duration,
    /// Over HTTP, tensors as JSON rather than binary.
    #[arg(long)]
    http_json: bool,
    #[command(flatten)]
    output: Output,
}

/// How the requests of a rate are spread over time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arrival {
    /// As independent users send: exponential gaps.
    #[default]
    Poisson,
    /// Equal gaps.
    Uniform,
}

pub(crate) fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("cannot start the async runtime: {error}")))?;
    let report = runtime.block_on(LocalSet::new().run_until(measure(args, config)))?;
    match document(args.output.output, &report)? {
        Some(text) => print(&text)?,
        None => print(&report.text(args.output.output == Format::Wide))?,
    }
    report.verdict()
}

async fn measure(args: &Args, config: &Config) -> Result<Report, Failure> {
    let target = Target::of(args, config)?;
    let model = target.metadata(config).await?;
    let tensors = payload::tensors(&model, &args.input_shape, args.seed)?;
    let client = Client::connect(&target, &tensors, args).await?;
    let sequences = args.sequence_length.map(|length| Sequences::new(length, generator()));
    let plan = Plan { pace: pace(args), timeout: args.timeout, sequences };
    let line = progress::waiting("warming up");
    if !args.warm_up.is_zero() {
        engine::run(&client, &plan, Until::Elapsed(args.warm_up), args.seed).await?;
    }
    line.set_message("measuring");
    let until = args.requests.map_or(Until::Elapsed(args.duration), |count| Until::Sent(count.get()));
    // Another stretch of the random arrivals than the warm-up's.
    let stats = engine::run(&client, &plan, until, args.seed.wrapping_add(1)).await?;
    line.finish_and_clear();
    Ok(Report::new(args, &target, &tensors, client.request_bytes(), &stats))
}

/// Tells this generator from others: no two processes of a machine have one pid and moment.
fn generator() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_nsec.cast_unsigned() << 22) ^ u64::from(std::process::id())
}

fn pace(args: &Args) -> Pace {
    match args.rate {
        None => Pace::Closed { concurrency: args.concurrency.get() as usize },
        Some(rate) => Pace::Open { rate, arrival: args.arrival, max_in_flight: args.max_in_flight },
    }
}

impl Args {
    /// The gRPC connections to open: each endpoint gets one at least, where as many requests are
    /// under way.
    fn connections(&self, target: &Target) -> usize {
        let under_way = match self.rate {
            None => self.concurrency.get() as usize,
            Some(_) => 64,
        };
        let usual = || under_way.div_ceil(16).clamp(1, 4).max(under_way.min(target.addresses.len()));
        self.connections.map_or_else(usual, |said| said.get() as usize)
    }

    fn wire(&self) -> Wire {
        if self.http_json { Wire::Json } else { Wire::Binary }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("write how many requests a second, such as 500 or 0.5".to_owned()),
    }
}
