//! Receives a worker's messages until its stream ends. From then on no request is routed to the worker.
//! The lease decides whether the worker is lost, unless the worker said goodbye.

use std::sync::Arc;

use millrace_proto::parts::{PartAssembler, TELEMETRY_BYTES_MAX};
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use prost::Message as _;
use tonic::Streaming;

use super::checkpoints::CheckpointQueue;
use super::control::WorkerControlService;
use super::gpu_absence::LOST_AFTER;
use super::registration;
use super::worker::{AttachedWorker, STATUS_BOUNDS};

/// The reason for the end of a stream.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Ended {
    #[error("the worker closed the stream")]
    Closed,
    #[error("the worker said goodbye")]
    Left,
    #[error("another stream replaced the stream")]
    Replaced,
    #[error("the worker sent a second hello")]
    GreetedTwice,
    #[error("{0}")]
    Broken(String),
}

/// Receives the worker's messages until its stream ends.
pub(super) async fn listen(
    control: WorkerControlService,
    worker: Arc<AttachedWorker>,
    mut incoming: Streaming<wire::WorkerMessage>,
    checkpoints: CheckpointQueue,
) {
    let stop = control.stop.clone();
    let ended = stop.run_until_cancelled(hear(&control, &worker, &mut incoming, &checkpoints)).await;
    control.fleet.detach(&worker);
    let epoch = worker.epoch().0;
    let worker = &worker.name;
    match ended {
        // This controller is shutting down.
        None => {}
        Some(reason @ (Ended::Closed | Ended::Left | Ended::Replaced)) => {
            tracing::info!(%worker, epoch, %reason, "a worker's stream ended: routing no requests to the worker");
        }
        Some(reason @ (Ended::GreetedTwice | Ended::Broken(_))) => {
            tracing::warn!(%worker, epoch, %reason, "a worker's stream broke: routing no requests to the worker");
        }
    }
}

fn log_lost_gpus(worker: &AttachedWorker) {
    let worker_name = &worker.name;
    let lost: Vec<_> = worker.lost_gpus().iter().map(|gpu| gpu.0).collect();
    if lost.is_empty() {
        tracing::info!(worker = %worker_name, "every GPU has an executor again, and may have slices");
    } else {
        let seconds = LOST_AFTER.as_secs();
        tracing::warn!(worker = %worker_name, gpus = ?lost, seconds, "GPUs stay without an executor: they get no slices");
    }
}

async fn hear(
    control: &WorkerControlService,
    worker: &Arc<AttachedWorker>,
    incoming: &mut Streaming<wire::WorkerMessage>,
    checkpoints: &CheckpointQueue,
) -> Ended {
    let mut left = false;
    let mut statuses = PartAssembler::new(STATUS_BOUNDS);
    loop {
        let message = tokio::select! {
            message = incoming.message() => message,
            () = worker.stream_ended.cancelled() => return Ended::Replaced,
        };
        if worker.sign_of_life(control.fleet.now()) {
            tracing::info!(worker = %worker.name, "worker is heard again: routing requests to it again");
            control.fleet.changed();
        }
        match message {
            Ok(Some(wire::WorkerMessage { message: Some(message) })) => match message {
                Message::Telemetry(telemetry) => {
                    let len = telemetry.encoded_len();
                    if len > TELEMETRY_BYTES_MAX {
                        return Ended::Broken(format!(
                            "the telemetry has {len} bytes, more than {TELEMETRY_BYTES_MAX}"
                        ));
                    }
                    let shared = worker.shares_gpus();
                    worker.report(telemetry);
                    let other_lost = worker.note_absent_gpus(control.fleet.now());
                    if other_lost {
                        log_lost_gpus(worker);
                    }
                    // Slices depend on the sharing and on the GPUs.
                    if other_lost || worker.shares_gpus() != shared {
                        control.fleet.changed();
                    }
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
            // This is a message of a newer build within the same protocol version.
            Ok(Some(wire::WorkerMessage { message: None })) => {}
            Ok(None) | Err(_) if left => return Ended::Left,
            Ok(None) => return Ended::Closed,
            Err(status) => return Ended::Broken(status.message().to_owned()),
        }
    }
}

/// Handles a worker that shuts down in order. The worker finishes the running requests and gets no new
/// requests, and the leader places the functions elsewhere at once.
async fn leave(control: &WorkerControlService, worker: &Arc<AttachedWorker>) {
    tracing::info!(worker = %worker.name, epoch = worker.epoch().0, "worker is shutting down");
    control.fleet.retire(worker);
    if !control.outlook.leads() {
        return;
    }
    if let Err(failure) = registration::end(&control.replica, worker.member()).await {
        // The worker's lease still expires.
        tracing::info!(worker = %worker.name, error = failure.message, "cannot commit the end of a worker's registration yet");
    }
}
