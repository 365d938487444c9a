//! A controller's data directory, used by a single process at a time and by a single member of a
//! single cluster.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millrace_cluster_state::ControllerId;
use millrace_storage::{DirectoryLock, LockError};
use millrace_types::ClusterId;

use crate::error::Error;
use crate::frame::RecordFault;
use crate::fs::{self as seam, DiskFs, Fs};

const IDENTITY: &str = "identity";
/// A marker file in a directory with a diverged state, which must not be used.
const DIVERGED: &str = "diverged";

/// The format of the identity file, which stands for the format of the whole directory.
///
/// | format | since | content |
/// |---|---|---|
/// | 1 | 0.1.0 | `identity`, `log/` in sled 0.34, `log.witness`, `snapshots/`; still read |
/// | 2 | 0.1.0 | the identity file has the id of the directory |
const FORMAT: u32 = 2;
/// The first format, whose identity file has no line for the directory.
const FORMAT_UNNAMED: u32 = 1;

/// The owner of a data directory: a member of a cluster's controller group. Written once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryOwner {
    pub cluster: ClusterId,
    pub controller: ControllerId,
    /// The directory's own id, drawn at random when it was created: a member that lost its
    /// directory cannot claim its identity with a new directory. Empty in a directory of format 1.
    pub directory: String,
}

impl fmt::Display for DirectoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "controller {} of cluster {}", self.controller.0, self.cluster)
    }
}

/// A data directory, locked until this value is dropped.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    identity: Option<DirectoryOwner>,
    _lock: DirectoryLock,
}

impl DataDir {
    /// Creates the directory if it is missing, locks it and reads its identity. Blocks.
    ///
    /// # Errors
    /// [`Error::InUse`] if another process has the lock; [`Error::UnknownFormat`] and
    /// [`Error::Damaged`] for the identity file; [`Error::Diverged`] after [`mark_diverged`];
    /// [`Error::Io`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        fs::create_dir_all(&path).map_err(Error::io("making", &path))?;
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            DiskFs::default().sync_dir(parent).map_err(Error::io("syncing", parent))?;
        }
        let lock = DirectoryLock::acquire(&path).map_err(|error| match error {
            LockError::Held { holder } => Error::InUse { path: path.clone(), holder },
            LockError::Io { doing, path, source } => Error::Io { doing, path, source },
        })?;
        // On an error below, dropping this value releases the lock.
        let mut dir = Self { path, identity: None, _lock: lock };
        dir.identity = read_identity(&DiskFs::default(), &dir.path)?;
        match fs::read_to_string(dir.path.join(DIVERGED)) {
            Ok(entry) => Err(Error::Diverged { path: dir.path.clone(), entry: entry.trim().to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(dir),
            Err(error) => Err(Error::io("reading", &dir.path.join(DIVERGED))(error)),
        }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory's owner; `None` for a new directory, before [`crate::open`] sets the owner.
    #[must_use]
    pub fn identity(&self) -> Option<&DirectoryOwner> {
        self.identity.as_ref()
    }

    pub(crate) fn set_owner(&mut self, identity: &DirectoryOwner) -> Result<(), Error> {
        write_identity(&DiskFs::default(), &self.path, identity)?;
        self.identity = Some(identity.clone());
        Ok(())
    }
}

/// Marks a data directory as diverged, so that every later open refuses the directory. After log
/// entry `index` a majority of the controllers has another state. Blocks.
///
/// # Errors
/// [`Error::Io`].
pub fn mark_diverged(dir: &Path, index: u64) -> Result<(), Error> {
    let written = seam::write_durably(&DiskFs::default(), dir, DIVERGED, |file| {
        file.append(format!("{index}\n").as_bytes())
    });
    written.map_err(Error::io("writing", &dir.join(DIVERGED)))
}

/// Renders the identity file: text that an operator can read, which in every format ends with the
/// checksum of all lines before.
fn render(identity: &DirectoryOwner) -> String {
    let mut text = format!(
        "millrace data directory\nformat {FORMAT}\ncluster {}\ncontroller {}\ndirectory {}\n",
        identity.cluster, identity.controller.0, identity.directory
    );
    let checksum = crc32fast::hash(text.as_bytes());
    text.push_str(&format!("checksum {checksum:08x}\n"));
    text
}

fn parse(bytes: &[u8]) -> Result<DirectoryOwner, RecordFault> {
    let damaged = || RecordFault::Damaged("its contents are not those that were written".to_owned());
    let text = std::str::from_utf8(bytes).map_err(|_| damaged())?;
    let contents = text.len().checked_sub("checksum 00000000\n".len()).and_then(|end| text.get(..end));
    let contents = contents.ok_or_else(damaged)?;
    if text[contents.len()..] != format!("checksum {:08x}\n", crc32fast::hash(contents.as_bytes())) {
        return Err(RecordFault::Damaged("its checksum does not match".to_owned()));
    }
    let mut lines = contents.lines();
    let mut field = |name: &str| lines.next().and_then(|line| line.strip_prefix(name)).ok_or_else(damaged);
    field("millrace data directory")?;
    let found = field("format ")?.parse().map_err(|_| damaged())?;
    if ![FORMAT_UNNAMED, FORMAT].contains(&found) {
        return Err(RecordFault::UnknownFormat { found, known: FORMAT });
    }
    let cluster = ClusterId(Arc::from(field("cluster ")?));
    let controller = ControllerId(field("controller ")?.parse().map_err(|_| damaged())?);
    let directory = if found == FORMAT_UNNAMED { "" } else { field("directory ")? };
    Ok(DirectoryOwner { cluster, controller, directory: directory.to_owned() })
}

pub(crate) fn read_identity(fs: &dyn Fs, dir: &Path) -> Result<Option<DirectoryOwner>, Error> {
    let path = dir.join(IDENTITY);
    let names = fs.list(dir).map_err(Error::io("reading", dir))?;
    if !names.iter().any(|name| name == IDENTITY) {
        return Ok(None);
    }
    let read = fs.open(&path).and_then(|file| seam::read_all(&*file));
    let bytes = read.map_err(Error::io("reading", &path))?;
    parse(&bytes).map(Some).map_err(|flaw| Error::flaw(format!("identity file {}", path.display()), flaw))
}

pub(crate) fn write_identity(fs: &dyn Fs, dir: &Path, identity: &DirectoryOwner) -> Result<(), Error> {
    let id = &*identity.cluster.0;
    if !(1..=128).contains(&id.len()) || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::BadClusterId(id.to_owned()));
    }
    let name = identity.directory.bytes();
    if identity.directory.len() > 128 || !name.into_iter().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::BadDirectoryName(identity.directory.clone()));
    }
    let written = seam::write_durably(fs, dir, IDENTITY, |file| file.append(render(identity).as_bytes()));
    written.map_err(Error::io("writing", &dir.join(IDENTITY)))
}
