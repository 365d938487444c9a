//! `millrace-chaos`: runs scenarios and says what they found.

mod args;
mod binary;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use millrace_chaos::report::{Folder, Report, Verdict};
use millrace_chaos::scenario::{self, Options, Scenario};
use millrace_chaos::timeline::{Echo, Timeline};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use tokio::runtime::Runtime;

use crate::args::{Cli, Command, How, Output, Run, Soak};

/// Some check of a run failed, or could not be made.
const FAILED: u8 = 1;
/// The command line cannot be used, or nothing could be run.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::List { output } => list(output),
        Command::Run(run) => play(&run),
        Command::Soak(soak) => go_on(&soak),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(USAGE)
    })
}

fn list(output: Output) -> anyhow::Result<ExitCode> {
    match output {
        Output::Text => {
            for it in scenario::all() {
                println!("{:22}{:>9}   {}", it.name(), it.length(), it.about());
            }
        }
        Output::Json => {
            let entry = |it: &Scenario| serde_json::json!({ "name": it.name(), "about": it.about(), "length": it.length() });
            let list: Vec<_> = scenario::all().iter().map(entry).collect();
            println!("{}", serde_json::to_string_pretty(&list)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn play(run: &Run) -> anyhow::Result<ExitCode> {
    let (scenarios, options) = (run.scenarios()?, run.options()?);
    let mut runner = Runner::begin(&run.how)?;
    for scenario in &scenarios {
        runner.run(scenario, &options)?;
    }
    Ok(runner.end())
}

/// Each scenario has a seed of its own, which its report says: it can be run again by itself.
fn go_on(soak: &Soak) -> anyhow::Result<ExitCode> {
    let options = soak.how.options()?;
    let mut runner = Runner::begin(&soak.how)?;
    let (scenarios, mut rng) = (scenario::all(), StdRng::seed_from_u64(options.seed));
    let lasts = Duration::from_secs(60 * u64::from(soak.minutes.get()));
    let timeline = Timeline::begin(Echo::Silent);
    while timeline.now() < lasts {
        let scenario = scenarios.choose(&mut rng).context("there are scenarios")?;
        let seed = u64::from(rng.random::<u32>());
        runner.run(scenario, &Options { seed, ..options.clone() })?;
    }
    Ok(runner.end())
}

/// Runs one scenario after the other, and tells of each.
struct Runner {
    runtime: Runtime,
    output: Output,
    folder: Option<Folder>,
    failed: u32,
    passed: u32,
}

impl Runner {
    /// Everything runs on this thread but what the runtime's own threads carry: processes are tied to
    /// the thread that starts them, and these end last.
    fn begin(how: &How) -> anyhow::Result<Self> {
        let folder = how.report.as_deref().map(Folder::begin).transpose()?;
        let runtime = Runtime::new().context("cannot start the async runtime")?;
        Ok(Self { runtime, output: how.output, folder, failed: 0, passed: 0 })
    }

    fn run(&mut self, scenario: &Scenario, options: &Options) -> anyhow::Result<()> {
        if self.output == Output::Text {
            println!("{} --seed {}: {}", scenario.name(), options.seed, scenario.about());
        }
        let report = self.runtime.block_on(scenario.run(options));
        match report.verdict {
            Verdict::Fail => self.failed += 1,
            Verdict::Pass => self.passed += 1,
            Verdict::Skipped => {}
        }
        print(&report, self.output)?;
        match &mut self.folder {
            Some(folder) => folder.add(report),
            None => Ok(()),
        }
    }

    fn end(self) -> ExitCode {
        if self.passed + self.failed > 1 && self.output == Output::Text {
            println!("{} passed, {} failed", self.passed, self.failed);
        }
        if let Some(folder) = &self.folder {
            eprintln!("report: {}", folder.page().display());
        }
        if self.failed > 0 { ExitCode::from(FAILED) } else { ExitCode::SUCCESS }
    }
}

fn print(report: &Report, output: Output) -> anyhow::Result<()> {
    match output {
        Output::Text => println!("{}\n", report.text()),
        Output::Json => println!("{}", serde_json::to_string(report)?),
    }
    Ok(())
}
