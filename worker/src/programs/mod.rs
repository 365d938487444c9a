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
//! | [`aside`] | copies of large data, off the actors' thread |
//! | [`names`] | which names it has, and has used |
//! | [`outputs`] | what it answered, checked |
//! | [`health`] | whether programs start, and how often again, for who shows it |
//! | [`launch`] | what a child does before it is the program |
//! | `log` | what it says, in the worker's log |

mod aside;
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
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_types::workflow::Signature;
use millrace_types::{Bytes, Digest};
use tokio::runtime::Handle;
use tokio::sync::watch;

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
    /// How many files were put there.
    files: AtomicU64,
    launcher: Launcher,
    objects: Objects,
    aside: aside::Aside,
    /// The most bytes that an output in a process's own memory has: it is answered, in one message.
    output_max: Bytes,
    /// Whether every process is to end. Each one's watch holds a receiver until it has.
    closing: watch::Sender<bool>,
    healths: watch::Sender<health::Healths>,
    restarts: health::Restarts,
}

/// A program that is ready to be started. Its file is there as long as this is, which whoever may start
/// it shares: a revision that is going starts processes for the requests that it still has.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) declared: Signature,
    path: PathBuf,
    programs: Programs,
}

impl Drop for Program {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        let remove = move || match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "a program's file stays until the next start");
            }
            _ => {}
        };
        // Not on the thread of the actors, which are the last to have it.
        match Handle::try_current() {
            Ok(threads) => drop(threads.spawn_blocking(remove)),
            Err(_none) => remove(),
        }
    }
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
        let (healths, files) = (watch::Sender::default(), AtomicU64::new(0));
        let (aside, restarts) = (aside::Aside::default(), health::Restarts::default());
        let inner = Inner { dir, files, launcher, objects, aside, output_max, closing, healths, restarts };
        Ok(Self(Arc::new(inner)))
    }

    /// Puts a program's file where it can be started: one of its own each time, since the one before of
    /// the same program may be going still. Blocks.
    ///
    /// # Errors
    /// The file system's. Nothing is left then.
    pub(crate) fn put(&self, digest: Digest, declared: Signature, file: &[u8]) -> io::Result<Program> {
        let number = self.0.files.fetch_add(1, Ordering::Relaxed);
        let path = self.0.dir.join(format!("{}-{number}", digest.hex()));
        let program = Program { declared, path, programs: self.clone() };
        let mut options = std::fs::OpenOptions::new();
        let mut open = options.write(true).create_new(true).mode(0o700).open(&program.path)?;
        io::Write::write_all(&mut open, file)?;
        Ok(program)
    }

    /// Ends every process, and returns when none is left.
    pub(crate) async fn stop(&self) {
        self.0.closing.send_replace(true);
        self.0.closing.closed().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_file_is_there_as_long_as_somebody_may_start_it() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = Launcher { program: "/nowhere".into(), args: Vec::new(), envs: Vec::new() };
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (objects, _told) = runtime.block_on(async { Objects::registered(Bytes::ZERO) });
        let programs = Programs::open(dir.path(), launcher, objects, Bytes::ZERO).unwrap();
        let put = || {
            let declared = Signature { inputs: Vec::new(), outputs: Vec::new() };
            Arc::new(programs.put(Digest::of(b"program"), declared, b"program").unwrap())
        };
        let files = || std::fs::read_dir(dir.path()).unwrap().count();
        let hosted = put();
        let crew = Arc::clone(&hosted);
        drop(hosted);
        assert_eq!(std::fs::read(&crew.path).unwrap(), b"program");
        // The same program applied again, while the one before is going.
        let next = put();
        assert_eq!(files(), 2);
        drop(crew);
        assert_eq!(std::fs::read(&next.path).unwrap(), b"program");
        drop(next);
        assert_eq!(files(), 0);
    }
}
