//! The command line.

use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Parser, Subcommand, ValueEnum};
use millrace_chaos::scenario::{self, Keep, Scenario};

const EXAMPLES: &str = "\
Examples:
  millrace-chaos list
  millrace-chaos run leader-kill --seed 7
  millrace-chaos run executor-storm --rounds 30 --dispatch torpor --eviction torpor
  millrace-chaos run all -o json > report.jsonl

Exit codes:
  0  every check of every run held; what this machine does not allow was skipped
  1  a check failed: the report shows what violates it, and the logs are kept
  2  nothing could be run";

/// Faults for a cluster of real processes on this machine, and a verdict.
#[derive(Debug, Parser)]
#[command(name = "millrace-chaos", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the scenarios.
    List {
        /// How to print.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Output,
    },
    /// Run scenarios, one after the other.
    Run(Run),
}

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    /// Their names, or `all`.
    #[arg(required = true, value_name = "SCENARIO")]
    names: Vec<String>,
    /// Where random choices begin: which process, when, which bytes [default: a random one, printed].
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// How many faults [default: as many as the scenario says].
    #[arg(long, value_name = "N")]
    rounds: Option<NonZeroU32>,
    /// How many functions `executor-storm` has [default: 200].
    #[arg(long, value_name = "N")]
    functions: Option<NonZeroU32>,
    /// The dispatch policy of the workers, as of 'millrace up' [default: its own].
    #[arg(long, value_name = "NAME")]
    dispatch: Option<String>,
    /// The eviction policy of the workers, as of 'millrace up' [default: its own].
    #[arg(long, value_name = "NAME")]
    eviction: Option<String>,
    /// The binary to test [default: beside this one, or in target/].
    #[arg(long, value_name = "PATH", env = "MILLRACE_BINARY")]
    pub(crate) millrace: Option<PathBuf>,
    /// How to print: text as it happens, or a line of JSON for each scenario.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub(crate) output: Output,
    /// Keep the processes' folders and logs, not only when a check fails.
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Text,
    Json,
}

impl Run {
    /// What is to be run.
    pub(crate) fn scenarios(&self) -> anyhow::Result<Vec<&'static Scenario>> {
        if self.names == ["all"] {
            return Ok(scenario::ALL.iter().collect());
        }
        let find = |name: &String| {
            scenario::find(name)
                .with_context(|| format!("there is no scenario {name:?}: see 'millrace-chaos list'"))
        };
        self.names.iter().map(find).collect()
    }

    pub(crate) fn rounds(&self) -> Option<u32> {
        self.rounds.map(NonZeroU32::get)
    }

    pub(crate) fn functions(&self) -> Option<u32> {
        self.functions.map(NonZeroU32::get)
    }

    /// The policies that were named, as words for a worker, which refuses what it does not know.
    pub(crate) fn policies(&self) -> Vec<String> {
        let flags = [("--dispatch", &self.dispatch), ("--eviction", &self.eviction)];
        let words = flags.into_iter().flat_map(|(flag, name)| Some([flag.to_owned(), name.clone()?]));
        words.flatten().collect()
    }

    pub(crate) fn keep(&self) -> Keep {
        if self.keep { Keep::Always } else { Keep::Failed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> Run {
        match Cli::parse_from([&["millrace-chaos", "run"], words].concat()).command {
            Command::Run(run) => run,
            Command::List { .. } => panic!("these words run"),
        }
    }

    #[test]
    fn scenarios_are_named_one_by_one_or_all_at_once() {
        let names = |words: &[&str]| {
            run(words).scenarios().map(|found| found.iter().map(|it| it.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["worker-kill", "leader-kill"]).unwrap(), ["worker-kill", "leader-kill"]);
        assert_eq!(names(&["all"]).unwrap().len(), scenario::ALL.len());
        assert!(names(&["leader-kil"]).unwrap_err().to_string().contains("millrace-chaos list"));
    }
}
