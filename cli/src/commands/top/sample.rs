//! The data that `top` requests, and the conversion of counts to rates.

use std::collections::VecDeque;
use std::time::Duration;

use futures::TryStreamExt as _;
use millrace_client::messages as wire;
use millrace_client::{Admin, Error};
use millrace_proto::activity::{Activity, FunctionActivity, LatencyBucket};
use tokio::time::Instant;

use crate::clock::now;

/// The number of functions to request, the busiest first. A controller returns at most as many.
const FUNCTIONS_MAX: u32 = 1_000;
/// The number of events to keep.
const EVENTS_MAX: usize = 500;
/// The middle of a latency bucket relative to its end. A bucket is a quarter of an octave wide.
const MIDDLE: f64 = 0.917_004_043_204_671_2; // 2^(-1/8)

/// The state of the cluster at a moment.
#[derive(Debug, Clone)]
pub(super) struct ClusterSample {
    pub(super) at: Instant,
    pub(super) status: wire::ClusterStatus,
    pub(super) nodes: Vec<wire::Node>,
    pub(super) functions: Vec<wire::Function>,
    pub(super) workflows: Vec<wire::Workflow>,
    pub(super) activity: Activity,
    pub(super) left_out: u32,
    pub(super) missing: Vec<String>,
}

impl ClusterSample {
    /// Requests a sample. Admin reads may be stale, because an operator also watches a cluster
    /// without a leader.
    pub(super) async fn take(admin: &Admin) -> Result<Self, Error> {
        let functions = admin.functions(None).try_collect::<Vec<_>>();
        let workflows = admin.workflows(None).try_collect::<Vec<_>>();
        let (status, nodes, functions, workflows, told) = futures::try_join!(
            admin.cluster_status(),
            admin.nodes(),
            functions,
            workflows,
            admin.activity(FUNCTIONS_MAX)
        )?;
        Ok(Self {
            at: now(),
            status,
            nodes,
            functions,
            workflows,
            activity: told.activity.unwrap_or_default(),
            left_out: told.functions_left_out,
            missing: told.missing,
        })
    }
}

/// The last samples, within the window of rates.
#[derive(Debug, Default)]
pub(super) struct SampleHistory(VecDeque<ClusterSample>);

impl SampleHistory {
    /// Adds a sample, and drops the samples that are older than `window`, except for the newest of
    /// these.
    pub(super) fn add(&mut self, sample: ClusterSample, window: Duration) {
        self.0.push_back(sample);
        let newest = self.0[self.0.len() - 1].at;
        while self.0.len() > 2 && newest - self.0[1].at >= window {
            self.0.pop_front();
        }
    }

    /// Returns the newest sample.
    pub(super) fn now(&self) -> Option<&ClusterSample> {
        self.0.back()
    }

    /// Returns the oldest sample that is comparable with the newest: all samples between the two
    /// have counts of the same processes. A process that joined or restarted would add or remove
    /// all its counts since its start.
    pub(super) fn before(&self) -> Option<&ClusterSample> {
        let now = self.now()?;
        let same = |it: &&ClusterSample| it.activity.processes == now.activity.processes;
        self.0.iter().rev().skip(1).take_while(same).last()
    }
}

/// The time between two samples, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct SampleInterval(pub(super) f64);

impl SampleInterval {
    pub(super) fn between(before: &ClusterSample, now: &ClusterSample) -> Self {
        Self((now.at - before.at).as_secs_f64().max(1e-3))
    }

    /// Returns the growth of a count per second.
    pub(super) fn rate(self, before: u64, now: u64) -> f64 {
        now.saturating_sub(before) as f64 / self.0
    }

    /// Returns the growth of a sum of times, as a share of the span.
    pub(super) fn share(
        self,
        before: Option<prost_types::Duration>,
        now: Option<prost_types::Duration>,
    ) -> f64 {
        seconds(now).max(seconds(before)).mul_add(1.0, -seconds(before)) / self.0
    }
}

/// Converts a duration of a message to seconds.
pub(super) fn seconds(time: Option<prost_types::Duration>) -> f64 {
    time.and_then(|it| Duration::try_from(it).ok()).unwrap_or_default().as_secs_f64()
}

/// Returns the latency that the given share of the requests between two samples did not exceed,
/// within a tenth. Returns `None` if there was no request.
pub(super) fn quantile(
    before: Option<&FunctionActivity>,
    now: &FunctionActivity,
    share: f64,
) -> Option<Duration> {
    let earlier = |end: f64| {
        let buckets = before.map_or(&[][..], |it| &it.latencies);
        buckets.iter().find(|it| it.up_to_seconds == end).map_or(0, |it| it.count)
    };
    let grown: Vec<(f64, u64)> = now
        .latencies
        .iter()
        .map(|&LatencyBucket { up_to_seconds, count }| {
            (up_to_seconds, count.saturating_sub(earlier(up_to_seconds)))
        })
        .collect();
    let all: u64 = grown.iter().map(|&(_, count)| count).sum();
    let rank = (share * all as f64).ceil().max(1.0) as u64;
    let mut seen = 0;
    let (end, _) = grown.iter().find(|&&(_, count)| {
        seen += count;
        seen >= rank
    })?;
    // The last bucket has no end: its latencies are beyond any objective.
    Duration::try_from_secs_f64(end * MIDDLE).ok().or(Some(Duration::MAX))
}

/// The newest events, and the position after them.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    pub(super) kept: VecDeque<wire::Event>,
    next: String,
}

impl EventLog {
    /// Returns an empty list at the same position, to receive the later events.
    pub(super) fn after(&self) -> Self {
        Self { kept: VecDeque::new(), next: self.next.clone() }
    }

    /// Appends later events.
    pub(super) fn extend(&mut self, newer: Self) {
        self.next = newer.next;
        self.kept.extend(newer.kept);
        self.kept.drain(..self.kept.len().saturating_sub(EVENTS_MAX));
    }

    /// Requests the new events.
    pub(super) async fn follow(&mut self, admin: &Admin) -> Result<(), Error> {
        loop {
            let page = admin.events(&self.next, Duration::ZERO).await?;
            self.next = page.next;
            if page.events.is_empty() {
                return Ok(());
            }
            self.kept.extend(page.events);
            self.kept.drain(..self.kept.len().saturating_sub(EVENTS_MAX));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn sample(at: Instant, processes: &[&str]) -> ClusterSample {
        ClusterSample {
            at,
            status: wire::ClusterStatus::default(),
            nodes: Vec::new(),
            functions: Vec::new(),
            workflows: Vec::new(),
            activity: Activity {
                processes: processes.iter().map(ToString::to_string).collect(),
                ..Activity::default()
            },
            left_out: 0,
            missing: Vec::new(),
        }
    }

    fn activity(latencies: &[(f64, u64)]) -> FunctionActivity {
        let bucket = |&(up_to_seconds, count): &(f64, u64)| LatencyBucket { up_to_seconds, count };
        FunctionActivity { latencies: latencies.iter().map(bucket).collect(), ..FunctionActivity::default() }
    }

    #[test]
    fn samples_are_compared_over_the_window() {
        let start = now();
        let mut history = SampleHistory::default();
        let window = Duration::from_secs(10);
        assert!(history.before().is_none());
        for second in 0..30 {
            history.add(sample(start + Duration::from_secs(second), &["w"]), window);
        }
        assert_eq!(history.before().unwrap().at, start + Duration::from_secs(19));
        // A single old sample is better than none.
        history.add(sample(start + Duration::from_secs(90), &["w"]), window);
        assert_eq!(history.before().unwrap().at, start + Duration::from_secs(29));
    }

    #[test]
    fn samples_of_other_processes_are_not_compared() {
        let start = now();
        let second = Duration::from_secs(1);
        let mut history = SampleHistory::default();
        let window = Duration::from_secs(10);
        history.add(sample(start, &["w/1"]), window);
        history.add(sample(start + second, &["w/2"]), window);
        assert!(history.before().is_none());
        history.add(sample(start + 2 * second, &["w/2"]), window);
        assert_eq!(history.before().unwrap().at, start + second);
    }

    #[test]
    fn a_quantile_covers_the_requests_between_two_samples() {
        let before = activity(&[(0.1, 100)]);
        let now = activity(&[(0.1, 198), (1.0, 1), (f64::INFINITY, 1)]);
        let of = |share| quantile(Some(&before), &now, share).unwrap();
        let near = |span: Duration, seconds: f64| (span.as_secs_f64() / seconds - 1.0).abs() < 0.1;
        assert!(near(of(0.5), 0.1) && near(of(0.98), 0.1), "{:?}", of(0.98));
        assert!(near(of(0.99), 1.0));
        assert_eq!(of(1.0), Duration::MAX);
        assert_eq!(quantile(Some(&now), &now, 0.5), None, "no request arrived");
    }

    #[test]
    fn a_decreasing_count_gives_a_rate_of_zero() {
        let span = SampleInterval(2.0);
        let time = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        assert!((span.rate(10, 14) - 2.0).abs() < 1e-12 && span.rate(14, 10).abs() < 1e-12);
        assert!(
            (span.share(time(1), time(2)) - 0.5).abs() < 1e-12 && span.share(time(2), None).abs() < 1e-12
        );
    }
}
