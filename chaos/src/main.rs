//! `millrace-chaos`: runs scenarios and reports their verdicts.

mod args;
mod binary;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Parser as _;
use millrace_chaos::cluster::{Ground, HarnessNamespace};
use millrace_chaos::hostile;
use millrace_chaos::report::{CheckVerdict, HarnessUsage, ReportFolder, RunReport};
use millrace_chaos::scenario::{self, ChaosScenario, ScenarioOptions};
use millrace_chaos::timeline::{EventOutput, Timeline};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{ChaosCli, ChaosCommand, CommonArgs, ReportFormat, RunArgs, SoakArgs};

/// Exit code if a check of a run failed or could not be made.
const FAILED: u8 = 1;
/// Exit code if the command line is invalid, or no scenario could be run.
const USAGE: u8 = 2;
/// Exit code after an interrupt: 128 and the number of SIGINT, as in shells.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let done = match ChaosCli::parse().command {
        ChaosCommand::List { output } => list(output),
        ChaosCommand::Run(run) => play(&run),
        ChaosCommand::Soak(soak) => go_on(&soak),
        ChaosCommand::Attack(orders) => hostile::run(&orders).map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(USAGE)
    })
}

fn list(output: ReportFormat) -> anyhow::Result<ExitCode> {
    let grounds = |it: &ChaosScenario| it.grounds().map(Ground::word).collect::<Vec<_>>();
    match output {
        ReportFormat::Text => {
            for it in scenario::all() {
                println!("{:22}{:>9}   {}", it.name(), it.length(), it.about());
                println!("{:34}on {}", "", grounds(&it).join(", "));
            }
        }
        ReportFormat::Json => {
            let entry = |it: &ChaosScenario| serde_json::json!({ "name": it.name(), "about": it.about(), "length": it.length(), "grounds": grounds(it) });
            let list: Vec<_> = scenario::all().iter().map(entry).collect();
            println!("{}", serde_json::to_string_pretty(&list)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn play(run: &RunArgs) -> anyhow::Result<ExitCode> {
    let options = run.options()?;
    let scenarios = run.scenarios(&options)?;
    let mut runner = Runner::begin(&run.how, &options)?;
    for scenario in &scenarios {
        runner.run(scenario, &options)?;
        if runner.interrupted {
            break;
        }
    }
    Ok(runner.end())
}

/// Runs scenarios until the time is over. Each scenario gets its own seed, which its report names,
/// so that a scenario can be run again alone.
fn go_on(soak: &SoakArgs) -> anyhow::Result<ExitCode> {
    let options = soak.how.options()?;
    let mut runner = Runner::begin(&soak.how, &options)?;
    // Without this check the loop would skip every scenario, which takes no time, until the time is
    // over.
    if let Some(reason) = &runner.unavailable {
        bail!("{reason}");
    }
    let scenarios: Vec<_> = scenario::all().into_iter().filter(|it| it.refusal(&options).is_none()).collect();
    let mut rng = StdRng::seed_from_u64(options.seed);
    let lasts = Duration::from_secs(60 * u64::from(soak.minutes.get()));
    let timeline = Timeline::begin(EventOutput::Silent);
    while timeline.now() < lasts && !runner.interrupted {
        let scenario = scenarios.choose(&mut rng).context("there are scenarios")?;
        let seed = u64::from(rng.random::<u32>());
        runner.run(scenario, &ScenarioOptions { seed, ..options.clone() })?;
        runner.rolling(timeline.now(), lasts, &options)?;
    }
    Ok(runner.end())
}

/// Runs scenarios in sequence, and reports each.
struct Runner {
    runtime: Runtime,
    output: ReportFormat,
    folder: Option<ReportFolder>,
    reports: RunTotals,
    interrupted: bool,
    /// The reason why the ground is not available on this machine.
    unavailable: Option<String>,
    /// The harness's namespace, dropped after the runtime and its processes.
    _switch: Option<HarnessNamespace>,
}

/// Counts of all runs so far.
#[derive(Debug, Default)]
struct RunTotals {
    failed: u32,
    passed: u32,
    skipped: u32,
    requests: u64,
    lost: u64,
    faults: usize,
}

impl Runner {
    /// Starts the runtime. The runs stay on this thread, and the runtime's own threads end last:
    /// processes are tied to the thread that starts them.
    fn begin(how: &CommonArgs, options: &ScenarioOptions) -> anyhow::Result<Self> {
        let folder = how.report.as_deref().map(ReportFolder::begin).transpose()?;
        // Enter the namespace before the runtime starts: new threads inherit the namespace of this
        // thread.
        let entered = match options.ground.kind {
            Ground::Namespaces => HarnessNamespace::enter().map(Some),
            Ground::Processes | Ground::Compose => options.ground.check().map(|()| None),
        };
        let unavailable = entered.as_ref().err();
        let unavailable = unavailable.map(|error| format!("this machine has no such ground: {error:#}"));
        let runtime = Runtime::new().context("cannot start the async runtime")?;
        Ok(Self {
            runtime,
            output: how.output,
            folder,
            reports: RunTotals::default(),
            interrupted: false,
            unavailable,
            _switch: entered.unwrap_or_default(),
        })
    }

    fn run(&mut self, scenario: &ChaosScenario, options: &ScenarioOptions) -> anyhow::Result<()> {
        if self.output == ReportFormat::Text {
            println!("{} --seed {}: {}", scenario.name(), options.seed, scenario.about());
        }
        let report = match self.unavailable.clone() {
            Some(reason) => scenario.skipped(options, reason),
            None => match self.runtime.block_on(unless_interrupted(scenario.run(options)))? {
                Some(report) => report,
                None => {
                    self.interrupted = true;
                    return Ok(());
                }
            },
        };
        self.reports.add(&report);
        print(&report, self.output)?;
        match &mut self.folder {
            Some(folder) => folder.add(report),
            None => Ok(()),
        }
    }

    /// Prints the counts so far, and adds a sample of the harness's own resources to the report.
    fn rolling(&mut self, passed: Duration, of: Duration, options: &ScenarioOptions) -> anyhow::Result<()> {
        let own = HarnessUsage::now(passed);
        if self.output == ReportFormat::Text {
            let RunTotals { failed, passed: held, skipped, requests, lost, faults } = self.reports;
            let minutes = |span: Duration| span.as_secs() / 60;
            println!(
                "soak --seed {}, {} of {} minutes: {held} passed, {failed} failed, {skipped} skipped; {faults} faults, {requests} requests, {lost} lost; the harness has {own}\n",
                options.seed,
                minutes(passed),
                minutes(of),
            );
        }
        match &mut self.folder {
            Some(folder) => folder.note(own),
            None => Ok(()),
        }
    }

    fn end(self) -> ExitCode {
        let RunTotals { failed, passed, .. } = self.reports;
        if passed + failed > 1 && self.output == ReportFormat::Text {
            println!("{passed} passed, {failed} failed");
        }
        if let Some(folder) = &self.folder {
            eprintln!("report: {}", folder.page().display());
        }
        match (failed, self.interrupted) {
            (1.., _) => ExitCode::from(FAILED),
            (_, true) => ExitCode::from(INTERRUPTED),
            _ => ExitCode::SUCCESS,
        }
    }
}

impl RunTotals {
    fn add(&mut self, report: &RunReport) {
        match report.verdict {
            CheckVerdict::Fail => self.failed += 1,
            CheckVerdict::Pass => self.passed += 1,
            CheckVerdict::Skipped => self.skipped += 1,
        }
        self.requests += report.requests.total.ended();
        self.lost += report.requests.total.lost;
        self.faults += report.faults();
    }
}

/// Returns the result of a run; `None` after a signal, when the run is dropped together with
/// everything that it made.
async fn unless_interrupted<T>(run: impl Future<Output = T>) -> anyhow::Result<Option<T>> {
    let failed = "cannot listen for signals";
    let mut terminate = signal(SignalKind::terminate()).context(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).context(failed)?;
    tokio::select! {
        done = run => Ok(Some(done)),
        _ = terminate.recv() => Ok(None),
        _ = interrupt.recv() => Ok(None),
    }
}

fn print(report: &RunReport, output: ReportFormat) -> anyhow::Result<()> {
    match output {
        ReportFormat::Text => println!("{}\n", report.text()),
        ReportFormat::Json => println!("{}", serde_json::to_string(report)?),
    }
    Ok(())
}
