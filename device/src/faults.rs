//! Faults that tests and chaos runs inject into a GPU.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::api::InjectedFault;
use crate::error::Error;

/// The injected faults. A single-use fault is consumed by the first operation that checks its flag.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    pub(crate) fail_copy: AtomicBool,
    pub(crate) fail_map: AtomicBool,
    pub(crate) exhaust_launch: AtomicBool,
    pub(crate) lost: AtomicBool,
    pub(crate) context_lost: AtomicBool,
    pub(crate) peers_lost: AtomicBool,
}

impl Faults {
    pub(crate) fn alive(&self) -> Result<(), Error> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::Lost("Xid 79 was injected: the GPU has fallen off the bus".to_owned()));
        }
        if self.context_lost.load(Ordering::Relaxed) {
            return Err(Error::ContextLost("an illegal access was injected".to_owned()));
        }
        Ok(())
    }

    /// Fails if a copy may not be carried out.
    pub(crate) fn may_copy(&self) -> Result<(), Error> {
        self.alive()?;
        if self.fail_copy.swap(false, Ordering::Relaxed) {
            return Err(Error::CopyFailed("this fault was injected".to_owned()));
        }
        Ok(())
    }

    /// Fails if a launch may not be carried out.
    pub(crate) fn may_launch(&self) -> Result<(), Error> {
        self.alive()?;
        if self.exhaust_launch.swap(false, Ordering::Relaxed) {
            return Err(Error::OutOfMemory("this fault was injected".to_owned()));
        }
        Ok(())
    }

    /// Records a fault. `corrupt` changes loaded bytes of a region.
    pub(crate) fn inject<R>(
        &self,
        fault: InjectedFault<'_, R>,
        corrupt: impl FnOnce(&R) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let flag = match fault {
            InjectedFault::FailNextCopy => &self.fail_copy,
            InjectedFault::FailNextMap => &self.fail_map,
            InjectedFault::ExhaustNextLaunch => &self.exhaust_launch,
            InjectedFault::Lose => &self.lost,
            InjectedFault::LoseContext => &self.context_lost,
            InjectedFault::LosePeers => &self.peers_lost,
            InjectedFault::Corrupt(region) => return corrupt(region),
        };
        flag.store(true, Ordering::Relaxed);
        Ok(())
    }
}
