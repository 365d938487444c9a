//! Brings one artifact into host memory: from the local file if it is there and whole, else from a
//! controller; checked, compiled and laid out in first-use order. Blocking work runs on the
//! runtime's blocking threads, never on the actor thread.

use std::sync::Arc;

use bytes::Bytes as Chunk;
use futures::StreamExt as _;
use millrace_types::{Bytes, Digest, Reason};
use tokio::sync::mpsc;
use tokio::task::{JoinError, spawn_blocking};

use super::fetch::{ArtifactSource, Chunks};
use super::plan::Failure;
use super::store::{self, Store};

/// Pieces received and not yet written: 1 MiB each.
const CHUNKS_MAX: usize = 4;

/// The artifact's bytes, from the disk or else through it.
///
/// # Errors
/// [`Failure`] with what to tell people and whether to try again.
pub(super) async fn artifact(
    store: &Store,
    source: &Arc<dyn ArtifactSource>,
    digest: Digest,
    announced: Bytes,
) -> Result<Vec<u8>, Failure> {
    if let Some(bytes) = read(store, digest, announced).await? {
        return Ok(bytes);
    }
    let chunks = source.fetch(digest).await.map_err(fetch_failure)?;
    download(store, chunks, digest, announced).await?;
    tracing::info!(%digest, bytes = announced.get(), "artifact fetched");
    // What is compiled is what is on the disk: a write that went wrong shows now, not at the next start.
    let damaged =
        || Failure::Transient("the artifact was damaged while it was written: check the disk".into());
    read(store, digest, announced).await?.ok_or_else(damaged)
}

async fn read(store: &Store, digest: Digest, announced: Bytes) -> Result<Option<Vec<u8>>, Failure> {
    let store = store.clone();
    spawn_blocking(move || store.read(digest, announced)).await.map_err(panicked)?.map_err(store_failure)
}

async fn download(
    store: &Store,
    mut chunks: Chunks,
    digest: Digest,
    announced: Bytes,
) -> Result<(), Failure> {
    let (sender, mut receiver) = mpsc::channel::<Chunk>(CHUNKS_MAX);
    let store = store.clone();
    let writer = spawn_blocking(move || {
        let mut writer = store.create(digest, announced)?;
        while let Some(chunk) = receiver.blocking_recv() {
            writer.write(&chunk)?;
        }
        Ok::<_, store::Error>(writer)
    });
    let received = async {
        while let Some(chunk) = chunks.next().await {
            // A writer that failed has closed the channel and says why below.
            if sender.send(chunk?).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    let received = received.await;
    drop(sender);
    let writer = writer.await.map_err(panicked)?.map_err(store_failure)?;
    received.map_err(fetch_failure)?;
    spawn_blocking(move || writer.commit()).await.map_err(panicked)?.map_err(store_failure)
}

fn fetch_failure(failure: millrace_types::Failure) -> Failure {
    let message = format!("fetching the artifact: {}", failure.message);
    match failure.reason {
        Reason::ArtifactNotFound => Failure::Transient(message),
        _ => Failure::Unavailable(message),
    }
}

fn store_failure(error: store::Error) -> Failure {
    Failure::Transient(format!("storing the artifact: {error}"))
}

/// Our own bug: the blocking task panicked.
pub(super) fn panicked(error: JoinError) -> Failure {
    Failure::Permanent(format!("preparing the model failed inside the worker: {error}"))
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;
    use futures::stream;

    use super::*;

    struct Given(Vec<Result<Chunk, millrace_types::Failure>>);

    impl ArtifactSource for Given {
        fn fetch(&self, _: Digest) -> BoxFuture<'static, Result<Chunks, millrace_types::Failure>> {
            let chunks = stream::iter(self.0.clone()).boxed();
            Box::pin(async { Ok(chunks) })
        }
    }

    struct Unreachable;

    impl ArtifactSource for Unreachable {
        fn fetch(&self, _: Digest) -> BoxFuture<'static, Result<Chunks, millrace_types::Failure>> {
            Box::pin(async { Err(millrace_types::Failure::new(Reason::NoLeader, "nobody there")) })
        }
    }

    fn given(chunks: &[&'static [u8]]) -> Arc<dyn ArtifactSource> {
        Arc::new(Given(chunks.iter().map(|chunk| Ok(Chunk::from_static(chunk))).collect()))
    }

    fn residue(dir: &tempfile::TempDir) -> usize {
        std::fs::read_dir(dir.path()).unwrap().count()
    }

    #[tokio::test]
    async fn is_fetched_once_and_then_read_from_disk() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let digest = Digest::of(b"a model");
        let bytes = artifact(&store, &given(&[b"a mo", b"del"]), digest, Bytes(7)).await.unwrap();
        assert_eq!(bytes, b"a model");
        let nobody: Arc<dyn ArtifactSource> = Arc::new(Unreachable);
        assert_eq!(artifact(&store, &nobody, digest, Bytes(7)).await.unwrap(), b"a model");
    }

    #[tokio::test]
    async fn a_damaged_file_is_fetched_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let digest = Digest::of(b"a model");
        std::fs::write(dir.path().join(digest.hex()), b"a mode!").unwrap();
        let bytes = artifact(&store, &given(&[b"a model"]), digest, Bytes(7)).await.unwrap();
        assert_eq!(bytes, b"a model");
    }

    #[tokio::test]
    async fn wrong_short_or_long_bytes_fail_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let digest = Digest::of(b"a model");
        for chunks in [&[&b"a modem"[..]][..], &[&b"a mo"[..]], &[&b"a model"[..], &b"s"[..]]] {
            let outcome = artifact(&store, &given(chunks), digest, Bytes(7)).await;
            assert!(matches!(outcome, Err(Failure::Transient(_))), "{outcome:?}");
            assert_eq!(residue(&dir), 0, "{chunks:?}");
        }
    }

    #[tokio::test]
    async fn a_transfer_that_breaks_is_unavailable_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let broken = millrace_types::Failure::new(Reason::NoWorker, "connection reset");
        let source: Arc<dyn ArtifactSource> =
            Arc::new(Given(vec![Ok(Chunk::from_static(b"a m")), Err(broken)]));
        let outcome = artifact(&store, &source, Digest::of(b"a model"), Bytes(7)).await;
        assert!(matches!(outcome, Err(Failure::Unavailable(_))), "{outcome:?}");
        assert_eq!(residue(&dir), 0);
    }
}
