//! The check that no accepted idempotent request is lost: each request is answered, if necessary
//! after retries that an error allowed. A request that was running in two executors when both died
//! may be quarantined, because such a request looks like one that kills executors (docs/operate/promises.md).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use hdrhistogram::Histogram;
use millrace_types::Reason;

use crate::history::{RequestRecord, RequestResult};
use crate::report::PromiseCheck;
use crate::timeline::seconds;

const NAME: &str = "no idempotent request is lost";
/// Number of executors' deaths during a request after which the request is quarantined.
const DEATHS: usize = 2;

/// Judges all requests. `killed` contains the known times at which executors died, one range per
/// fault.
#[must_use]
pub fn check(requests: &[RequestRecord], killed: &[RangeInclusive<Duration>]) -> PromiseCheck {
    let mut lost: Vec<String> = requests.iter().filter_map(|it| lost(it, killed)).collect();
    let answered =
        requests.iter().filter(|it| matches!(it.how, RequestResult::Right | RequestResult::Wrong(_))).count();
    let quarantined = requests.len() - answered - lost.len();
    if requests.is_empty() {
        lost.push("no request was made".to_owned());
    }
    let mut detail = detail(requests, answered);
    if quarantined > 0 {
        detail += &format!("; {quarantined} quarantined, each running in {DEATHS} executors that died");
    }
    PromiseCheck::of(NAME, detail, lost)
}

fn lost(request: &RequestRecord, killed: &[RangeInclusive<Duration>]) -> Option<String> {
    let meets = |it: &&RangeInclusive<Duration>| *it.start() <= request.ended && *it.end() >= request.begun;
    let caught = || killed.iter().filter(meets).count();
    match &request.how {
        RequestResult::Right | RequestResult::Wrong(_) => None,
        RequestResult::Refused(why)
            if why.starts_with(Reason::Quarantined.as_str()) && caught() >= DEATHS =>
        {
            None
        }
        RequestResult::Refused(why) => Some(request.line(&format!("refused for good: {why}"))),
        RequestResult::GivenUp(why) => Some(request.line(&format!("given up: {why}"))),
    }
}

fn detail(requests: &[RequestRecord], answered: usize) -> String {
    // Microseconds up to an hour, with three significant digits.
    let mut took = Histogram::<u64>::new_with_max(3_600_000_000, 3).expect("the bounds are valid");
    for request in requests {
        let micros = u64::try_from((request.ended - request.begun).as_micros()).unwrap_or(u64::MAX);
        took.saturating_record(micros);
    }
    let at = |quantile: f64| seconds(Duration::from_micros(took.value_at_quantile(quantile)));
    let retried = requests.iter().filter(|request| !request.retried.is_empty()).count();
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in requests.iter().flat_map(|request| &request.retried) {
        let reason = reason.split_once(':').map_or(reason.as_str(), |(reason, _)| reason);
        *reasons.entry(reason).or_default() += 1;
    }
    let reasons: Vec<_> = reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    let reasons = if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join(", ")) };
    format!(
        "{answered} of {} answered, {retried} after a retry{reasons}; p50 {}, p99 {}, slowest {}",
        requests.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::requests::request;
    use crate::report::CheckVerdict;

    #[test]
    fn a_request_that_is_refused_for_good_or_given_up_is_caught() {
        let right = || request(RequestResult::Right, &["NO_WORKER: none", "NO_WORKER: none"]);
        assert_eq!(check(&[right()], &[]).verdict, CheckVerdict::Pass);
        let detail = check(&[right()], &[]).detail;
        assert!(detail.starts_with("1 of 1 answered, 1 after a retry (NO_WORKER 2)"), "{detail}");
        for how in [RequestResult::Refused("no".into()), RequestResult::GivenUp("late".into())] {
            assert_eq!(check(&[right(), request(how, &[])], &[]).verdict, CheckVerdict::Fail);
        }
        assert_eq!(
            check(&[request(RequestResult::Wrong("other bytes".into()), &[])], &[]).verdict,
            CheckVerdict::Pass
        );
    }

    #[test]
    fn a_request_may_be_quarantined_only_after_two_executor_deaths() {
        let ms = Duration::from_millis;
        let verdict = |why: &str, first: (u64, u64), second: (u64, u64)| {
            let killed = [first, second].map(|(from, to)| ms(from)..=ms(to));
            check(&[request(RequestResult::Refused(why.to_owned()), &[])], &killed).verdict
        };
        assert_eq!(verdict("QUARANTINED", (1_100, 1_100), (1_900, 1_900)), CheckVerdict::Pass);
        assert_eq!(verdict("QUARANTINED", (400, 5_400), (1_900, 1_900)), CheckVerdict::Pass, "armed before");
        assert_eq!(
            verdict("QUARANTINED", (1_100, 1_100), (2_100, 2_100)),
            CheckVerdict::Fail,
            "the request had ended"
        );
        assert_eq!(verdict("EXECUTOR_LOST", (1_100, 1_100), (1_900, 1_900)), CheckVerdict::Fail);
    }

    #[test]
    fn a_run_without_requests_fails() {
        assert_eq!(check(&[], &[]).verdict, CheckVerdict::Fail);
    }
}
