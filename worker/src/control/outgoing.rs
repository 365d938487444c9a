//! The messages that a stream sends. The transport pulls messages from `watch` channels, so nothing
//! queues here: a slow controller gets only the latest telemetry.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::stream::{self, Stream};
use millrace_proto::parts::PartSender;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use tokio::sync::{oneshot, watch};

use super::checkpoint::CheckpointOutbox;
use super::leaders::StreamId;
use crate::data_dir::DataDir;
use crate::registration::NodeEpochStore;

/// The sources of every stream's messages.
#[derive(Debug, Clone)]
pub(super) struct StreamSources {
    /// The greeting. The cluster id and the epoch are filled in later.
    pub(super) hello: wire::WorkerHello,
    pub(super) data_dir: DataDir,
    pub(super) registrations: NodeEpochStore,
    pub(super) statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
    pub(super) telemetry: watch::Receiver<Arc<wire::Telemetry>>,
    /// Checkpoints, each addressed to one stream.
    pub(super) outbox: watch::Receiver<CheckpointOutbox>,
    /// Whether this worker is shutting down in order.
    pub(super) leaving: watch::Receiver<bool>,
}

/// The statuses that a stream has sent.
#[derive(Debug, Default)]
struct SentStatuses {
    statuses: PartSender<wire::FunctionStatuses>,
    /// Parts of the statuses that are sent before any other message.
    parts: VecDeque<wire::FunctionStatuses>,
}

enum OutgoingPhase {
    Hello(oneshot::Receiver<()>),
    Welcome(oneshot::Receiver<()>),
    Updates,
    End,
}

/// Returns the messages of one stream: the greeting, and after the controller's greeting every
/// change of the functions' statuses, this stream's checkpoints and the telemetry. A slow
/// controller gets only the latest of each. The last message is a goodbye.
pub(super) fn outgoing(
    mut feeds: StreamSources,
    stream: StreamId,
    stream_break: Option<wire::StreamBreak>,
    welcomed: oneshot::Receiver<()>,
) -> impl Stream<Item = wire::WorkerMessage> {
    feeds.hello.stream_break = stream_break;
    let begin = (feeds, SentStatuses::default(), OutgoingPhase::Hello(welcomed));
    stream::unfold(begin, move |(mut feeds, mut said, next)| async move {
        let (message, next) = match next {
            OutgoingPhase::Hello(welcomed) => {
                (Message::Hello(feeds.greeting()), OutgoingPhase::Welcome(welcomed))
            }
            OutgoingPhase::Welcome(welcomed) => {
                welcomed.await.ok()?;
                feeds.telemetry.mark_changed();
                (feeds.statuses(&mut said)?, OutgoingPhase::Updates)
            }
            OutgoingPhase::Updates => match said.parts.pop_front() {
                Some(part) => (Message::FunctionStatuses(part), OutgoingPhase::Updates),
                None => feeds.update(stream, &mut said).await?,
            },
            OutgoingPhase::End => return None,
        };
        Some((wire::WorkerMessage { message: Some(message) }, (feeds, said, next)))
    })
}

impl StreamSources {
    fn greeting(&self) -> wire::WorkerHello {
        wire::WorkerHello {
            cluster_id: self.data_dir.cluster().map(|id| id.to_string()).unwrap_or_default(),
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            seen_epoch: self.registrations.get().seen.0,
            ..self.hello.clone()
        }
    }

    /// Returns the next message; `None` once the worker is gone.
    async fn update(
        &mut self,
        stream: StreamId,
        said: &mut SentStatuses,
    ) -> Option<(Message, OutgoingPhase)> {
        loop {
            let message = tokio::select! {
                biased;
                left = async { self.leaving.wait_for(|leaving| *leaving).await.is_ok() } => {
                    return left.then_some((Message::Goodbye(wire::Goodbye {}), OutgoingPhase::End));
                }
                changed = self.statuses.changed() => changed.ok().and_then(|()| self.statuses(said)),
                changed = self.outbox.changed() => match changed.ok().map(|()| self.checkpoint(stream)) {
                    Some(None) => continue,
                    mine => mine.flatten(),
                },
                changed = self.telemetry.changed() => changed.ok().map(|()| self.telemetry()),
            };
            return Some((message?, OutgoingPhase::Updates));
        }
    }

    /// Returns the first part of the statuses that this stream has not sent. There is always at
    /// least one part.
    fn statuses(&mut self, said: &mut SentStatuses) -> Option<Message> {
        let functions = self.statuses.borrow_and_update().clone();
        said.parts.extend(said.statuses.next(&(), &functions));
        said.parts.pop_front().map(Message::FunctionStatuses)
    }

    /// Returns the batch in the outbox if the batch is addressed to this stream.
    fn checkpoint(&mut self, stream: StreamId) -> Option<Message> {
        let outbox = self.outbox.borrow_and_update();
        let batch = outbox.batch.clone();
        (outbox.to == Some(stream)).then_some(Message::Checkpoint(wire::Checkpoint { batch }))
    }

    fn telemetry(&mut self) -> Message {
        let epoch = self.registrations.get().current.unwrap_or_default().0;
        let telemetry = self.telemetry.borrow_and_update().as_ref().clone();
        Message::Telemetry(wire::Telemetry { epoch, ..telemetry })
    }
}
