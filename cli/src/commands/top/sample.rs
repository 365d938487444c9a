//! What `top` asks for, and how what it was told becomes rates.

use std::collections::VecDeque;
use std::time::Duration;

use futures::TryStreamExt as _;
use millrace_client::messages as wire;
use millrace_client::{Admin, Error};
use millrace_proto::activity::{Activity, FunctionActivity, LatencyBucket};
use tokio::time::Instant;

use crate::clock::now;

/// Functions that are shown, the busiest: the most that a controller tells.
const FUNCTIONS_MAX: u32 = 1_000;
/// Events that are kept.
const EVENTS_MAX: usize = 500;
/// The middle of a bucket of latencies, which is a quarter of an octave wide, by its end.
const MIDDLE: f64 = 0.917_004_043_204_671_2; // 2^(-1/8)

/// What the cluster said at one moment.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) status: wire::ClusterStatus,
    pub(super) nodes: Vec<wire::Node>,
    pub(super) functions: Vec<wire::Function>,
    pub(super) workflows: Vec<wire::Workflow>,
    pub(super) activity: Activity,
    pub(super) left_out: u32,
    pub(super) missing: Vec<String>,
}

impl Sample {
    /// Asks for it. What is read may be behind: an operator looks at a cluster without a leader too.
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

/// The last samples, as far back as rates look.
#[derive(Debug, Default)]
pub(super) struct History(VecDeque<Sample>);

impl History {
    /// Takes a sample in, and lets go of those that are more than `window` older, but for one.
    pub(super) fn add(&mut self, sample: Sample, window: Duration) {
        self.0.push_back(sample);
        let newest = self.0[self.0.len() - 1].at;
        while self.0.len() > 2 && newest - self.0[1].at >= window {
            self.0.pop_front();
        }
    }

    /// The newest.
    pub(super) fn now(&self) -> Option<&Sample> {
        self.0.back()
    }

    /// The oldest that the newest can be compared with: counted by the same processes, as all between
    /// are. A process that came or began anew brings or takes all that it ever counted.
    pub(super) fn before(&self) -> Option<&Sample> {
        let now = self.now()?;
        let same = |it: &&Sample| it.activity.processes == now.activity.processes;
        self.0.iter().rev().skip(1).take_while(same).last()
    }
}

/// What grew between two samples, a second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span(pub(super) f64);

impl Span {
    pub(super) fn between(before: &Sample, now: &Sample) -> Self {
        Self((now.at - before.at).as_secs_f64().max(1e-3))
    }

    /// How fast a count grew.
    pub(super) fn rate(self, before: u64, now: u64) -> f64 {
        now.saturating_sub(before) as f64 / self.0
    }

    /// What share of the time a sum of times grew by.
    pub(super) fn share(
        self,
        before: Option<prost_types::Duration>,
        now: Option<prost_types::Duration>,
    ) -> f64 {
        seconds(now).max(seconds(before)).mul_add(1.0, -seconds(before)) / self.0
    }
}

/// A time of the wire in seconds.
pub(super) fn seconds(time: Option<prost_types::Duration>) -> f64 {
    time.and_then(|it| Duration::try_from(it).ok()).unwrap_or_default().as_secs_f64()
}

/// A latency that so many of the requests between two samples did not exceed, within a tenth; `None`
/// where there was none.
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
    // The last bucket has no end: what took so long is beyond any objective.
    Duration::try_from_secs_f64(end * MIDDLE).ok().or(Some(Duration::MAX))
}

/// The newest events, and where to go on.
#[derive(Debug, Default)]
pub(super) struct Events {
    pub(super) kept: VecDeque<wire::Event>,
    next: String,
}

impl Events {
    /// To go on with what comes after these.
    pub(super) fn after(&self) -> Self {
        Self { kept: VecDeque::new(), next: self.next.clone() }
    }

    /// Takes in what came after these.
    pub(super) fn extend(&mut self, newer: Self) {
        self.next = newer.next;
        self.kept.extend(newer.kept);
        self.kept.drain(..self.kept.len().saturating_sub(EVENTS_MAX));
    }

    /// Asks for what is new.
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

    pub(in super::super) fn sample(at: Instant, processes: &[&str]) -> Sample {
        Sample {
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
        let (mut history, window) = (History::default(), Duration::from_secs(10));
        assert!(history.before().is_none());
        for second in 0..30 {
            history.add(sample(start + Duration::from_secs(second), &["w"]), window);
        }
        assert_eq!(history.before().unwrap().at, start + Duration::from_secs(19));
        // A lone old one is better than none.
        history.add(sample(start + Duration::from_secs(90), &["w"]), window);
        assert_eq!(history.before().unwrap().at, start + Duration::from_secs(29));
    }

    #[test]
    fn what_other_processes_counted_is_not_compared() {
        let (start, second) = (now(), Duration::from_secs(1));
        let (mut history, window) = (History::default(), Duration::from_secs(10));
        history.add(sample(start, &["w/1"]), window);
        history.add(sample(start + second, &["w/2"]), window);
        assert!(history.before().is_none());
        history.add(sample(start + 2 * second, &["w/2"]), window);
        assert_eq!(history.before().unwrap().at, start + second);
    }

    #[test]
    fn a_quantile_is_of_what_came_in_between() {
        let before = activity(&[(0.1, 100)]);
        let now = activity(&[(0.1, 198), (1.0, 1), (f64::INFINITY, 1)]);
        let of = |share| quantile(Some(&before), &now, share).unwrap();
        let near = |span: Duration, seconds: f64| (span.as_secs_f64() / seconds - 1.0).abs() < 0.1;
        assert!(near(of(0.5), 0.1) && near(of(0.98), 0.1), "{:?}", of(0.98));
        assert!(near(of(0.99), 1.0));
        assert_eq!(of(1.0), Duration::MAX);
        assert_eq!(quantile(Some(&now), &now, 0.5), None, "nothing came");
    }

    #[test]
    fn a_sum_that_fell_is_no_rate_below_zero() {
        let span = Span(2.0);
        let time = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        assert!((span.rate(10, 14) - 2.0).abs() < 1e-12 && span.rate(14, 10).abs() < 1e-12);
        assert!(
            (span.share(time(1), time(2)) - 0.5).abs() < 1e-12 && span.share(time(2), None).abs() < 1e-12
        );
    }
}
