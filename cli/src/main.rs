//! The `millrace` binary: everything a user types, and every process of a cluster.
//!
//! This crate parses arguments, reads configuration, sets telemetry up and prints. What a verb does
//! is in `commands/`, one file each; every one that talks to a cluster does so through
//! `millrace-client`.

mod args;
mod clock;
mod cluster;
mod commands;
mod config;
mod failure;
mod load;
mod output;
mod private;
mod process;
mod processes;
mod progress;
mod readiness;
mod removed;
mod session;
mod telemetry;
mod tensors;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Cli, Command};
use crate::failure::Failure;

/// A request allocates a few hundred times, and large tensors' buffers are wanted again at once:
/// glibc's allocator spends a tenth of a busy server and gives each of those buffers back to the
/// kernel.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => match removed::refusal(&error) {
            Some(failure) => return failure.report(),
            None => error.exit(),
        },
    };
    if cli.command.keeps_data() {
        private::keep_new_files_private();
    }
    if let Command::Executor = cli.command {
        // A process of its own kind: no settings, no runtime, no telemetry.
        return millrace_executor::main();
    }
    if let Command::Program = cli.command {
        return millrace_worker::programs::launch();
    }
    if let Command::Inspect(inspect) = &cli.command {
        return inspect.run();
    }
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    let config = cli.command.settle(config::load(&cli.global)?);
    let runtime = tokio::runtime::Runtime::new()
        .map_err(|error| Failure::failed(format!("cannot start the async runtime: {error}")))?;
    let (telemetry, kept) = {
        let _context = runtime.enter();
        telemetry::start(&config, cli.command.default_log(), &cli.command.process())?
    };
    let outcome = commands::run(cli.command, config, kept, &runtime);
    // From here, a plain thread: a flush inside the runtime could wait for itself.
    telemetry.shut_down();
    outcome
}
