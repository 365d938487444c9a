//! Prewarming hints, which requests of workflows carry for the functions that are likely to run
//! next (D29). This module decides which hints to follow and how far. A model on the disk is loaded
//! into host memory. A model that is in host memory and should be on a GPU is passed on with the
//! request, and the node decides.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use millrace_proto::worker as wire;
use millrace_types::{FunctionKey, FunctionName, Revision, RevisionKey, TenantName, Timestamp};
use millrace_workflow::hints::{HintRateLimit, Prewarm};
use millrace_workflow::{AHEAD_MAX, PrewarmTarget};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::host_tier::gate::{HintOutcome, HostMemoryGate};
use crate::signature::Signatures;

/// Follows hints. Clones share the state.
#[derive(Clone)]
pub(crate) struct HintFollower(Arc<Inner>);

struct Inner {
    prewarm: Prewarm,
    signatures: watch::Receiver<Arc<Signatures>>,
    gate: HostMemoryGate,
    clock: Arc<dyn Clock>,
    /// Locked because requests arrive on any thread; the lock is never held across an await.
    pace: Mutex<HintRateLimit>,
    host: AtomicU64,
    there: AtomicU64,
    busy: AtomicU64,
}

/// Counts of hints by outcome, without the hints that were passed on to the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HintOutcomes {
    /// Hints that requested their models from the disk.
    pub(crate) host: u64,
    /// Hints for host memory with the model already there.
    pub(crate) there: u64,
    /// Hints that were dropped because requests or another hint waited for the host tier.
    pub(crate) busy: u64,
}

impl HintFollower {
    pub(crate) fn new(
        prewarm: Prewarm,
        signatures: watch::Receiver<Arc<Signatures>>,
        gate: HostMemoryGate,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self(Arc::new(Inner {
            prewarm,
            signatures,
            gate,
            clock,
            pace: Mutex::default(),
            host: AtomicU64::default(),
            there: AtomicU64::default(),
            busy: AtomicU64::default(),
        }))
    }

    /// Follows a request's hints as far as host memory. Returns the functions that the node should
    /// consider for a GPU: their models are in host memory.
    pub(crate) fn follow(&self, tenant: &TenantName, hints: &[wire::Likely]) -> Vec<RevisionKey> {
        if self.0.prewarm == Prewarm::Off || hints.is_empty() {
            return Vec::new();
        }
        let now = self.0.clock.now();
        let hints = hints.iter().take(AHEAD_MAX);
        hints
            .filter_map(|hint| key(tenant, hint).filter(|key| self.follow_one(now, key, nearness(hint.to()))))
            .collect()
    }

    /// Follows one hint. Returns whether the hint is passed on to the node.
    fn follow_one(&self, now: Timestamp, key: &RevisionKey, to: PrewarmTarget) -> bool {
        let inner = &self.0;
        // A function that is not served here is another worker's, or no worker's.
        let Some(digest) = inner.signatures.borrow().get(key).map(|it| it.digest) else { return false };
        let mut pace = inner.pace.lock().unwrap_or_else(PoisonError::into_inner);
        if !pace.admits(now, key, to) {
            return false;
        }
        let hinted = inner.gate.hint(digest);
        let warms = hinted == HintOutcome::Here && to == PrewarmTarget::Gpu;
        if warms || hinted == HintOutcome::Asked {
            pace.followed(now, key, to);
        }
        if !warms {
            let counter = match hinted {
                HintOutcome::Here => &inner.there,
                HintOutcome::Asked => &inner.host,
                HintOutcome::Busy => &inner.busy,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        warms
    }

    pub(crate) fn followed(&self) -> HintOutcomes {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HintOutcomes { host: get(&self.0.host), there: get(&self.0.there), busy: get(&self.0.busy) }
    }
}

impl std::fmt::Debug for HintFollower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HintFollower").field("prewarm", &self.0.prewarm).finish_non_exhaustive()
    }
}

fn key(tenant: &TenantName, hint: &wire::Likely) -> Option<RevisionKey> {
    let name = FunctionName::new(&hint.function).ok()?;
    let function = FunctionKey { tenant: tenant.clone(), name };
    Some(RevisionKey { function, revision: Revision::new(hint.revision)? })
}

fn nearness(to: wire::WarmTo) -> PrewarmTarget {
    match to {
        wire::WarmTo::Gpu => PrewarmTarget::Gpu,
        wire::WarmTo::Host | wire::WarmTo::Unspecified => PrewarmTarget::Host,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::Digest;

    use super::*;
    use crate::clock::Sleeper;
    use crate::signature::{FunctionSignature, InputReader};

    /// A clock that advances by a millisecond at each reading.
    #[derive(Default)]
    struct Later(AtomicU64);

    impl Clock for Later {
        fn now(&self) -> Timestamp {
            Timestamp(self.0.fetch_add(1_000_000, Ordering::Relaxed))
        }

        fn wake_at(&self, at: Timestamp, _: Sleeper) -> Timestamp {
            at
        }

        fn sleep_for(&self, span: Duration) -> Duration {
            span
        }
    }

    /// Follows the hints of a chain a → b → c → d: each step is hinted for host memory as the
    /// second next step, and for a GPU as the next step.
    #[test]
    fn each_step_of_a_chain_is_passed_on_once_it_is_the_next_step() {
        let tenant = TenantName::default();
        let likely = |function: &str, to: wire::WarmTo| wire::Likely {
            function: function.into(),
            revision: 1,
            to: to.into(),
        };
        let clock = Arc::new(Later::default());
        let gate = HostMemoryGate::new(clock.clone());
        let mut signatures = Signatures::new();
        for name in ["b", "c", "d"] {
            let digest = Digest::of(name.as_bytes());
            gate.record_loaded(digest);
            let signature = FunctionSignature {
                digest,
                inputs: Vec::new(),
                outputs: Vec::new(),
                reader: InputReader::Gpu,
                state: None,
            };
            let key = key(&tenant, &likely(name, wire::WarmTo::Gpu)).unwrap();
            signatures.insert(key, Arc::new(signature));
        }
        let (_told, signatures) = watch::channel(Arc::new(signatures));
        let hints = HintFollower::new(Prewarm::On, signatures, gate, clock);
        let gpu = wire::WarmTo::Gpu;
        let host = wire::WarmTo::Host;
        let handed_on = |hinted: &[wire::Likely]| {
            let keys = hints.follow(&tenant, hinted);
            keys.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(handed_on(&[likely("b", gpu), likely("c", host), likely("d", host)]), ["default/b@1"]);
        assert_eq!(handed_on(&[likely("c", gpu), likely("d", host)]), ["default/c@1"]);
        assert_eq!(handed_on(&[likely("d", gpu)]), ["default/d@1"]);
        assert_eq!(handed_on(&[likely("b", gpu)]), [""; 0], "a request a few milliseconds later");
        assert_eq!(hints.followed(), HintOutcomes { host: 0, there: 3, busy: 0 });
    }
}
