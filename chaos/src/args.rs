//! The command line.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand, ValueEnum};
use millrace_chaos::cluster::{Ground, GroundConfig};
use millrace_chaos::hostile;
use millrace_chaos::scenario::{self, ChaosScenario, KeepFolders, ScenarioOptions};
use millrace_chaos::timeline::EventOutput;
use millrace_types::policy::GpuSharingName;

use crate::binary;

const EXAMPLES: &str = "\
Examples:
  millrace-chaos list
  millrace-chaos run leader-kill --seed 7
  millrace-chaos run executor-storm --lasts 1m --preset torpor --isolation model
  millrace-chaos run mine.yaml --report target/chaos
  millrace-chaos run all -o json > report.jsonl
  millrace-chaos run split-brain --ground namespaces
  millrace-chaos run executor-storm --ground compose --lasts 1m
  millrace-chaos soak --minutes 60 --seed 3 --report target/soak

Exit codes:
  0    every check of every run passed; runs that this machine does not allow were skipped
  1    a check failed: the report shows the violation, and the logs are kept
  2    no scenario could be run
  130  the run was interrupted, and everything that it had started was removed";

/// Inject faults into a cluster of real processes or containers on this machine, and report a
/// verdict.
#[derive(Debug, Parser)]
#[command(name = "millrace-chaos", version, after_help = EXAMPLES)]
pub(crate) struct ChaosCli {
    #[command(subcommand)]
    pub(crate) command: ChaosCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ChaosCommand {
    /// List the scenarios.
    List {
        /// Output format.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: ReportFormat,
    },
    /// Run scenarios in sequence.
    Run(RunArgs),
    /// Run scenarios drawn from the seed in sequence, until the time is over. Each run
    /// lasts as long as its scenario defines. After each run, the command prints the counts of all
    /// runs, and whether the memory and descriptors of this process grow.
    Soak(SoakArgs),
    /// Attack a cluster, as ordered by a scenario.
    #[command(name = hostile::SUBCOMMAND, hide = true)]
    Attack(hostile::AttackOrders),
}

#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Names of scenarios, or `all`, or your own scenario files (.yaml).
    #[arg(required = true, value_name = "SCENARIO")]
    names: Vec<String>,
    /// Number of rounds, for scenarios that have rounds [default: the scenario's].
    #[arg(long, value_name = "N")]
    rounds: Option<NonZeroU32>,
    /// Duration of a storm, and of each of the three parts of hostile-clients: the control and two
    /// attacks [default: the scenario's].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    lasts: Option<Duration>,
    /// Number of functions, for scenarios that have many [default: the scenario's].
    #[arg(long, value_name = "N")]
    functions: Option<NonZeroU32>,
    #[command(flatten)]
    pub(crate) how: CommonArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SoakArgs {
    /// Minutes after which no further scenario starts.
    #[arg(long, value_name = "N")]
    pub(crate) minutes: NonZeroU32,
    #[command(flatten)]
    pub(crate) how: CommonArgs,
}

/// Options of every run.
#[derive(Debug, clap::Args)]
pub(crate) struct CommonArgs {
    /// Seed of the random choices, such as process, time and bytes [default: random, printed].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Preset with which the cluster starts, as in 'millrace up' [default: the cluster's own].
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// Models that share an executor process, as in 'millrace up' [default: the scenario's].
    #[arg(long, value_name = "NAME", value_parser = ["gpu", "model", "resident"])]
    isolation: Option<String>,
    /// Sharing of GPUs, as in 'millrace policy set' [default: the preset's].
    #[arg(long, value_name = "MODE")]
    gpu_sharing: Option<GpuSharingName>,
    /// Place where processes run: on loopback, each in its own network namespace (requires root, ip
    /// and nft), or as the containers of deploy/compose (requires root, a Docker Engine and a
    /// compose tool).
    #[arg(long, value_name = "GROUND", default_value = "processes")]
    ground: Ground,
    /// Folder of compose.yaml, for --ground compose [default: deploy/compose of this repository].
    #[arg(long, value_name = "DIR")]
    deploy: Option<PathBuf>,
    /// Binary to test [default: beside this one, or in target/].
    #[arg(long, value_name = "PATH", env = "MILLRACE_BINARY")]
    millrace: Option<PathBuf>,
    /// Output format: text as events happen, or a line of JSON for each scenario.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub(crate) output: ReportFormat,
    /// Folder for two further reports: junit.xml for CI and report.html for a browser.
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
    /// Keep the processes' folders and logs even if every check passes.
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReportFormat {
    Text,
    Json,
}

impl RunArgs {
    /// Returns the scenarios to run. Every file is read before any process starts. A named scenario
    /// that the ground cannot run is an error; `all` skips such scenarios later.
    pub(crate) fn scenarios(&self, options: &ScenarioOptions) -> anyhow::Result<Vec<ChaosScenario>> {
        if self.names == ["all"] {
            return Ok(scenario::all());
        }
        let scenarios = self.named()?;
        match scenarios.iter().find_map(|it| it.refusal(options)) {
            Some(refusal) => Err(anyhow::Error::msg(refusal)),
            None => Ok(scenarios),
        }
    }

    fn named(&self) -> anyhow::Result<Vec<ChaosScenario>> {
        let find = |name: &String| {
            if name.ends_with(".yaml") || name.ends_with(".yml") {
                return ChaosScenario::read(Path::new(name));
            }
            scenario::find(name)
                .with_context(|| format!("there is no scenario {name:?}: see 'millrace-chaos list'"))
        };
        self.names.iter().map(find).collect()
    }

    pub(crate) fn options(&self) -> anyhow::Result<ScenarioOptions> {
        let rounds = self.rounds.map(u32::from);
        let functions = self.functions.map(u32::from);
        Ok(ScenarioOptions { rounds, functions, lasts: self.lasts, ..self.how.options()? })
    }
}

impl CommonArgs {
    /// Returns the options, with each scenario's own rounds, duration and functions.
    pub(crate) fn options(&self) -> anyhow::Result<ScenarioOptions> {
        let seed = match self.seed {
            Some(seed) => seed,
            None => u64::from(getrandom::u32().map_err(|error| anyhow::anyhow!("no randomness: {error}"))?),
        };
        Ok(ScenarioOptions {
            seed,
            program: binary::find(self.millrace.as_deref())?,
            ground: GroundConfig { kind: self.ground, deploy: binary::deploy(self.deploy.as_deref())? },
            rounds: None,
            lasts: None,
            functions: None,
            preset: self.preset.clone(),
            isolation: self.isolation.clone(),
            gpu_sharing: self.gpu_sharing,
            echo: if self.output == ReportFormat::Text { EventOutput::Print } else { EventOutput::Silent },
            keep: if self.keep { KeepFolders::Always } else { KeepFolders::Failed },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> RunArgs {
        match ChaosCli::parse_from([&["millrace-chaos", "run"], words].concat()).command {
            ChaosCommand::Run(run) => run,
            other => panic!("these words run: {other:?}"),
        }
    }

    fn on(ground: Ground) -> ScenarioOptions {
        ScenarioOptions {
            seed: 1,
            program: PathBuf::new(),
            ground: GroundConfig { kind: ground, deploy: None },
            rounds: None,
            lasts: None,
            functions: None,
            preset: None,
            isolation: None,
            gpu_sharing: None,
            echo: EventOutput::Silent,
            keep: KeepFolders::Failed,
        }
    }

    #[test]
    fn a_scenario_that_the_ground_cannot_run_is_refused_by_name_and_accepted_in_all() {
        let refusal = run(&["leader-kill", "split-brain"]).scenarios(&on(Ground::Compose)).unwrap_err();
        assert!(refusal.to_string().starts_with("split-brain cannot"), "{refusal}");
        assert!(run(&["all"]).scenarios(&on(Ground::Compose)).is_ok());
    }

    #[test]
    fn scenarios_are_found_by_name_or_all_at_once() {
        let names = |words: &[&str]| {
            let found = run(words).scenarios(&on(Ground::Processes))?;
            anyhow::Ok(found.iter().map(|it| it.name().to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(names(&["worker-kill", "leader-kill"]).unwrap(), ["worker-kill", "leader-kill"]);
        assert_eq!(names(&["all"]).unwrap().len(), scenario::all().len());
        assert!(names(&["leader-kil"]).unwrap_err().to_string().contains("millrace-chaos list"));
    }

    #[test]
    fn an_invalid_scenario_file_is_refused_with_its_line() {
        let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
        let path = file.path().to_str().unwrap();
        std::fs::write(path, "name: mine\nkind: storm\n").unwrap();
        let refusal = run(&[path]).scenarios(&on(Ground::Processes)).unwrap_err().to_string();
        assert!(refusal.contains(path) && refusal.contains("line 2"), "{refusal}");
    }

    #[test]
    fn a_preset_and_an_isolation_are_parsed() {
        let run = run(&["executor-kill", "--isolation", "model", "--preset", "fifo"]);
        assert_eq!(run.how.isolation.as_deref(), Some("model"));
        assert_eq!(run.how.preset.as_deref(), Some("fifo"));
    }
}
