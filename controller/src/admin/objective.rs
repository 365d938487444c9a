//! The condition "Objective": whether a function meets its SLO, by the counts of the nodes. The
//! condition describes the past over all revisions, and changes nothing. The runs themselves are blamed
//! only at a function's first revision: bills do not separate revisions, so a faster model would be
//! blamed for the previous one.

use std::time::Duration;

use millrace_proto::admin as api;
use millrace_types::{Revision, Slo, SloCounts, Usage};

/// The maximum rounding of the bill of each answered request: a run is billed in whole milliseconds.
const ROUNDED_UP_MAX: Duration = Duration::from_millis(1);

/// Returns the condition of a function with an SLO. `latest` is the number of the newest revision.
pub(super) fn condition(slo: &Slo, counts: SloCounts, usage: Usage, latest: Revision) -> api::Condition {
    let (status, reason, message) = judge(slo, counts, (latest == Revision::FIRST).then_some(usage));
    api::Condition { r#type: "Objective".into(), status: status.into(), reason: reason.into(), message }
}

fn judge(
    slo: &Slo,
    SloCounts { m, n }: SloCounts,
    usage: Option<Usage>,
) -> (api::ConditionStatus, &'static str, String) {
    let Slo { deadline, percentile } = slo;
    if n == 0 {
        return (api::ConditionStatus::Unknown, "NoRequests", "no request was counted yet".to_owned());
    }
    // Each request was judged by the deadline then in force, so only the current target is quoted.
    let share = format!("{:.4}", percentile * 100.0);
    let share = share.trim_end_matches('0').trim_end_matches('.');
    let seen = format!(
        "{m} of {n} requests so far were within the deadline (current target: {share}% within {deadline:?})"
    );
    if m as f64 >= percentile * n as f64 {
        return (api::ConditionStatus::True, "Met", seen);
    }
    // The billed mean less its rounding is a lower bound on the mean duration of the runs.
    let too_long = if usage.is_some() { "wait or are swapped in" } else { "wait, are swapped in or run" };
    let mean_ns = usage.and_then(|usage| usage.gpu_ns.checked_div(usage.requests)).unwrap_or(0);
    let run = Duration::from_nanos(mean_ns);
    match run.saturating_sub(ROUNDED_UP_MAX) > *deadline {
        true => (
            api::ConditionStatus::False,
            "RunsTooLong",
            format!(
                "{seen}: the runs alone took {:?} on average, which scheduling cannot shorten: allow more time (slo.deadline), or apply a faster model",
                Duration::from_millis(u64::try_from(run.as_millis()).unwrap_or(u64::MAX))
            ),
        ),
        false => (
            api::ConditionStatus::False,
            "Missed",
            format!(
                "{seen}: if this continues, requests {too_long} for too long: see 'millrace ps', add GPUs or allow more time"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLO: Slo = Slo { deadline: Duration::from_millis(3), percentile: 0.98 };

    fn judged(m: u64, n: u64, mean_ms: u64) -> (api::ConditionStatus, &'static str, String) {
        let usage = Usage { gpu_ns: n * mean_ms * 1_000_000, requests: n, idle_ms: 0 };
        judge(&SLO, SloCounts { m, n }, Some(usage))
    }

    #[test]
    fn an_objective_is_unknown_met_missed_or_shorter_than_the_runs() {
        use api::ConditionStatus::{False, True, Unknown};
        let reasons = [judged(0, 0, 0), judged(98, 100, 4), judged(97, 100, 4), judged(0, 100, 5)];
        let reasons = reasons.map(|(status, reason, _)| (status, reason));
        let expected = [(Unknown, "NoRequests"), (True, "Met"), (False, "Missed"), (False, "RunsTooLong")];
        assert_eq!(reasons, expected);
    }

    #[test]
    fn a_later_revision_is_not_blamed_for_the_runs_of_earlier_revisions() {
        let usage = Usage { gpu_ns: 100 * 5_000_000, requests: 100, idle_ms: 0 };
        let reason = |latest| condition(&SLO, SloCounts { m: 0, n: 100 }, usage, latest).reason;
        assert_eq!(reason(Revision::FIRST), "RunsTooLong");
        assert_eq!(reason(Revision::FIRST.next()), "Missed");
    }

    #[test]
    fn a_message_has_the_counts_and_the_next_step() {
        assert_eq!(
            judged(98, 100, 1).2,
            "98 of 100 requests so far were within the deadline (current target: 98% within 3ms)"
        );
        assert!(judged(0, 100, 5).2.contains("5ms on average"), "{:?}", judged(0, 100, 5));
    }
}
