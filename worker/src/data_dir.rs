//! The worker's data directory. A lock file ensures that one process owns the directory. An identity
//! file ensures that the directory is never used for another node or another cluster.
//!
//! ```text
//! <data-dir>/lock            locked while the worker process lives
//! <data-dir>/identity.json   format 1: node name and, after the first controller, cluster id
//! <data-dir>/artifacts/      model files, see `millrace_storage`
//! <data-dir>/learned.json    see `profile_store`
//! ```

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_storage::{DirectoryLock, LockError};
use millrace_types::{ClusterId, NodeName};
use serde::{Deserialize, Serialize};

/// Version of `identity.json` that this build writes and reads.
pub const IDENTITY_FORMAT: u32 = 1;

/// The reason why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process holds the directory's lock.
    #[error("{} is in use by {holder}: stop that process, or give this worker a data directory of its own", path.display())]
    Locked {
        path: PathBuf,
        /// The process that has the lock, such as "process 4711".
        holder: String,
    },
    /// The directory belongs to another node.
    #[error("{} belongs to node {found}, and this worker is {node}: use another directory, or name the worker {found}", path.display())]
    OtherNode {
        path: PathBuf,
        /// Name of the node in the identity file.
        found: NodeName,
        /// Name of this worker's node.
        node: NodeName,
    },
    /// The directory belongs to another cluster than the controller.
    #[error(
        "this worker belongs to cluster {mine} and the controller to {theirs}: point the worker at its own cluster, or give it a new data directory"
    )]
    OtherCluster {
        /// Cluster id in the identity file.
        mine: ClusterId,
        /// Cluster id that the controller reported.
        theirs: ClusterId,
    },
    /// The identity file has an unknown version or is damaged.
    #[error("{} cannot be read as format {IDENTITY_FORMAT} ({problem}): use the build that wrote it, or give the worker a new data directory", path.display())]
    Identity {
        path: PathBuf,
        /// Description of the fault.
        problem: String,
    },
    /// The operating system returned an error.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or directory that was read or written.
        path: PathBuf,
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

/// A data directory that this process has locked. Clones share the lock; the last clone releases
/// the lock.
#[derive(Debug, Clone)]
pub struct DataDir(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    // Sessions with several controllers may receive the cluster id at the same time: the first
    // session sets it.
    identity: Mutex<Identity>,
    // The operating system releases the lock when the process ends, also after a kill.
    _lock: DirectoryLock,
}

impl DataDir {
    /// Creates or opens the directory for `node`, and locks the directory.
    ///
    /// # Errors
    /// [`Error`] if another process holds the lock, the directory belongs to another node or is
    /// damaged, or the file system returns an error.
    pub fn open(path: &Path, node: &NodeName) -> Result<Self, Error> {
        std::fs::create_dir_all(path).map_err(at(path))?;
        let lock = DirectoryLock::acquire(path).map_err(|error| match error {
            LockError::Held { holder } => Error::Locked { path: path.to_owned(), holder },
            LockError::Io { path, source, .. } => Error::Io { path, source },
        })?;
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
            let path = path.to_owned();
            return Err(Error::OtherNode { path, found: identity.node, node: node.clone() });
        }
        Ok(Self(Arc::new(Inner { path: path.to_owned(), identity: Mutex::new(identity), _lock: lock })))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the id of the directory's cluster; `None` before the first controller was met.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        self.identity().cluster_id.clone()
    }

    /// Adopts a controller's cluster as this worker's, for ever. The first call writes the identity file.
    ///
    /// # Errors
    /// [`Error::OtherCluster`] if the directory already belongs to another cluster; [`Error::Io`].
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
        // Each lock holder replaces the whole value in its last step, so a panic leaves a valid
        // value.
        self.0.identity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read_identity(path: &Path, bytes: &[u8]) -> Result<Identity, Error> {
    let refuse = |problem: String| Error::Identity { path: path.to_owned(), problem };
    let identity: Identity = serde_json::from_slice(bytes).map_err(|error| refuse(error.to_string()))?;
    if identity.format == IDENTITY_FORMAT {
        Ok(identity)
    } else {
        Err(refuse(format!("the file has format {}", identity.format)))
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
    fn a_data_directory_in_use_is_refused_until_its_owner_drops_it() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::open(dir.path(), &node("w1")).unwrap();
        assert!(matches!(DataDir::open(dir.path(), &node("w1")), Err(Error::Locked { .. })));
        drop(first);
        DataDir::open(dir.path(), &node("w1")).unwrap();
    }

    #[test]
    fn a_directory_of_another_node_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        drop(DataDir::open(dir.path(), &node("w1")).unwrap());
        assert!(matches!(DataDir::open(dir.path(), &node("w2")), Err(Error::OtherNode { .. })));
    }

    #[test]
    fn a_worker_keeps_its_first_cluster_over_restarts() {
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
    fn a_damaged_or_newer_identity_file_is_refused() {
        for text in ["", "{}", r#"{"format":2,"node":"w1","cluster_id":null}"#] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("identity.json"), text).unwrap();
            assert!(matches!(DataDir::open(dir.path(), &node("w1")), Err(Error::Identity { .. })), "{text}");
        }
    }
}
