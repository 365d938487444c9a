//! The faults that a file can name.

use serde::Deserialize;

use super::{Size, Span};
use crate::proxy::Way;

/// A fault of a process, a link or a machine.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// kill -9 of a process. The process stays down until its repair; an executor is replaced
    /// by its worker.
    Kill(Who),
    /// SIGSTOP to a process: the process hangs until its repair.
    Stop(Who),
    /// SIGTERM to a process, as when a service manager restarts a service: the process ends by
    /// itself and is restarted.
    Restart(Who),
    /// A limit on a worker's memory at its present amount. If the limit ends the worker, the repair
    /// restarts it.
    Starve(Who),
    /// Links carry nothing.
    Cut(Cut),
    /// The link of a process is down: neither clients nor other processes reach it.
    Unplug(Who),
    /// Every link between processes is slow.
    Slow(Slow),
    /// Each sync of a controller's log takes longer.
    StallDisk(Stall),
    /// A controller's wall clock jumps.
    MoveClock(Jump),
    /// A GPU, chosen by the seed, fails.
    Device(DeviceFault),
}

/// The target of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum Who {
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

impl Who {
    pub(crate) fn is_controller(self) -> bool {
        !self.is_worker() && self != Self::Executor
    }

    pub(crate) fn is_worker(self) -> bool {
        matches!(self, Self::AnyWorker | Self::Worker(_))
    }
}

impl TryFrom<String> for Who {
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
pub(crate) struct Cut {
    pub(crate) who: Who,
    pub(crate) from: Side,
    #[serde(default)]
    pub(crate) way: Way,
}

/// The processes at the other end of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Side {
    Controllers,
    Workers,
    Everybody,
}

/// The delay, loss and bandwidth of slow links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Slow {
    /// Delay of a packet, each way.
    #[serde(default = "no_time")]
    pub(crate) delay: Span,
    /// Number of packets in a thousand that are lost at first.
    #[serde(default)]
    pub(crate) loss_permille: u32,
    /// Bytes per second.
    pub(crate) bandwidth: Option<Size>,
}

fn no_time() -> Span {
    Span::exactly(std::time::Duration::ZERO)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Stall {
    pub(crate) who: Who,
    pub(crate) each_sync: Span,
}

/// A jump of a controller's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Jump {
    pub(crate) who: Who,
    pub(crate) by: Span,
    pub(crate) direction: Direction,
}

/// The direction of a clock's jump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Direction {
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
    /// Memory runs out in the next launch.
    OutOfMemory,
    /// The executor aborts at the beginning of its next run.
    AbortOnRun,
}
