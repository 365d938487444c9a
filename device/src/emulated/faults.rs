//! Faults that tests and chaos runs inject into an emulated GPU.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;

/// The injected faults. A single-use fault is consumed by the first operation that checks its flag.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) fail_copy: AtomicBool,
    pub(super) fail_map: AtomicBool,
    pub(super) exhaust_launch: AtomicBool,
    pub(super) lost: AtomicBool,
    pub(super) context_lost: AtomicBool,
    pub(super) peers_lost: AtomicBool,
}

impl Faults {
    pub(super) fn alive(&self) -> Result<(), Error> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::Lost("Xid 79 was injected: the GPU has fallen off the bus".to_owned()));
        }
        if self.context_lost.load(Ordering::Relaxed) {
            return Err(Error::ContextLost("an illegal access was injected".to_owned()));
        }
        Ok(())
    }

    /// Fails if a copy may not be carried out.
    pub(super) fn may_copy(&self) -> Result<(), Error> {
        self.alive()?;
        if self.fail_copy.swap(false, Ordering::Relaxed) {
            return Err(Error::CopyFailed("this fault was injected".to_owned()));
        }
        Ok(())
    }
}
