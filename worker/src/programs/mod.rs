//! Functions that are programs of their owners (D10, D11). A worker that allows programs keeps their
//! processes running beside its GPUs. The processes see data and never a device, their requests do not
//! enter the GPUs' queue, and no GPU time is billed.
//!
//! ```text
//! Function ── Enqueue ─► pool ── Call ─► process   an actor each; policy::process_pool decides
//!     ▲                   │ ▲              │
//!     └─── Computed ──────┘ └── Return ────┤
//!                 objects ◄── Store, Fetch ┘              memfds: no byte is moved
//! ```
//! A process runs a file that the function's owner uploaded, so a worker runs programs only with the
//! operator's permission. The process runs as the worker's user without a sandbox: a client that may
//! publish programs may do everything that the worker may. The process gets few of the worker's
//! environment variables and, apart from its socket, none of its descriptors. The process dies with the
//! worker.
//!
//! | module | holds |
//! |---|---|
//! | [`pool`] | the actor of a process pool: the processes of one function |
//! | [`process`] | a process, from start to end |
//! | [`data`] | the data that a process names, stores and fetches |
//! | [`copies`] | copies of large data, off the actor thread |
//! | [`names`] | the data names of a process |
//! | [`outputs`] | the check of a process's outputs |
//! | [`health`] | the health and the restarts of programs, for status and metrics |
//! | [`launch`] | the steps of a child process before the program runs |
//! | `log` | the output of a process in the worker's log |

mod copies;
mod data;
pub(crate) mod health;
mod launch;
mod log;
mod names;
mod outputs;
pub(crate) mod pool;
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

use crate::objects::ObjectStore;

pub use launch::launch;

/// The command that starts a function's program by a call of [`launch`], which runs the program named in
/// `MILLRACE_FUNCTION_PROGRAM`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramLauncher {
    /// The executable of the launcher.
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Environment variables that each process gets in addition.
    pub envs: Vec<(OsString, OsString)>,
}

impl ProgramLauncher {
    /// Returns the present executable with the argument `program`, which the `millrace` binary understands.
    ///
    /// # Errors
    /// The path of the present executable is unknown.
    pub fn this_program() -> io::Result<Self> {
        Ok(Self { program: std::env::current_exe()?, args: vec!["program".into()], envs: Vec::new() })
    }
}

/// The folder of a worker's programs, and the state that the processes share. Clones share both.
#[derive(Debug, Clone)]
pub(crate) struct ProgramStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    /// The number of files that were written so far.
    files: AtomicU64,
    launcher: ProgramLauncher,
    objects: ObjectStore,
    aside: copies::CopyPermits,
    /// Maximum size of an output in a process's own memory, which is answered in one message.
    output_max: Bytes,
    /// Whether every process has to end. The watch of each process holds a receiver until the process has
    /// ended.
    closing: watch::Sender<bool>,
    healths: watch::Sender<health::ProgramHealths>,
    restarts: health::ProcessRestarts,
}

/// A program that is ready to be started. Its file exists as long as this value, which all owners share: a
/// retiring revision still starts processes for its remaining requests.
#[derive(Debug)]
pub(crate) struct HostedProgram {
    pub(crate) declared: Signature,
    path: PathBuf,
    programs: ProgramStore,
}

impl Drop for HostedProgram {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        let remove = move || match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    "cannot delete a program's file: the next start of the worker deletes it"
                );
            }
            _ => {}
        };
        // The last owner is usually an actor, and the actor thread must not block.
        match Handle::try_current() {
            Ok(threads) => drop(threads.spawn_blocking(remove)),
            Err(_none) => remove(),
        }
    }
}

impl ProgramStore {
    /// Opens the folder, and removes the files of an earlier worker process.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn open(
        dir: &Path,
        launcher: ProgramLauncher,
        objects: ObjectStore,
        output_max: Bytes,
    ) -> io::Result<Self> {
        match std::fs::remove_dir_all(dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => std::fs::create_dir_all(dir)?,
        }
        Ok(Self(Arc::new(Inner {
            dir: std::path::absolute(dir)?,
            files: AtomicU64::new(0),
            launcher,
            objects,
            aside: copies::CopyPermits::default(),
            output_max,
            closing: watch::Sender::new(false),
            healths: watch::Sender::default(),
            restarts: health::ProcessRestarts::default(),
        })))
    }

    /// Writes a program's executable file. Each call writes a new file, because an earlier revision with
    /// the same program may still use the earlier file. Blocks.
    ///
    /// # Errors
    /// Errors of the file system. No file is left behind.
    pub(crate) fn put(&self, digest: Digest, declared: Signature, file: &[u8]) -> io::Result<HostedProgram> {
        let number = self.0.files.fetch_add(1, Ordering::Relaxed);
        let path = self.0.dir.join(format!("{}-{number}", digest.hex()));
        let program = HostedProgram { declared, path, programs: self.clone() };
        let mut options = std::fs::OpenOptions::new();
        let mut open = options.write(true).create_new(true).mode(0o700).open(&program.path)?;
        io::Write::write_all(&mut open, file)?;
        Ok(program)
    }

    /// Ends every process, and waits until all processes have ended.
    pub(crate) async fn stop(&self) {
        self.0.closing.send_replace(true);
        self.0.closing.closed().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_file_exists_as_long_as_the_program_has_an_owner() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = ProgramLauncher { program: "/nowhere".into(), args: Vec::new(), envs: Vec::new() };
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (objects, _told) = runtime.block_on(async { ObjectStore::registered(Bytes::ZERO) });
        let programs = ProgramStore::open(dir.path(), launcher, objects, Bytes::ZERO).unwrap();
        let put = || {
            let declared = Signature { inputs: Vec::new(), outputs: Vec::new() };
            Arc::new(programs.put(Digest::of(b"program"), declared, b"program").unwrap())
        };
        let files = || std::fs::read_dir(dir.path()).unwrap().count();
        let hosted = put();
        let crew = Arc::clone(&hosted);
        drop(hosted);
        assert_eq!(std::fs::read(&crew.path).unwrap(), b"program");
        // The same program is applied again while its earlier revision retires.
        let next = put();
        assert_eq!(files(), 2);
        drop(crew);
        assert_eq!(std::fs::read(&next.path).unwrap(), b"program");
        drop(next);
        assert_eq!(files(), 0);
    }
}
