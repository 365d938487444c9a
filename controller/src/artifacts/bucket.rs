//! The object store for model files that all controllers share. Each call is bounded in time and
//! memory, and each error names the store.
//!
//! `<prefix>/<cluster id>/sha256/<64 hex digits>` is a complete file: the store shows a file only after
//! the last byte. The cluster id keeps one cluster from collecting another cluster's files.
//! `<...>.damaged` is a file with contents other than its digest. `<cluster id>/millrace.json` marks
//! the place as the cluster's: a volume that is not mounted, or a folder on one machine only, lacks the
//! mark.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes as Chunk;
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use millrace_types::{Bytes, ClusterId, Digest, Failure, Reason};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _, PutPayload, RetryConfig, WriteMultipart};

use super::pieces::CHUNK_BYTES;
use crate::config::{ObjectStoreKind, ObjectStoreUrl};

/// Bytes per read or write call. S3 allows 10,000 parts of a file: 78 GiB.
const PART_BYTES: u64 = 8 << 20;
/// Parts in flight to the store per file.
const PARTS_IN_FLIGHT: usize = 4;
/// Parts read ahead per file.
const PARTS_AHEAD: usize = 2;
/// The timeout of one call, including retries.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The time during which a call is retried after a failure of the store.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);
const RETRIES_MAX: usize = 3;
/// The timeout of a listing of all files.
const LIST_TIMEOUT: Duration = Duration::from_secs(120);
const DAMAGED: &str = ".damaged";

/// Error of the object store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "cannot use the object store {place} ({doing}: {problem}): deployed functions are still served; try again once the store is back"
    )]
    Unavailable { place: String, doing: &'static str, problem: String },
    #[error(
        "{place} is not where this cluster keeps its model files: is the volume mounted, and the same on every controller?"
    )]
    Elsewhere { place: String },
    #[error("model file {digest} is not in {place}: upload the model again")]
    Missing { place: String, digest: Digest },
    #[error("model file {digest} in {place} is damaged: upload the model again")]
    Damaged { place: String, digest: Digest },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let reason = match &error {
            Error::Unavailable { .. } | Error::Elsewhere { .. } => Reason::StoreUnavailable,
            Error::Missing { .. } => Reason::ArtifactNotFound,
            Error::Damaged { .. } => Reason::DigestMismatch,
        };
        Failure::new(reason, error.to_string())
    }
}

#[derive(Debug, Clone)]
enum Backing {
    /// A folder, opened at each use: a folder opened once would be created again after the volume went
    /// away.
    Folder(PathBuf),
    Bucket(Arc<dyn ObjectStore>),
}

/// The files of one cluster in the store. Clones share the connections.
#[derive(Debug, Clone)]
pub(crate) struct Bucket {
    place: ObjectStoreUrl,
    backing: Backing,
    root: Path,
}

impl Bucket {
    /// Returns a client of the store, without contacting the store, which may be down.
    ///
    /// # Errors
    /// The AWS settings in the environment are invalid.
    pub(crate) fn open(place: &ObjectStoreUrl, cluster: &ClusterId) -> Result<Self, object_store::Error> {
        let (backing, prefix) = match &place.kind {
            ObjectStoreKind::Folder(folder) => (Backing::Folder(folder.clone()), Path::default()),
            ObjectStoreKind::Bucket { name, prefix } => {
                let s3 = s3(AmazonS3Builder::from_env(), name)?;
                (Backing::Bucket(s3), prefix.clone())
            }
        };
        Ok(Self { place: place.clone(), backing, root: prefix.join(&*cluster.0) })
    }

    pub(crate) fn place(&self) -> &ObjectStoreUrl {
        &self.place
    }

    fn path(&self, digest: Digest) -> Path {
        self.root.clone().join("sha256").join(digest.hex())
    }

    fn aside(&self, digest: Digest) -> Path {
        self.root.clone().join("sha256").join(format!("{}{DAMAGED}", digest.hex()))
    }

    async fn objects(&self, doing: &'static str) -> Result<Arc<dyn ObjectStore>, Error> {
        match &self.backing {
            Backing::Bucket(store) => Ok(store.clone()),
            Backing::Folder(folder) => {
                let folder = folder.clone();
                let open = move || LocalFileSystem::new_with_prefix(folder).map(|it| it.with_fsync(true));
                let opened = async {
                    let opened = tokio::task::spawn_blocking(open).await;
                    opened.map_err(|source| object_store::Error::JoinError { source })?
                };
                let opened: Arc<dyn ObjectStore> = Arc::new(self.in_time(doing, opened).await?);
                Ok(opened)
            }
        }
    }

    async fn in_time<T>(
        &self,
        doing: &'static str,
        call: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(CALL_TIMEOUT, call).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(self.unavailable(doing, &error)),
            Err(_) => Err(self.unavailable(doing, &format!("no answer within {CALL_TIMEOUT:?}"))),
        }
    }

    fn unavailable(&self, doing: &'static str, problem: &dyn std::fmt::Display) -> Error {
        Error::Unavailable { place: self.place.to_string(), doing, problem: problem.to_string() }
    }

    /// Returns the size of the object at a path, if any.
    async fn size(&self, path: &Path) -> Result<Option<u64>, Error> {
        let objects = self.objects("looking for a model file").await?;
        let head = async {
            match objects.head(path).await {
                Ok(meta) => Ok(Some(meta.size)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        self.in_time("looking for a model file", head).await
    }

    /// Whether a file with this digest and size exists.
    pub(crate) async fn has(&self, digest: Digest, bytes: Bytes) -> Result<bool, Error> {
        Ok(self.size(&self.path(digest)).await? == Some(bytes.get()))
    }

    /// Checks that the place belongs to this cluster, and marks an unmarked place. If the cluster has
    /// files in the store already (`used`), the mark must exist.
    pub(crate) async fn claim(&self, used: bool) -> Result<(), Error> {
        let mark = self.root.clone().join("millrace.json");
        if self.size(&mark).await?.is_some() {
            return Ok(());
        }
        if used {
            return Err(Error::Elsewhere { place: self.place.to_string() });
        }
        let objects = self.objects("marking the place").await?;
        let text = "{\"what\":\"model files of a Millrace cluster\",\"format\":1}\n";
        let put = objects.put(&mark, PutPayload::from_static(text.as_bytes()));
        self.in_time("marking the place", put).await.map(|_| ())
    }

    /// Writes a file, completely or not at all. An error among the chunks aborts the write.
    pub(crate) async fn put(
        &self,
        digest: Digest,
        chunks: impl Stream<Item = Result<Vec<u8>, Failure>>,
    ) -> Result<(), Failure> {
        const DOING: &str = "writing a model file";
        let objects = self.objects(DOING).await?;
        let path = self.path(digest);
        let begun = self.in_time(DOING, objects.put_multipart(&path)).await?;
        let part = usize::try_from(PART_BYTES).expect("a part fits the memory");
        let mut writing = WriteMultipart::new_with_chunk_size(begun, part);
        let mut chunks = std::pin::pin!(chunks);
        while let Some(chunk) = chunks.next().await {
            let ready = match chunk {
                Ok(chunk) => {
                    let free = self.in_time(DOING, writing.wait_for_capacity(PARTS_IN_FLIGHT)).await;
                    free.map(|()| chunk).map_err(Failure::from)
                }
                Err(failure) => Err(failure),
            };
            match ready {
                Ok(chunk) => writing.put(chunk.into()),
                Err(failure) => {
                    if let Err(error) =
                        self.in_time("aborting the write of a model file", writing.abort()).await
                    {
                        tracing::warn!(%error, "cannot remove the parts of an upload from the object store");
                    }
                    return Err(failure);
                }
            }
        }
        self.in_time(DOING, writing.finish()).await?;
        Ok(())
    }

    /// Returns a file's bytes in order. The bytes are unverified: the reader must check the digest.
    pub(crate) async fn read(
        &self,
        digest: Digest,
        bytes: Bytes,
    ) -> Result<impl Stream<Item = Result<Chunk, Failure>> + Send + use<>, Error> {
        const DOING: &str = "reading a model file";
        let path = self.path(digest);
        let place = self.place.to_string();
        match self.size(&path).await? {
            None => return Err(Error::Missing { place, digest }),
            Some(size) if size != bytes.get() => return Err(Error::Damaged { place, digest }),
            Some(_) => {}
        }
        let objects = self.objects(DOING).await?;
        let parts = (0..bytes.get()).step_by(usize::try_from(PART_BYTES).expect("a part fits the memory"));
        let ranges = parts.map(move |from| from..(from + PART_BYTES).min(bytes.get()));
        let bucket = self.clone();
        let read = stream::iter(ranges).map(move |range| {
            let bucket = bucket.clone();
            let objects = objects.clone();
            let path = path.clone();
            async move { bucket.in_time(DOING, objects.get_range(&path, range)).await.map_err(Failure::from) }
        });
        Ok(read.buffered(PARTS_AHEAD).map_ok(slices).try_flatten())
    }

    /// Returns every file of the cluster, including damaged files that were set aside.
    pub(crate) async fn list(&self) -> Result<Vec<Digest>, Error> {
        const DOING: &str = "listing the model files";
        let objects = self.objects(DOING).await?;
        let folder = self.root.clone().join("sha256");
        let files = objects.list(Some(&folder)).try_filter_map(|meta| async move {
            let name = meta.location.filename();
            let hex = name.map(|name| name.strip_suffix(DAMAGED).unwrap_or(name));
            Ok(hex.and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok()))
        });
        match tokio::time::timeout(LIST_TIMEOUT, files.try_collect::<Vec<_>>()).await {
            Ok(listed) => listed.map_err(|error| self.unavailable(DOING, &error)),
            Err(_) => Err(self.unavailable(DOING, &format!("no answer within {LIST_TIMEOUT:?}"))),
        }
    }

    /// Removes a file and the damaged copy. A missing file counts as removed.
    pub(crate) async fn remove(&self, digest: Digest) -> Result<(), Error> {
        const DOING: &str = "removing a model file";
        let objects = self.objects(DOING).await?;
        for path in [self.path(digest), self.aside(digest)] {
            let removed = async {
                match objects.delete(&path).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                    Err(error) => Err(error),
                }
            };
            self.in_time(DOING, removed).await?;
        }
        Ok(())
    }

    /// Renames a damaged file, so that a sound file can take its place.
    pub(crate) async fn set_aside(&self, digest: Digest) -> Result<(), Error> {
        const DOING: &str = "setting a damaged model file aside";
        let objects = self.objects(DOING).await?;
        let from = self.path(digest);
        let to = self.aside(digest);
        self.in_time(DOING, objects.rename(&from, &to)).await
    }

    /// Returns the failure that reports a damaged file.
    pub(crate) fn damaged(&self, digest: Digest) -> Failure {
        Error::Damaged { place: self.place.to_string(), digest }.into()
    }
}

/// Splits a part into pieces that fit into a message.
fn slices(part: Chunk) -> impl Stream<Item = Result<Chunk, Failure>> {
    let from = (0..part.len()).step_by(CHUNK_BYTES);
    stream::iter(from.map(move |from| Ok(part.slice(from..(from + CHUNK_BYTES).min(part.len())))))
}

/// Returns a client of a bucket, configured from the environment.
fn s3(from_env: AmazonS3Builder, bucket: &str) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    // Installing fails if a provider is installed already, and any provider will do.
    rustls::crypto::ring::default_provider().install_default().ok();
    let endpoint = from_env.get_config_value(&AmazonS3ConfigKey::Endpoint);
    let plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    let retry =
        RetryConfig { max_retries: RETRIES_MAX, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
    let mut builder = from_env.with_bucket_name(bucket).with_retry(retry);
    if plain {
        // A plain-HTTP endpoint is explicit configuration, such as MinIO beside the controllers.
        builder = builder.with_allow_http(true);
    }
    Ok(Arc::new(builder.build()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(dir: &std::path::Path, cluster: &str) -> Bucket {
        let place = format!("file://{}", dir.display()).parse().unwrap();
        Bucket::open(&place, &ClusterId(cluster.into())).unwrap()
    }

    #[tokio::test]
    async fn a_file_of_many_parts_is_stored_completely_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let bucket = folder(dir.path(), "a");
        let file: Vec<u8> = (0..20_000_003_u32).map(|n| n.to_le_bytes()[1]).collect();
        let digest = Digest::of(&file);
        let bytes = Bytes(file.len() as u64);
        let chunks = || stream::iter(file.chunks(CHUNK_BYTES).map(|chunk| Ok(chunk.to_vec())));
        let broken = stream::iter([Err(Failure::new(Reason::DigestMismatch, "damaged"))]);
        let refused = bucket.put(digest, chunks().chain(broken)).await.unwrap_err();
        assert_eq!(refused.reason, Reason::DigestMismatch);
        assert!(!bucket.has(digest, bytes).await.unwrap());

        bucket.put(digest, chunks()).await.unwrap();
        assert!(bucket.has(digest, bytes).await.unwrap());
        let read: Vec<Chunk> = bucket.read(digest, bytes).await.unwrap().try_collect().await.unwrap();
        assert!(read.iter().all(|chunk| chunk.len() <= CHUNK_BYTES), "each fits a message");
        assert!(read.concat() == file);
        let listed = bucket.list().await.unwrap();
        assert_eq!(listed, [digest]);
        assert_eq!(folder(dir.path(), "b").list().await.unwrap(), [], "another cluster lists none of them");
        bucket.remove(digest).await.unwrap();
        bucket.remove(digest).await.unwrap();
        assert!(matches!(bucket.read(digest, bytes).await.err(), Some(Error::Missing { .. })));
    }

    #[tokio::test]
    async fn a_place_is_marked_once_and_recognized_by_its_mark() {
        let dir = tempfile::tempdir().unwrap();
        let bucket = folder(dir.path(), "a");
        assert!(matches!(bucket.claim(true).await, Err(Error::Elsewhere { .. })));
        bucket.claim(false).await.unwrap();
        bucket.claim(true).await.unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        assert!(matches!(bucket.claim(false).await, Err(Error::Unavailable { .. })));
        assert!(!dir.path().exists(), "a missing volume is not created again");
    }

    #[tokio::test]
    async fn an_unreachable_bucket_is_named_in_the_error() {
        let endpoint = AmazonS3Builder::new().with_region("r").with_access_key_id("k");
        let endpoint = endpoint.with_secret_access_key("hush");
        assert!(s3(endpoint.clone(), "models").is_ok(), "with TLS");
        // No server listens at this port.
        let store = s3(endpoint.with_endpoint("http://127.0.0.1:1"), "models").unwrap();
        let place: ObjectStoreUrl = "s3://models/team".parse().unwrap();
        let bucket = Bucket { place, backing: Backing::Bucket(store), root: Path::from("team/a") };
        let failure = Failure::from(bucket.has(Digest::of(b"m"), Bytes(1)).await.unwrap_err());
        assert_eq!((failure.reason, failure.retryable), (Reason::StoreUnavailable, true));
        assert!(
            failure.message.contains("s3://models/team") && !failure.message.contains("hush"),
            "{failure}"
        );
    }
}
