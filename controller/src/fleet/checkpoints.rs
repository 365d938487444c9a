//! What a worker checkpoints of its soft state goes into the log as it came, and is acknowledged
//! once it is committed (DESIGN §5). Only the leader does: anyone else lets a batch go, and the
//! worker sends it again to whom it then takes for the leader.

use std::sync::Arc;

use millrace_cluster_state::{Applied, Caller, Command, packed};
use millrace_policy::lease::Standing;
use millrace_proto::worker as wire;
use millrace_types::checkpoint::SYNC_BYTES_MAX;
use millrace_types::{Epoch, Failure, Reason, SyncBatch};
use tokio::sync::mpsc;

use super::control::Control;
use super::worker::Worker;

/// Batches of one worker that wait for the one before theirs. A worker has one in flight, and sends
/// it again when no answer comes: what is beyond is such a repeat, and is let go.
const BATCHES_WAITING_MAX: usize = 2;

/// Where a worker's batches go in.
#[derive(Debug)]
pub(super) struct Checkpoints(mpsc::Sender<SyncBatch>);

/// What is no checkpoint.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("a checkpoint of {0} bytes: at most {SYNC_BYTES_MAX} are taken")]
    TooLarge(usize),
    #[error("a checkpoint cannot be read: {0}")]
    Unreadable(#[from] rmp_serde::decode::Error),
}

/// Begins to take a worker's batches, and answers each.
pub(super) fn open(
    control: Control,
    worker: Arc<Worker>,
) -> (Checkpoints, mpsc::Receiver<wire::CheckpointAck>) {
    let (batches, waiting) = mpsc::channel(BATCHES_WAITING_MAX);
    let (acks, answers) = mpsc::channel(1);
    tokio::spawn(commit_each(control, worker, waiting, acks));
    (Checkpoints(batches), answers)
}

impl Checkpoints {
    /// Takes a batch, if there is room: never waits, since the stream also carries signs of life.
    pub(super) fn take(&self, batch: &[u8]) -> Result<(), Error> {
        if batch.len() > SYNC_BYTES_MAX {
            return Err(Error::TooLarge(batch.len()));
        }
        let batch = packed::from_slice(batch)?;
        if self.0.try_send(batch).is_err() {
            tracing::debug!("a checkpoint came while others wait: it is sent again");
        }
        Ok(())
    }
}

/// Ends with the stream's other half, or when nobody reads the answers.
async fn commit_each(
    control: Control,
    worker: Arc<Worker>,
    mut batches: mpsc::Receiver<SyncBatch>,
    acks: mpsc::Sender<wire::CheckpointAck>,
) {
    while let Some(batch) = batches.recv().await {
        let (epoch, seq) = (batch.epoch, batch.seq);
        match commit(&control, &worker, batch).await {
            Ok(Some(ack)) => {
                if acks.send(ack).await.is_err() {
                    return;
                }
            }
            Ok(None) => {}
            Err(failure) => {
                tracing::debug!(worker = %worker.name, %epoch, seq, error = failure.message, "a checkpoint is not committed");
            }
        }
    }
}

async fn commit(
    control: &Control,
    worker: &Worker,
    batch: SyncBatch,
) -> Result<Option<wire::CheckpointAck>, Failure> {
    if !control.outlook.leads() {
        return Ok(None);
    }
    let epoch = batch.epoch;
    if control.outlook.standing(&worker.name) == Standing::Lost {
        return Err(Failure::new(Reason::Fenced, "the node is about to be declared lost"));
    }
    let caller = Caller(format!("worker/{}", worker.name).into());
    let command = Command::SyncNode { node: worker.name.clone(), batch };
    control.replica.propose(caller, None, command).await.map(|applied| answer(epoch, applied))
}

fn answer(epoch: Epoch, applied: Applied) -> Option<wire::CheckpointAck> {
    let (seq, full_wanted) = match applied {
        Applied::Synced { seq } => (seq, false),
        Applied::SyncRepeated { last } => (last, false),
        Applied::ResyncWanted { last } => (last, true),
        _ => return None,
    };
    Some(wire::CheckpointAck { epoch: epoch.0, seq, full_wanted })
}
