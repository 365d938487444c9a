//! The faults that a file can name.

use serde::Deserialize;

use super::{Size, Span};
use crate::proxy::Way;

/// Something that is broken.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// kill -9. It stays down until it is repaired; an executor's worker replaces it by itself.
    Kill(Who),
    /// SIGSTOP: the process hangs, and goes on when it is repaired.
    Stop(Who),
    /// SIGTERM, as a service manager restarts a service: it ends by itself and is started again.
    Restart(Who),
    /// The process gets no more memory from the system. Where that ends it, it is started again when
    /// it is repaired.
    Starve(Who),
    /// Links carry nothing.
    Cut(Cut),
    /// A process's own link is down: nobody reaches it, clients included.
    Unplug(Who),
    /// Every link between processes is slow.
    Slow(Slow),
    /// Each sync of a controller's log takes longer.
    StallDisk(Stall),
    /// A controller's wall clock jumps.
    MoveClock(Jump),
    /// A GPU fails, one by the seed.
    Device(DeviceFault),
}

/// Whom a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum Who {
    Leader,
    /// A controller that does not lead, by the seed.
    Follower,
    /// Any controller, by the seed.
    AnyController,
    EveryController,
    Controller(u64),
    /// Any worker, by the seed.
    AnyWorker,
    Worker(u32),
    /// Any executor of any worker, by the seed.
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
                        "{text:?} is nobody: write leader, follower, controller, controller-1, every-controller, worker, worker-1 or executor"
                    ));
                }
            },
        })
    }
}

/// Links from one to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Cut {
    pub(crate) who: Who,
    pub(crate) from: Side,
    #[serde(default)]
    pub(crate) way: Way,
}

/// Who is at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Side {
    Controllers,
    Workers,
    Everybody,
}

/// What makes links slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Slow {
    /// How long a packet takes, each way.
    #[serde(default = "no_time")]
    pub(crate) delay: Span,
    /// Of a thousand packets, how many are lost at first.
    #[serde(default)]
    pub(crate) loss_permille: u32,
    /// What goes through in a second.
    pub(crate) bandwidth: Option<Size>,
}

fn no_time() -> Span {
    Span::exactly(std::time::Duration::ZERO)
}

/// A slow disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Stall {
    pub(crate) who: Who,
    pub(crate) each_sync: Span,
}

/// A clock that jumps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Jump {
    pub(crate) who: Who,
    pub(crate) by: Span,
    pub(crate) direction: Direction,
}

/// Where a clock jumps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Direction {
    Ahead,
    Back,
    /// One of them, by the seed.
    Either,
}

/// How a GPU fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeviceFault {
    /// Its next copy fails.
    FailedCopy,
    /// It cannot map the next memory.
    FailedMap,
    /// It reports that it is lost.
    Xid,
    /// It is lost and says nothing.
    OffTheBus,
    /// Memory runs out in its next launch.
    OutOfMemory,
    /// Its executor aborts when it begins its next run.
    AbortOnRun,
}
