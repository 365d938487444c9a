//! `completions`: a shell's completion script on standard output.

use clap_complete::Shell;

use crate::failure::CommandFailure;
use crate::output::print;

/// Print a shell's completion script.
#[derive(Debug, clap::Args)]
#[command(after_help = "For bash, in ~/.bashrc: source <(millrace completions bash)")]
pub(crate) struct Args {
    /// The shell that runs the script.
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completion script of a command line.
pub(crate) fn run(args: &Args, command: &mut clap::Command) -> Result<(), CommandFailure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "millrace", &mut script);
    print(&String::from_utf8_lossy(&script))
}
