//! The SLO counts of functions, and whether Function actors report the counts to the Node.

use millrace_scheduling::admission::FunctionTotals;
use millrace_types::SloCounts;

use crate::policy::EffectivePolicy;

/// Whether the Function actor reports its SLO counts to the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SloCountReports {
    /// The counts are reported after each request that changes them, because the order of the node's queue
    /// depends on the counts.
    Yes,
    /// The counts are never reported.
    No,
}

/// Whether Function actors report SLO counts under a policy.
pub(crate) fn slo_reports(in_force: &EffectivePolicy) -> SloCountReports {
    if in_force.policy.dispatch.uses_scores() { SloCountReports::Yes } else { SloCountReports::No }
}

/// Returns the part of a score that the function's objective is compared with (T17).
pub(crate) fn slo_counts(score: &FunctionTotals) -> SloCounts {
    SloCounts { m: score.in_time, n: score.scored }
}
