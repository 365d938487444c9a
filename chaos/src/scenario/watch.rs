//! Observes a cluster during a storm: the resources of a worker, second by second, and the time
//! until killed executors are replaced.

use std::time::Duration;

use anyhow::{Context as _, bail};
use millrace_client::Admin;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::victim::{ExecutorVictim, not_back};
use crate::cluster::{PATIENCE, ProcessUsage};
use crate::oracle::leaks::UsageSample;
use crate::timeline::Timeline;

const SAMPLE_EVERY: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Maximum number of killed executors that wait to be observed.
const KILLED_MAX: usize = 1024;

/// The observations of a storm.
#[derive(Debug, Default)]
pub(super) struct StormObservations {
    pub(super) usage: Vec<UsageSample>,
    /// Time until the GPU was up without the executor, for each killed executor.
    pub(super) returns: Vec<Duration>,
}

/// A running observation, which lasts until [`StormWatch::end`].
#[derive(Debug)]
pub(super) struct StormWatch {
    killed: mpsc::Sender<(Duration, ExecutorVictim)>,
    timeline: Timeline,
    looking: JoinHandle<anyhow::Result<StormObservations>>,
}

impl StormWatch {
    /// Starts to observe the cluster, and the resources of the worker with this pid.
    pub(super) fn begin(admin: Admin, worker: Option<u32>, timeline: Timeline) -> Self {
        let (killed, victims) = mpsc::channel(KILLED_MAX);
        let looking = tokio::spawn(look(admin, worker, timeline.clone(), victims));
        Self { killed, timeline, looking }
    }

    /// Observes the return of an executor that was killed just now.
    pub(super) fn killed(&self, victim: ExecutorVictim) {
        // Executors beyond the bound are not observed; the end of every run asks each function
        // anyway.
        if self.killed.try_send((self.timeline.now(), victim)).is_err() {
            self.timeline.saw("too many executors were killed to observe this one");
        }
    }

    /// Ends once all killed executors are replaced.
    ///
    /// # Errors
    /// If an executor is not replaced in time, or the worker ended.
    pub(super) async fn end(self) -> anyhow::Result<StormObservations> {
        drop(self.killed);
        self.looking.await.context("the task that observes the storm failed")?
    }
}

async fn look(
    admin: Admin,
    worker: Option<u32>,
    timeline: Timeline,
    mut killed: mpsc::Receiver<(Duration, ExecutorVictim)>,
) -> anyhow::Result<StormObservations> {
    let mut seen = StormObservations::default();
    let mut away: Vec<(Duration, ExecutorVictim)> = Vec::new();
    let mut samples = tokio::time::interval(SAMPLE_EVERY);
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let mut open = true;
    while open || !away.is_empty() {
        tokio::select! {
            victim = killed.recv(), if open => match victim {
                Some(victim) => away.push(victim),
                None => open = false,
            },
            _ = samples.tick() => if let Some(pid) = worker {
                seen.usage.push(UsageSample { at: timeline.now(), usage: ProcessUsage::of(pid)? });
            },
            _ = looks.tick(), if !away.is_empty() => {
                // No controller answers: ask again at the next tick.
                let Ok(nodes) = admin.nodes().await else { continue };
                let now = timeline.now();
                away.retain(|(at, victim)| {
                    let back = not_back(&nodes, victim).is_none();
                    if back {
                        seen.returns.push(now - *at);
                    }
                    !back
                });
                if let Some((at, victim)) = away.iter().find(|(at, _)| !open && now - *at > PATIENCE) {
                    bail!("the executor {} is not back {:?} after it was killed", victim.role(), now - *at);
                }
            },
        }
    }
    Ok(seen)
}
