//! What a worker says, until its stream ends. Then nothing is routed to it any more; whether it is
//! lost is for its lease to say, unless it took its leave.

use std::sync::Arc;

use millrace_proto::parts::{PartAssembler, TELEMETRY_BYTES_MAX};
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use prost::Message as _;
use tonic::Streaming;

use super::checkpoints::Checkpoints;
use super::control::Control;
use super::registration;
use super::worker::{STATUS_BOUNDS, Worker};

/// Why a stream ended.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Ended {
    #[error("it closed the stream")]
    Closed,
    #[error("it took its leave")]
    Left,
    #[error("another stream took its place")]
    Replaced,
    #[error("it greeted twice")]
    GreetedTwice,
    #[error("{0}")]
    Broken(String),
}

/// Hears the worker until its stream ends.
pub(super) async fn listen(
    control: Control,
    worker: Arc<Worker>,
    mut incoming: Streaming<wire::WorkerMessage>,
    checkpoints: Checkpoints,
) {
    let stop = control.stop.clone();
    let ended = stop.run_until_cancelled(hear(&control, &worker, &mut incoming, &checkpoints)).await;
    control.fleet.detach(&worker);
    let (worker, epoch) = (&worker.name, worker.epoch().0);
    match ended {
        // This controller goes down.
        None => {}
        Some(reason @ (Ended::Closed | Ended::Left | Ended::Replaced)) => {
            tracing::info!(%worker, epoch, %reason, "a worker's stream ended: nothing is routed over it");
        }
        Some(reason @ (Ended::GreetedTwice | Ended::Broken(_))) => {
            tracing::warn!(%worker, epoch, %reason, "worker lost its stream: nothing is routed to it");
        }
    }
}

async fn hear(
    control: &Control,
    worker: &Arc<Worker>,
    incoming: &mut Streaming<wire::WorkerMessage>,
    checkpoints: &Checkpoints,
) -> Ended {
    let mut left = false;
    let mut statuses = PartAssembler::new(STATUS_BOUNDS);
    loop {
        let message = tokio::select! {
            message = incoming.message() => message,
            () = worker.lost.cancelled() => return Ended::Replaced,
        };
        if worker.sign_of_life(control.fleet.now()) {
            tracing::info!(worker = %worker.name, "worker is heard again: requests go to it again");
            control.fleet.changed();
        }
        match message {
            Ok(Some(wire::WorkerMessage { message: Some(message) })) => match message {
                Message::Telemetry(telemetry) => {
                    let len = telemetry.encoded_len();
                    if len > TELEMETRY_BYTES_MAX {
                        return Ended::Broken(format!(
                            "its telemetry has {len} bytes, more than {TELEMETRY_BYTES_MAX}"
                        ));
                    }
                    worker.report(telemetry);
                }
                Message::FunctionStatuses(part) => match statuses.take(part) {
                    Ok(None) => {}
                    Ok(Some(update)) => match worker.report_functions(update) {
                        Ok(true) => control.fleet.changed(),
                        Ok(false) => {}
                        Err(error) => return Ended::Broken(error.to_string()),
                    },
                    Err(error) => return Ended::Broken(error.to_string()),
                },
                Message::Checkpoint(checkpoint) => {
                    if let Err(error) = checkpoints.take(&checkpoint.batch) {
                        return Ended::Broken(error.to_string());
                    }
                }
                Message::Goodbye(wire::Goodbye {}) => {
                    left = true;
                    leave(control, worker).await;
                }
                Message::Hello(_) => return Ended::GreetedTwice,
            },
            // A message of a newer build within the same protocol version.
            Ok(Some(wire::WorkerMessage { message: None })) => {}
            Ok(None) | Err(_) if left => return Ended::Left,
            Ok(None) => return Ended::Closed,
            Err(status) => return Ended::Broken(status.message().to_owned()),
        }
    }
}

/// The worker goes down in order. What it has in hand it finishes; nothing new is sent to it, and
/// its functions are placed elsewhere at once.
async fn leave(control: &Control, worker: &Arc<Worker>) {
    tracing::info!(worker = %worker.name, epoch = worker.epoch().0, "worker goes down in order");
    control.fleet.retire(worker);
    if !control.outlook.leads() {
        return;
    }
    if let Err(failure) = registration::end(&control.replica, worker.member()).await {
        // Its lease ends all the same.
        tracing::info!(worker = %worker.name, error = failure.message, "the leave of a worker is not committed yet");
    }
}
