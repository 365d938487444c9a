//! `completions`: a shell's completion script on standard output.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::args::Cli;
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

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "millrace", &mut script);
    print(&String::from_utf8_lossy(&script))
}
