//! Samples the resources of a cluster's processes, second by second, for the report.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::cluster::{Usage, descendants};
use crate::proxy::{Network, Party};
use crate::report::Taken;
use crate::timeline::Timeline;

const COUNT_EVERY: Duration = Duration::from_secs(1);

/// A running census, which lasts until [`Census::end`].
#[derive(Debug)]
pub(super) struct Census {
    stop: CancellationToken,
    counting: JoinHandle<Vec<Taken>>,
}

impl Census {
    pub(super) fn begin(network: Network, timeline: Timeline) -> Self {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let counting = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(COUNT_EVERY);
            let mut counted = Vec::new();
            while stopped.run_until_cancelled(ticks.tick()).await.is_some() {
                counted.push(count(&network, timeline.now()));
            }
            counted
        });
        Self { stop, counting }
    }

    pub(super) async fn end(&mut self) -> Vec<Taken> {
        self.stop.cancel();
        // The task only reads /proc, so its failure does not affect the run.
        (&mut self.counting).await.unwrap_or_default()
    }
}

fn count(network: &Network, at: Duration) -> Taken {
    let mut taken = Taken { at, ..Taken::default() };
    for (pid, party) in network.named() {
        // A process that has ended meanwhile uses no resources.
        let Ok(usage) = Usage::of(pid) else { continue };
        match party {
            Party::Controller(_) => taken.controllers.add(usage),
            Party::Worker(_) => {
                taken.workers.add(usage);
                let executors = descendants(pid).into_iter().filter_map(|pid| Usage::of(pid).ok());
                executors.for_each(|usage| taken.executors.add(usage));
            }
            Party::Outside => {}
        }
    }
    taken
}
