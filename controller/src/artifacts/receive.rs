//! Receives the bytes of uploads, each in a slot and at a minimum rate.

use std::pin::pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use millrace_proto::admin::{self, upload_artifact_request::Part};
use millrace_types::{Bytes, Digest, Failure, Reason};
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;

use super::blocking::blocking;
use crate::config::{ControllerLimits, UPLOAD_RATE};
use crate::pace::TransferPace;
use millrace_storage::{FileStore, FileWriter, VerifiedFile};

/// The uploads in progress.
#[derive(Debug)]
pub(super) struct Uploads {
    store: Arc<FileStore>,
    limits: ControllerLimits,
    places: Semaphore,
}

impl Uploads {
    pub(super) fn new(store: Arc<FileStore>, limits: ControllerLimits) -> Self {
        let places = Semaphore::new(limits.uploads);
        Self { store, limits, places }
    }

    /// Takes a slot, or refuses the upload if none is free.
    pub(super) fn take_place(&self) -> Result<SemaphorePermit<'_>, Failure> {
        self.places.try_acquire().map_err(|_| {
            let message = format!("{} uploads are running already: try again soon", self.limits.uploads);
            Failure::new(Reason::QueueFull, message)
        })
    }

    /// Receives a model file and checks the digest.
    pub(super) async fn receive<S>(&self, messages: S) -> Result<VerifiedFile, Failure>
    where
        S: Stream<Item = Result<admin::UploadArtifactRequest, Status>>,
    {
        let mut pace = TransferPace::begin(UPLOAD_RATE);
        let mut messages = pin!(messages);
        let Some(Part::Header(header)) = next_part(&mut messages, &mut pace).await? else {
            return Err(Failure::malformed("the first message of an upload must be its header"));
        };
        let mut incoming = self.begin(&header).await?;
        while let Some(part) = next_part(&mut messages, &mut pace).await? {
            let Part::Data(chunk) = part else {
                return Err(Failure::malformed("an upload has one header, as its first message"));
            };
            pace.count(chunk.len());
            incoming = blocking(move || incoming.write(&chunk).map(|()| incoming)).await?;
        }
        blocking(move || incoming.finish()).await
    }

    async fn begin(&self, header: &admin::Artifact) -> Result<FileWriter, Failure> {
        let digest: Digest = header.digest.parse().map_err(|error| Failure::malformed(format!("{error}")))?;
        let bytes = Bytes(header.bytes);
        if bytes > self.limits.artifact_bytes {
            let message =
                format!("the model file has {bytes}: at most {} are allowed", self.limits.artifact_bytes);
            return Err(Failure::new(Reason::ModelTooLarge, message));
        }
        let store = self.store.clone();
        blocking(move || store.begin(digest, bytes)).await
    }
}

/// Returns the next part of an upload; `None` at the end.
async fn next_part(
    messages: &mut (impl Stream<Item = Result<admin::UploadArtifactRequest, Status>> + Unpin),
    pace: &mut TransferPace,
) -> Result<Option<Part>, Failure> {
    match pace.next(messages.next()).await? {
        None => Ok(None),
        Some(Ok(message)) => Ok(message.part),
        Some(Err(status)) => Err(millrace_proto::status::from_status(&status)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::stream;

    use super::*;

    fn message(part: Part) -> Result<admin::UploadArtifactRequest, Status> {
        Ok(admin::UploadArtifactRequest { part: Some(part) })
    }

    fn header(bytes: &[u8]) -> Result<admin::UploadArtifactRequest, Status> {
        let header = admin::Artifact { digest: Digest::of(bytes).to_string(), bytes: bytes.len() as u64 };
        message(Part::Header(header))
    }

    /// Returns an upload that sends one byte every 29 s.
    fn dripping() -> impl Stream<Item = Result<admin::UploadArtifactRequest, Status>> + Send {
        stream::unfold(0, |sent| async move {
            if sent > 0 {
                tokio::time::sleep(Duration::from_secs(29)).await;
            }
            let part = if sent == 0 { header(&[0; 1 << 20]) } else { message(Part::Data(vec![0_u8].into())) };
            Some((part, sent + 1))
        })
    }

    #[tokio::test(start_paused = true)]
    async fn slow_uploads_lose_their_slots_within_a_minute() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(FileStore::open(dir.path()).unwrap());
        let limits = ControllerLimits { uploads: 4, ..ControllerLimits::default() };
        let uploads = Arc::new(Uploads::new(store, limits));
        let begun = tokio::time::Instant::now();
        let slow: Vec<_> = (0..4)
            .map(|_| {
                let uploads = uploads.clone();
                tokio::spawn(async move {
                    let _place = uploads.take_place()?;
                    uploads.receive(dripping()).await
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let refused = uploads.take_place().unwrap_err();
        assert_eq!((refused.reason, refused.retryable), (Reason::QueueFull, true));
        // A client tries again every second.
        let _place = loop {
            match uploads.take_place() {
                Ok(place) => break place,
                Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        };
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        let model = b"a model";
        let fifth = stream::iter([header(model), message(Part::Data(model.as_slice().into()))]);
        assert_eq!(uploads.receive(fifth).await.unwrap().digest(), Digest::of(model));
        for slow in slow {
            let failure = slow.await.unwrap().unwrap_err();
            assert_eq!(failure.reason, Reason::TimedOut, "{}", failure.message);
        }
        assert_eq!(std::fs::read_dir(dir.path().join("incoming")).unwrap().count(), 0);
    }
}
