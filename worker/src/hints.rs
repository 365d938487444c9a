//! Hints of functions that workflows are likely to ask for next, as they come with requests (D29): which
//! are followed, and how far. A model on the disk is brought into host memory; one that is there and
//! should be on a GPU is handed on with the request, for the node to decide.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use millrace_policy::prewarm::{Pace, Prewarm};
use millrace_policy::workflow::{AHEAD_MAX, Nearness};
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
        hints
            .filter_map(|hint| key(tenant, hint).filter(|key| self.goes_on(now, key, nearness(hint.to()))))
            .collect()
    }

    /// Whether a hint is the node's to follow.
    fn goes_on(&self, now: Timestamp, key: &RevisionKey, to: Nearness) -> bool {
        let inner = &self.0;
        // Whatever is not served here is another worker's, or nobody's.
        let Some(digest) = inner.signatures.borrow().get(key).map(|it| it.digest) else { return false };
        let mut pace = inner.pace.lock().unwrap_or_else(PoisonError::into_inner);
        if !pace.admits(now, key, to) {
            return false;
        }
        let hinted = inner.gate.hint(digest);
        let warms = hinted == Hinted::Here && to == Nearness::Gpu;
        if warms || hinted == Hinted::Asked {
            pace.followed(now, key, to);
        }
        if !warms {
            let counter = match hinted {
                Hinted::Here => &inner.there,
                Hinted::Asked => &inner.host,
                Hinted::Busy => &inner.busy,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        warms
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

fn nearness(to: wire::WarmTo) -> Nearness {
    match to {
        wire::WarmTo::Gpu => Nearness::Gpu,
        wire::WarmTo::Host | wire::WarmTo::Unspecified => Nearness::Host,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::Digest;

    use super::*;
    use crate::clock::Sleeper;
    use crate::host_tier::{Reader, Signature};

    /// A millisecond later each time that it is asked.
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

    /// As along a → b → c → d: the step after next is named for host memory first, and for a GPU one
    /// step later.
    #[test]
    fn each_step_of_a_chain_is_handed_on_when_it_is_the_next() {
        let tenant = TenantName::default();
        let likely = |function: &str, to: wire::WarmTo| wire::Likely {
            function: function.into(),
            revision: 1,
            to: to.into(),
        };
        let clock = Arc::new(Later::default());
        let gate = Gate::new(clock.clone());
        let mut signatures = Signatures::new();
        for name in ["b", "c", "d"] {
            let digest = Digest::of(name.as_bytes());
            gate.arrived(digest);
            let (inputs, outputs) = (Vec::new(), Vec::new());
            let signature = Signature { digest, inputs, outputs, reader: Reader::Gpu, state: None };
            let key = key(&tenant, &likely(name, wire::WarmTo::Gpu)).unwrap();
            signatures.insert(key, Arc::new(signature));
        }
        let (_told, signatures) = watch::channel(Arc::new(signatures));
        let hints = Hints::new(Prewarm::On, signatures, gate, clock);
        let (gpu, host) = (wire::WarmTo::Gpu, wire::WarmTo::Host);
        let handed_on = |hinted: &[wire::Likely]| {
            let keys = hints.follow(&tenant, hinted);
            keys.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(handed_on(&[likely("b", gpu), likely("c", host), likely("d", host)]), ["default/b@1"]);
        assert_eq!(handed_on(&[likely("c", gpu), likely("d", host)]), ["default/c@1"]);
        assert_eq!(handed_on(&[likely("d", gpu)]), ["default/d@1"]);
        assert_eq!(handed_on(&[likely("b", gpu)]), [""; 0], "a request a few milliseconds later");
        assert_eq!(hints.followed(), Followed { host: 0, there: 3, busy: 0 });
    }
}
