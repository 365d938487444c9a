//! The scenario in which links are cut, slowed and restored. The majority continues. An isolated
//! controller reports its isolation, and continues to serve the deployed functions. Afterwards
//! every process is back.
//!
//! | fault | expectation meanwhile |
//! |---|---|
//! | the leader is isolated | the others elect another leader and accept writes; the old leader accepts none |
//! | a follower is isolated | the others accept writes; the follower accepts none |
//! | a worker is cut from all controllers | the worker counts as lost, and its functions are placed again |
//! | every process is isolated | no controller accepts writes, and each reports the reason |
//! | every link is slow, if proxies are in front of processes | writes and requests continue |
//!
//! The seed decides whether an isolated controller still reaches its workers. If so, its gateway
//! serves their functions. In both cases the controller answers stale reads.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use futures::TryStreamExt as _;
use futures::future::try_join_all;
use millrace_client::Error;
use millrace_types::Reason;
use rand::Rng as _;
use rand::seq::{IndexedRandom as _, SliceRandom as _};

use super::promise::TimedPromise;
use super::stage::ScenarioStage;
use crate::proxy::{CutDirection, LinkParty, LinkSlowness};

/// Delay of a packet on a slow link, in milliseconds.
const SLOW_MS: std::ops::RangeInclusive<u64> = 5..=30;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartitionFault {
    LeaderAlone,
    FollowerAlone,
    WorkerCutOff,
    EverybodyAlone,
    Slow,
}

/// The processes that a controller still reaches when it is cut from the other controllers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReachableProcesses {
    Workers,
    Nobody,
}

pub(super) async fn play(stage: &mut ScenarioStage) -> anyhow::Result<()> {
    let mut faults = vec![
        PartitionFault::LeaderAlone,
        PartitionFault::FollowerAlone,
        PartitionFault::WorkerCutOff,
        PartitionFault::EverybodyAlone,
    ];
    faults.extend(stage.cluster.slows().then_some(PartitionFault::Slow));
    faults.shuffle(&mut stage.rng);
    for fault in faults.into_iter().cycle().take(stage.rounds as usize) {
        match fault {
            PartitionFault::LeaderAlone => {
                let leader = stage.cluster.leader().await?;
                stage.controller_alone(leader, "which leads").await?;
            }
            PartitionFault::FollowerAlone => {
                let follower = stage.a_follower().await?;
                stage.controller_alone(follower, "which follows").await?;
            }
            PartitionFault::WorkerCutOff => stage.worker_cut_off().await?,
            PartitionFault::EverybodyAlone => stage.everybody_alone().await?,
            PartitionFault::Slow => stage.slow().await?,
        }
        stage.resumed().await?;
        stage.whole().await?;
        stage.calm().await;
    }
    Ok(())
}

impl ScenarioStage {
    /// Cuts a controller from the others, and checks both sides.
    async fn controller_alone(&mut self, id: u64, role: &str) -> anyhow::Result<()> {
        let left = if self.rng.random() { ReachableProcesses::Workers } else { ReachableProcesses::Nobody };
        let ids = self.cluster.controller_ids();
        let others: Vec<u64> = ids.into_iter().filter(|&other| other != id).collect();
        let mut beyond: Vec<LinkParty> = others.iter().map(|&id| LinkParty::Controller(id)).collect();
        let from = match left {
            ReachableProcesses::Workers => "the other controllers",
            ReachableProcesses::Nobody => "every process",
        };
        if left == ReachableProcesses::Nobody {
            beyond.extend(self.workers());
        }
        self.fault();
        self.timeline.fault(format!("cut controller {id}, {role}, from {from}"));
        self.cluster.cut(&[LinkParty::Controller(id)], &beyond, CutDirection::Both)?;
        let (leader, term) = self.cluster.leader_among(&others, None).await?;
        self.timeline.saw(format!("controller {leader} leads the others, term {term}"));
        self.resumed().await?;
        self.note_writes_resumed();
        self.says_that_it_is_alone(id).await?;
        self.serves_what_it_can(id, left).await?;
        self.mend()?;
        Ok(())
    }

    /// Cuts a worker from every controller. The worker has to count as lost, and other workers have
    /// to take over its functions.
    async fn worker_cut_off(&mut self) -> anyhow::Result<()> {
        let names = self.cluster.worker_names();
        let worker = names.choose(&mut self.rng).context("there is a worker")?.clone();
        self.fault();
        self.timeline.fault(format!("cut {worker} from every controller"));
        let controllers = self.controllers();
        self.cluster.cut(&[LinkParty::Worker(worker.clone())], &controllers, CutDirection::Both)?;
        self.resumed().await?;
        self.lost(&worker).await?;
        self.served().await?;
        let took = self.timeline.now() - self.latest.at;
        self.note("functions are placed again", TimedPromise::placed_again(), took);
        self.calm().await;
        self.mend()?;
        Ok(())
    }

    /// Cuts every link.
    async fn everybody_alone(&mut self) -> anyhow::Result<()> {
        let all = [self.controllers(), self.workers()].concat();
        self.timeline.fault("cut every process from every other");
        for (index, one) in all.iter().enumerate() {
            // Each pair is cut once, and no process is cut from itself.
            self.cluster.cut(std::slice::from_ref(one), &all[index + 1..], CutDirection::Both)?;
        }
        let ids = self.cluster.controller_ids();
        try_join_all(ids.iter().map(|&id| self.says_that_it_is_alone(id))).await?;
        // Ask all gateways at the same time: a gateway holds a request for a while before it
        // refuses the request, and the requests of the load wait only for a limited time.
        try_join_all(ids.into_iter().map(|id| self.serves_what_it_can(id, ReachableProcesses::Nobody)))
            .await?;
        // No write or request can succeed before the links are restored, so recovery is measured
        // from here.
        self.fault();
        self.mend()?;
        Ok(())
    }

    /// Slows every link.
    async fn slow(&mut self) -> anyhow::Result<()> {
        let by = Duration::from_millis(self.rng.random_range(SLOW_MS));
        let all = [self.controllers(), self.workers()].concat();
        let (leader, term) = self.cluster.leader_and_term().await?;
        self.fault();
        self.timeline.fault(format!("delayed every link by {by:?} each way"));
        self.cluster.slow(&all, LinkSlowness { delay: by, ..LinkSlowness::default() });
        self.calm().await;
        self.resumed().await?;
        self.note_writes_resumed();
        let now = self.cluster.leader_and_term().await?;
        let then = (leader, term);
        if now != then {
            self.timeline
                .saw(format!("controller {} leads, term {}: the change was not necessary", now.0, now.1));
        }
        self.mend()?;
        Ok(())
    }

    /// Checks that a controller without a majority refuses a write and a linearizable read for want
    /// of a leader.
    async fn says_that_it_is_alone(&self, id: u64) -> anyhow::Result<()> {
        let endpoint = self.cluster.endpoint_of(id)?;
        let admin = self.cluster.admin_of(id)?;
        let read = async {
            let read = admin.functions(None).try_collect::<Vec<_>>().await;
            read.map(|found| format!("a linearizable read of {} functions", found.len()))
        };
        let write = async { self.targets.poke(endpoint).await.map(|()| "a write".to_owned()) };
        let (read, write) = tokio::join!(read, write);
        for (asked, answer) in [("a read", read), ("a write", write)] {
            match answer {
                Ok(what) => bail!("controller {id} reaches no majority, but answered {what}"),
                Err(Error::Refused(failure)) if failure.reason == Reason::NoLeader => {
                    self.timeline.saw(format!("controller {id} refuses {asked}: {}", failure.message));
                }
                Err(error) => bail!(
                    "controller {id} reaches no majority, but refused {asked} for another reason: {error}"
                ),
            }
        }
        Ok(())
    }

    /// Checks that a controller without a majority serves everything that needs none: stale reads,
    /// and requests if it reaches its workers. Without workers, it has to refuse requests with an
    /// error that allows a retry.
    async fn serves_what_it_can(&self, id: u64, left: ReachableProcesses) -> anyhow::Result<()> {
        let stale = self.cluster.admin_of(id)?.with_stale_reads();
        let found: Vec<_> = stale
            .functions(None)
            .try_collect()
            .await
            .with_context(|| format!("controller {id} does not answer a stale read"))?;
        let names: Vec<_> = found.iter().filter_map(|it| Some(it.spec.as_ref()?.name.as_str())).collect();
        let asked = self.targets.names().map(async |name| {
            ensure!(names.contains(&name), "controller {id} has forgotten {name}");
            Ok((name, self.targets.try_ask(name, self.cluster.endpoint_of(id)?).await?))
        });
        for (name, asked) in try_join_all(asked).await? {
            match (left, asked) {
                (ReachableProcesses::Workers, Ok(())) => {}
                (ReachableProcesses::Nobody, Err(error)) if error.retryable() => {
                    self.timeline.saw(format!("the gateway of controller {id} refuses {name}: {error}"));
                }
                (ReachableProcesses::Workers, Err(error)) => {
                    bail!("the gateway of controller {id} reaches its workers, but refuses {name}: {error}")
                }
                (ReachableProcesses::Nobody, Err(error)) => {
                    bail!(
                        "the gateway of controller {id} reaches no worker, but refuses {name} for good: {error}"
                    )
                }
                (ReachableProcesses::Nobody, Ok(())) => {
                    bail!("the gateway of controller {id} reaches no worker, but answered for {name}")
                }
            }
        }
        let served = if left == ReachableProcesses::Workers { ", and requests" } else { "" };
        self.timeline.saw(format!("controller {id} answers stale reads{served}"));
        Ok(())
    }
}
