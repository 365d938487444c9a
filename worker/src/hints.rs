//! Hints of functions that workflows are likely to ask for next, as they come with requests (D29): which
//! are followed, and how far. A model on the disk is brought into host memory; one that is there and
//! should be on a GPU is handed on with the request, for the node to decide.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use millrace_policy::prewarm::{Pace, Prewarm};
use millrace_policy::workflow::AHEAD_MAX;
use millrace_proto::worker as wire;
use millrace_types::{FunctionKey, FunctionName, Revision, RevisionKey, TenantName, Timestamp};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::host_tier::Signatures;
use crate::host_tier::gate::{Gate, Hinted};

/// Follows hints. Clones share everything.
#[derive(Clone)]
pub(crate) struct Hints(Arc<Inner>);

struct Inner {
    prewarm: Prewarm,
    signatures: watch::Receiver<Arc<Signatures>>,
    gate: Gate,
    clock: Arc<dyn Clock>,
    /// Requests come on any thread, hence the lock; never held across a wait.
    pace: Mutex<Pace>,
    host: AtomicU64,
    there: AtomicU64,
    busy: AtomicU64,
}

/// What became of hints, those handed on to the node not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Followed {
    /// Their models were asked for from the disk.
    pub(crate) host: u64,
    /// Their models were in host memory, where they should be.
    pub(crate) there: u64,
    /// The host tier had others to bring.
    pub(crate) busy: u64,
}

impl Hints {
    pub(crate) fn new(
        prewarm: Prewarm,
        signatures: watch::Receiver<Arc<Signatures>>,
        gate: Gate,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let (pace, [host, there, busy]) = (Mutex::default(), Default::default());
        Self(Arc::new(Inner { prewarm, signatures, gate, clock, pace, host, there, busy }))
    }

    /// Follows the hints that came with a request, as far as host memory goes. Gives those that should
    /// be on a GPU and may be brought there.
    pub(crate) fn follow(&self, tenant: &TenantName, hints: &[wire::Likely]) -> Vec<RevisionKey> {
        if self.0.prewarm == Prewarm::Off || hints.is_empty() {
            return Vec::new();
        }
        let now = self.0.clock.now();
        let hints = hints.iter().take(AHEAD_MAX);
        hints.filter_map(|hint| key(tenant, hint).filter(|key| self.goes_on(now, key, hint.to()))).collect()
    }

    /// Whether a hint is the node's to follow.
    fn goes_on(&self, now: Timestamp, key: &RevisionKey, to: wire::WarmTo) -> bool {
        let inner = &self.0;
        // Whatever is not served here is another worker's, or nobody's.
        let Some(digest) = inner.signatures.borrow().get(key).map(|it| it.digest) else { return false };
        if !inner.pace.lock().unwrap_or_else(PoisonError::into_inner).admits(now, key) {
            return false;
        }
        let counter = match inner.gate.hint(digest) {
            Hinted::Here if to == wire::WarmTo::Gpu => return true,
            Hinted::Here => &inner.there,
            Hinted::Asked => &inner.host,
            Hinted::Busy => &inner.busy,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        false
    }

    pub(crate) fn followed(&self) -> Followed {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Followed { host: get(&self.0.host), there: get(&self.0.there), busy: get(&self.0.busy) }
    }
}

impl std::fmt::Debug for Hints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hints").field("prewarm", &self.0.prewarm).finish_non_exhaustive()
    }
}

fn key(tenant: &TenantName, hint: &wire::Likely) -> Option<RevisionKey> {
    let name = FunctionName::new(&hint.function).ok()?;
    let function = FunctionKey { tenant: tenant.clone(), name };
    Some(RevisionKey { function, revision: Revision::new(hint.revision)? })
}
