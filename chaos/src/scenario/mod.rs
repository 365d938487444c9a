//! The scenarios: each is a cluster under load, faults, and what has to hold afterwards.
//!
//! Every run ends with the same checks ([`stage::Stage::finish`]); each scenario adds its own.

mod all_controllers_kill;
mod clock_jump;
mod damage;
mod executor_kill;
mod executor_storm;
mod follower_kill;
mod full_disk;
mod leader_kill;
mod partition;
mod small_disk;
mod stage;
mod stalled_disk;
mod torn_store;
mod worker_kill;

use std::path::PathBuf;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use self::stage::Stage;
use crate::cluster::{Injection, Links, Machine, Plan};
use crate::load::{Mix, Target};
use crate::report::{Report, Verdict};
use crate::timeline::Echo;

/// A scenario a person can run.
pub struct Scenario {
    /// What it is called.
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// How many faults one run has unless said otherwise.
    pub rounds: u32,
    plan: Plan,
    functions: fn(&Options) -> Vec<Target>,
    mix: Mix,
    /// Why this machine cannot run it, if it cannot.
    skipped: fn() -> Option<String>,
    play: for<'a> fn(&'a mut Stage) -> LocalBoxFuture<'a, anyhow::Result<()>>,
}

/// How to run a scenario.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where its random choices begin.
    pub seed: u64,
    /// The `millrace` binary.
    pub program: PathBuf,
    /// How many faults; `None` for the scenario's own number.
    pub rounds: Option<u32>,
    /// How many functions `executor-storm` has; `None` for its own number.
    pub functions: Option<u32>,
    /// What workers are started with besides: which policies.
    pub policies: Vec<String>,
    /// Where events go as they happen.
    pub echo: Echo,
    /// What becomes of the processes' folders and logs.
    pub keep: Keep,
}

/// What becomes of the processes' folders and logs at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// They stay.
    Always,
    /// They stay when the run failed.
    Failed,
}

/// What a promise in seconds is, and where it is made. This machine is shared and the binary may be
/// a debug build: a run fails only beyond [`ALLOWANCE`] times the promise, and prints what it took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Promise {
    pub(crate) within: Duration,
    pub(crate) source: &'static str,
}

/// How many times as long as promised a run may take before it fails.
pub(crate) const ALLOWANCE: u32 = 5;

/// Writes after the loss of a leader, and after that of any other controller.
pub(crate) const WRITES_RESUME: Promise =
    Promise { within: Duration::from_secs(2), source: "DESIGN §7, leader: writes resume < 2 s" };
/// A function whose only worker was lost: its lease of 2 s and a second.
pub(crate) const PLACED_AGAIN: Promise =
    Promise { within: Duration::from_secs(3), source: "DESIGN §7, worker: new placement < lease + 1 s" };

const GROUP: Plan = Plan {
    controllers: 3,
    workers: 2,
    links: Links::Direct,
    injection: Injection::Off,
    machine: Machine::OneGpu,
};
const PROXIED: Plan = Plan { links: Links::Proxied, ..GROUP };
const INJECTED: Plan = Plan { injection: Injection::On, ..GROUP };
const NODE: Plan = Plan { controllers: 1, workers: 1, machine: Machine::FourGpus, ..GROUP };

/// Every scenario.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "leader-kill",
        about: "kill -9 the leading controller under load, and start it again",
        rounds: 3,
        plan: GROUP,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(leader_kill::play(stage)),
    },
    Scenario {
        name: "follower-kill",
        about: "kill -9 a controller that does not lead, and start it again",
        rounds: 3,
        plan: GROUP,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(follower_kill::play(stage)),
    },
    Scenario {
        name: "worker-kill",
        about: "kill -9 a worker under requests, see its functions placed elsewhere, and start it again",
        rounds: 2,
        plan: GROUP,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(worker_kill::play(stage)),
    },
    Scenario {
        name: "executor-kill",
        about: "kill -9 executors, the processes that own a GPU, under requests",
        rounds: 4,
        plan: GROUP,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(executor_kill::play(stage)),
    },
    Scenario {
        name: "executor-storm",
        about: "kill -9 an executor every 10 s on a node of four GPUs that swaps hundreds of functions",
        rounds: 6,
        plan: NODE,
        functions: executor_storm::functions,
        mix: Mix::Requests,
        skipped: never,
        play: |stage| Box::pin(executor_storm::play(stage)),
    },
    Scenario {
        name: "all-controllers-kill",
        about: "kill -9 every controller at once, and start them again over their folders",
        rounds: 2,
        plan: GROUP,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(all_controllers_kill::play(stage)),
    },
    Scenario {
        name: "partition",
        about: "cut the leader, a follower, a worker and everybody off, and slow the links, through proxies",
        rounds: 5,
        plan: PROXIED,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(partition::play(stage)),
    },
    Scenario {
        name: "torn-store",
        about: "kill -9 a controller, cut, flip or zero what it stored, start it, replace it if it refuses",
        rounds: 5,
        plan: GROUP,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(torn_store::play(stage)),
    },
    Scenario {
        name: "full-disk",
        about: "fill the disk of the leader, then of a follower, and free it again (needs a tmpfs)",
        rounds: 2,
        plan: GROUP,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: small_disk::not_allowed,
        play: |stage| Box::pin(full_disk::play(stage)),
    },
    Scenario {
        name: "clock-jump",
        about: "move the clock of the leader, then of a follower that leads next, by up to two days, ahead and back",
        rounds: 4,
        plan: INJECTED,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(clock_jump::play(stage)),
    },
    Scenario {
        name: "stalled-disk",
        about: "stall the disk of a follower, then let the leader's hang, or be slow, until another leads",
        rounds: 2,
        plan: INJECTED,
        functions: stage::two,
        mix: Mix::Everything,
        skipped: never,
        play: |stage| Box::pin(stalled_disk::play(stage)),
    },
];

fn never() -> Option<String> {
    None
}

/// The scenario of a name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}

impl Scenario {
    /// Plays it, and judges what was recorded. What goes wrong on the way is in the report: a
    /// cluster that does not come back is what is looked for.
    pub async fn run(&self, options: &Options) -> Report {
        let mut report = Report {
            scenario: self.name.to_owned(),
            seed: options.seed,
            verdict: Verdict::Skipped,
            reason: (self.skipped)(),
            checks: Vec::new(),
            timeline: Vec::new(),
            kept: None,
        };
        if report.reason.is_some() {
            return report;
        }
        let mut stage = match Stage::begin(self, options).await {
            Ok(stage) => stage,
            Err(error) => {
                let reason = Some(format!("the cluster did not start: {error:#}"));
                return Report { verdict: Verdict::Fail, reason, ..report };
            }
        };
        let played = (self.play)(&mut stage).await;
        stage.finish(played, options.keep, &mut report).await;
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_is_found_by_its_name() {
        for scenario in ALL {
            assert_eq!(find(scenario.name).map(|found| found.about), Some(scenario.about));
        }
        assert!(find("none").is_none());
    }
}
