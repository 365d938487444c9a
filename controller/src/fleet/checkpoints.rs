//! Commits the checkpoints of workers to the log unchanged, and acknowledges them after the
//! commit. Only the leader commits. Other controllers drop a batch, and the worker sends it again
//! to the presumed leader.

use std::sync::Arc;

use millrace_cluster_state::{CallerName, CommandEffect, StateCommand, packed};
use millrace_nodes::lease::LeaseState;
use millrace_proto::worker as wire;
use millrace_types::checkpoint::SYNC_BYTES_MAX;
use millrace_types::{Epoch, Failure, Reason, SyncBatch};
use tokio::sync::mpsc;

use super::control::WorkerControlService;
use super::worker::AttachedWorker;

/// Batches of one worker that wait for the previous batch. A worker has one batch in flight and repeats
/// that batch if no answer arrives. A batch beyond this limit is such a repeat, and is dropped.
const BATCHES_WAITING_MAX: usize = 2;

/// The queue of a worker's batches.
#[derive(Debug)]
pub(super) struct CheckpointQueue(mpsc::Sender<SyncBatch>);

/// Error of a malformed checkpoint.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("a checkpoint has {0} bytes: at most {SYNC_BYTES_MAX} are allowed")]
    TooLarge(usize),
    #[error("cannot read a checkpoint: {0}")]
    Unreadable(#[from] rmp_serde::decode::Error),
}

/// Starts to commit a worker's batches, and to acknowledge each.
pub(super) fn open(
    control: WorkerControlService,
    worker: Arc<AttachedWorker>,
) -> (CheckpointQueue, mpsc::Receiver<wire::CheckpointAck>) {
    let (batches, waiting) = mpsc::channel(BATCHES_WAITING_MAX);
    let (acks, answers) = mpsc::channel(1);
    tokio::spawn(commit_each(control, worker, waiting, acks));
    (CheckpointQueue(batches), answers)
}

impl CheckpointQueue {
    /// Enqueues a batch if the queue has a free slot. Never waits, because the stream also carries
    /// signs of life.
    pub(super) fn take(&self, batch: &[u8]) -> Result<(), Error> {
        if batch.len() > SYNC_BYTES_MAX {
            return Err(Error::TooLarge(batch.len()));
        }
        let batch = packed::from_slice(batch)?;
        if self.0.try_send(batch).is_err() {
            tracing::debug!("dropping a checkpoint while others wait: the worker sends it again");
        }
        Ok(())
    }
}

/// Commits batches until the stream ends or the acknowledgements have no reader.
async fn commit_each(
    control: WorkerControlService,
    worker: Arc<AttachedWorker>,
    mut batches: mpsc::Receiver<SyncBatch>,
    acks: mpsc::Sender<wire::CheckpointAck>,
) {
    while let Some(batch) = batches.recv().await {
        let epoch = batch.epoch;
        let seq = batch.seq;
        match commit(&control, &worker, batch).await {
            Ok(Some(ack)) => {
                if acks.send(ack).await.is_err() {
                    return;
                }
            }
            Ok(None) => {}
            Err(failure) => {
                tracing::debug!(worker = %worker.name, %epoch, seq, error = failure.message, "cannot commit a checkpoint");
            }
        }
    }
}

async fn commit(
    control: &WorkerControlService,
    worker: &AttachedWorker,
    batch: SyncBatch,
) -> Result<Option<wire::CheckpointAck>, Failure> {
    if !control.outlook.leads() {
        return Ok(None);
    }
    let epoch = batch.epoch;
    if control.outlook.lease_state(&worker.name) == LeaseState::Lost {
        return Err(Failure::new(Reason::Fenced, "the node is about to be declared lost"));
    }
    let caller = CallerName(format!("worker/{}", worker.name).into());
    let command = StateCommand::SyncNode { node: worker.name.clone(), batch };
    control.replica.propose(caller, None, command).await.map(|applied| answer(epoch, applied))
}

fn answer(epoch: Epoch, applied: CommandEffect) -> Option<wire::CheckpointAck> {
    let (seq, full_wanted) = match applied {
        CommandEffect::Synced { seq } => (seq, false),
        CommandEffect::SyncRepeated { last } => (last, false),
        CommandEffect::ResyncWanted { last } => (last, true),
        _ => return None,
    };
    Some(wire::CheckpointAck { epoch: epoch.0, seq, full_wanted })
}
