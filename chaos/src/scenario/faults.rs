//! Injects the faults that a file names, and undoes them.

use std::time::Duration;

use anyhow::Context as _;
use rand::Rng as _;
use rand::seq::IndexedRandom as _;

use super::repair::FaultRepair;
use super::spec::{
    ClockJumpSpec, CutSide, CutSpec, DeviceFault, DiskStallSpec, FaultSpec, FaultTarget, JumpDirection,
    SlowLinksSpec,
};
use super::stage::ScenarioStage;
use crate::cluster::ClusterProcess;
use crate::proxy::{LinkParty, LinkSlowness, RestoreMode};

/// Maximum duration of a stall, longer than any scenario; the repair ends the stall.
const STALL_LASTS: Duration = Duration::from_secs(600);
/// Time within which a fault of a GPU ends its executor under load: the fault acts on the next
/// work.
const ARMED: Duration = Duration::from_secs(5);

/// Time that the choice of a controller waits for a leader, which the choice depends on. In a storm, other
/// faults can leave no majority until their repair is due, and a wait here delays every later repair.
const LEADER_PATIENCE: Duration = Duration::from_secs(10);

impl ScenarioStage {
    /// Injects a fault, and returns its repairs; none for a fault that ends by itself.
    pub(super) async fn inflict(&mut self, fault: &FaultSpec) -> anyhow::Result<Vec<FaultRepair>> {
        self.latest.leader = None;
        match *fault {
            FaultSpec::Kill(FaultTarget::Executor) => {
                let victim = self.an_executor().await?;
                self.kill_executor(&victim)?;
                self.latest.victims.push(victim);
                Ok(Vec::new())
            }
            FaultSpec::Kill(FaultTarget::EveryController) => {
                self.breaks_connections();
                let ids = self.cluster.controller_ids();
                self.cluster.kill_all_controllers().await?;
                Ok(ids.into_iter().map(|id| FaultRepair::Start(ClusterProcess::Controller(id))).collect())
            }
            FaultSpec::Kill(who) => {
                let (process, role) = self.chosen(who).await?;
                self.loses(&process);
                self.cluster.kill(&process, &role).await?;
                Ok(vec![FaultRepair::Start(process)])
            }
            FaultSpec::Stop(who) => self.stop(who).await,
            FaultSpec::Restart(who) => {
                let (process, role) = self.chosen(who).await?;
                self.loses(&process);
                self.cluster.end(&process, &role).await?;
                self.cluster.begin_start(&process)?;
                Ok(Vec::new())
            }
            FaultSpec::Starve(who) => {
                let (process, _) = self.chosen(who).await?;
                self.loses(&process);
                let ClusterProcess::Worker(name) = process else { return Ok(Vec::new()) };
                self.cluster.limit_worker_memory(&name)?;
                Ok(vec![FaultRepair::Feed(name)])
            }
            FaultSpec::Cut(cut) => self.cut(cut).await,
            FaultSpec::Unplug(who) => {
                let (process, role) = self.chosen(who).await?;
                self.loses(&process);
                self.cluster.unplug(&process, &role)?;
                Ok(vec![FaultRepair::Plug(process)])
            }
            FaultSpec::Slow(slow) => Ok(self.slow_links(slow)),
            FaultSpec::StallDisk(DiskStallSpec { who, each_sync }) => {
                let id = self.controller(who).await?;
                let each_sync = each_sync.draw(&mut self.rng);
                self.cluster.stall_disk(id, each_sync, STALL_LASTS).await?;
                Ok(vec![FaultRepair::Clear(id)])
            }
            FaultSpec::MoveClock(ClockJumpSpec { who, by, direction }) => {
                let id = self.controller(who).await?;
                let by = i64::try_from(by.draw(&mut self.rng).as_millis()).context("the jump is too long")?;
                let back = match direction {
                    JumpDirection::Ahead => false,
                    JumpDirection::Back => true,
                    JumpDirection::Either => self.rng.random(),
                };
                self.cluster.move_clock(id, if back { -by } else { by }).await?;
                Ok(vec![FaultRepair::Clear(id)])
            }
            FaultSpec::Device(fault) => self.fail_device(fault).await.map(|()| Vec::new()),
        }
    }

    async fn stop(&mut self, who: FaultTarget) -> anyhow::Result<Vec<FaultRepair>> {
        let (pid, what) = match who {
            FaultTarget::Executor => {
                let victim = self.an_executor().await?;
                (victim.pid(), format!("the executor {}", victim.role()))
            }
            who => {
                let (process, role) = self.chosen(who).await?;
                self.loses(&process);
                (self.cluster.pid(&process)?, format!("{process}{role}"))
            }
        };
        self.timeline.fault(format!("stopped {what} (SIGSTOP, pid {pid})"));
        crate::cluster::signal(pid, rustix::process::Signal::STOP)?;
        Ok(vec![FaultRepair::Continue(pid)])
    }

    async fn cut(&mut self, CutSpec { who, from, way }: CutSpec) -> anyhow::Result<Vec<FaultRepair>> {
        let (process, role) = self.chosen(who).await?;
        self.loses(&process);
        let one = process.party();
        let (beyond, whom) = match from {
            CutSide::Controllers => (self.controllers(), "the controllers"),
            CutSide::Workers => (self.workers(), "the workers"),
            CutSide::Everybody => ([self.controllers(), self.workers()].concat(), "every other process"),
        };
        let beyond: Vec<LinkParty> = beyond.into_iter().filter(|other| *other != one).collect();
        self.timeline.fault(format!("cut {process}{role}: no link to {whom}, {way}"));
        self.cluster.cut(&[one], &beyond, way)?;
        Ok(vec![FaultRepair::Mend])
    }

    fn slow_links(
        &mut self,
        SlowLinksSpec { delay, loss_permille, bandwidth }: SlowLinksSpec,
    ) -> Vec<FaultRepair> {
        self.breaks_connections();
        let bytes_per_second = bandwidth.and_then(|size| std::num::NonZeroU64::new(size.0));
        let slowness = LinkSlowness { delay: delay.draw(&mut self.rng), loss_permille, bytes_per_second };
        let all = [self.controllers(), self.workers()].concat();
        self.timeline.fault(format!("made every link slow: {slowness}"));
        self.cluster.slow(&all, slowness);
        vec![FaultRepair::Mend]
    }

    async fn fail_device(&mut self, fault: DeviceFault) -> anyhow::Result<()> {
        let (ClusterProcess::Worker(name), _) = self.chosen(FaultTarget::AnyWorker).await? else {
            return Ok(());
        };
        let nodes = self.cluster.admin()?.nodes().await?;
        let node = nodes
            .iter()
            .find(|node| node.name == name)
            .context("the cluster lists no node for the chosen worker")?;
        let gpu = node.gpus.choose(&mut self.rng).context("the chosen worker has no GPU")?.index;
        if matches!(
            fault,
            DeviceFault::Xid | DeviceFault::OffTheBus | DeviceFault::LostContext | DeviceFault::AbortOnRun
        ) {
            let now = self.timeline.now();
            self.killed.push(now..=now + ARMED);
        }
        self.cluster.fail_device(&name, gpu, fault.into()).await
    }

    /// Undoes faults. Restarted processes are awaited later, because a controller is not ready
    /// before a majority runs.
    pub(super) async fn undo(&mut self, undos: Vec<FaultRepair>) -> anyhow::Result<()> {
        for undo in undos {
            match undo {
                FaultRepair::Start(process) => self.cluster.begin_start(&process)?,
                FaultRepair::Continue(pid) => {
                    self.timeline.did(format!("process {pid} continues (SIGCONT)"));
                    crate::cluster::signal(pid, rustix::process::Signal::CONT)?;
                }
                FaultRepair::Feed(name) => self.cluster.lift_worker_memory_limit(&name)?,
                FaultRepair::Plug(process) => {
                    self.breaks_connections();
                    self.cluster.plug(&process)?;
                }
                FaultRepair::Mend => self.mend()?,
                // The faults of a machine end with the controller's process.
                FaultRepair::Clear(id) if !self.cluster.running_controllers().contains(&id) => {}
                FaultRepair::Clear(id) => self.cluster.clear_faults(id).await?,
            }
        }
        Ok(())
    }

    /// Restores every link. The seed decides whether waiting data is delivered or the connections
    /// are reset.
    pub(super) fn mend(&mut self) -> anyhow::Result<()> {
        let how = if self.rng.random() { RestoreMode::Resume } else { RestoreMode::Reset };
        self.breaks_connections();
        let what = self.cluster.mend(how)?;
        self.timeline.did(format!("restored every link: {what}"));
        Ok(())
    }

    /// Chooses a running process, by the seed, and returns its role for the timeline.
    async fn chosen(&mut self, who: FaultTarget) -> anyhow::Result<(ClusterProcess, String)> {
        Ok(match who {
            FaultTarget::AnyWorker => {
                let names = self.cluster.running_workers();
                let name = names.choose(&mut self.rng).context("no worker runs")?;
                (ClusterProcess::Worker(name.clone()), String::new())
            }
            FaultTarget::Worker(number) => {
                (ClusterProcess::Worker(format!("worker-{number}")), String::new())
            }
            who => {
                let id = self.controller(who).await?;
                let leads = self.latest.leader == Some(id);
                let role = if leads { ", the leader" } else { "" };
                (ClusterProcess::Controller(id), role.to_owned())
            }
        })
    }

    async fn controller(&mut self, who: FaultTarget) -> anyhow::Result<u64> {
        let leader = tokio::time::timeout(LEADER_PATIENCE, self.cluster.leader()).await;
        let leader = leader.with_context(|| format!("no controller leads within {LEADER_PATIENCE:?}"))??;
        self.latest.leader = Some(leader);
        let running = self.cluster.running_controllers();
        let chosen = match who {
            FaultTarget::Leader => Some(leader),
            FaultTarget::Controller(id) => Some(id),
            FaultTarget::Follower => {
                let followers: Vec<u64> = running.into_iter().filter(|&id| id != leader).collect();
                followers.choose(&mut self.rng).copied()
            }
            _ => running.choose(&mut self.rng).copied(),
        };
        chosen.context("no such controller runs")
    }

    /// Records the fault for the bills and remembers the worker that the fault concerns.
    fn loses(&mut self, process: &ClusterProcess) {
        self.breaks_connections();
        if let ClusterProcess::Worker(name) = process {
            self.latest.worker = Some(name.clone());
            self.account.lost.push(self.timeline.now());
        }
    }

    fn breaks_connections(&mut self) {
        self.account.broke.push(self.timeline.now());
    }

    pub(super) fn controllers(&self) -> Vec<LinkParty> {
        self.cluster.controller_ids().into_iter().map(LinkParty::Controller).collect()
    }

    pub(super) fn workers(&self) -> Vec<LinkParty> {
        self.cluster.worker_names().into_iter().map(LinkParty::Worker).collect()
    }
}

impl From<DeviceFault> for millrace_proto::executor::Fault {
    fn from(fault: DeviceFault) -> Self {
        match fault {
            DeviceFault::FailedCopy => Self::FailNextCopy,
            DeviceFault::FailedMap => Self::FailNextMap,
            DeviceFault::Xid => Self::Xid,
            DeviceFault::OffTheBus => Self::OffTheBus,
            DeviceFault::LostContext => Self::LoseContext,
            DeviceFault::OutOfMemory => Self::OutOfMemory,
            DeviceFault::AbortOnRun => Self::AbortOnRun,
        }
    }
}
