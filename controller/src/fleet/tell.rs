//! Sends updates to a worker: leadership, registration, desired state, and acknowledgements of
//! checkpoints. A slow worker gets only the latest of each. The desired state is sent in parts: first
//! the whole, and then the changes.

use std::sync::Arc;

use futures::Stream;
use millrace_proto::parts::PartSender;
use millrace_proto::worker as wire;
use millrace_proto::worker::controller_message::Message;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use tokio::sync::mpsc;
use tonic::Status;

use super::control::WorkerControlService;
use super::worker::AttachedWorker;

pub(super) type WorkerUpdate = Result<wire::ControllerMessage, Status>;

/// Returns the stream of messages to a worker: the hello, then every update.
pub(super) fn tell(
    control: WorkerControlService,
    worker: Arc<AttachedWorker>,
    mut acks: mpsc::Receiver<wire::CheckpointAck>,
) -> impl Stream<Item = WorkerUpdate> + Send {
    async_stream::stream! {
        let mut epochs = worker.epochs();
        let mut leadership = control.outlook.leadership();
        let mut desired = control.outlook.desired();
        let epoch = *epochs.borrow_and_update();
        yield message(Message::Hello(wire::ControllerHello {
            cluster_id: control.cluster_id.to_string(),
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            epoch: epoch.0,
        }));
        leadership.mark_changed();
        desired.mark_changed();
        let mut told = None;
        let mut parts = PartSender::<wire::DesiredState>::default();
        loop {
            tokio::select! {
                biased;
                () = control.stop.cancelled() => break,
                () = worker.stream_ended.cancelled() => break,
                changed = epochs.changed() => {
                    if changed.is_err() { break }
                    let epoch = epochs.borrow_and_update().0;
                    yield message(Message::Registration(wire::Registration { epoch }));
                    // The desired state of the new registration may be available already.
                    desired.mark_changed();
                }
                changed = leadership.changed() => {
                    if changed.is_err() { break }
                    let now = *leadership.borrow_and_update();
                    if !now.leads {
                        // The worker drops this stream's desired state at the same message.
                        parts.forget();
                        told = None;
                    }
                    let now = wire::Leadership { term: now.term, leads: now.leads };
                    yield message(Message::Leadership(now));
                }
                changed = desired.changed() => {
                    if changed.is_err() { break }
                    let next = desired.borrow_and_update().as_ref().and_then(|it| it.of(&worker.member()));
                    let Some(next) = next else { continue };
                    if told.as_ref().is_none_or(|told| !Arc::ptr_eq(told, &next)) {
                        for part in parts.next(&next.head, &next.items) {
                            yield message(Message::DesiredState(part));
                        }
                        told = Some(next);
                    }
                }
                Some(ack) = acks.recv() => yield message(Message::CheckpointAck(ack)),
            }
        }
    }
}

fn message(message: Message) -> WorkerUpdate {
    Ok(wire::ControllerMessage { message: Some(message) })
}
