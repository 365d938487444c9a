//! The gate that withholds a leader's messages after quorum loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this controller withholds the messages of a leader. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub(super) struct LeaderGate(Arc<AtomicBool>);

impl LeaderGate {
    pub(super) fn is_silent(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn set_silent(&self, silent: bool) {
        self.0.store(silent, Ordering::Relaxed);
    }
}
