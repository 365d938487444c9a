//! The options of a run, and the command that repeats the run.

use std::path::PathBuf;
use std::time::Duration;

use millrace_types::policy::GpuSharingName;

use super::spec::ScenarioSpec;
use crate::cluster::{Ground, GroundConfig};
use crate::timeline::EventOutput;

/// The options of a run.
#[derive(Debug, Clone)]
pub struct ScenarioOptions {
    /// The seed of the random choices.
    pub seed: u64,
    /// The `millrace` binary under test.
    pub program: PathBuf,
    /// The ground of the processes.
    pub ground: GroundConfig,
    /// Number of rounds; `None` for the scenario's own.
    pub rounds: Option<u32>,
    /// Duration of a storm, or of a run of hostile clients; `None` for the scenario's own.
    pub lasts: Option<Duration>,
    /// Number of functions of each numbered kind; `None` for the scenario's own.
    pub functions: Option<u32>,
    /// The preset with which the cluster starts; `None` for the default.
    pub preset: Option<String>,
    /// The isolation of the workers; `None` for the scenario's own.
    pub isolation: Option<String>,
    /// The sharing of GPUs, set before the first request; `None` for the preset's.
    pub gpu_sharing: Option<GpuSharingName>,
    /// The destination of new events.
    pub echo: EventOutput,
    /// Whether the processes' folders and logs are kept.
    pub keep: KeepFolders,
}

impl ScenarioOptions {
    /// Returns the arguments for the processes, as on the command line.
    pub(super) fn words(&self) -> Vec<String> {
        let named = [("--preset", &self.preset), ("--isolation", &self.isolation)];
        let words = named.into_iter().flat_map(|(flag, name)| Some([flag.to_owned(), name.clone()?]));
        words.flatten().collect()
    }

    /// Returns the command that runs a scenario again with the same choices.
    pub(super) fn again(&self, scenario: &ScenarioSpec) -> String {
        let mut words = vec!["millrace-chaos run".to_owned(), scenario.name.clone()];
        words.push(format!("--seed {}", self.seed));
        match scenario.lasts.is_none() {
            true => words.extend(self.rounds.map(|rounds| format!("--rounds {rounds}"))),
            false => words.extend(self.lasts.map(|it| format!("--lasts {}s", it.as_secs_f64()))),
        }
        words.extend(self.functions.map(|functions| format!("--functions {functions}")));
        words.extend(self.words());
        words.extend(self.gpu_sharing.map(|it| format!("--gpu-sharing {it}")));
        let ground = self.ground.kind;
        words.extend((ground != Ground::default()).then(|| format!("--ground {}", ground.word())));
        words.join(" ")
    }
}

/// Whether the processes' folders and logs are kept at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepFolders {
    /// Folders and logs are always kept.
    Always,
    /// Folders and logs are kept if the run failed.
    Failed,
}
