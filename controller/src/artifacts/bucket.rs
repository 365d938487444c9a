//! The object store that the controllers share, as far as model files go. Everything it does is
//! bounded in time and memory, and every failure names the place.
//!
//! `<prefix>/<cluster id>/sha256/<64 hex digits>` is a whole file: the store shows none before its
//! last byte. The cluster's name keeps one cluster from collecting another's files.
//! `<...>.damaged` was not what its name says. `<cluster id>/millrace.json` marks the place as the
//! cluster's: a volume that is not mounted, or a folder of one machine only, lacks it.

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

use super::place::{Kind, SharedPlace};
use super::spread::CHUNK_BYTES;

/// What is read or written with one call. S3 takes 10,000 parts of a file: 78 GiB.
const PART_BYTES: u64 = 8 << 20;
/// Parts on their way to the store at a time, for each file.
const PARTS_IN_FLIGHT: usize = 4;
/// Parts read ahead, for each file.
const PARTS_AHEAD: usize = 2;
/// How long one call may take, its repetitions included.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the store may be asked again after a failure of its own.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);
const RETRIES_MAX: usize = 3;
/// How long listing every file may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(120);
const DAMAGED: &str = ".damaged";

/// What went wrong with the store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "the object store {place} cannot be used ({doing}: {problem}): what is deployed is served on; try again once it is back"
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
    /// Looked for at each use: opened once, it would be made anew where a volume went away.
    Folder(PathBuf),
    Bucket(Arc<dyn ObjectStore>),
}

/// One cluster's files in the store. Cloning shares its connections.
#[derive(Debug, Clone)]
pub(crate) struct Bucket {
    place: SharedPlace,
    backing: Backing,
    root: Path,
}

impl Bucket {
    /// Makes ready to use the place. Nothing is asked of it yet: it may be down.
    ///
    /// # Errors
    /// What is wrong with the AWS settings in the environment.
    pub(crate) fn open(place: &SharedPlace, cluster: &ClusterId) -> Result<Self, object_store::Error> {
        let (backing, prefix) = match &place.kind {
            Kind::Folder(folder) => (Backing::Folder(folder.clone()), Path::default()),
            Kind::Bucket { name, prefix } => {
                let s3 = s3(AmazonS3Builder::from_env(), name)?;
                (Backing::Bucket(s3), prefix.clone())
            }
        };
        Ok(Self { place: place.clone(), backing, root: prefix.join(&*cluster.0) })
    }

    /// Where it is.
    pub(crate) fn place(&self) -> &SharedPlace {
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

    /// The size of what stands under a path, if something does.
    async fn size(&self, path: &Path) -> Result<Option<u64>, Error> {
        let objects = self.objects("looking for it").await?;
        let head = async {
            match objects.head(path).await {
                Ok(meta) => Ok(Some(meta.size)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        self.in_time("looking for it", head).await
    }

    /// Whether a file of that digest and size is there.
    pub(crate) async fn has(&self, digest: Digest, bytes: Bytes) -> Result<bool, Error> {
        Ok(self.size(&self.path(digest)).await? == Some(bytes.get()))
    }

    /// Makes sure that this is the cluster's place before something is put there. `used` says whether
    /// the cluster has files in it already: then its mark must be there.
    pub(crate) async fn claim(&self, used: bool) -> Result<(), Error> {
        let mark = self.root.clone().join("millrace.json");
        if self.size(&mark).await?.is_some() {
            return Ok(());
        }
        if used {
            return Err(Error::Elsewhere { place: self.place.to_string() });
        }
        let objects = self.objects("marking it").await?;
        let text = "{\"what\":\"model files of a Millrace cluster\",\"format\":1}\n";
        let put = objects.put(&mark, PutPayload::from_static(text.as_bytes()));
        self.in_time("marking it", put).await.map(|_| ())
    }

    /// Puts a file there, whole or not at all. An error among the chunks ends it.
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
                    if let Err(error) = self.in_time("giving a model file up", writing.abort()).await {
                        tracing::warn!(%error, "parts of an upload stay in the object store");
                    }
                    return Err(failure);
                }
            }
        }
        self.in_time(DOING, writing.finish()).await?;
        Ok(())
    }

    /// A file's bytes as they are there, in order. Whoever reads them checks the digest.
    pub(crate) async fn read(
        &self,
        digest: Digest,
        bytes: Bytes,
    ) -> Result<impl Stream<Item = Result<Chunk, Failure>> + Send + use<>, Error> {
        const DOING: &str = "reading a model file";
        let (path, place) = (self.path(digest), self.place.to_string());
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
            let (bucket, objects, path) = (bucket.clone(), objects.clone(), path.clone());
            async move { bucket.in_time(DOING, objects.get_range(&path, range)).await.map_err(Failure::from) }
        });
        Ok(read.buffered(PARTS_AHEAD).map_ok(slices).try_flatten())
    }

    /// Every file of the cluster, set aside or not.
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

    /// Removes a file, and what was set aside of it. One that is not there is removed already.
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

    /// Takes a damaged file out of the way of a sound one.
    pub(crate) async fn set_aside(&self, digest: Digest) -> Result<(), Error> {
        const DOING: &str = "setting a damaged model file aside";
        let objects = self.objects(DOING).await?;
        let (from, to) = (self.path(digest), self.aside(digest));
        self.in_time(DOING, objects.rename(&from, &to)).await
    }

    /// What a damaged file is reported as.
    pub(crate) fn damaged(&self, digest: Digest) -> Failure {
        Error::Damaged { place: self.place.to_string(), digest }.into()
    }
}

/// A part in pieces that fit a message.
fn slices(part: Chunk) -> impl Stream<Item = Result<Chunk, Failure>> {
    let from = (0..part.len()).step_by(CHUNK_BYTES);
    stream::iter(from.map(move |from| Ok(part.slice(from..(from + CHUNK_BYTES).min(part.len())))))
}

/// A client of a bucket, with what the environment says.
fn s3(from_env: AmazonS3Builder, bucket: &str) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    // Or one is there already: any will do.
    rustls::crypto::ring::default_provider().install_default().ok();
    let endpoint = from_env.get_config_value(&AmazonS3ConfigKey::Endpoint);
    let plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    let retry =
        RetryConfig { max_retries: RETRIES_MAX, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
    let mut builder = from_env.with_bucket_name(bucket).with_retry(retry);
    if plain {
        // Who names such an endpoint means it: MinIO beside the controllers.
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
    async fn a_file_of_many_parts_is_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let bucket = folder(dir.path(), "a");
        let file: Vec<u8> = (0..20_000_003_u32).map(|n| n.to_le_bytes()[1]).collect();
        let (digest, bytes) = (Digest::of(&file), Bytes(file.len() as u64));
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
        assert_eq!(folder(dir.path(), "b").list().await.unwrap(), [], "another cluster's are not ours");
        bucket.remove(digest).await.unwrap();
        bucket.remove(digest).await.unwrap();
        assert!(matches!(bucket.read(digest, bytes).await.err(), Some(Error::Missing { .. })));
    }

    #[tokio::test]
    async fn a_place_is_marked_once_and_known_by_its_mark() {
        let dir = tempfile::tempdir().unwrap();
        let bucket = folder(dir.path(), "a");
        assert!(matches!(bucket.claim(true).await, Err(Error::Elsewhere { .. })));
        bucket.claim(false).await.unwrap();
        bucket.claim(true).await.unwrap();
        std::fs::remove_dir_all(dir.path()).unwrap();
        assert!(matches!(bucket.claim(false).await, Err(Error::Unavailable { .. })));
        assert!(!dir.path().exists(), "a volume that went away is not made anew");
    }

    #[tokio::test]
    async fn a_bucket_that_does_not_answer_is_named() {
        let endpoint = AmazonS3Builder::new().with_region("r").with_access_key_id("k");
        let endpoint = endpoint.with_secret_access_key("hush");
        assert!(s3(endpoint.clone(), "models").is_ok(), "with TLS");
        // Nothing listens there.
        let store = s3(endpoint.with_endpoint("http://127.0.0.1:1"), "models").unwrap();
        let place: SharedPlace = "s3://models/team".parse().unwrap();
        let bucket = Bucket { place, backing: Backing::Bucket(store), root: Path::from("team/a") };
        let failure = Failure::from(bucket.has(Digest::of(b"m"), Bytes(1)).await.unwrap_err());
        assert_eq!((failure.reason, failure.retryable), (Reason::StoreUnavailable, true));
        assert!(
            failure.message.contains("s3://models/team") && !failure.message.contains("hush"),
            "{failure}"
        );
    }
}
