//! The profile store: on the worker's disk, the times that the cost model measured of each model. A
//! restarted worker predicts runs and loads as its predecessor did (L15, L21), without slow first
//! requests.
//!
//! `<data-dir>/learned.json`, format 1: by artifact and type of GPU, in nanoseconds, the time for
//! which a copy from the host keeps a link busy, the time by which a copy extends a run, and the
//! duration of a run. The file is written every [`EVERY`] if something changed, and at the end. The
//! file is only a help: without a readable file, the worker logs a warning and starts with an empty
//! store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use millrace_types::Digest;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::task::{JoinSet, spawn_blocking};

use crate::handle::NodeHandle;
use crate::install::Profile;

/// Version of the file that this build writes and reads.
const FORMAT: u32 = 1;
/// Shortest interval between two writes of the file.
const EVERY: Duration = Duration::from_secs(30);
/// Maximum number of artifacts in the store. Beyond this number, the artifacts that the node does
/// not serve are forgotten.
const ARTIFACTS_MAX: usize = 10_000;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct GpuTypeProfile {
    gpu_type: String,
    load_ns: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    swap_ns: Option<u64>,
    run_ns: u64,
}

type Artifacts = BTreeMap<Digest, Vec<GpuTypeProfile>>;

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    format: u32,
    artifacts: Artifacts,
}

#[derive(Debug, Default)]
struct StoredProfiles {
    artifacts: Artifacts,
    /// Whether the file lacks some of `artifacts`.
    news: bool,
}

/// The profile store of a data directory. Clones share the contents.
#[derive(Debug, Clone)]
pub(crate) struct ProfileStore {
    path: Arc<Path>,
    /// Locked while the file is written, so that only one task writes at a time.
    known: Arc<Mutex<StoredProfiles>>,
}

impl ProfileStore {
    /// Opens the store with the profiles that an earlier worker of this directory wrote.
    pub(crate) fn open(dir: &Path) -> Self {
        let path = dir.join("learned.json");
        let artifacts = read(&path).unwrap_or_else(|problem| {
            tracing::warn!(path = %path.display(), problem, "cannot read the profile store: starting with an empty one");
            BTreeMap::new()
        });
        Self { path: path.into(), known: Arc::new(Mutex::new(StoredProfiles { artifacts, news: false })) }
    }

    /// Returns the profiles of an artifact, one per type of GPU.
    pub(crate) async fn profiles(&self, digest: Digest) -> Vec<Profile> {
        let profile = |it: &GpuTypeProfile| Profile {
            gpu_type: it.gpu_type.clone(),
            load: Duration::from_nanos(it.load_ns),
            swap: it.swap_ns.map(Duration::from_nanos),
            run: Duration::from_nanos(it.run_ns),
        };
        let known = self.known.lock().await;
        known.artifacts.get(&digest).map(|of| of.iter().map(profile).collect()).unwrap_or_default()
    }

    /// Saves the node's new profiles periodically, until the returned task is dropped.
    pub(crate) fn follow(self, node: NodeHandle) -> JoinSet<()> {
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                tokio::time::sleep(EVERY).await;
                self.keep(&node).await;
            }
        });
        task
    }

    /// Saves the node's profiles if the stored profiles differ.
    pub(crate) async fn keep(&self, node: &NodeHandle) {
        self.take_in(node.profiles().await).await;
    }

    async fn take_in(&self, learned: Vec<(Digest, Profile)>) {
        let mut known = self.known.lock().await;
        known.take_in(learned);
        if !known.news {
            return;
        }
        let path = self.path.clone();
        let document = Document { format: FORMAT, artifacts: known.artifacts.clone() };
        match spawn_blocking(move || write(&path, &document)).await {
            Ok(Ok(())) => known.news = false,
            Ok(Err(error)) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot write the profile store: trying again later");
            }
            Err(error) => tracing::error!(%error, "the task that writes the profile store panicked"),
        }
    }
}

impl StoredProfiles {
    fn take_in(&mut self, learned: Vec<(Digest, Profile)>) {
        let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let mut served = Artifacts::new();
        for (digest, Profile { gpu_type, load, swap, run }) in learned {
            let on_gpu = GpuTypeProfile {
                gpu_type,
                load_ns: nanos(load),
                swap_ns: swap.map(nanos),
                run_ns: nanos(run),
            };
            served.entry(digest).or_default().push(on_gpu);
        }
        self.news |= served.iter().any(|(digest, of)| self.artifacts.get(digest) != Some(of));
        if self.artifacts.keys().chain(served.keys()).collect::<BTreeSet<_>>().len() > ARTIFACTS_MAX {
            self.artifacts.clear();
        }
        self.artifacts.extend(served);
    }
}

fn read(path: &Path) -> Result<Artifacts, String> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error.to_string()),
    };
    let document: Document = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if document.format == FORMAT {
        Ok(document.artifacts)
    } else {
        Err(format!("the file has format {}, and this build reads {FORMAT}", document.format))
    }
}

/// Writes the file whole or not at all.
fn write(path: &Path, document: &Document) -> io::Result<()> {
    let tmp: PathBuf = path.with_extension("json.tmp");
    let mut file = File::create(&tmp)?;
    file.write_all(&serde_json::to_vec(document)?)?;
    file.sync_all()?;
    std::fs::rename(&tmp, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(run_ms: u64) -> Profile {
        let [load, swap, run] = [40, 12, run_ms].map(Duration::from_millis);
        Profile { gpu_type: "V100".to_owned(), load, swap: Some(swap), run }
    }

    #[tokio::test]
    async fn a_later_worker_of_the_directory_reads_the_profiles() {
        let dir = tempfile::tempdir().unwrap();
        let learned = ProfileStore::open(dir.path());
        let digest = Digest::of(b"a");
        assert_eq!(learned.profiles(digest).await, []);
        learned.take_in(vec![(digest, profile(10))]).await;
        learned.take_in(vec![(digest, profile(12))]).await;
        let again = ProfileStore::open(dir.path());
        assert_eq!(again.profiles(digest).await, [profile(12)]);
        std::fs::remove_file(dir.path().join("learned.json")).unwrap();
        again.take_in(vec![(digest, profile(12))]).await;
        assert!(!dir.path().join("learned.json").exists(), "an unchanged profile is not written");
        again.take_in(vec![(Digest::of(b"b"), profile(1))]).await;
        assert_eq!(
            ProfileStore::open(dir.path()).profiles(digest).await,
            [profile(12)],
            "a profile is kept though its artifact is not served"
        );
    }

    #[tokio::test]
    async fn a_failed_write_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let learned = ProfileStore::open(dir.path());
        // A directory of the temporary file's name makes the write fail.
        std::fs::create_dir(dir.path().join("learned.json.tmp")).unwrap();
        let digest = Digest::of(b"a");
        learned.take_in(vec![(digest, profile(10))]).await;
        std::fs::remove_dir(dir.path().join("learned.json.tmp")).unwrap();
        learned.take_in(vec![(digest, profile(10))]).await;
        assert_eq!(ProfileStore::open(dir.path()).profiles(digest).await, [profile(10)]);
    }

    #[test]
    fn a_full_store_keeps_the_artifacts_that_are_served() {
        let mut known = StoredProfiles::default();
        let some = |numbers: std::ops::Range<usize>| {
            numbers.map(|number| (Digest::of(&number.to_le_bytes()), profile(1))).collect::<Vec<_>>()
        };
        known.take_in(some(0..ARTIFACTS_MAX));
        known.take_in(some(0..ARTIFACTS_MAX));
        assert_eq!(known.artifacts.len(), ARTIFACTS_MAX);
        known.take_in(some(ARTIFACTS_MAX..ARTIFACTS_MAX + 3));
        assert_eq!(known.artifacts.len(), 3);
    }

    #[tokio::test]
    async fn an_unreadable_file_gives_an_empty_store() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["{", r#"{"format": 9, "artifacts": {}}"#] {
            std::fs::write(dir.path().join("learned.json"), text).unwrap();
            assert_eq!(ProfileStore::open(dir.path()).profiles(Digest::of(b"a")).await, [], "{text}");
        }
    }
}
