//! The load of an artifact's bytes: from the local file if it exists and is intact, otherwise from a
//! controller through the local file. Blocking work runs on the runtime's blocking threads, never on the
//! actor thread.

use std::sync::Arc;

use bytes::Bytes as Chunk;
use futures::StreamExt as _;
use millrace_types::{Bytes, Digest, Reason};
use tokio::sync::mpsc;
use tokio::task::{JoinError, spawn_blocking};

use super::fetch::{ArtifactChunks, ArtifactSource};
use super::plan::PrepareFailure;
use millrace_storage::FileStore;

/// Maximum number of chunks that are received and not yet written, of 1 MiB each.
const CHUNKS_MAX: usize = 4;

/// Returns the artifact's bytes. A missing artifact is fetched to the disk first.
///
/// # Errors
/// [`PrepareFailure`], with a message for people. Its variant says whether to try again.
pub(super) async fn artifact(
    store: &FileStore,
    source: &Arc<dyn ArtifactSource>,
    digest: Digest,
    announced: Bytes,
) -> Result<Vec<u8>, PrepareFailure> {
    if let Some(bytes) = read(store, digest, announced).await? {
        return Ok(bytes);
    }
    let chunks = source.fetch(digest).await.map_err(fetch_failure)?;
    download(store, chunks, digest, announced).await?;
    tracing::info!(%digest, %announced, "artifact fetched");
    // The bytes are read back from the disk before they are compiled, so that a bad write shows now and not
    // at the next start.
    let damaged =
        || PrepareFailure::Transient("the artifact was damaged when it was written: check the disk".into());
    read(store, digest, announced).await?.ok_or_else(damaged)
}

async fn read(
    store: &FileStore,
    digest: Digest,
    announced: Bytes,
) -> Result<Option<Vec<u8>>, PrepareFailure> {
    let store = store.clone();
    spawn_blocking(move || store.read_all(digest, announced)).await.map_err(panicked)?.map_err(store_failure)
}

async fn download(
    store: &FileStore,
    mut chunks: ArtifactChunks,
    digest: Digest,
    announced: Bytes,
) -> Result<(), PrepareFailure> {
    let (sender, mut receiver) = mpsc::channel::<Chunk>(CHUNKS_MAX);
    let to = store.clone();
    let writer = spawn_blocking(move || {
        let mut writer = to.begin(digest, announced)?;
        while let Some(chunk) = receiver.blocking_recv() {
            writer.write(&chunk)?;
        }
        Ok::<_, millrace_storage::Error>(writer)
    });
    let received = async {
        while let Some(chunk) = chunks.next().await {
            // A writer that failed has closed the channel. Its error is returned below.
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
    let store = store.clone();
    let stored = spawn_blocking(move || store.publish(&writer.finish_within()?));
    stored.await.map_err(panicked)?.map_err(store_failure)
}

fn fetch_failure(failure: millrace_types::Failure) -> PrepareFailure {
    let message = format!("cannot fetch the artifact: {}", failure.message);
    match failure.reason {
        Reason::ArtifactNotFound => PrepareFailure::Transient(message),
        _ => PrepareFailure::Unavailable(message),
    }
}

fn store_failure(error: millrace_storage::Error) -> PrepareFailure {
    PrepareFailure::Transient(format!("cannot store the artifact: {error}"))
}

/// Returns the failure for a panic of a blocking task, which is a bug of the worker.
pub(super) fn panicked(error: JoinError) -> PrepareFailure {
    PrepareFailure::Permanent(format!("the worker failed while it prepared the model: {error}"))
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;
    use futures::stream;

    use super::*;

    struct Given(Vec<Result<Chunk, millrace_types::Failure>>);

    impl ArtifactSource for Given {
        fn fetch(&self, _: Digest) -> BoxFuture<'static, Result<ArtifactChunks, millrace_types::Failure>> {
            let chunks = stream::iter(self.0.clone()).boxed();
            Box::pin(async { Ok(chunks) })
        }
    }

    struct Unreachable;

    impl ArtifactSource for Unreachable {
        fn fetch(&self, _: Digest) -> BoxFuture<'static, Result<ArtifactChunks, millrace_types::Failure>> {
            Box::pin(async { Err(millrace_types::Failure::new(Reason::NoLeader, "unreachable")) })
        }
    }

    fn given(chunks: &[&'static [u8]]) -> Arc<dyn ArtifactSource> {
        Arc::new(Given(chunks.iter().map(|chunk| Ok(Chunk::from_static(chunk))).collect()))
    }

    fn residue(dir: &tempfile::TempDir) -> usize {
        // The folder of unfinished files stays.
        let folders = [dir.path().to_owned(), dir.path().join("incoming")];
        folders.iter().map(|folder| std::fs::read_dir(folder).unwrap().count()).sum::<usize>() - 1
    }

    #[tokio::test]
    async fn an_artifact_is_fetched_once_and_then_read_from_disk() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let digest = Digest::of(b"a model");
        let bytes = artifact(&store, &given(&[b"a mo", b"del"]), digest, Bytes(7)).await.unwrap();
        assert_eq!(bytes, b"a model");
        let unreachable: Arc<dyn ArtifactSource> = Arc::new(Unreachable);
        assert_eq!(artifact(&store, &unreachable, digest, Bytes(7)).await.unwrap(), b"a model");
    }

    #[tokio::test]
    async fn a_damaged_file_is_fetched_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let digest = Digest::of(b"a model");
        std::fs::write(dir.path().join(digest.hex()), b"a mode!").unwrap();
        let bytes = artifact(&store, &given(&[b"a model"]), digest, Bytes(7)).await.unwrap();
        assert_eq!(bytes, b"a model");
    }

    #[tokio::test]
    async fn wrong_short_or_long_bytes_fail_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let digest = Digest::of(b"a model");
        for chunks in [&[&b"a modem"[..]][..], &[&b"a mo"[..]], &[&b"a model"[..], &b"s"[..]]] {
            let outcome = artifact(&store, &given(chunks), digest, Bytes(7)).await;
            assert!(matches!(outcome, Err(PrepareFailure::Transient(_))), "{outcome:?}");
            assert_eq!(residue(&dir), 0, "{chunks:?}");
        }
    }

    #[tokio::test]
    async fn a_transfer_that_breaks_is_unavailable_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let broken = millrace_types::Failure::new(Reason::NoWorker, "connection reset");
        let source: Arc<dyn ArtifactSource> =
            Arc::new(Given(vec![Ok(Chunk::from_static(b"a m")), Err(broken)]));
        let outcome = artifact(&store, &source, Digest::of(b"a model"), Bytes(7)).await;
        assert!(matches!(outcome, Err(PrepareFailure::Unavailable(_))), "{outcome:?}");
        assert_eq!(residue(&dir), 0);
    }
}
