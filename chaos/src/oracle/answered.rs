//! No accepted idempotent request is lost: each is answered, if need be after its client was told to
//! try again and did.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::requests::{Ended, Request};
use crate::report::Check;
use crate::timeline::seconds;

const NAME: &str = "no idempotent request is lost";

/// Judges all requests.
#[must_use]
pub fn check(requests: &[Request]) -> Check {
    let mut lost: Vec<String> = requests.iter().filter_map(lost).collect();
    let answered = requests.len() - lost.len();
    if requests.is_empty() {
        lost.push("no request was made".to_owned());
    }
    Check::of(NAME, detail(requests, answered), lost)
}

fn lost(request: &Request) -> Option<String> {
    match &request.how {
        Ended::Right | Ended::Wrong(_) => None,
        Ended::Refused(why) => Some(request.line(&format!("refused for good: {why}"))),
        Ended::GivenUp(why) => Some(request.line(&format!("given up: {why}"))),
    }
}

fn detail(requests: &[Request], answered: usize) -> String {
    // Microseconds up to an hour, to three digits.
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
        "{answered} of {} answered, {retried} after being told to try again{reasons}; p50 {}, p99 {}, slowest {}",
        requests.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::requests::request;
    use crate::report::Verdict;

    #[test]
    fn a_request_may_be_told_to_try_again_but_has_to_be_answered() {
        let right = || request(Ended::Right, &["NO_WORKER: none", "NO_WORKER: none"]);
        assert_eq!(check(&[right()]).verdict, Verdict::Pass);
        let detail = check(&[right()]).detail;
        assert!(
            detail.starts_with("1 of 1 answered, 1 after being told to try again (NO_WORKER 2)"),
            "{detail}"
        );
        for how in [Ended::Refused("no".into()), Ended::GivenUp("late".into())] {
            assert_eq!(check(&[right(), request(how, &[])]).verdict, Verdict::Fail);
        }
        assert_eq!(check(&[request(Ended::Wrong("other bytes".into()), &[])]).verdict, Verdict::Pass);
    }

    #[test]
    fn no_request_at_all_proves_nothing() {
        assert_eq!(check(&[]).verdict, Verdict::Fail);
    }
}
