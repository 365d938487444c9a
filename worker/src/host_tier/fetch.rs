//! The fetch of model artifacts from the controllers, behind a trait, so that the host tier can be tested
//! without controllers.
//!
//! A fetch asks each controller at most once. Controllers with a stream to this worker come first, in
//! rotation from a random one, so that workers which fetch the same model spread over the holders. If a
//! controller lacks the file, does not answer or breaks off, the fetch continues with the next controller
//! from the same offset. The fetch fails after the last controller, and the host tier retries with
//! backoff.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt as _};
use millrace_proto::parts::control_client;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_types::{Digest, Failure, Reason};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::watch;
use tonic::Streaming;
use tonic::transport::Channel;

/// Maximum time without data from a controller, before its response and between two chunks.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// An artifact's bytes as a stream of consecutive chunks.
pub type ArtifactChunks = BoxStream<'static, Result<Bytes, Failure>>;

/// A source of artifacts by digest. The bytes are not trusted: the store checks them.
pub trait ArtifactSource: Send + Sync + 'static {
    /// Starts to fetch an artifact.
    fn fetch(&self, digest: Digest) -> BoxFuture<'static, Result<ArtifactChunks, Failure>>;
}

/// The controllers as a source of artifacts. A fetch asks each controller at most once.
#[derive(Debug, Clone)]
pub struct ControllerSource(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    controllers: Vec<(String, Channel)>,
    attached: watch::Receiver<BTreeSet<usize>>,
    seed: u64,
    fetches: AtomicU64,
}

impl ControllerSource {
    /// Returns a source over these controllers. `attached` holds the positions of the controllers that are
    /// asked first. Channels connect when they are first used, and again after a loss.
    #[must_use]
    pub fn new(
        controllers: Vec<(String, Channel)>,
        attached: watch::Receiver<BTreeSet<usize>>,
        seed: u64,
    ) -> Self {
        Self(Arc::new(Inner { controllers, attached, seed, fetches: AtomicU64::new(0) }))
    }

    async fn begin(self, digest: Digest) -> Result<ArtifactChunks, Failure> {
        let fetch = self.0.fetches.fetch_add(1, Ordering::Relaxed);
        let mut random = SmallRng::seed_from_u64(self.0.seed.wrapping_add(fetch));
        let order =
            order(self.0.controllers.len(), &self.0.attached.borrow(), |below| random.random_range(0..below));
        let mut pull =
            ArtifactFetch { from: self, digest, order, current: None, received: 0, refusals: Vec::new() };
        // The first chunk is fetched here, so that a fetch that no controller can serve fails at once.
        let first = pull.next().await?;
        let rest = stream::try_unfold(pull, |mut pull| async move {
            let chunk = pull.next().await?;
            Ok(chunk.map(|chunk| (chunk, pull)))
        });
        Ok(stream::iter(first.map(Ok)).chain(rest).boxed())
    }
}

impl ArtifactSource for ControllerSource {
    fn fetch(&self, digest: Digest) -> BoxFuture<'static, Result<ArtifactChunks, Failure>> {
        Box::pin(self.clone().begin(digest))
    }
}

/// Returns the order in which to ask the controllers: first the attached ones, then the others. Each of the
/// two groups is rotated to start with a drawn controller.
fn order(
    controllers: usize,
    attached: &BTreeSet<usize>,
    mut draw: impl FnMut(usize) -> usize,
) -> VecDeque<usize> {
    let (mut there, mut others): (Vec<_>, Vec<_>) =
        (0..controllers).partition(|place| attached.contains(place));
    for group in [&mut there, &mut others] {
        if !group.is_empty() {
            let first = draw(group.len());
            group.rotate_left(first);
        }
    }
    there.into_iter().chain(others).collect()
}

/// The fetch of an artifact.
struct ArtifactFetch {
    from: ControllerSource,
    digest: Digest,
    /// The controllers that were not asked yet.
    order: VecDeque<usize>,
    current: Option<ArtifactHolder>,
    /// The number of bytes that were passed on so far.
    received: u64,
    /// The failures of the controllers that were asked.
    refusals: Vec<(usize, Failure)>,
}

/// The controller that sends the artifact now.
struct ArtifactHolder {
    place: usize,
    chunks: Streaming<wire::ArtifactChunk>,
    /// The number of leading bytes to skip, because an earlier controller sent them.
    skip: u64,
}

impl ArtifactFetch {
    /// Returns the next chunk, or `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let Some(holder) = &mut self.current else {
                let Some(place) = self.order.pop_front() else { return Err(self.failure()) };
                self.ask(place).await;
                continue;
            };
            match with_timeout(holder.chunks.message()).await {
                Ok(Some(wire::ArtifactChunk { mut data })) => {
                    let skipped = data.len().min(usize::try_from(holder.skip).unwrap_or(usize::MAX));
                    data.advance(skipped);
                    holder.skip -= skipped as u64;
                    if !data.is_empty() {
                        self.received += data.len() as u64;
                        return Ok(Some(data));
                    }
                }
                Ok(None) => return Ok(None),
                Err(failure) => {
                    let place = holder.place;
                    self.current = None;
                    self.refused(place, failure);
                }
            }
        }
    }

    async fn ask(&mut self, place: usize) {
        let mut client = control_client(self.from.0.controllers[place].1.clone());
        let request = wire::FetchArtifactRequest { digest: self.digest.to_string() };
        match with_timeout(client.fetch_artifact(request)).await {
            Ok(response) => {
                let chunks = response.into_inner();
                self.current = Some(ArtifactHolder { place, chunks, skip: self.received });
            }
            Err(failure) => self.refused(place, failure),
        }
    }

    fn refused(&mut self, place: usize, failure: Failure) {
        let (controller, _) = &self.from.0.controllers[place];
        tracing::debug!(
            digest = %self.digest,
            controller,
            received = self.received,
            reason = failure.message,
            "a controller did not send the artifact"
        );
        self.refusals.push((place, failure));
    }

    /// Returns the failure of the whole fetch, with the messages of all controllers. The reason is
    /// `ArtifactNotFound` only if every controller answered that.
    fn failure(&self) -> Failure {
        let missing = |failure: &Failure| failure.reason == Reason::ArtifactNotFound;
        let reasons = || self.refusals.iter().map(|(_, failure)| failure);
        let worst = reasons().rfind(|failure| !missing(failure)).or_else(|| reasons().next_back());
        let reason = worst.map_or(Reason::NoLeader, |failure| failure.reason);
        let says = |(place, failure): &(usize, Failure)| {
            format!("controller {}: {}", self.from.0.controllers[*place].0, failure.message)
        };
        let all: Vec<_> = self.refusals.iter().map(says).collect();
        let message = if all.is_empty() { "no controller to fetch from".to_owned() } else { all.join("; ") };
        Failure::new(reason, message)
    }
}

async fn with_timeout<T>(answer: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, Failure> {
    match tokio::time::timeout(SILENCE_MAX, answer).await {
        Ok(answer) => answer.map_err(|status| from_status(&status)),
        Err(_elapsed) => {
            Err(Failure::new(Reason::TimedOut, format!("the controller sent nothing for {SILENCE_MAX:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attached_controllers_are_asked_first_in_rotation_from_a_drawn_one() {
        let attached = BTreeSet::from([1, 3, 4]);
        assert_eq!(order(5, &attached, |_| 0), [1, 3, 4, 0, 2]);
        assert_eq!(order(5, &attached, |below| below - 1), [4, 1, 3, 2, 0]);
        assert_eq!(order(2, &BTreeSet::new(), |_| 1), [1, 0]);
        assert_eq!(order(0, &attached, |_| 0), [0; 0]);
    }

    // Paused time advances only while the test waits, so the test takes no real time.
    #[tokio::test(start_paused = true)]
    async fn a_silent_controller_is_given_up() {
        let silent = std::future::pending::<Result<(), tonic::Status>>();
        assert_eq!(with_timeout(silent).await.unwrap_err().reason, Reason::TimedOut);
    }
}
