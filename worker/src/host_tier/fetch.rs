//! Where model artifacts come from: any controller that has the file. Behind a trait, so that the
//! host tier is tested without one.
//!
//! One fetch asks every controller once: those this worker has a stream to first, from a random
//! one on, so that workers which want the same model spread over its holders. One that has not the
//! file, does not answer or breaks off is left for the next, which goes on where it stopped. When
//! none is left the fetch has failed; the host tier tries again, with backoff.

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

/// How long a controller may keep silent, before its answer and between two pieces.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// An artifact's bytes, in order, in pieces.
pub type Chunks = BoxStream<'static, Result<Bytes, Failure>>;

/// Gives out artifacts by digest. What it gives is not trusted: the store checks it.
pub trait ArtifactSource: Send + Sync + 'static {
    /// Begins to fetch an artifact.
    fn fetch(&self, digest: Digest) -> BoxFuture<'static, Result<Chunks, Failure>>;
}

/// The controllers, each asked once for an artifact.
#[derive(Debug, Clone)]
pub struct Controllers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    controllers: Vec<(String, Channel)>,
    attached: watch::Receiver<BTreeSet<usize>>,
    seed: u64,
    fetches: AtomicU64,
}

impl Controllers {
    /// Asks these, those in `attached`, by their place in the list, first. Channels connect when
    /// they are first used and again after a loss.
    #[must_use]
    pub fn new(
        controllers: Vec<(String, Channel)>,
        attached: watch::Receiver<BTreeSet<usize>>,
        seed: u64,
    ) -> Self {
        Self(Arc::new(Inner { controllers, attached, seed, fetches: AtomicU64::new(0) }))
    }

    async fn begin(self, digest: Digest) -> Result<Chunks, Failure> {
        let fetch = self.0.fetches.fetch_add(1, Ordering::Relaxed);
        let mut random = SmallRng::seed_from_u64(self.0.seed.wrapping_add(fetch));
        let order =
            order(self.0.controllers.len(), &self.0.attached.borrow(), |below| random.random_range(0..below));
        let mut pull = Pull { from: self, digest, order, current: None, received: 0, refusals: Vec::new() };
        // The first piece here, so that a fetch nobody can serve fails at once.
        let first = pull.next().await?;
        let rest = stream::try_unfold(pull, |mut pull| async move {
            let chunk = pull.next().await?;
            Ok(chunk.map(|chunk| (chunk, pull)))
        });
        Ok(stream::iter(first.map(Ok)).chain(rest).boxed())
    }
}

impl ArtifactSource for Controllers {
    fn fetch(&self, digest: Digest) -> BoxFuture<'static, Result<Chunks, Failure>> {
        Box::pin(self.clone().begin(digest))
    }
}

/// Everybody, those `attached` first; among them, and among the others, from one drawn on.
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

/// One artifact on its way.
struct Pull {
    from: Controllers,
    digest: Digest,
    /// Whom to ask yet.
    order: VecDeque<usize>,
    current: Option<Holder>,
    /// Bytes given on so far.
    received: u64,
    /// What those asked said instead.
    refusals: Vec<(usize, Failure)>,
}

/// Who gives the artifact now.
struct Holder {
    place: usize,
    chunks: Streaming<wire::ArtifactChunk>,
    /// What of its bytes another one gave already.
    skip: u64,
}

impl Pull {
    /// The next piece; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let Some(holder) = &mut self.current else {
                let Some(place) = self.order.pop_front() else { return Err(self.failure()) };
                self.ask(place).await;
                continue;
            };
            match within_patience(holder.chunks.message()).await {
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
        match within_patience(client.fetch_artifact(request)).await {
            Ok(response) => {
                let chunks = response.into_inner();
                self.current = Some(Holder { place, chunks, skip: self.received });
            }
            Err(failure) => self.refused(place, failure),
        }
    }

    fn refused(&mut self, place: usize, failure: Failure) {
        let (controller, _) = &self.from.0.controllers[place];
        let (digest, received) = (self.digest, self.received);
        tracing::debug!(%digest, controller, received, reason = failure.message, "artifact not from this one");
        self.refusals.push((place, failure));
    }

    /// What each of them said. A file is missing only if nobody could have it.
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

async fn within_patience<T>(answer: impl Future<Output = Result<T, tonic::Status>>) -> Result<T, Failure> {
    match tokio::time::timeout(SILENCE_MAX, answer).await {
        Ok(answer) => answer.map_err(|status| from_status(&status)),
        Err(_elapsed) => Err(Failure::new(Reason::TimedOut, format!("nothing came for {SILENCE_MAX:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_are_there_are_asked_first_from_one_drawn_on() {
        let attached = BTreeSet::from([1, 3, 4]);
        assert_eq!(order(5, &attached, |_| 0), [1, 3, 4, 0, 2]);
        assert_eq!(order(5, &attached, |below| below - 1), [4, 1, 3, 2, 0]);
        assert_eq!(order(2, &BTreeSet::new(), |_| 1), [1, 0]);
        assert_eq!(order(0, &attached, |_| 0), [0; 0]);
    }

    // Paused time stands still while nothing is awaited, so this is the wait alone.
    #[tokio::test(start_paused = true)]
    async fn one_that_falls_silent_is_given_up() {
        let silent = std::future::pending::<Result<(), tonic::Status>>();
        assert_eq!(within_patience(silent).await.unwrap_err().reason, Reason::TimedOut);
    }
}
