//! Functions that are programs of their owners (D10, D11): a worker that allows it keeps processes of
//! them running beside its GPUs. They see data and never a device, take no place in the GPUs' queue,
//! and no GPU time is charged for them.
//!
//! ```text
//! Function ── Enqueue ─► Crew ── Call ─► process          an actor each; policy::crew decides
//!     ▲                   │ ▲              │
//!     └─── Computed ──────┘ └── Return ────┤
//!                 objects ◄── Store, Fetch ┘              memfds: no byte is moved
//! ```
//! A process is what a file says that its owner uploaded, so it is started only where the operator
//! said so. It is of the worker's user and is not shut off from it: whoever may publish programs may
//! do what the worker may. It has few of the worker's variables, none of its descriptors but its
//! socket, and it dies with the worker.
//!
//! | module | holds |
//! |---|---|
//! | [`crew`] | the actor: the processes of one function |
//! | [`process`] | one of them, from its start to its end |
//! | [`data`] | what it names, stores and fetches |
//! | [`names`] | which names it has, and has used |
//! | [`outputs`] | what it answered, checked |
//! | [`health`] | whether programs start, for who says what is ready |
//! | [`launch`] | what a child does before it is the program |
//! | `log` | what it says, in the worker's log |

pub(crate) mod crew;
mod data;
pub(crate) mod health;
mod launch;
mod log;
mod names;
mod outputs;
mod process;

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millrace_types::workflow::Signature;
use millrace_types::{Bytes, Digest};
use tokio::sync::watch;

use crate::host_tier::store;
use crate::objects::Objects;

pub use launch::launch;

/// The program that becomes a user's: it finds which in `MILLRACE_FUNCTION_PROGRAM`, and calls
/// [`launch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables added to those that a process has.
    pub envs: Vec<(OsString, OsString)>,
}

impl Launcher {
    /// This program with the argument `program`: what `millrace` understands.
    ///
    /// # Errors
    /// When the operating system does not tell which program this is.
    pub fn this_program() -> io::Result<Self> {
        Ok(Self { program: std::env::current_exe()?, args: vec!["program".into()], envs: Vec::new() })
    }
}

/// Where a worker's programs are, and what their processes share. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Programs(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    launcher: Launcher,
    objects: Objects,
    /// The most bytes that an output in a process's own memory has: it is answered, in one message.
    output_max: Bytes,
    /// Whether every process is to end. Each one's watch holds a receiver until it has.
    closing: watch::Sender<bool>,
    healths: watch::Sender<health::Healths>,
}

/// A program that is ready to be started.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) declared: Signature,
    path: PathBuf,
    programs: Programs,
}

impl Programs {
    /// Opens the folder, and removes what another worker process left there.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn open(
        dir: &Path,
        launcher: Launcher,
        objects: Objects,
        output_max: Bytes,
    ) -> io::Result<Self> {
        match std::fs::remove_dir_all(dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => std::fs::create_dir_all(dir)?,
        }
        let (dir, closing) = (std::path::absolute(dir)?, watch::Sender::new(false));
        let healths = watch::Sender::default();
        Ok(Self(Arc::new(Inner { dir, launcher, objects, output_max, closing, healths })))
    }

    /// Puts a program's file where it can be started. Blocks.
    ///
    /// # Errors
    /// The file system's.
    pub(crate) fn put(&self, digest: Digest, declared: Signature, file: &[u8]) -> io::Result<Program> {
        let path = self.path(digest);
        let unfinished = path.with_extension("tmp");
        let mut options = std::fs::OpenOptions::new();
        let mut open = options.write(true).create(true).truncate(true).mode(0o700).open(&unfinished)?;
        io::Write::write_all(&mut open, file)?;
        drop(open);
        // Those that run it keep the file they began with.
        std::fs::rename(&unfinished, &path)?;
        Ok(Program { declared, path, programs: self.clone() })
    }

    /// Removes a program's file. Blocks.
    ///
    /// # Errors
    /// [`store::Error::Io`].
    pub(crate) fn remove(&self, digest: Digest) -> Result<(), store::Error> {
        let path = self.path(digest);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(store::Error::Io { path, source }),
            _ => Ok(()),
        }
    }

    fn path(&self, digest: Digest) -> PathBuf {
        self.0.dir.join(digest.hex())
    }

    /// Ends every process, and returns when none is left.
    pub(crate) async fn stop(&self) {
        self.0.closing.send_replace(true);
        self.0.closing.closed().await;
    }
}
