//! The worker's data directory: a lock, so that one process owns it, and an identity file, so that
//! it is never used for another node or another cluster.
//!
//! ```text
//! <data-dir>/lock            held for as long as the worker lives
//! <data-dir>/identity.json   format 1: node name and, once a controller was met, cluster id
//! <data-dir>/artifacts/      see `host_tier::store`
//! <data-dir>/learned.json    see `learned`
//! ```

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_types::{ClusterId, NodeName};
use serde::{Deserialize, Serialize};

/// The version of `identity.json` that this build writes and reads.
pub const IDENTITY_FORMAT: u32 = 1;

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process has it.
    #[error("{} is in use by another process: stop that one, or give this worker a data directory of its own", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// It belongs to another node.
    #[error("{} belongs to node {found}, and this worker is {node}: use another directory, or name the worker {found}", path.display())]
    OtherNode {
        /// The directory.
        path: PathBuf,
        /// Whose it is.
        found: NodeName,
        /// Who asked for it.
        node: NodeName,
    },
    /// It belongs to another cluster.
    #[error(
        "this worker belongs to cluster {mine} and the controller to {theirs}: point the worker at its own cluster, or give it a new data directory"
    )]
    OtherCluster {
        /// The cluster of the directory.
        mine: ClusterId,
        /// The cluster of the controller.
        theirs: ClusterId,
    },
    /// Its identity file is of a newer version, or damaged.
    #[error("{} cannot be read as format {IDENTITY_FORMAT} ({problem}): use the build that wrote it, or give the worker a new data directory", path.display())]
    Identity {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// What was being read or written.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    format: u32,
    node: NodeName,
    cluster_id: Option<ClusterId>,
}

/// An owned data directory. Clones share it; the lock goes with the last one.
#[derive(Debug, Clone)]
pub struct DataDir(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    // Sessions with several controllers may learn the cluster's id at once: the first one decides.
    identity: Mutex<Identity>,
    // Released by the operating system at the latest when the process ends, a kill included.
    lock: File,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Closing is not enough: a child that is just being forked has the file open until it runs
        // its program.
        if let Err(error) = self.lock.unlock() {
            tracing::warn!(path = %self.path.display(), %error, "the data directory stays locked");
        }
    }
}

impl DataDir {
    /// Creates or opens the directory for `node` and locks it.
    ///
    /// # Errors
    /// [`Error`] when another process holds it, it is another node's, or the file system refuses.
    pub fn open(path: &Path, node: &NodeName) -> Result<Self, Error> {
        std::fs::create_dir_all(path).map_err(at(path))?;
        let lock = lock(path)?;
        let file = path.join("identity.json");
        let identity = match std::fs::read(&file) {
            Ok(bytes) => read_identity(&file, &bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let new = Identity { format: IDENTITY_FORMAT, node: node.clone(), cluster_id: None };
                write_identity(path, &new)?;
                new
            }
            Err(error) => return Err(at(&file)(error)),
        };
        if identity.node != *node {
            let (path, node) = (path.to_owned(), node.clone());
            return Err(Error::OtherNode { path, found: identity.node, node });
        }
        Ok(Self(Arc::new(Inner { path: path.to_owned(), identity: Mutex::new(identity), lock })))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The cluster it belongs to; `None` until the first controller was met.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        self.identity().cluster_id.clone()
    }

    /// Takes a controller's cluster as this worker's, for ever. Writes a file the first time.
    ///
    /// # Errors
    /// [`Error::OtherCluster`] when it has another already; [`Error::Io`].
    pub fn adopt_cluster(&self, theirs: &ClusterId) -> Result<(), Error> {
        let mut identity = self.identity();
        match &identity.cluster_id {
            Some(mine) if mine == theirs => Ok(()),
            Some(mine) => Err(Error::OtherCluster { mine: mine.clone(), theirs: theirs.clone() }),
            None => {
                let new = Identity { cluster_id: Some(theirs.clone()), ..identity.clone() };
                write_identity(&self.0.path, &new)?;
                *identity = new;
                Ok(())
            }
        }
    }

    fn identity(&self) -> MutexGuard<'_, Identity> {
        // Every holder replaces the whole value in its last step, so a panic leaves a good one.
        self.0.identity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock(path: &Path) -> Result<File, Error> {
    let file = path.join("lock");
    let lock = OpenOptions::new().create(true).append(true).open(&file).map_err(at(&file))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(at(&file)(error)),
    }
}

fn read_identity(path: &Path, bytes: &[u8]) -> Result<Identity, Error> {
    let refuse = |problem: String| Error::Identity { path: path.to_owned(), problem };
    let identity: Identity = serde_json::from_slice(bytes).map_err(|error| refuse(error.to_string()))?;
    if identity.format == IDENTITY_FORMAT {
        Ok(identity)
    } else {
        Err(refuse(format!("it says format {}", identity.format)))
    }
}

fn write_identity(dir: &Path, identity: &Identity) -> Result<(), Error> {
    let path = dir.join("identity.json");
    let text = serde_json::to_vec_pretty(identity).map_err(|error| at(&path)(error.into()))?;
    let tmp = dir.join("identity.json.tmp");
    let write = || {
        let mut file = File::create(&tmp)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&tmp, &path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(at(&path))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    |source| Error::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn cluster(name: &str) -> ClusterId {
        ClusterId(name.into())
    }

    #[test]
    fn one_process_at_a_time_and_a_clear_refusal_for_the_second() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::open(dir.path(), &node("w1")).unwrap();
        assert!(matches!(DataDir::open(dir.path(), &node("w1")), Err(Error::Locked { .. })));
        drop(first);
        DataDir::open(dir.path(), &node("w1")).unwrap();
    }

    #[test]
    fn refuses_a_directory_of_another_node() {
        let dir = tempfile::tempdir().unwrap();
        drop(DataDir::open(dir.path(), &node("w1")).unwrap());
        assert!(matches!(DataDir::open(dir.path(), &node("w2")), Err(Error::OtherNode { .. })));
    }

    #[test]
    fn the_first_cluster_met_is_the_only_one_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::open(dir.path(), &node("w1")).unwrap();
        assert_eq!(first.cluster(), None);
        first.adopt_cluster(&cluster("a")).unwrap();
        drop(first);
        let again = DataDir::open(dir.path(), &node("w1")).unwrap();
        assert_eq!(again.cluster(), Some(cluster("a")));
        again.adopt_cluster(&cluster("a")).unwrap();
        assert!(matches!(again.adopt_cluster(&cluster("b")), Err(Error::OtherCluster { .. })));
        assert_eq!(again.cluster(), Some(cluster("a")));
    }

    #[test]
    fn refuses_a_damaged_or_newer_identity_file() {
        for text in ["", "{}", r#"{"format":2,"node":"w1","cluster_id":null}"#] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("identity.json"), text).unwrap();
            assert!(matches!(DataDir::open(dir.path(), &node("w1")), Err(Error::Identity { .. })), "{text}");
        }
    }
}
