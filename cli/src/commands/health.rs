//! `health`: whether one server serves, for health checks. Asks `grpc.health.v1`, as any other prober
//! may; this verb is for images that have none.

use std::time::Duration;

use millrace_client::Address;
use millrace_transport::channel::{ChannelConfig, endpoint};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::failure::Failure;
use crate::output::print;

const HELP: &str = "\
A controller serves while it has a worker, and a worker while it takes requests: neither does any more
once it was told to stop. Whether the cluster as a whole is up is another question: 'cluster wait'.

Examples:
  millrace health                     the controller of this machine
  millrace health 127.0.0.1:7080      the worker of this machine";

/// Ask one server whether it serves; exit with 1 if it says no, and with 4 if it says nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// A controller's client address, or a worker's.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    address: Address,
    /// How long it may take to answer.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "3s")]
    timeout: Duration,
}

pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let Args { address, timeout } = args;
    let silent = |why: String| {
        Failure::unreachable(format!("{} does not say how it is: {why}", address.authority())).hint(
            "see its log; ports are 8080 of a controller and 7080 of a worker, if nothing else was said",
        )
    };
    let endpoint =
        endpoint(address.authority(), ChannelConfig::default()).map_err(|error| silent(error.to_string()))?;
    let check = async {
        let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
        let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
        answer.map(|answer| answer.into_inner().status()).map_err(|status| status.message().to_owned())
    };
    let answered = tokio::time::timeout(timeout, check).await;
    match answered.map_err(|_| silent(format!("no answer within {timeout:?}")))?.map_err(silent)? {
        ServingStatus::Serving => print("serving"),
        status => Err(Failure::failed(format!("{} is {}", address.authority(), status.as_str_name()))
            .hint("it has no worker yet, or goes down: see its log")),
    }
}
