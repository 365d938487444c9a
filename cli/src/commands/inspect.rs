//! `inspect`: checks a model file for a controller, in a separate process.

use std::process::ExitCode;

use crate::process;

/// Check the model file on standard input for a controller.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The process that started this one; when it ends, this process ends.
    #[arg(value_name = "PID")]
    parent: u32,
}

impl Args {
    pub(crate) fn run(&self) -> ExitCode {
        match process::die_with(self.parent) {
            Ok(()) => millrace_controller::serve_inspection(),
            Err(failure) => failure.report(),
        }
    }
}
