//! The results of requests, second by second, for the plots. Pure.

use std::time::Duration;

use serde::Serialize;

use crate::history::{RequestRecord, RequestResult};

/// The requests that ended in a second of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestSecond {
    /// Seconds since the start of the timeline.
    pub at: u64,
    /// Number of right answers.
    pub answered: u64,
    /// Number of right answers after a retry.
    pub retried: u64,
    /// Number of requests that were refused for good, given up, or answered wrong.
    pub lost: u64,
    /// The median latency in milliseconds, from the first try to the end.
    pub p50_ms: f64,
    /// The 99th percentile of the latency, in milliseconds.
    pub p99_ms: f64,
    /// The maximum latency, in milliseconds.
    pub max_ms: f64,
}

/// All requests of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RequestSeries {
    /// All seconds from the first to the last in which a request ended.
    pub seconds: Vec<RequestSecond>,
    /// All requests together.
    pub total: RequestSecond,
}

impl RequestSeries {
    /// Groups requests by the second of their end.
    #[must_use]
    pub fn of(requests: &[RequestRecord]) -> Self {
        let mut by_second: Vec<Vec<&RequestRecord>> = Vec::new();
        for request in requests {
            // A run lasts some hours at most.
            let at = usize::try_from(request.ended.as_secs()).unwrap_or(usize::MAX - 1);
            if by_second.len() <= at {
                by_second.resize(at + 1, Vec::new());
            }
            by_second[at].push(request);
        }
        let first = by_second.iter().position(|ended| !ended.is_empty()).unwrap_or_default();
        let seconds =
            (0..).zip(&by_second).skip(first).map(|(at, ended)| RequestSecond::of(at, ended)).collect();
        Self { seconds, total: RequestSecond::of(0, &requests.iter().collect::<Vec<_>>()) }
    }
}

impl RequestSecond {
    fn of(at: u64, ended: &[&RequestRecord]) -> Self {
        let count = |which: fn(&RequestRecord) -> bool| ended.iter().filter(|it| which(it)).count() as u64;
        let right = |request: &RequestRecord| request.how == RequestResult::Right;
        let mut took: Vec<Duration> = ended.iter().map(|it| it.ended - it.begun).collect();
        took.sort_unstable();
        let at_hundredth = |hundredth: usize| {
            let index = (took.len() * hundredth).div_ceil(100).saturating_sub(1);
            took.get(index).map_or(0.0, |took| took.as_secs_f64() * 1e3)
        };
        Self {
            at,
            answered: count(right),
            retried: count(|it| it.how == RequestResult::Right && !it.retried.is_empty()),
            lost: count(|it| it.how != RequestResult::Right),
            p50_ms: at_hundredth(50),
            p99_ms: at_hundredth(99),
            max_ms: at_hundredth(100),
        }
    }

    /// Returns the number of requests that ended.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.answered + self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(begun_ms: u64, ended_ms: u64, how: RequestResult) -> RequestRecord {
        let at = Duration::from_millis;
        let id = "r".to_owned();
        let function = "f".to_owned();
        RequestRecord { id, function, begun: at(begun_ms), ended: at(ended_ms), retried: Vec::new(), how }
    }

    #[test]
    fn requests_count_in_the_second_in_which_they_ended() {
        let again = RequestRecord {
            retried: vec!["NO_WORKER: none".into()],
            ..request(1500, 3100, RequestResult::Right)
        };
        let requests = [
            request(1000, 1010, RequestResult::Right),
            request(1000, 1030, RequestResult::GivenUp("late".into())),
            again,
        ];
        let RequestSeries { seconds, total } = RequestSeries::of(&requests);
        assert_eq!(seconds.iter().map(|it| it.at).collect::<Vec<_>>(), [1, 2, 3]);
        let first = RequestSecond {
            at: 1,
            answered: 1,
            lost: 1,
            p50_ms: 10.0,
            p99_ms: 30.0,
            max_ms: 30.0,
            ..RequestSecond::default()
        };
        assert_eq!(seconds[0], first);
        assert_eq!(seconds[1], RequestSecond { at: 2, ..RequestSecond::default() });
        assert_eq!((seconds[2].answered, seconds[2].retried, seconds[2].max_ms), (1, 1, 1600.0));
        assert_eq!((total.ended(), total.lost, total.max_ms), (3, 1, 1600.0));
    }

    #[test]
    fn a_run_without_requests_has_no_seconds() {
        assert_eq!(RequestSeries::of(&[]), RequestSeries::default());
    }
}
