//! What the cost model learned of each model, on the worker's disk: a worker that starts again predicts
//! runs and loads as the one before it did (L15, L21), and no request has to show them first.
//!
//! `<data-dir>/learned.json`, format 1: by artifact, what bringing it from the host and running it takes
//! on each type of GPU, in nanoseconds. Written every [`EVERY`] where something changed, and at the end.
//! It only helps: a file that cannot be read is said so, and learned anew.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_types::Digest;
use serde::{Deserialize, Serialize};
use tokio::task::{JoinSet, spawn_blocking};

use crate::handle::NodeHandle;
use crate::install::Profile;

/// The version of the file that this build writes and reads.
const FORMAT: u32 = 1;
/// How often it is written at most.
const EVERY: Duration = Duration::from_secs(30);
/// Artifacts that are remembered. Of more, those that the node does not serve are forgotten.
const ARTIFACTS_MAX: usize = 10_000;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OnGpu {
    gpu_type: String,
    load_ns: u64,
    run_ns: u64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Document {
    format: u32,
    artifacts: BTreeMap<Digest, Vec<OnGpu>>,
}

/// What was learned. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Learned {
    path: Arc<Path>,
    known: Arc<Mutex<BTreeMap<Digest, Vec<OnGpu>>>>,
}

impl Learned {
    /// What an earlier worker of this directory left.
    pub(crate) fn open(dir: &Path) -> Self {
        let path = dir.join("learned.json");
        let known = read(&path).unwrap_or_else(|problem| {
            tracing::warn!(path = %path.display(), problem, "what was learned of models cannot be read: it is learned anew");
            BTreeMap::new()
        });
        Self { path: path.into(), known: Arc::new(Mutex::new(known)) }
    }

    /// What is known of an artifact.
    pub(crate) fn profiles(&self, digest: Digest) -> Vec<Profile> {
        let profile = |it: &OnGpu| Profile {
            gpu_type: it.gpu_type.clone(),
            load: Duration::from_nanos(it.load_ns),
            run: Duration::from_nanos(it.run_ns),
        };
        self.known().get(&digest).map(|of| of.iter().map(profile).collect()).unwrap_or_default()
    }

    /// Keeps up with what the node learns, until the task is dropped.
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

    /// Writes what the node has learned, where that is news.
    pub(crate) async fn keep(&self, node: &NodeHandle) {
        if !self.take_in(node.learned().await) {
            return;
        }
        let (path, artifacts) = (self.path.clone(), self.known().clone());
        let document = Document { format: FORMAT, artifacts };
        let written = spawn_blocking(move || write(&path, &document)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(path = %self.path.display(), %error, "what was learned of models cannot be written");
        }
    }

    /// Whether any of it is news.
    fn take_in(&self, learned: Vec<(Digest, Profile)>) -> bool {
        let mut served = BTreeMap::<Digest, Vec<OnGpu>>::new();
        for (digest, Profile { gpu_type, load, run }) in learned {
            let [load_ns, run_ns] =
                [load, run].map(|span| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
            served.entry(digest).or_default().push(OnGpu { gpu_type, load_ns, run_ns });
        }
        let mut known = self.known();
        let news = served.iter().any(|(digest, of)| known.get(digest) != Some(of));
        if known.len() + served.len() > ARTIFACTS_MAX {
            known.clear();
        }
        known.extend(served);
        news
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Digest, Vec<OnGpu>>> {
        // Whatever a panic left is a guess like any other.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> Result<BTreeMap<Digest, Vec<OnGpu>>, String> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error.to_string()),
    };
    let document: Document = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if document.format == FORMAT {
        Ok(document.artifacts)
    } else {
        Err(format!("it is of format {}, and this build reads {FORMAT}", document.format))
    }
}

/// Whole or not at all.
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
        let (load, run) = (Duration::from_millis(40), Duration::from_millis(run_ms));
        Profile { gpu_type: "V100".to_owned(), load, run }
    }

    fn document(learned: &Learned) -> Document {
        Document { format: FORMAT, artifacts: learned.known().clone() }
    }

    #[test]
    fn another_worker_of_the_directory_knows_it() {
        let dir = tempfile::tempdir().unwrap();
        let learned = Learned::open(dir.path());
        let digest = Digest::of(b"a");
        assert_eq!(learned.profiles(digest), []);
        assert!(learned.take_in(vec![(digest, profile(10))]));
        assert!(!learned.take_in(vec![(digest, profile(10))]), "it is no news");
        assert!(learned.take_in(vec![(digest, profile(12))]));
        write(&learned.path, &document(&learned)).unwrap();
        let again = Learned::open(dir.path());
        assert_eq!(again.profiles(digest), [profile(12)]);
        assert!(!again.take_in(Vec::new()), "what is not served now stays known");
        assert_eq!(again.profiles(digest), [profile(12)]);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_learned_anew() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["{", r#"{"format": 9, "artifacts": {}}"#] {
            std::fs::write(dir.path().join("learned.json"), text).unwrap();
            let learned = Learned::open(dir.path());
            assert_eq!(learned.profiles(Digest::of(b"a")), [], "{text}");
        }
    }
}
