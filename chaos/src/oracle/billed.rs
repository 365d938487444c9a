//! The check that bills stay within the promised bounds: each answered request is billed once. The
//! usage that a lost worker had not reported yet may be missing. A request may be billed twice if the
//! answer was lost with the connection and the request was carried out again
//! (docs/operate/promises.md).

use std::time::Duration;

use crate::history::{RequestRecord, RequestResult};
use crate::report::PromiseCheck;

pub const NAME: &str = "bills count every answer once";
/// Time before its loss for which a worker's usage may be missing. A worker reports about once a
/// second, and the acknowledgement has to arrive.
const UNTOLD: Duration = Duration::from_secs(3);
/// Silence after which a connection or a stream may be given up without any fault, because the
/// machine stood still. Its requests may then be carried out again.
const SILENT: Duration = Duration::from_secs(2);
/// Time after a fault in which the fault may still break a connection. A silent connection is given
/// up after 4 s.
const BREAKS_WITHIN: Duration = Duration::from_secs(10);

/// The data by which bills are judged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BillingRecord {
    /// Number of requests that the cluster billed in the run.
    pub billed: u64,
    /// Number of answers to the harness's own requests.
    pub asked: u64,
    /// Times at which workers were lost.
    pub lost: Vec<Duration>,
    /// Times of the faults that may break a connection, losses of workers included.
    pub broke: Vec<Duration>,
}

impl BillingRecord {
    /// Returns the least and the greatest number of requests that may be billed.
    #[must_use]
    pub fn bounds(&self, requests: &[RequestRecord]) -> (u64, u64) {
        let count =
            |which: &dyn Fn(&RequestRecord) -> bool| requests.iter().filter(|it| which(it)).count() as u64;
        let answered =
            self.asked + count(&|it| matches!(it.how, RequestResult::Right | RequestResult::Wrong(_)));
        let untold =
            |it: &RequestRecord| self.lost.iter().any(|&at| it.ended + UNTOLD >= at && it.begun <= at);
        let broken = |it: &RequestRecord| {
            it.how != RequestResult::Right
                || it.ended - it.begun >= SILENT
                || self.broke.iter().any(|&at| it.begun <= at + BREAKS_WITHIN && it.ended >= at)
        };
        let tries: u64 = requests.iter().map(|it| it.retried.len() as u64).sum();
        (answered.saturating_sub(count(&untold)), answered + count(&broken) + tries)
    }
}

/// Judges a bill.
#[must_use]
pub fn check(account: &BillingRecord, requests: &[RequestRecord]) -> PromiseCheck {
    let (least, most) = account.bounds(requests);
    let billed = account.billed;
    let detail = format!("{billed} requests billed; {least} to {most} are right");
    let wrong = !(least..=most).contains(&billed);
    PromiseCheck::of(NAME, detail, wrong.then(|| format!("{billed} were billed")).into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::requests::request;
    use crate::report::CheckVerdict;

    fn verdict(account: &BillingRecord) -> CheckVerdict {
        let requests =
            [request(RequestResult::Right, &[]), request(RequestResult::Right, &["NO_WORKER: none"])];
        check(account, &requests).verdict
    }

    #[test]
    fn each_answer_is_billed_once_and_each_try_at_most_once() {
        let billed = |billed| BillingRecord { billed, asked: 1, ..BillingRecord::default() };
        let verdicts = [2, 3, 4, 5].map(|count| verdict(&billed(count)));
        assert_eq!(
            verdicts,
            [CheckVerdict::Fail, CheckVerdict::Pass, CheckVerdict::Pass, CheckVerdict::Fail]
        );
    }

    #[test]
    fn unreported_usage_of_a_lost_worker_may_be_missing() {
        let lost_at =
            |at| BillingRecord { billed: 0, lost: vec![Duration::from_secs(at)], ..BillingRecord::default() };
        assert_eq!(verdict(&lost_at(4)), CheckVerdict::Pass, "within a second of the answers");
        assert_eq!(verdict(&lost_at(60)), CheckVerdict::Fail, "long after them");
    }

    #[test]
    fn a_request_under_way_at_a_fault_may_be_billed_twice() {
        let broke = |at| BillingRecord {
            billed: 5,
            broke: vec![Duration::from_secs(at)],
            ..BillingRecord::default()
        };
        assert_eq!(verdict(&broke(1)), CheckVerdict::Pass);
        assert_eq!(verdict(&broke(60)), CheckVerdict::Fail);
    }
}
