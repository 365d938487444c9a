//! Receives uploads of model files.
//!
//! ```text
//! upload ─► a slot of `ControllerLimits::uploads` ─► receive, at a minimum rate ─► inspect, with memory ─► record
//! ```
//! An upload that is silent or too slow overall loses its slot.

use std::sync::Arc;

use futures::Stream;
use millrace_cluster_state::{CallerName, ControllerId, ModelSummary, StateCommand};
use millrace_proto::admin;
use millrace_types::{Bytes, Digest, Failure, Reason};
use tonic::Status;

use super::blocking::blocking;
use super::file::ArtifactFile;
use super::service::ArtifactService;
use millrace_storage::VerifiedFile;

/// The result of an upload.
#[derive(Debug)]
pub(crate) struct Uploaded {
    pub(crate) digest: Digest,
    pub(crate) bytes: Bytes,
    pub(crate) model: ModelSummary,
}

impl ArtifactService {
    /// Receives, inspects, stores and records a model file. A refused upload, or a drop of this future,
    /// leaves nothing behind.
    pub(crate) async fn upload<S>(
        self: Arc<Self>,
        messages: S,
        caller: CallerName,
    ) -> Result<Uploaded, Failure>
    where
        S: Stream<Item = Result<admin::UploadArtifactRequest, Status>>,
    {
        let _place = self.uploads.take_place()?;
        let verified = self.uploads.receive(messages).await?;
        let model = self.inspector.inspect(&verified).await?;
        // Run in a separate task: a client that goes away now must not separate the file from the
        // record.
        let artifacts = self.clone();
        let recorded = tokio::spawn(async move { artifacts.record(verified, model, caller).await });
        recorded.await.unwrap_or_else(|error| {
            let failure = Failure::new(Reason::Internal, format!("cannot record the upload: {error}"));
            Err(failure.after_execution())
        })
    }

    async fn record(
        &self,
        verified: VerifiedFile,
        model: ModelSummary,
        caller: CallerName,
    ) -> Result<Uploaded, Failure> {
        let digest = verified.digest();
        let bytes = verified.bytes();
        let _changing = self.changing.lock(digest).await;
        let store = self.store.clone();
        blocking(move || store.publish(&verified)).await?;
        // The file may have been here without a record for long. The file gets a record now, perhaps
        // after this function returns, so restart the grace period.
        self.orphans.forget(&digest);
        if let Err(failure) = self.spread_and_record(digest, bytes, &model, caller).await {
            // If the outcome of the record is unknown, the file stays and the collector decides later.
            if !failure.may_have_executed && self.replica.state().artifact(&digest).is_none() {
                let store = self.store.clone();
                blocking(move || store.remove(digest)).await?;
            }
            return Err(failure);
        }
        Ok(Uploaded { digest, bytes, model })
    }

    /// Copies the file to the object store or a majority of the voters, and then records the holders: a
    /// revision may refer to the file from the first record on.
    async fn spread_and_record(
        &self,
        digest: Digest,
        bytes: Bytes,
        model: &ModelSummary,
        caller: CallerName,
    ) -> Result<(), Failure> {
        let mut executed = false;
        let held = ArtifactFile { digest, bytes };
        let holders = match &self.shared {
            Some(bucket) => {
                self.put(bucket, digest).await?;
                vec![ControllerId::OBJECT_STORE]
            }
            None => self.spread(held).await?,
        };
        for holder in holders {
            let command = StateCommand::AddArtifact { digest, bytes, model: model.clone(), holder };
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
