//! `health`: whether a server serves, for health checks. Calls `grpc.health.v1`, as any other
//! prober may. The verb is for images without a prober.

use std::time::Duration;

use millrace_client::Address;
use millrace_transport::channel::{ChannelConfig, endpoint};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::failure::CommandFailure;
use crate::output::print;

const HELP: &str = "\
A controller serves while it has a worker and room for further requests, and a worker while it accepts
requests. A server that was told to stop no longer serves. 'cluster wait' checks the cluster as a whole.

Examples:
  millrace health                     this machine's controller
  millrace health 127.0.0.1:7080      this machine's worker";

/// Check whether one server serves; exit with 1 if it does not, and with 4 if it does not answer.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// The client address of a controller, or the address of a worker.
    #[arg(value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    address: Address,
    /// The timeout of the check.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "3s")]
    timeout: Duration,
}

pub(crate) async fn run(args: Args) -> Result<(), CommandFailure> {
    let Args { address, timeout } = args;
    let silent = |why: String| {
        CommandFailure::unreachable(format!("{} does not answer a health check: {why}", address.authority()))
            .hint("see the server's log; the default port of a controller is 8080, and of a worker 7080")
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
        status => Err(CommandFailure::failed(format!("{} is {}", address.authority(), status.as_str_name()))
            .hint("the controller has no worker or no room for further requests, or the server is shutting down: see its log")),
    }
}
