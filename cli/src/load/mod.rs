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
//! | [`args`] | the options |
//! | [`target`] | the server and the protocol |
//! | [`payload`] | the request, encoded once |
//! | [`grpc`], [`http`] | the senders |
//! | [`schedule`], [`timer`] | the send times of the open loop |
//! | [`engine`] | the two loops |
//! | [`sequence`] | requests of functions that keep state |
//! | [`stats`], [`report`] | the measurements |

mod args;
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

use millrace_client::{Endpoints, Inference, ModelMetadata};
use rustix::time::{ClockId, clock_gettime};
use tokio::task::LocalSet;

use crate::config::Config;
use crate::failure::CommandFailure;
pub(crate) use crate::load::args::Args;
use crate::load::engine::{LoadClient, LoadEnd, LoadLoop, LoadPlan};
use crate::load::report::LoadReport;
use crate::load::sequence::ClientSequences;
use crate::load::target::{LoadTarget, Protocol};
use crate::output::{ListFormat, document, print};
use crate::progress;

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
    let model = metadata(&target, config).await?;
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

/// Fetches the declared inputs and outputs of the model.
async fn metadata(target: &LoadTarget, config: &Config) -> Result<ModelMetadata, CommandFailure> {
    match target.protocol {
        Protocol::Grpc => {
            let endpoints = Endpoints::new(target.addresses.clone())?;
            let inference = Inference::new(endpoints).with_tenant(config.tenant.clone());
            Ok(inference.model_metadata(&target.model, &target.version).await?)
        }
        Protocol::Http => http::metadata(target).await,
    }
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
