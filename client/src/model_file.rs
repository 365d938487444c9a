//! A model file on this machine, or a program packed from a file: its digest, and its bytes as a
//! stream of upload messages.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use futures::Stream;
use millrace_proto::admin::{Artifact, UploadArtifactRequest, upload_artifact_request::Part};
use millrace_types::Digest;
use millrace_types::digest::Hasher;
use tokio::io::{AsyncRead, AsyncReadExt as _};

use crate::error::Error;

/// The file bytes that an upload message carries, and the read buffer's size.
const CHUNK: usize = 1 << 20;

/// A model file whose digest is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    path: PathBuf,
    /// The bytes to upload, if they differ from the file's: a program packed with its declaration.
    packed: Option<Bytes>,
    digest: Digest,
    bytes: u64,
}

/// The slot in which an upload's stream leaves the error that ended the stream. A stream of
/// messages cannot carry an error itself.
pub(crate) type ReadFailure = Arc<Mutex<Option<Error>>>;

impl ModelFile {
    /// Reads the whole file and computes its digest. Blocks the thread.
    ///
    /// # Errors
    /// [`Error::File`] when the file cannot be opened or read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_owned();
        let failed = |cause| Error::File { path: path.clone(), cause };
        let mut file = File::open(&path).map_err(failed)?;
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; CHUNK];
        let mut bytes = 0;
        loop {
            let read = file.read(&mut buffer).map_err(failed)?;
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
            bytes += read as u64;
        }
        Ok(Self { digest: hasher.finish(), bytes, path, packed: None })
    }

    /// Returns an upload of bytes that were packed from the file: a program with its declared
    /// inputs and outputs.
    #[must_use]
    pub fn packed(path: impl AsRef<Path>, packed: Bytes) -> Self {
        let path = path.as_ref().to_owned();
        Self { digest: Digest::of(&packed), bytes: packed.len() as u64, path, packed: Some(packed) }
    }

    /// Returns the path of the file on this machine.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the digest, which is the artifact's name in the cluster.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the number of bytes that an upload sends.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the messages of an upload: the header, then the contents in chunks. `progress`
    /// receives the number of bytes sent so far. An error ends the stream early and is left in
    /// `failure`.
    pub(crate) fn messages<P>(
        &self,
        progress: Arc<P>,
        failure: ReadFailure,
    ) -> impl Stream<Item = UploadArtifactRequest> + Send + 'static
    where
        P: Fn(u64) + Send + Sync + 'static,
    {
        let file = self.clone();
        async_stream::stream! {
            let header = Artifact { digest: file.digest.to_string(), bytes: file.bytes };
            yield UploadArtifactRequest { part: Some(Part::Header(header)) };
            let mut source = match source(&file).await {
                Ok(source) => source,
                Err(cause) => return leave(&failure, Error::File { path: file.path, cause }),
            };
            let mut sent = 0;
            loop {
                match next_chunk(&mut source).await {
                    Err(cause) => return leave(&failure, Error::File { path: file.path, cause }),
                    Ok(data) if data.is_empty() => break,
                    Ok(data) => {
                        sent += data.len() as u64;
                        yield UploadArtifactRequest { part: Some(Part::Data(data)) };
                        progress(sent);
                    }
                }
            }
            if sent != file.bytes {
                leave(&failure, Error::FileChanged { path: file.path, expected: file.bytes, sent });
            }
        }
    }
}

type Source = Box<dyn AsyncRead + Send + Unpin>;

async fn source(file: &ModelFile) -> std::io::Result<Source> {
    Ok(match &file.packed {
        Some(packed) => Box::new(std::io::Cursor::new(packed.clone())),
        None => Box::new(tokio::fs::File::open(&file.path).await?),
    })
}

async fn next_chunk(source: &mut Source) -> std::io::Result<Bytes> {
    let mut chunk = BytesMut::with_capacity(CHUNK);
    while chunk.len() < CHUNK && source.read_buf(&mut chunk).await? > 0 {}
    Ok(chunk.freeze())
}

fn leave(failure: &ReadFailure, error: Error) {
    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt as _;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn file_of(bytes: &[u8]) -> (tempfile::TempDir, ModelFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, bytes).unwrap();
        (folder, ModelFile::open(path).unwrap())
    }

    #[tokio::test]
    async fn an_upload_is_a_header_and_the_file_in_order() {
        let content: Vec<u8> = (0..CHUNK + 10).map(|i| u8::try_from(i % 251).unwrap()).collect();
        let (_folder, file) = file_of(&content);
        assert_eq!((file.digest(), file.bytes()), (Digest::of(&content), content.len() as u64));
        let heard = Arc::new(AtomicU64::new(0));
        let hears = heard.clone();
        let failure = ReadFailure::default();
        let progress = Arc::new(move |sent| hears.store(sent, Ordering::Relaxed));
        let parts: Vec<_> = file.messages(progress, failure.clone()).collect().await;
        let header = Artifact { digest: file.digest().to_string(), bytes: file.bytes() };
        let data = |range: std::ops::Range<usize>| Part::Data(Bytes::copy_from_slice(&content[range]));
        let expected = [Part::Header(header), data(0..CHUNK), data(CHUNK..CHUNK + 10)];
        assert_eq!(parts.into_iter().map(|message| message.part.unwrap()).collect::<Vec<_>>(), expected);
        assert_eq!(heard.load(Ordering::Relaxed), file.bytes());
        assert!(failure.lock().unwrap().is_none());
    }

    #[tokio::test]
    async fn a_file_that_shrank_is_noticed() {
        let (_folder, file) = file_of(b"whole");
        std::fs::write(file.path(), b"hal").unwrap();
        let failure = ReadFailure::default();
        let _parts: Vec<_> = file.messages(Arc::new(|_| {}), failure.clone()).collect().await;
        let left = failure.lock().unwrap().take();
        assert!(matches!(left, Some(Error::FileChanged { expected: 5, sent: 3, .. })), "{left:?}");
    }

    #[tokio::test]
    async fn packed_bytes_are_sent_instead_of_the_file() {
        let packed = Bytes::from_static(b"declared and the file");
        let file = ModelFile::packed("run.py", packed.clone());
        assert_eq!((file.digest(), file.bytes()), (Digest::of(&packed), packed.len() as u64));
        let parts: Vec<_> = file.messages(Arc::new(|_| {}), ReadFailure::default()).collect().await;
        assert_eq!(parts[1].part, Some(Part::Data(packed)));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = ModelFile::open("no/such.onnx").unwrap_err();
        assert!(error.to_string().starts_with("cannot read no/such.onnx: "), "{error}");
    }
}
