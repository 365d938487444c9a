//! The `millrace` binary: the command line, and every process of a cluster.
//!
//! This crate parses arguments, reads configuration, starts telemetry and prints. Each file in
//! `commands/` implements one verb, `args` lists all verbs, and `dispatch` runs one. Every verb that
//! calls a cluster uses `millrace-client`.

mod args;
mod clock;
mod cluster;
mod commands;
mod config;
mod dispatch;
mod failure;
mod huge_pages;
mod load;
mod manifests;
mod output;
mod private;
mod process;
mod processes;
mod progress;
mod readiness;
mod removed;
mod session;
mod target;
mod telemetry;
mod tensors;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Cli, Command};
use crate::failure::CommandFailure;

/// A request allocates a few hundred times, and the buffers of large tensors are soon needed again.
/// With glibc's allocator, a busy server spends a tenth of its time in the allocator, and each of
/// these buffers is returned to the kernel.
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
    huge_pages::enable(matches!(cli.command, Command::Executor | Command::Program));
    if let Command::Executor = cli.command {
        // An executor reads no settings and needs no runtime and no telemetry.
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

fn run(cli: Cli) -> Result<(), CommandFailure> {
    let config = cli.command.with_overrides(config::load(&cli.global)?);
    let runtime = tokio::runtime::Runtime::new()
        .map_err(|error| CommandFailure::failed(format!("cannot start the async runtime: {error}")))?;
    let (telemetry, kept) = {
        let _context = runtime.enter();
        telemetry::start(&config, cli.command.default_log(), &cli.command.process())?
    };
    let outcome = dispatch::run(cli.command, config, kept, &runtime);
    // Shut down outside the runtime: a flush inside the runtime could wait for itself.
    telemetry.shut_down();
    outcome
}
