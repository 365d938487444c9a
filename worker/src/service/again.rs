//! A request that is run again, for what it gave was lost with its GPU's executor after the run had ended
//! and before it was answered: where there is no room for an output as an object, its bytes are
//! answered, and come from that GPU. As after any loss only where running twice does no harm, as often
//! and as long as its client allows. Not here: outputs that became objects, which whoever takes them
//! has made again.

use std::time::Duration;

use crate::handle::NodeHandle;
use crate::request::Invocation;

/// A request that is being run, to be run again.
pub(super) struct Again(Invocation);

impl Again {
    /// Remembers a request, where what it gives may stay on a GPU and it may run twice.
    pub(super) fn of(invocation: &Invocation, node: &NodeHandle) -> Option<Self> {
        let may = !invocation.on_gpus.keep.is_empty() && node.may_run_twice(&invocation.revision);
        may.then(|| Self(invocation.clone()))
    }

    /// The request as it is now that it was started so often and took so long; `None` where nothing of
    /// what its client allows is left.
    pub(super) fn after(self, attempts: u32, took: Duration) -> Option<Invocation> {
        let attempts_left = self.0.attempts_left.saturating_sub(attempts);
        let timeout = self.0.timeout.saturating_sub(took);
        let left = attempts_left > 0 && !timeout.is_zero();
        let objective = self.0.objective.map(|objective| objective.saturating_sub(took));
        let (cold, behind) = (Duration::ZERO, Duration::ZERO);
        let counted = true;
        left.then_some(Invocation { attempts_left, timeout, objective, cold, behind, counted, ..self.0 })
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{FunctionKey, FunctionName, RequestId, Revision, RevisionKey, TenantName};

    use super::*;
    use crate::request::OnGpus;

    #[test]
    fn what_is_left_of_a_requests_time_and_starts_is_what_it_has_again() {
        let millis = Duration::from_millis;
        let name = FunctionName::new("f").unwrap();
        let invocation = Invocation {
            request_id: RequestId::new("request-1").unwrap(),
            attempts_left: 3,
            revision: RevisionKey {
                function: FunctionKey { tenant: TenantName::default(), name },
                revision: Revision::FIRST,
            },
            timeout: millis(100),
            objective: Some(millis(50)),
            priority: 0,
            inputs: Vec::new(),
            descriptors: Vec::new(),
            on_gpus: OnGpus::default(),
            outputs: Vec::new(),
            next: Vec::new(),
            cold: millis(7),
            behind: millis(8),
            counted: false,
        };
        let again = |attempts, took| Again(invocation.clone()).after(attempts, millis(took));
        let next = again(1, 30).unwrap();
        assert_eq!((next.attempts_left, next.timeout, next.objective), (2, millis(70), Some(millis(20))));
        assert!(next.counted && (next.cold + next.behind).is_zero());
        assert_eq!(again(1, 60).unwrap().objective, Some(Duration::ZERO), "late already");
        assert!(again(3, 30).is_none() && again(1, 100).is_none());
    }
}
