//! The files of a worker's programs, and the state that the processes share.

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

use super::copies::CopyPermits;
use super::health::{ProcessRestarts, ProgramHealths};
use crate::objects::ObjectStore;

/// The command that starts a function's program by a call of [`launch`](super::launch()), which runs the
/// program named in `MILLRACE_FUNCTION_PROGRAM`.
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
pub(crate) struct ProgramStore(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    dir: PathBuf,
    /// The number of files that were written so far.
    files: AtomicU64,
    launcher: ProgramLauncher,
    objects: ObjectStore,
    aside: CopyPermits,
    /// Maximum size of an output in a process's own memory, which is answered in one message.
    output_max: Bytes,
    /// Whether every process has to end. The watch of each process holds a receiver until the process has
    /// ended.
    closing: watch::Sender<bool>,
    pub(super) healths: watch::Sender<ProgramHealths>,
    pub(super) restarts: ProcessRestarts,
}

/// A program that is ready to be started. Its file exists as long as this value, which all owners share: a
/// retiring revision still starts processes for its remaining requests.
#[derive(Debug)]
pub(crate) struct HostedProgram {
    pub(crate) declared: Signature,
    path: PathBuf,
    programs: ProgramStore,
}

impl HostedProgram {
    /// Returns the path of the program's executable file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the store of the program's file.
    pub(crate) fn programs(&self) -> &ProgramStore {
        &self.programs
    }
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
            aside: CopyPermits::default(),
            output_max,
            closing: watch::Sender::new(false),
            healths: watch::Sender::default(),
            restarts: ProcessRestarts::default(),
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

    /// Returns the folder of the programs' files, in which the processes run.
    pub(crate) fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// Returns the command that starts a program.
    pub(crate) fn launcher(&self) -> &ProgramLauncher {
        &self.0.launcher
    }

    /// Returns the objects of the worker, which hold the data of programs.
    pub(crate) fn objects(&self) -> &ObjectStore {
        &self.0.objects
    }

    /// Returns the permits of large copies.
    pub(crate) fn copies(&self) -> &CopyPermits {
        &self.0.aside
    }

    /// Returns the maximum size of an output in a process's own memory.
    pub(crate) fn output_max(&self) -> Bytes {
        self.0.output_max
    }

    /// Returns a receiver that tells whether every process has to end. [`Self::stop`] waits until all
    /// receivers are dropped.
    pub(crate) fn closing(&self) -> watch::Receiver<bool> {
        self.0.closing.subscribe()
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
        let pool = Arc::clone(&hosted);
        drop(hosted);
        assert_eq!(std::fs::read(&pool.path).unwrap(), b"program");
        // The same program is applied again while its earlier revision retires.
        let next = put();
        assert_eq!(files(), 2);
        drop(pool);
        assert_eq!(std::fs::read(&next.path).unwrap(), b"program");
        drop(next);
        assert_eq!(files(), 0);
    }
}
