//! No accepted idempotent request is lost: each is answered, if need be after its client was told to
//! try again and did, and every answer is right.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::report::Check;
use crate::timeline::seconds;

const ANSWERED: &str = "no idempotent request is lost";
const RIGHT: &str = "every answer is right";

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// Answered as before any fault.
    Right,
    /// Answered otherwise, or in another's name.
    Wrong(String),
    /// Refused by an error that does not say to try again.
    Refused(String),
    /// Still not answered when its client gave up.
    GivenUp(String),
}

/// One request, with its client's tries at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its id, the same at each try.
    pub id: String,
    /// The function's name.
    pub function: String,
    /// When it was first sent.
    pub begun: Duration,
    /// When it ended.
    pub ended: Duration,
    /// The errors that said to try again.
    pub retried: Vec<String>,
    /// How it ended.
    pub how: Ended,
}

impl Request {
    fn line(&self, why: &str) -> String {
        let Self { id, function, begun, ended, retried, .. } = self;
        let (from, to) = (begun.as_secs_f64(), ended.as_secs_f64());
        let after = match retried.len() {
            0 => String::new(),
            tries => format!(", after {tries} tries, the last: {}", retried[tries - 1]),
        };
        format!("{from:>9.3} .. {to:>9.3}  {id} to {function}: {why}{after}")
    }
}

/// Judges all requests.
#[must_use]
pub fn check(requests: &[Request]) -> Vec<Check> {
    let mut lost = Vec::new();
    let mut wrong = Vec::new();
    for request in requests {
        match &request.how {
            Ended::Right => {}
            Ended::Wrong(why) => wrong.push(request.line(why)),
            Ended::Refused(why) => lost.push(request.line(&format!("refused for good: {why}"))),
            Ended::GivenUp(why) => lost.push(request.line(&format!("given up: {why}"))),
        }
    }
    if requests.is_empty() {
        lost.push("no request was made".to_owned());
    }
    let answered = requests.len() - lost.len().min(requests.len());
    let right = format!("{} of {answered} answers", answered - wrong.len());
    vec![Check::of(ANSWERED, answered_detail(requests, answered), lost), Check::of(RIGHT, right, wrong)]
}

fn answered_detail(requests: &[Request], answered: usize) -> String {
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
    use crate::report::Verdict;

    fn request(how: Ended, retried: &[&str]) -> Request {
        Request {
            id: "r".into(),
            function: "f".into(),
            begun: Duration::from_secs(1),
            ended: Duration::from_secs(2),
            retried: retried.iter().map(|&it| it.to_owned()).collect(),
            how,
        }
    }

    fn verdicts(requests: &[Request]) -> Vec<Verdict> {
        check(requests).iter().map(|check| check.verdict).collect()
    }

    #[test]
    fn a_request_may_be_told_to_try_again_but_has_to_be_answered() {
        let right = || request(Ended::Right, &["NO_WORKER: none", "NO_WORKER: none"]);
        assert_eq!(verdicts(&[right()]), [Verdict::Pass, Verdict::Pass]);
        let detail = &check(&[right()])[0].detail;
        assert!(
            detail.starts_with("1 of 1 answered, 1 after being told to try again (NO_WORKER 2)"),
            "{detail}"
        );
        for how in [Ended::Refused("no".into()), Ended::GivenUp("late".into())] {
            assert_eq!(verdicts(&[right(), request(how, &[])]), [Verdict::Fail, Verdict::Pass]);
        }
    }

    #[test]
    fn a_wrong_answer_is_caught() {
        let wrong = request(Ended::Wrong("other bytes".into()), &[]);
        assert_eq!(verdicts(&[wrong]), [Verdict::Pass, Verdict::Fail]);
    }

    #[test]
    fn no_request_at_all_proves_nothing() {
        assert_eq!(verdicts(&[]), [Verdict::Fail, Verdict::Pass]);
    }
}
