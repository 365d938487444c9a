//! The end of every run: the load ends, the cluster settles, the oracle judges the records, and the
//! cluster ends.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use millrace_client::{Admin, Endpoints, messages};

use super::options::KeepFolders;
use super::spec::Invariant;
use super::stage::ScenarioStage;
use crate::cluster::{is_alive, until, until_within};
use crate::history::{AdminOperation, FunctionReading};
use crate::load::read_all;
use crate::oracle::healthy::{self, ALLOWANCE, SettledCluster};
use crate::oracle::{
    acknowledged, answered, billed, correct_answers, counted, leftover_processes, linearizable,
};
use crate::report::{CheckVerdict, PromiseCheck, RequestSeries, RunReport};
use crate::timeline::seconds;

/// Maximum time in which processes end after their parent was killed.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(10);
/// The name of the check that ended and idle sequences are freed.
const NO_SEQUENCE_LEFT: &str = "no sequence is left behind";
/// Maximum time until a worker's counts are in the bill.
const BILL_PATIENCE: Duration = Duration::from_secs(15);

impl ScenarioStage {
    /// Ends the load, waits for the cluster to settle, judges the records, and ends the cluster.
    pub(super) async fn finish(
        mut self,
        played: anyhow::Result<()>,
        keep: KeepFolders,
        report: &mut RunReport,
    ) {
        if let Err(error) = played {
            self.failed("the cluster recovers", &error);
        }
        if let Err(error) = self.load.stop().await {
            self.failed("clients end", &error);
        }
        self.timeline.did("ended the load");
        self.check_took();
        match self.settle().await {
            Ok(found) => self.checks.push(healthy::check(&found, self.healthy_within)),
            Err(error) => self.failed(healthy::NAME, &error),
        }
        self.judge().await;
        report.taken = self.census.end().await;
        match self.end().await {
            Ok(check) => self.checks.push(check),
            Err(error) => self.failed(leftover_processes::NAME, &error),
        }
        let failed = self.checks.iter().any(|check| check.verdict == CheckVerdict::Fail);
        report.verdict = if failed { CheckVerdict::Fail } else { CheckVerdict::Pass };
        report.checks = self.checks;
        report.requests = RequestSeries::of(&self.load.requests());
        report.took = self.timeline.now();
        report.timeline = self.timeline.events();
        if failed || keep == KeepFolders::Always {
            report.kept = Some(self.folder.keep().display().to_string());
        }
    }

    fn failed(&mut self, name: &str, error: &anyhow::Error) {
        let lines = format!("{error:#}").lines().map(str::to_owned).collect();
        self.checks.push(PromiseCheck::fail(name, "this did not happen", lines));
    }

    fn check_took(&mut self) {
        for (name, (promise, took)) in &self.took {
            let slowest = took.iter().max().copied().unwrap_or_default();
            let limit = promise.within * ALLOWANCE;
            let each: Vec<_> = took.iter().map(|it| seconds(*it)).collect();
            let detail = format!(
                "slowest of {}: {} (each: {}); promised {}, fails beyond {}",
                took.len(),
                seconds(slowest),
                each.join(", "),
                seconds(promise.within),
                seconds(limit)
            );
            let late = (slowest > limit).then(|| promise.source.clone());
            self.checks.push(PromiseCheck::of(*name, detail, late.into_iter().collect()));
        }
    }

    /// Waits until every process is back, the controllers agree, and every gateway serves.
    async fn settle(&self) -> anyhow::Result<SettledCluster> {
        let begun = self.timeline.now();
        self.cluster.wait_for_status(self.wanted(0)).await?;
        self.functions_are_ready().await?;
        let functions = self.controllers_agree().await?;
        let took = self.timeline.now() - begun;
        for id in self.cluster.controller_ids() {
            for name in self.targets.names() {
                let endpoint = self.cluster.endpoint_of(id)?;
                let asked = self.targets.ask(name, endpoint).await;
                asked.with_context(|| format!("the gateway of controller {id} does not serve {name}"))?;
            }
        }
        self.sms_were_disjoint().await?;
        let controllers = self.cluster.controller_ids().len();
        let workers = self.workers;
        Ok(SettledCluster { controllers, functions, workers, took })
    }

    /// Fails if an emulated GPU counted launches on SMs of another launch.
    async fn sms_were_disjoint(&self) -> anyhow::Result<()> {
        let nodes = self.cluster.admin()?.nodes().await?;
        let gpus = nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (&node.name, gpu)));
        match gpus.clone().find(|(_, gpu)| gpu.sm_violations > 0) {
            Some((node, gpu)) => anyhow::bail!(
                "GPU {} of {node} counted {} launches on SMs of another launch",
                gpu.index,
                gpu.sm_violations
            ),
            None => Ok(()),
        }
    }

    async fn functions_are_ready(&self) -> anyhow::Result<()> {
        let admin = self.cluster.admin()?;
        until("every enabled function is ready, on as many nodes as it asks for", async || {
            let listed = async {
                let functions: Vec<_> = admin.functions(None).try_collect().await?;
                anyhow::Ok((functions, admin.nodes().await?))
            };
            match listed.await {
                Ok((functions, nodes)) => functions
                    .iter()
                    .find_map(healthy::not_ready)
                    .or_else(|| healthy::misplaced(&functions, &nodes)),
                Err(error) => Some(error.to_string()),
            }
        })
        .await
    }

    /// Waits until each controller's own state has the same functions as the common state. Returns
    /// their number.
    async fn controllers_agree(&self) -> anyhow::Result<usize> {
        let admin = self.cluster.admin()?;
        for id in self.cluster.controller_ids() {
            let stale = self.cluster.admin_of(id)?.with_stale_reads();
            until(&format!("controller {id} agrees with all"), async || {
                match (known(&stale).await, known(&admin).await) {
                    (Ok(own), Ok(all)) => (own != all).then(|| healthy::difference(&own, &all)),
                    (Err(error), _) | (_, Err(error)) => Some(error.to_string()),
                }
            })
            .await?;
        }
        Ok(known(&admin).await?.len())
    }

    async fn judge(&mut self) {
        if self.holds(Invariant::Acknowledged) || self.holds(Invariant::Linearizable) {
            self.judge_writes().await;
        }
        let requests = self.load.requests();
        if self.holds(Invariant::Answered) {
            let excused_from = self.excused_from.unwrap_or(Duration::MAX);
            let judged: Vec<_> = requests.iter().filter(|it| it.begun < excused_from).cloned().collect();
            self.checks.push(answered::check(&judged, &self.killed));
        }
        if self.holds(Invariant::Right) {
            self.checks.push(correct_answers::check(&requests));
        }
        if self.holds(Invariant::Counted) {
            self.judge_sequences().await;
        }
        if self.holds(Invariant::Billed) {
            match self.bill().await {
                Ok(check) => self.checks.push(check),
                Err(error) => self.failed(billed::NAME, &error),
            }
        }
    }

    /// Judges the answers of sequences, and checks that no sequence is left.
    async fn judge_sequences(&mut self) {
        self.checks.push(counted::check(&self.load.steps()));
        match self.room().await {
            Ok(()) => {
                let detail = "of each function, the maximum number of sequences can start";
                self.checks.push(PromiseCheck::pass(NO_SEQUENCE_LEFT, detail));
            }
            Err(error) => self.failed(NO_SEQUENCE_LEFT, &error),
        }
    }

    async fn room(&self) -> anyhow::Result<()> {
        for counter in self.targets.counters() {
            counter.has_room(Endpoints::new(self.cluster.addresses())?).await?;
        }
        Ok(())
    }

    async fn judge_writes(&mut self) {
        let mut histories = self.load.history.by_key();
        match self.last().await {
            Ok((last, reads)) => {
                if self.holds(Invariant::Acknowledged) {
                    self.checks.push(acknowledged::check(&histories, &last));
                }
                for read in reads {
                    histories.entry(read.key.clone()).or_default().push(read);
                }
            }
            Err(error) => {
                self.failed("no acknowledged write is lost", &error.context("the end cannot be read"));
            }
        }
        if self.holds(Invariant::Linearizable) {
            // The search may block this thread for long, and nothing else has to run meanwhile.
            self.checks.push(linearizable::check(&histories));
        }
    }

    /// Returns the final state of every function, and the same as reads, which are the last
    /// operations of the histories.
    async fn last(&self) -> anyhow::Result<(BTreeMap<String, FunctionReading>, Vec<AdminOperation>)> {
        let invoked = self.timeline.now();
        let last = read_all(&self.cluster.admin()?).await?;
        let returned = self.timeline.now();
        let keys = self.load.history.by_key().into_keys();
        let reads =
            keys.map(|key| AdminOperation::last_read(&key, last.get(&key).copied(), invoked, returned));
        let reads = reads.collect();
        Ok((last, reads))
    }

    /// Waits until the bill contains everything that may not be missing, and judges the bill.
    async fn bill(&mut self) -> anyhow::Result<PromiseCheck> {
        let requests = self.load.requests();
        let admin = self.cluster.admin()?;
        self.account.asked = self.targets.asked();
        let (least, _) = self.account.bounds(&requests);
        // The check reports any requests that are still missing after the wait.
        let mut billed = 0;
        let read = until_within(BILL_PATIENCE, "every answer is billed", async || {
            match self.targets.billed(&admin).await {
                Ok(sum) => {
                    billed = sum;
                    (billed < least).then(|| format!("{billed} of {least}"))
                }
                Err(error) => Some(error.to_string()),
            }
        });
        if let Err(late) = read.await {
            self.timeline.saw(format!("{late:#}"));
        }
        self.account.billed = billed;
        Ok(billed::check(&self.account, &requests))
    }

    /// Kills all processes except for the executors, which have to end by themselves.
    async fn end(&mut self) -> anyhow::Result<PromiseCheck> {
        let pids = self.cluster.pids();
        self.cluster.kill_all_servers().await?;
        let mut left = Vec::new();
        let ended = until_within(LEFTOVER_PATIENCE, "every process is gone", async || {
            left = pids.iter().copied().filter(|&pid| is_alive(pid)).collect();
            (!left.is_empty()).then(|| format!("pids {left:?}"))
        });
        // The check reports the processes that are left.
        ended.await.unwrap_or_default();
        Ok(leftover_processes::check(&pids, &left))
    }
}

async fn known(
    admin: &Admin,
) -> Result<BTreeMap<String, healthy::FunctionFingerprint>, millrace_client::Error> {
    let functions: Vec<messages::Function> = admin.functions(None).try_collect().await?;
    Ok(healthy::known(&functions))
}
