//! The faults that a file can name.

use serde::Deserialize;

use super::{DurationRange, MemorySize};
use crate::proxy::CutDirection;

/// A fault of a process, a link or a machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FaultSpec {
    /// kill -9 of a process. The process stays down until its repair; an executor is replaced
    /// by its worker.
    Kill(FaultTarget),
    /// SIGSTOP to a process: the process hangs until its repair.
    Stop(FaultTarget),
    /// SIGTERM to a process, as when a service manager restarts a service: the process ends by
    /// itself and is restarted.
    Restart(FaultTarget),
    /// A limit on a worker's memory at its present amount. If the limit ends the worker, the repair
    /// restarts it.
    Starve(FaultTarget),
    /// Links carry nothing.
    Cut(CutSpec),
    /// The link of a process is down: neither clients nor other processes reach it.
    Unplug(FaultTarget),
    /// Every link between processes is slow.
    Slow(SlowLinksSpec),
    /// Each sync of a controller's log takes longer.
    StallDisk(DiskStallSpec),
    /// A controller's wall clock jumps.
    MoveClock(ClockJumpSpec),
    /// A GPU, chosen by the seed, fails.
    Device(DeviceFault),
}

/// The target of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum FaultTarget {
    Leader,
    /// A controller that does not lead, chosen by the seed.
    Follower,
    /// Any controller, chosen by the seed.
    AnyController,
    EveryController,
    Controller(u64),
    /// Any worker, chosen by the seed.
    AnyWorker,
    Worker(u32),
    /// Any executor of any worker, chosen by the seed.
    Executor,
}

impl FaultTarget {
    pub(crate) fn is_controller(self) -> bool {
        !self.is_worker() && self != Self::Executor
    }

    pub(crate) fn is_worker(self) -> bool {
        matches!(self, Self::AnyWorker | Self::Worker(_))
    }
}

impl TryFrom<String> for FaultTarget {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let numbered = |prefix: &str| text.strip_prefix(prefix)?.parse::<u32>().ok();
        Ok(match text.as_str() {
            "leader" => Self::Leader,
            "follower" => Self::Follower,
            "controller" => Self::AnyController,
            "every-controller" => Self::EveryController,
            "worker" => Self::AnyWorker,
            "executor" => Self::Executor,
            _ => match (numbered("controller-"), numbered("worker-")) {
                (Some(id), _) => Self::Controller(id.into()),
                (_, Some(number)) => Self::Worker(number),
                _ => {
                    return Err(format!(
                        "{text:?} is not a process: write leader, follower, controller, controller-1, every-controller, worker, worker-1 or executor"
                    ));
                }
            },
        })
    }
}

/// A cut of the links from one process to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct CutSpec {
    pub(crate) who: FaultTarget,
    pub(crate) from: CutSide,
    #[serde(default)]
    pub(crate) way: CutDirection,
}

/// The processes at the other end of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CutSide {
    Controllers,
    Workers,
    Everybody,
}

/// The delay, loss and bandwidth of slow links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct SlowLinksSpec {
    /// Delay of a packet, each way.
    #[serde(default = "no_time")]
    pub(crate) delay: DurationRange,
    /// Number of packets in a thousand that are lost at first.
    #[serde(default)]
    pub(crate) loss_permille: u32,
    /// Bytes per second.
    pub(crate) bandwidth: Option<MemorySize>,
}

fn no_time() -> DurationRange {
    DurationRange::exactly(std::time::Duration::ZERO)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct DiskStallSpec {
    pub(crate) who: FaultTarget,
    pub(crate) each_sync: DurationRange,
}

/// A jump of a controller's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ClockJumpSpec {
    pub(crate) who: FaultTarget,
    pub(crate) by: DurationRange,
    pub(crate) direction: JumpDirection,
}

/// The direction of a clock's jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum JumpDirection {
    Ahead,
    Back,
    /// Ahead or back, chosen by the seed.
    Either,
}

/// The kind of a GPU's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeviceFault {
    /// The next copy of the GPU fails.
    FailedCopy,
    /// The next mapping of memory fails.
    FailedMap,
    /// The GPU reports that it is lost.
    Xid,
    /// The GPU is lost without a report.
    OffTheBus,
    /// The executor's context on the GPU is lost without a report.
    LostContext,
    /// Memory runs out in the next launch.
    OutOfMemory,
    /// The executor aborts at the beginning of its next run.
    AbortOnRun,
}
