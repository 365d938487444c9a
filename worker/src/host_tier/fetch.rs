//! Where model artifacts come from: any controller that has the file. Behind a trait, so that the
//! host tier is tested without one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt as _};
use millrace_proto::worker::FetchArtifactRequest;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_types::{Digest, Failure, Reason};
use tonic::transport::Channel;

/// An artifact's bytes, in order, in pieces.
pub type Chunks = BoxStream<'static, Result<Bytes, Failure>>;

/// Gives out artifacts by digest. What it gives is not trusted: the store checks it.
pub trait ArtifactSource: Send + Sync + 'static {
    /// Begins to fetch an artifact.
    fn fetch(&self, digest: Digest) -> BoxFuture<'static, Result<Chunks, Failure>>;
}

/// The controllers, asked in turn: the one that answered last is asked first.
#[derive(Debug, Clone)]
pub struct Controllers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    channels: Vec<Channel>,
    favourite: AtomicUsize,
}

impl Controllers {
    /// Asks these. Channels connect when they are first used and again after a loss.
    #[must_use]
    pub fn new(channels: Vec<Channel>) -> Self {
        Self(Arc::new(Inner { channels, favourite: AtomicUsize::new(0) }))
    }

    async fn ask(self, digest: Digest) -> Result<Chunks, Failure> {
        let channels = &self.0.channels;
        let first = self.0.favourite.load(Ordering::Relaxed);
        let mut last = Failure::new(Reason::NoLeader, "no controller to fetch from".to_owned());
        for place in (first..first + channels.len()).map(|place| place % channels.len()) {
            let mut client = WorkerControlClient::new(channels[place].clone());
            let request = FetchArtifactRequest { digest: digest.to_string() };
            match client.fetch_artifact(request).await {
                Ok(response) => {
                    self.0.favourite.store(place, Ordering::Relaxed);
                    let chunks = response.into_inner().map(|chunk| match chunk {
                        Ok(chunk) => Ok(chunk.data),
                        Err(status) => Err(millrace_proto::status::from_status(&status)),
                    });
                    return Ok(chunks.boxed());
                }
                Err(status) => last = millrace_proto::status::from_status(&status),
            }
        }
        Err(last)
    }
}

impl ArtifactSource for Controllers {
    fn fetch(&self, digest: Digest) -> BoxFuture<'static, Result<Chunks, Failure>> {
        Box::pin(self.clone().ask(digest))
    }
}
