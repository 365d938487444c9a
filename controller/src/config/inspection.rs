//! The choice of the process that checks uploaded models.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

/// The process that checks models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inspection {
    /// Models are checked in the controller's process, for tests that have no program at hand.
    InProcess,
    /// Each model is checked in a separate child process.
    Child(InspectorCommand),
}

/// The command line of an inspecting process. The last argument is the process id of the parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InspectorCommand {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
}

impl InspectorCommand {
    /// Returns `inspect` of the running program.
    ///
    /// # Errors
    /// The system does not report the path of the running program.
    pub fn this_program() -> io::Result<Self> {
        Ok(Self { program: std::env::current_exe()?, args: vec!["inspect".into()] })
    }
}
