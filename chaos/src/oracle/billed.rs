//! Bills stay within their bounds: each answered request is billed, and billed once. What may be
//! missing is what a worker that was lost had not told yet; what may be there twice is what was carried
//! out again, since the answer was lost with its connection (docs/operating.md, *What is promised*).

use std::time::Duration;

use super::requests::{Ended, Request};
use crate::report::Check;

/// The check's name.
pub const NAME: &str = "bills count every answer once";
/// What a worker that is lost has not told: it tells about once a second, and the answer to that has
/// to come back.
const UNTOLD: Duration = Duration::from_secs(3);
/// A connection or a stream that is silent for so long may be given up, and its requests be carried out
/// again, without any fault: the machine stood still.
const SILENT: Duration = Duration::from_secs(2);
/// How long after a fault a connection may still break by it: it is given up after 4 s.
const BREAKS_WITHIN: Duration = Duration::from_secs(10);

/// What bills are judged by.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// What the cluster billed in the run, in requests.
    pub billed: u64,
    /// Answers that the harness itself asked for.
    pub asked: u64,
    /// When workers were lost.
    pub lost: Vec<Duration>,
    /// When faults happened that may break a connection, those included.
    pub broke: Vec<Duration>,
}

impl Account {
    /// The least and the most that may be billed.
    #[must_use]
    pub fn bounds(&self, requests: &[Request]) -> (u64, u64) {
        let count = |which: &dyn Fn(&Request) -> bool| requests.iter().filter(|it| which(it)).count() as u64;
        let answered = self.asked + count(&|it| matches!(it.how, Ended::Right | Ended::Wrong(_)));
        let untold = |it: &Request| self.lost.iter().any(|&at| it.ended + UNTOLD >= at && it.begun <= at);
        let broken = |it: &Request| {
            it.how != Ended::Right
                || it.ended - it.begun >= SILENT
                || self.broke.iter().any(|&at| it.begun <= at + BREAKS_WITHIN && it.ended >= at)
        };
        let tries: u64 = requests.iter().map(|it| it.retried.len() as u64).sum();
        (answered.saturating_sub(count(&untold)), answered + count(&broken) + tries)
    }
}

/// Judges a bill.
#[must_use]
pub fn check(account: &Account, requests: &[Request]) -> Check {
    let (least, most) = account.bounds(requests);
    let billed = account.billed;
    let detail = format!("{billed} requests billed; {least} to {most} are right");
    let wrong = !(least..=most).contains(&billed);
    Check::of(NAME, detail, wrong.then(|| format!("{billed} were billed")).into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::requests::request;
    use crate::report::Verdict;

    fn verdict(account: &Account) -> Verdict {
        let requests = [request(Ended::Right, &[]), request(Ended::Right, &["NO_WORKER: none"])];
        check(account, &requests).verdict
    }

    #[test]
    fn an_answer_is_billed_once_and_a_try_at_most() {
        let billed = |billed| Account { billed, asked: 1, ..Account::default() };
        let verdicts = [2, 3, 4, 5].map(|count| verdict(&billed(count)));
        assert_eq!(verdicts, [Verdict::Fail, Verdict::Pass, Verdict::Pass, Verdict::Fail]);
    }

    #[test]
    fn what_a_lost_worker_had_not_told_is_forgiven() {
        let lost_at = |at| Account { billed: 0, lost: vec![Duration::from_secs(at)], ..Account::default() };
        assert_eq!(verdict(&lost_at(4)), Verdict::Pass, "within a second of the answers");
        assert_eq!(verdict(&lost_at(60)), Verdict::Fail, "long after them");
    }

    #[test]
    fn what_was_under_way_at_a_fault_may_be_carried_out_twice() {
        let broke = |at| Account { billed: 5, broke: vec![Duration::from_secs(at)], ..Account::default() };
        assert_eq!(verdict(&broke(1)), Verdict::Pass);
        assert_eq!(verdict(&broke(60)), Verdict::Fail);
    }
}
