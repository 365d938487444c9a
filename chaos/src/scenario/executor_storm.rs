//! A node of four GPUs swaps far more models than they hold, and loses one executor after the other:
//! every request is answered, executors come back, and what the worker takes of its machine is flat.
//!
//! Each function has a model of its own with weights of its own, so that an answer from another
//! function's memory is a wrong one.

use std::time::Duration;

use anyhow::Context as _;
use millrace_client::messages::Gpu;
use rand::seq::IndexedRandom as _;
use rustix::process::Signal;

use super::Options;
use super::stage::Stage;
use crate::cluster::{Usage, shared_memory, signal, until};
use crate::load::{Network, Target};
use crate::oracle::flat::{self, Sample};
use crate::report::Check;
use crate::timeline::seconds;

/// The issue's own numbers.
const FUNCTIONS: u32 = 200;
const KILL_EVERY: Duration = Duration::from_secs(10);
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

pub(super) fn functions(options: &Options) -> Vec<Target> {
    let numbers = 1..=options.functions.unwrap_or(FUNCTIONS);
    let target = |number| Target {
        name: format!("swapped-{number}"),
        replicas: 1,
        network: Network { kind: "tiny-cnn", seed: u64::from(number) },
    };
    numbers.map(target).collect()
}

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    let name = stage.cluster.worker_names().pop().context("there is a worker")?;
    let worker = stage.cluster.worker_pid(&name)?;
    let held = Held::now(stage);
    let mut samples = Vec::new();
    let (mut returns, mut gap_max) = (Vec::new(), Duration::ZERO);
    for _ in 0..stage.rounds {
        let nodes = stage.cluster.admin()?.nodes().await?;
        let gpus = nodes.iter().flat_map(|node| &node.gpus).collect::<Vec<_>>();
        let count = |of: fn(&Gpu) -> u64| gpus.iter().map(|gpu| of(gpu)).sum::<u64>();
        let (swaps, evictions) = (count(|gpu| gpu.swaps), count(|gpu| gpu.evictions));
        stage.timeline.saw(format!("{swaps} swaps and {evictions} evictions so far"));
        let gpu = gpus.choose(&mut stage.rng).context("the node has a GPU")?;
        let (index, pid) = (gpu.index, gpu.executor_pid);
        stage.fault();
        stage.timeline.did(format!("kill -9 of the executor of GPU {index} (pid {pid})"));
        let killed = stage.timeline.now();
        signal(pid, Signal::KILL)?;
        let back = async {
            stage.executor_back(&name, index, pid).await?;
            let took = stage.timeline.now() - killed;
            stage.timeline.saw(format!("GPU {index} is up again, {} after the fault", seconds(took)));
            anyhow::Ok(took)
        };
        let (back, sampled) = tokio::join!(back, sample_until_the_next(stage, worker));
        returns.push(back?);
        samples.extend(sampled?);
        gap_max = gap_max.max(stage.load.answers.gap_max());
    }
    let slowest = returns.iter().max().copied().unwrap_or_default();
    stage.checks.push(Check::pass(
        "executors come back",
        format!(
            "{} of {} kills, the slowest after {}; never without an answer for more than {}",
            returns.len(),
            stage.rounds,
            seconds(slowest),
            seconds(gap_max)
        ),
    ));
    stage.checks.extend(flat::check(&samples));
    // Requests under way lie in shared memory too.
    stage.load.stop().await?;
    let check = held.is_all_that_is_held(stage).await?;
    stage.checks.push(check);
    Ok(())
}

/// What the worker takes, second by second, until the next kill is due.
async fn sample_until_the_next(stage: &Stage, worker: u32) -> anyhow::Result<Vec<Sample>> {
    let due = stage.timeline.now() + KILL_EVERY;
    let mut samples = Vec::new();
    let mut ticks = tokio::time::interval(SAMPLE_EVERY);
    while stage.timeline.now() < due {
        ticks.tick().await;
        samples.push(Sample { at: stage.timeline.now(), usage: Usage::of(worker)? });
    }
    Ok(samples)
}

/// The shared memory of all processes: what models, GPUs and requests under way lie in.
struct Held {
    files: u64,
}

impl Held {
    fn now(stage: &Stage) -> Self {
        let files = shared_memory(&stage.cluster.pids());
        stage.timeline.saw(format!("shared memory, files and bytes by name: {files:?}"));
        Self { files: files.values().map(|(count, _)| count).sum() }
    }

    /// Waits until no more files are held than were: those of dead executors and of requests are gone.
    async fn is_all_that_is_held(&self, stage: &Stage) -> anyhow::Result<Check> {
        until("the shared memory of dead executors and of requests is gone", async || {
            let now = shared_memory(&stage.cluster.pids());
            let files: u64 = now.values().map(|(count, _)| count).sum();
            (files > self.files).then(|| format!("{files} files, {} before: {now:?}", self.files))
        })
        .await?;
        let now = Self::now(stage);
        let detail = format!("{} files before the first kill, {} after the last", self.files, now.files);
        Ok(Check::pass("no shared memory is left behind", detail))
    }
}
