//! The options of `load`.

use std::num::{NonZeroU32, NonZeroU64};
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;

use crate::output::ListOutput;
use crate::tensors::shape;

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
    pub(super) target: Option<String>,
    /// The server, as grpc://HOST:PORT or http://HOST:PORT [default: the cluster's endpoints].
    #[arg(long, value_name = "URL")]
    pub(super) url: Option<String>,
    /// The name of the model on the server.
    #[arg(long, value_name = "NAME")]
    pub(super) model: Option<String>,
    /// The version of the model [default: the latest].
    #[arg(long, value_name = "N", default_value = "", hide_default_value = true)]
    pub(super) model_version: String,
    /// The number of requests in flight at any time.
    #[arg(short, long, value_name = "N", default_value = "1", conflicts_with = "rate")]
    pub(super) concurrency: NonZeroU32,
    /// The number of requests per second, sent independently of the server.
    #[arg(long, value_name = "PER-SECOND", value_parser = rate)]
    pub(super) rate: Option<f64>,
    /// The distribution of the requests at a rate.
    #[arg(long, value_enum, value_name = "KIND", default_value_t, requires = "rate")]
    pub(super) arrival: ArrivalPattern,
    /// The limit of requests in flight at a rate; requests beyond the limit are counted as not
    /// sent.
    #[arg(long, value_name = "N", default_value_t = 10_000, requires = "rate")]
    pub(super) max_in_flight: usize,
    /// The sending time after the warm-up.
    #[arg(short, long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s")]
    pub(super) duration: Duration,
    /// The number of requests to send, in place of a duration.
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    pub(super) requests: Option<NonZeroU64>,
    /// The sending time before the measurement.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "1s")]
    pub(super) warm_up: Duration,
    /// The number of gRPC connections that the requests share [default: 1 for each 16 in flight, at
    /// most 4, and 1 for each endpoint]. The connections are spread over the endpoints in turn. A
    /// broken connection fails its requests, and is opened again at the next endpoint that can be
    /// reached. Over HTTP, each request in flight has its own connection.
    #[arg(long, value_name = "N")]
    pub(super) connections: Option<NonZeroU32>,
    /// Send sequences of N requests, for a function that keeps state. Each client sends one
    /// sequence after another; the first request starts a sequence and the last ends it. A failed
    /// request breaks its sequence.
    #[arg(long, value_name = "N", conflicts_with = "rate")]
    pub(super) sequence_length: Option<NonZeroU32>,
    /// The shape of an input; by default, 1 for every variable dimension. May be repeated.
    #[arg(long, value_name = "NAME=SHAPE")]
    pub(super) input_shape: Vec<InputShape>,
    /// The seed of the random input values.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// The timeout of a request.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "60s")]
    pub(super) timeout: Duration,
    /// Send tensors as JSON in place of binary data, over HTTP.
    #[arg(long)]
    pub(super) http_json: bool,
    #[command(flatten)]
    pub(super) output: ListOutput,
}

/// The distribution of the requests at a rate over time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum ArrivalPattern {
    /// Exponential gaps, as from independent users.
    #[default]
    Poisson,
    /// Equal gaps.
    Uniform,
}

/// An argument `NAME=SHAPE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InputShape {
    pub(super) name: String,
    pub(super) dims: Vec<i64>,
}

impl FromStr for InputShape {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, dims) =
            text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=SHAPE, such as x=1x64"))?;
        Ok(Self { name: name.to_owned(), dims: shape::parse(dims)? })
    }
}

/// The encoding of tensors over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HttpTensorEncoding {
    /// The binary tensor extension.
    Binary,
    /// JSON numbers.
    Json,
}

impl Args {
    /// Returns the number of gRPC connections to open to this number of endpoints: at least one per
    /// endpoint if as many requests are in flight.
    pub(super) fn connections(&self, endpoints: usize) -> usize {
        let under_way = match self.rate {
            None => self.concurrency.get() as usize,
            Some(_) => 64,
        };
        let usual = || under_way.div_ceil(16).clamp(1, 4).max(under_way.min(endpoints));
        self.connections.map_or_else(usual, |said| said.get() as usize)
    }

    pub(super) fn wire(&self) -> HttpTensorEncoding {
        if self.http_json { HttpTensorEncoding::Json } else { HttpTensorEncoding::Binary }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("write a number of requests per second, such as 500 or 0.5".to_owned()),
    }
}
