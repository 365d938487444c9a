//! What came of a run: every request, the nodes as they were left, and the sums that the papers
//! report.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_policy::dispatch::Stats;
use millrace_policy::trace::{CoreId, Trace};
use millrace_types::{FunctionKey, GpuIndex, Reason, TenantName, Timestamp, Usage};
use millrace_worker::request::Split;
use millrace_worker::snapshot::{LinkSnapshot, NodeSnapshot};

use crate::control::function_key;
use crate::scenario::Function;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With an answer.
    Answered {
        /// From which node.
        node: usize,
        /// Where it ran.
        gpu: GpuIndex,
        /// How often it was begun.
        attempts: u32,
        /// Where the time went.
        split: Split,
    },
    /// Without.
    Failed {
        /// Why.
        reason: Reason,
    },
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Its place among the arrivals.
    pub request: usize,
    /// Its function's place.
    pub function: u32,
    /// When it came.
    pub arrived: Timestamp,
    /// When it was answered, or given up.
    pub finished: Timestamp,
    /// How.
    pub ending: Ending,
}

impl Record {
    /// From its arrival to its end.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.finished.since(self.arrived)
    }

    /// Whether it was answered.
    #[must_use]
    pub fn answered(&self) -> bool {
        matches!(self.ending, Ending::Answered { .. })
    }
}

/// What came of a run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Every request, in the order in which they came.
    pub records: Vec<Record>,
    /// The nodes before the first of them came: what they count includes how they were warmed.
    pub before: Vec<NodeSnapshot>,
    /// The nodes at the end.
    pub nodes: Vec<NodeSnapshot>,
    /// From the first moment to the last answer.
    pub span: Duration,
    /// GPUs that held the most popular model, on average over time (L17).
    pub held_of_top: f64,
    /// What each node's cores saw and did, where that was traced.
    pub traces: Vec<Trace>,
}

impl Outcome {
    /// Events that the nodes' cores handled, and one number for all they saw and did. Zeros unless
    /// traced.
    #[must_use]
    pub fn events(&self) -> (u64, u64) {
        let events = self.traces.iter().flat_map(|trace| trace.folds().values()).map(|fold| fold.events);
        let digests = self.traces.iter().map(Trace::digest);
        let hash = digests.fold(0, |hash: u64, digest| hash.rotate_left(17) ^ digest);
        (events.sum(), if self.traces.is_empty() { 0 } else { hash })
    }

    /// The number of the nodes' decisions, and the digest of their canonical text. Zeros unless traced.
    #[must_use]
    pub fn decisions(&self) -> (u64, u64) {
        let digests = self.traces.iter().map(|trace| trace.decisions().digest());
        digests.fold((0, 0), |(all, digest): (u64, u64), (count, of_node)| {
            (all + count, digest.rotate_left(17) ^ of_node)
        })
    }

    /// How wrong the nodes' cost models were, by type of GPU and by what turns had to do: how many were
    /// predicted, and by how much of what came they were off on average (L15). With what warming took.
    #[must_use]
    pub fn predictions(&self) -> BTreeMap<(String, &'static str), (u64, f64)> {
        let mut by = BTreeMap::<_, (u64, f64)>::new();
        for (gpu_type, told) in self.nodes.iter().flat_map(NodeSnapshot::predictions) {
            let (count, off) = by.entry((gpu_type.to_owned(), told.turn.name())).or_default();
            let all = *count + told.predictions;
            *off = (*off * *count as f64 + told.thousandths as f64 / 1000.0) / all as f64;
            *count = all;
        }
        by
    }

    /// The same of everything that was predicted; `None` where nothing was.
    #[must_use]
    pub fn estimates_off(&self) -> Option<f64> {
        let all = self.predictions().into_values();
        let (count, off) =
            all.fold((0, 0.0), |(sum, off), (count, by)| (sum + count, off + by * count as f64));
        (count > 0).then(|| off / count as f64)
    }

    /// Events by kind of core, for whoever wonders where the time goes.
    #[must_use]
    pub fn events_by_core(&self) -> BTreeMap<&'static str, u64> {
        let mut by = BTreeMap::new();
        for (core, fold) in self.traces.iter().flat_map(|trace| trace.folds()) {
            let name = match core {
                CoreId::Admission(_) => "function",
                CoreId::Dispatch => "dispatch",
                CoreId::Fabric => "fabric",
                CoreId::Gpu(_) => "gpu",
                CoreId::Executor(_) => "executor",
                CoreId::Link(_) => "link",
            };
            *by.entry(name).or_default() += fold.events;
        }
        by
    }

    /// The sums.
    #[must_use]
    pub fn summary(&self, functions: &[Function]) -> Summary {
        let mut latencies: Vec<Duration> = self.answered().map(Record::latency).collect();
        latencies.sort_unstable();
        let seconds = || latencies.iter().map(Duration::as_secs_f64);
        let count = latencies.len().max(1) as f64;
        let mean = seconds().sum::<f64>() / count;
        let variance = seconds().map(|latency| (latency - mean).powi(2)).sum::<f64>() / count;
        let sum = |count: fn(&Stats) -> u64| {
            let of = |nodes: &[NodeSnapshot]| nodes.iter().map(|node| count(&node.dispatch)).sum::<u64>();
            of(&self.nodes).saturating_sub(of(&self.before))
        };
        let (hits, misses) = (sum(|stats| stats.hits), sum(|stats| stats.misses));
        let (dispatched, false_misses) = (hits + misses, sum(|stats| stats.false_misses));
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let loads = self.gpu_loads();
        let (met, held) = self.compliance(functions);
        Summary {
            requests: self.records.len() as u64,
            failed: self.records.iter().filter(|record| !record.answered()).count() as u64,
            mean: Duration::from_secs_f64(mean),
            variance,
            p50: percentile(&latencies, 50.0),
            p98: percentile(&latencies, 98.0),
            p99: percentile(&latencies, 99.0),
            miss_ratio: share(misses, dispatched),
            false_miss_ratio: share(false_misses, misses),
            held_of_top: self.held_of_top,
            gpu_load: loads.iter().sum::<f64>() / loads.len().max(1) as f64,
            gpu_load_variance: normalised_variance(&loads),
            compliant: met,
            with_objective: held,
        }
    }

    /// What each function is billed for since the first moment (T26), by place: what the nodes counted
    /// of it, each in whole milliseconds.
    #[must_use]
    pub fn usage(&self, functions: &[Function]) -> Vec<Usage> {
        let (before, after) = (counted(&self.before), counted(&self.nodes));
        let of = |(place, function): (usize, &Function)| {
            let key = function_key(place, function);
            let at = |counts: &BTreeMap<FunctionKey, Usage>| counts.get(&key).copied().unwrap_or(Usage::NONE);
            at(&after).since(at(&before))
        };
        functions.iter().enumerate().map(of).collect()
    }

    /// The sums of each tenant's requests, by name.
    #[must_use]
    pub fn by_tenant(&self, functions: &[Function]) -> Vec<TenantSummary> {
        let mut records = BTreeMap::<&TenantName, Vec<&Record>>::new();
        functions.iter().for_each(|function| records.entry(&function.tenant).or_default().clear());
        for record in &self.records {
            records.entry(&functions[record.function as usize].tenant).or_default().push(record);
        }
        records.into_iter().map(|(tenant, records)| TenantSummary::of(tenant, &records)).collect()
    }

    fn answered(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| record.answered())
    }

    /// Each GPU's share of the time that it computed.
    #[must_use]
    pub fn gpu_loads(&self) -> Vec<f64> {
        fn busy(nodes: &[NodeSnapshot]) -> impl Iterator<Item = Duration> {
            nodes.iter().flat_map(|node| &node.gpus).map(|gpu| gpu.busy)
        }
        let busy = busy(&self.nodes).zip(busy(&self.before)).map(|(end, before)| end.saturating_sub(before));
        busy.map(|busy| busy.as_secs_f64() / self.span.as_secs_f64().max(1e-9)).collect()
    }

    /// Each link's share of what it could have carried towards the GPUs, or towards either of two, by node
    /// and in link order. Both directions of an NVLink are counted as one that carries as much.
    #[must_use]
    pub fn link_loads(&self) -> Vec<Vec<f64>> {
        let span = self.span.as_secs_f64().max(1e-9);
        let of = |(end, before): (&NodeSnapshot, &NodeSnapshot)| {
            let links = end.links.iter().zip(&before.links);
            let load = |(end, before): (&LinkSnapshot, &LinkSnapshot)| {
                let carried = end.carried.get().saturating_sub(before.carried.get());
                carried as f64 / end.rate.0.max(1) as f64 / span
            };
            links.map(load).collect::<Vec<f64>>()
        };
        self.nodes.iter().zip(&self.before).map(of).collect()
    }

    /// Functions that met their objectives, of those that have one and were asked: m/n >= p,
    /// recomputed from the requests (T17). What was not answered was late.
    #[must_use]
    pub fn compliance(&self, functions: &[Function]) -> (u64, u64) {
        let mut counts = BTreeMap::<u32, (u64, u64)>::new();
        for record in &self.records {
            let Some(slo) = functions[record.function as usize].slo else { continue };
            let (m, n) = counts.entry(record.function).or_default();
            *n += 1;
            *m += u64::from(record.answered() && record.latency() <= slo.deadline);
        }
        let met = counts.iter().filter(|(function, (m, n))| {
            let percentile = functions[**function as usize].slo.map_or(0.0, |slo| slo.percentile);
            *m as f64 >= percentile * *n as f64
        });
        (met.count() as u64, counts.len() as u64)
    }

    /// The latencies of one function's answers, in order.
    #[must_use]
    pub fn latencies_of(&self, wanted: impl Fn(u32) -> bool) -> Vec<Duration> {
        let mut latencies: Vec<_> =
            self.answered().filter(|record| wanted(record.function)).map(Record::latency).collect();
        latencies.sort_unstable();
        latencies
    }
}

/// What nodes have counted of each function for its bill.
fn counted(nodes: &[NodeSnapshot]) -> BTreeMap<FunctionKey, Usage> {
    let mut counted = BTreeMap::<FunctionKey, Usage>::new();
    let mut add = |key: &FunctionKey, usage: Usage| {
        let sum = counted.entry(key.clone()).or_default();
        *sum = sum.plus(usage);
    };
    for node in nodes {
        for (key, (score, _)) in node.scores() {
            let gpu_ns = score.billed_ms.saturating_mul(1_000_000);
            add(key, Usage { gpu_ns, requests: score.completed, idle_ms: 0 });
        }
        for (key, idle) in &node.idle {
            let idle_ms = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
            add(key, Usage { idle_ms, ..Usage::NONE });
        }
    }
    counted
}

/// What a run comes to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Requests.
    pub requests: u64,
    /// Of those, not answered.
    pub failed: u64,
    /// Latency of answers, on average.
    pub mean: Duration,
    /// Its variance, in square seconds.
    pub variance: f64,
    /// The latency within which half of the answers came.
    pub p50: Duration,
    /// 98%.
    pub p98: Duration,
    /// 99%.
    pub p99: Duration,
    /// Dispatches to a GPU without the model.
    pub miss_ratio: f64,
    /// Of those, while another GPU had it.
    pub false_miss_ratio: f64,
    /// GPUs that held the most popular model, on average.
    pub held_of_top: f64,
    /// The share of time that GPUs computed.
    pub gpu_load: f64,
    /// The variance of that between GPUs, each by the most loaded (Torpor, §7.4).
    pub gpu_load_variance: f64,
    /// Functions that met their objectives.
    pub compliant: u64,
    /// Functions that have one and were asked.
    pub with_objective: u64,
}

impl Summary {
    /// The share of functions that met their objectives; 1 where none has any.
    #[must_use]
    pub fn compliance(&self) -> f64 {
        if self.with_objective == 0 { 1.0 } else { self.compliant as f64 / self.with_objective as f64 }
    }
}

/// What a tenant had of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantSummary {
    /// Whose.
    pub tenant: TenantName,
    /// Requests.
    pub requests: u64,
    /// Of those, not answered.
    pub failed: u64,
    /// Latency of answers, on average.
    pub mean: Duration,
    /// The latency within which half of the answers came.
    pub p50: Duration,
    /// 98%.
    pub p98: Duration,
    /// 99%.
    pub p99: Duration,
    /// Time that GPUs computed for them.
    pub gpu_time: Duration,
}

impl TenantSummary {
    fn of(tenant: &TenantName, records: &[&Record]) -> Self {
        let mut latencies = Vec::with_capacity(records.len());
        let mut gpu_time = Duration::ZERO;
        for record in records {
            if let Ending::Answered { split, .. } = record.ending {
                latencies.push(record.latency());
                gpu_time += split.run;
            }
        }
        latencies.sort_unstable();
        let sum: Duration = latencies.iter().sum();
        Self {
            tenant: tenant.clone(),
            requests: records.len() as u64,
            failed: (records.len() - latencies.len()) as u64,
            mean: sum.checked_div(latencies.len() as u32).unwrap_or_default(),
            p50: percentile(&latencies, 50.0),
            p98: percentile(&latencies, 98.0),
            p99: percentile(&latencies, 99.0),
            gpu_time,
        }
    }
}

/// The value that so many percent of sorted ones do not exceed (nearest rank).
#[must_use]
pub fn percentile(sorted: &[Duration], percent: f64) -> Duration {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or_default()
}

/// The variance of values, each divided by the largest.
fn normalised_variance(values: &[f64]) -> f64 {
    let most = values.iter().copied().fold(0.0, f64::max);
    if most <= 0.0 {
        return 0.0;
    }
    let count = values.len() as f64;
    let mean = values.iter().map(|value| value / most).sum::<f64>() / count;
    values.iter().map(|value| (value / most - mean).powi(2)).sum::<f64>() / count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let sorted: Vec<_> = (1..=100).map(Duration::from_millis).collect();
        let ms = Duration::from_millis;
        assert_eq!(percentile(&sorted, 50.0), ms(50));
        assert_eq!(percentile(&sorted, 98.0), ms(98));
        assert_eq!(percentile(&sorted[..3], 98.0), ms(3));
        assert_eq!(percentile(&[], 98.0), ms(0));
    }

    #[test]
    fn load_variance_is_by_the_most_loaded() {
        assert_eq!(normalised_variance(&[0.5, 0.5]), 0.0);
        assert_eq!(normalised_variance(&[0.0, 0.5]), 0.25);
        assert_eq!(normalised_variance(&[0.0, 0.0]), 0.0);
    }
}
