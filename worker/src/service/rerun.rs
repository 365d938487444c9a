//! The second run of a request that lost its outputs. An output without capacity for an object is
//! answered with its bytes, which are read from the GPU after the run. If the GPU's executor dies
//! before that, the run is repeated. As after any loss, only idempotent functions are repeated,
//! within the client's attempts and timeout. Outputs that became objects are not covered here: a
//! consumer has a lost object computed again.

use std::time::Duration;

use crate::handle::NodeHandle;
use crate::request::Attempt;

/// A copy of a running request, from which the request can be run again.
pub(super) struct RerunCopy(Attempt);

impl RerunCopy {
    /// Copies a request if its outputs may stay on a GPU and the request may run twice.
    pub(super) fn of(invocation: &Attempt, node: &NodeHandle) -> Option<Self> {
        let may = !invocation.on_gpus.keep.is_empty() && node.is_idempotent(&invocation.revision);
        may.then(|| Self(invocation.clone()))
    }

    /// Returns the request for its next run, after `attempts` starts and the time `took`. Returns
    /// `None` if no attempt or no time is left.
    pub(super) fn after(self, attempts: u32, took: Duration) -> Option<Attempt> {
        let attempts_left = self.0.attempts_left.saturating_sub(attempts);
        let timeout = self.0.timeout.saturating_sub(took);
        let left = attempts_left > 0 && !timeout.is_zero();
        let objective = self.0.objective.map(|objective| objective.saturating_sub(took));
        left.then_some(Attempt {
            attempts_left,
            timeout,
            objective,
            cold: Duration::ZERO,
            behind: Duration::ZERO,
            counted: true,
            ..self.0
        })
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{FunctionKey, FunctionName, RequestId, Revision, RevisionKey, TenantName};

    use super::*;
    use crate::request::OnGpus;

    #[test]
    fn a_repeated_request_has_the_remaining_attempts_and_time() {
        let millis = Duration::from_millis;
        let name = FunctionName::new("f").unwrap();
        let invocation = Attempt {
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
            trial: None,
        };
        let again = |attempts, took| RerunCopy(invocation.clone()).after(attempts, millis(took));
        let next = again(1, 30).unwrap();
        assert_eq!((next.attempts_left, next.timeout, next.objective), (2, millis(70), Some(millis(20))));
        assert!(next.counted && (next.cold + next.behind).is_zero());
        assert_eq!(again(1, 60).unwrap().objective, Some(Duration::ZERO), "the objective has passed");
        assert!(again(3, 30).is_none() && again(1, 100).is_none());
    }
}
