//! Looks on while a storm rages: what a worker takes, second by second, and how soon executors that
//! were killed are replaced.

use std::time::Duration;

use anyhow::{Context as _, bail};
use millrace_client::Admin;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::executors::{Victim, not_back};
use crate::cluster::{PATIENCE, Usage};
use crate::oracle::flat::Sample;
use crate::timeline::Timeline;

const SAMPLE_EVERY: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Executors that may wait to be looked for.
const KILLED_MAX: usize = 1024;

/// What was seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) usage: Vec<Sample>,
    /// Of each executor that was killed, how soon its GPU was up without it.
    pub(super) returns: Vec<Duration>,
}

/// A look that goes on until it is ended.
#[derive(Debug)]
pub(super) struct Watch {
    killed: mpsc::Sender<(Duration, Victim)>,
    timeline: Timeline,
    looking: JoinHandle<anyhow::Result<Seen>>,
}

impl Watch {
    /// Looks from now on; at what a worker takes where its pid is given.
    pub(super) fn begin(admin: Admin, worker: Option<u32>, timeline: Timeline) -> Self {
        let (killed, victims) = mpsc::channel(KILLED_MAX);
        let looking = tokio::spawn(look(admin, worker, timeline.clone(), victims));
        Self { killed, timeline, looking }
    }

    /// Looks for the return of an executor that was killed just now.
    pub(super) fn killed(&self, victim: Victim) {
        // Beyond the bound nobody is looked for; the end of every run asks each function.
        if self.killed.try_send((self.timeline.now(), victim)).is_err() {
            self.timeline.saw("too many executors were killed to look for this one");
        }
    }

    /// Ends once all are back.
    ///
    /// # Errors
    /// When one is not back, or the worker ended.
    pub(super) async fn end(self) -> anyhow::Result<Seen> {
        drop(self.killed);
        self.looking.await.context("the look failed")?
    }
}

async fn look(
    admin: Admin,
    worker: Option<u32>,
    timeline: Timeline,
    mut killed: mpsc::Receiver<(Duration, Victim)>,
) -> anyhow::Result<Seen> {
    let mut seen = Seen::default();
    let mut away: Vec<(Duration, Victim)> = Vec::new();
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
                seen.usage.push(Sample { at: timeline.now(), usage: Usage::of(pid)? });
            },
            _ = looks.tick(), if !away.is_empty() => {
                // Nobody to ask: asked again.
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
