//! The latency of a lone pod under a limit of its time: a window that is reset (the paper), or a bucket.

use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_sim::workload::random;
use millrace_slices::tokens::{Action, Config, Event, QuotaCap, TokenCore, TokenHolder, TokenId};
use millrace_types::{ComputeCurve, Permille, SliceId, Terms, Timestamp};
use rand::Rng as _;

use super::setup::{SECOND, SKIP, percentages};
use crate::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;

const RUN: Duration = Duration::from_millis(14);
const LIMIT: u16 = 400;
const SM: u16 = 240;
const SPAN: Duration = Duration::from_secs(400);
const LOADS: [f64; 5] = [0.3, 0.5, 0.7, 0.8, 0.9];
/// The load at which the caps are judged.
const JUDGED: f64 = 0.8;

/// A pod that serves one request after another.
struct Pod {
    core: TokenCore,
    now: Timestamp,
    actions: Vec<Action>,
}

impl Pod {
    fn new(config: Config) -> Result<Self> {
        let share = |thousandths| Permille::new(thousandths).context("invalid share");
        let terms = Terms::new(share(SM)?, share(SM)?, Permille::ZERO, share(LIMIT)?)?;
        let mut core = TokenCore::new(config);
        core.on_event(Timestamp::ZERO, Event::Terms { slice: SliceId(0), terms }, &mut Vec::new());
        Ok(Self { core, now: Timestamp::ZERO, actions: Vec::new() })
    }

    /// Sends an event, and returns the granted token.
    fn send(&mut self, event: Event) -> Option<(TokenId, Option<Duration>)> {
        self.actions.clear();
        self.core.on_event(self.now, event, &mut self.actions);
        self.actions.iter().find_map(|action| match action {
            Action::Grant { token, busy, .. } => Some((*token, *busy)),
            _ => None,
        })
    }

    /// Runs a request that arrived at a time, and returns its latency.
    fn serve(&mut self, run: TokenHolder, arrived: Timestamp) -> Result<Duration> {
        self.now = self.now.max(arrived);
        let mut left = RUN;
        let ask = Event::Ask { slice: SliceId(0), run, deadline: None, curve: ComputeCurve::FLAT };
        let mut granted = self.send(ask);
        while !left.is_zero() {
            let Some((token, busy)) = granted else {
                let wake = self.core.next_wake().context("a waiting run has no wake")?;
                self.now = self.now.max(wake);
                granted = self.send(Event::Tick);
                continue;
            };
            let busy = busy.unwrap_or(left).min(left);
            left -= busy;
            self.now = self.now + busy;
            granted = self.send(Event::Spent { run, token, busy, more: !left.is_zero() });
        }
        Ok(self.now.since(arrived))
    }
}

/// Returns the sorted latencies of requests at random times, at a load in shares of the limit.
fn latencies(config: Config, load: f64, span: Duration, seed: u64) -> Result<Vec<Duration>> {
    let mut rng = random(seed, 60);
    let mut pod = Pod::new(config)?;
    let gap = RUN.as_secs_f64() * 1000.0 / f64::from(LIMIT) / load;
    let mut arrived = Timestamp::ZERO;
    let mut latencies = Vec::new();
    loop {
        arrived = arrived + Duration::from_secs_f64(-gap * (1.0 - rng.random::<f64>()).ln());
        if arrived > Timestamp::ZERO + span {
            break;
        }
        latencies.push(pod.serve(TokenHolder(latencies.len() as u64), arrived)?);
    }
    latencies.sort_unstable();
    Ok(latencies)
}

fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    sorted.get(sorted.len() * percent / 100).map_or(0.0, |latency| latency.as_secs_f64() * 1e3)
}

pub(super) fn cap(effort: Effort) -> Result<ExperimentReport> {
    let span = if effort.short { SPAN / 20 } else { SPAN };
    let token = Config::SLICES.token();
    let caps = [
        ("window of 1000 ms (paper)", QuotaCap::Window(SECOND)),
        ("window of 100 ms", QuotaCap::Window(SECOND / 10)),
        ("bucket of 1000 ms (ours)", QuotaCap::Bucket(SECOND)),
    ];
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "A pod alone on its GPU with a limit of 40% of the time. Requests of 14 ms arrive at random times for {} s, and run one after another; *load* is the share of the requests that the limit allows. A bucket of 1000 ms holds at most 400 ms of computing.",
        span.as_secs()
    ));
    let mut rows = Vec::new();
    for load in LOADS {
        let mut p99 = Vec::new();
        for (name, cap) in caps {
            let config = percentages(SKIP, cap, token)?;
            let mut p98s = SeedValues::default();
            let mut p99s = SeedValues::default();
            for seed in effort.each_seed() {
                let sorted = latencies(config, load, span, seed)?;
                p98s.0.push(percentile(&sorted, 98));
                p99s.0.push(percentile(&sorted, 99));
            }
            let cell = |values: &SeedValues| Unit::Millis.show(values.mean());
            rows.push(vec![format!("{load:.1}"), name.to_owned(), cell(&p98s), cell(&p99s)]);
            p99.push(p99s);
        }
        let [window, _, bucket] = p99.as_slice() else { anyhow::bail!("there are three caps") };
        report.orders.push(PolicyOrder {
            what: format!("load {load:.1}: the bucket's p99 is at most that of the window of 1000 ms"),
            by: window.differences(bucket),
            cause: None,
        });
        if load == JUDGED {
            report.figures.push(figure(
                "window of 1000 ms",
                Claim::goal("none stated; 127 ms in a reference model", Bound::About(127.0)),
                window,
            ));
            report.figures.push(figure(
                "bucket",
                Claim::goal("none stated; our aim is at most 50 ms", Bound::AtMost(50.0)),
                bucket,
            ));
        }
    }
    let header = ["load", "cap", "p98", "p99"].map(String::from).to_vec();
    report.tables.push(("Latencies under a limit of 40%:".to_owned(), header, rows));
    Ok(report)
}

fn figure(cap: &str, claim: Claim, p99: &SeedValues) -> Figure {
    Figure {
        what: format!("{cap}: p99 at a load of {JUDGED}"),
        claim,
        ours: p99.clone(),
        unit: Unit::Millis,
        cause: None,
    }
}
