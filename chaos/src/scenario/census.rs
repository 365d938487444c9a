//! Samples the resources of a cluster's processes, second by second, for the report.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::cluster::{ProcessUsage, descendants};
use crate::proxy::{LinkParty, ProxyNetwork};
use crate::report::ClusterUsage;
use crate::timeline::Timeline;

const COUNT_EVERY: Duration = Duration::from_secs(1);

/// A running census, which lasts until [`UsageCensus::end`].
#[derive(Debug)]
pub(super) struct UsageCensus {
    stop: CancellationToken,
    counting: JoinHandle<Vec<ClusterUsage>>,
}

impl UsageCensus {
    pub(super) fn begin(network: ProxyNetwork, timeline: Timeline) -> Self {
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

    pub(super) async fn end(&mut self) -> Vec<ClusterUsage> {
        self.stop.cancel();
        // The task only reads /proc, so its failure does not affect the run.
        (&mut self.counting).await.unwrap_or_default()
    }
}

fn count(network: &ProxyNetwork, at: Duration) -> ClusterUsage {
    let mut taken = ClusterUsage { at, ..ClusterUsage::default() };
    for (pid, party) in network.registered_processes() {
        // A process that has ended meanwhile uses no resources.
        let Ok(usage) = ProcessUsage::of(pid) else { continue };
        match party {
            LinkParty::Controller(_) => taken.controllers.add(usage),
            LinkParty::Worker(_) => {
                taken.workers.add(usage);
                let executors = descendants(pid).into_iter().filter_map(|pid| ProcessUsage::of(pid).ok());
                executors.for_each(|usage| taken.executors.add(usage));
            }
            LinkParty::Outside => {}
        }
    }
    taken
}
