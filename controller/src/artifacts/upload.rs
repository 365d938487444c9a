//! Takes a model file in.

use std::pin::pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use millrace_cluster_state::{Caller, Command, ControllerId, ModelSummary};
use millrace_proto::admin::{self, upload_artifact_request::Part};
use millrace_types::{Bytes, Digest, Failure, Reason};
use tonic::Status;

use super::spread::Held;
use super::store::{Incoming, Verified};
use super::{Artifacts, blocking, inspect};

/// What came of an upload.
#[derive(Debug)]
pub(crate) struct Uploaded {
    pub(crate) digest: Digest,
    pub(crate) bytes: Bytes,
    pub(crate) model: ModelSummary,
}

impl Artifacts {
    /// Receives, checks, stores and records a model file. Nothing is left of one that is refused,
    /// nor when this future is dropped.
    pub(crate) async fn upload<S>(self: Arc<Self>, messages: S, caller: Caller) -> Result<Uploaded, Failure>
    where
        S: Stream<Item = Result<admin::UploadArtifactRequest, Status>>,
    {
        let Ok(_permit) = self.uploads.try_acquire() else {
            let message = format!("{} uploads are running already: try again soon", self.limits.uploads);
            return Err(Failure::new(Reason::QueueFull, message));
        };
        let verified = self.receive(messages).await?;
        let (verified, model) = inspect::inspect(verified).await?;
        // A task of its own: a client that goes away now must not part the file from its record.
        let artifacts = self.clone();
        let recorded = tokio::spawn(async move { artifacts.record(verified, model, caller).await });
        recorded.await.unwrap_or_else(|error| {
            let failure = Failure::new(Reason::Internal, format!("the upload was not recorded: {error}"));
            Err(failure.after_execution())
        })
    }

    async fn receive<S>(&self, messages: S) -> Result<Verified, Failure>
    where
        S: Stream<Item = Result<admin::UploadArtifactRequest, Status>>,
    {
        let mut messages = pin!(messages);
        let mut next = async || match tokio::time::timeout(self.limits.upload_idle, messages.next()).await {
            Ok(None) => Ok(None),
            Ok(Some(Ok(message))) => Ok(message.part),
            Ok(Some(Err(status))) => Err(millrace_proto::status::from_status(&status)),
            Err(_) => Err(Failure::new(
                Reason::TimedOut,
                format!("nothing came for {:?}: upload it again", self.limits.upload_idle),
            )),
        };
        let Some(Part::Header(header)) = next().await? else {
            return Err(Failure::malformed("an upload begins with its header"));
        };
        let mut incoming = self.begin(&header).await?;
        while let Some(part) = next().await? {
            let Part::Data(chunk) = part else {
                return Err(Failure::malformed("an upload has one header, at its beginning"));
            };
            incoming = blocking(move || incoming.write(&chunk).map(|()| incoming)).await?;
        }
        blocking(move || incoming.finish()).await
    }

    async fn begin(&self, header: &admin::Artifact) -> Result<Incoming, Failure> {
        let digest: Digest = header.digest.parse().map_err(|error| Failure::malformed(format!("{error}")))?;
        let bytes = Bytes(header.bytes);
        if bytes > self.limits.artifact_bytes {
            let message =
                format!("the model file has {bytes}, and at most {} are taken", self.limits.artifact_bytes);
            return Err(Failure::new(Reason::ModelTooLarge, message));
        }
        let store = self.store.clone();
        blocking(move || store.begin(digest, bytes)).await
    }

    async fn record(
        &self,
        verified: Verified,
        model: ModelSummary,
        caller: Caller,
    ) -> Result<Uploaded, Failure> {
        let (digest, bytes) = (verified.digest(), verified.bytes());
        let _changing = self.changing.lock(digest).await;
        let store = self.store.clone();
        blocking(move || store.publish(&verified)).await?;
        // The file may have been here without a record for long: it is to get one now, perhaps after
        // this returns.
        self.orphans.forget(&digest);
        if let Err(failure) = self.spread_and_record(digest, bytes, &model, caller).await {
            // Whether it was recorded after all may be unknown: then the file stays, and the
            // collector looks again.
            if !failure.may_have_executed && self.replica.state().artifact(&digest).is_none() {
                let store = self.store.clone();
                blocking(move || store.remove(digest)).await?;
            }
            return Err(failure);
        }
        Ok(Uploaded { digest, bytes, model })
    }

    /// The state says who holds the file only after the object store or a majority does: a revision
    /// may refer to it from the first record on.
    async fn spread_and_record(
        &self,
        digest: Digest,
        bytes: Bytes,
        model: &ModelSummary,
        caller: Caller,
    ) -> Result<(), Failure> {
        let mut executed = false;
        let held = Held { digest, bytes };
        let holders = match &self.shared {
            Some(bucket) => {
                self.put(bucket, digest).await?;
                vec![ControllerId::OBJECT_STORE]
            }
            None => self.spread(held).await?,
        };
        for holder in holders {
            let command = Command::AddArtifact { digest, bytes, model: model.clone(), holder };
            let recorded = self.replica.propose(caller.clone(), None, command).await;
            recorded.map_err(|failure| if executed { failure.after_execution() } else { failure })?;
            executed = true;
        }
        match &self.shared {
            Some(bucket) => self.confirm(bucket, held).await.map_err(Failure::after_execution),
            None => Ok(()),
        }
    }
}
