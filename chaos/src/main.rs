//! `millrace-chaos`: runs scenarios and says what they found.

mod args;
mod binary;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use millrace_chaos::report::{Report, Verdict};
use millrace_chaos::scenario::{self, Options, Scenario};
use millrace_chaos::timeline::Echo;

use crate::args::{Cli, Command, Output, Run};

/// Some check of a run failed, or could not be made.
const FAILED: u8 = 1;
/// The command line cannot be used, or nothing could be run.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::List { output } => list(output),
        Command::Run(run) => play(&run),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(USAGE)
    })
}

fn list(output: Output) -> anyhow::Result<ExitCode> {
    match output {
        Output::Text => {
            for Scenario { name, about, .. } in scenario::ALL {
                println!("{name:22}{about}");
            }
        }
        Output::Json => {
            let entry = |it: &Scenario| serde_json::json!({ "name": it.name, "about": it.about, "rounds": it.rounds });
            let list: Vec<_> = scenario::ALL.iter().map(entry).collect();
            println!("{}", serde_json::to_string_pretty(&list)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn play(run: &Run) -> anyhow::Result<ExitCode> {
    let scenarios = run.scenarios()?;
    let program = binary::find(run.millrace.as_deref())?;
    let seed = match run.seed {
        Some(seed) => seed,
        None => u64::from(getrandom::u32().map_err(|error| anyhow::anyhow!("no randomness: {error}"))?),
    };
    let echo = if run.output == Output::Text { Echo::Print } else { Echo::Silent };
    let (rounds, functions, policies) = (run.rounds(), run.functions(), run.policies());
    let options = Options { seed, program, rounds, functions, policies, echo, keep: run.keep() };
    // Everything runs on this thread but what the runtime's own threads carry: processes are tied to
    // the thread that starts them, and this one ends last.
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let mut failed = false;
    for scenario in scenarios {
        if run.output == Output::Text {
            println!("{} --seed {seed}: {}", scenario.name, scenario.about);
        }
        let report = runtime.block_on(scenario.run(&options));
        failed |= report.verdict == Verdict::Fail;
        print(&report, run.output)?;
    }
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

fn print(report: &Report, output: Output) -> anyhow::Result<()> {
    match output {
        Output::Text => println!("{}\n", report.text()),
        Output::Json => println!("{}", serde_json::to_string(report)?),
    }
    Ok(())
}
