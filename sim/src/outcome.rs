//! The result of a simulation: a record of every request, the final state of the nodes, and the sums that the
//! papers report.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_core::trace::{CoreId, CoreTrace};
use millrace_scheduling::dispatch::DispatchStats;
use millrace_types::{FunctionKey, GpuIndex, Reason, TenantName, Timestamp, Usage};
use millrace_worker::request::AttemptTimes;
use millrace_worker::snapshot::{LinkSnapshot, NodeSnapshot};

use crate::control::function_key;
use crate::scenario::SimulatedFunction;

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestEnding {
    /// The client got an answer.
    Answered {
        /// The index of the node that answered.
        node: usize,
        /// The GPU that ran the request.
        gpu: GpuIndex,
        /// The number of times that the request was started.
        attempts: u32,
        /// The latency, split into its parts.
        split: AttemptTimes,
    },
    /// The client got an error.
    Failed { reason: Reason },
}

/// The record of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedRequest {
    /// The index of the request among the arrivals.
    pub request: usize,
    /// The index of the function.
    pub function: u32,
    /// The time of the request's arrival.
    pub arrived: Timestamp,
    /// The time of the answer or the error.
    pub finished: Timestamp,
    pub ending: RequestEnding,
}

impl SimulatedRequest {
    /// Returns the time from the arrival to the end.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.finished.since(self.arrived)
    }

    /// Returns whether the client got an answer.
    #[must_use]
    pub fn answered(&self) -> bool {
        matches!(self.ending, RequestEnding::Answered { .. })
    }
}

/// The result of a simulation.
#[derive(Debug, Clone)]
pub struct SimulationOutcome {
    /// The records of all requests, in the order of their arrival.
    pub records: Vec<SimulatedRequest>,
    /// The nodes before the first arrival. Their counts include the warm-up.
    pub before: Vec<NodeSnapshot>,
    /// The nodes at the end.
    pub nodes: Vec<NodeSnapshot>,
    /// The time from the end of the warm-up to the last answer.
    pub span: Duration,
    /// The number of GPUs that held the most popular model, on average over time (L17).
    pub held_of_top: f64,
    /// The trace of each node's cores. Empty unless the scenario is traced.
    pub traces: Vec<CoreTrace>,
}

impl SimulationOutcome {
    /// Returns the number of events that the nodes' cores handled, and a hash of all events and actions. Both
    /// are 0 unless the scenario is traced.
    #[must_use]
    pub fn events(&self) -> (u64, u64) {
        let events = self.traces.iter().flat_map(|trace| trace.folds().values()).map(|fold| fold.events);
        let digests = self.traces.iter().map(CoreTrace::digest);
        let hash = digests.fold(0, |hash: u64, digest| hash.rotate_left(17) ^ digest);
        (events.sum(), if self.traces.is_empty() { 0 } else { hash })
    }

    /// Returns the number of the nodes' decisions, and the digest of their canonical text. Both are 0
    /// unless the scenario is traced.
    #[must_use]
    pub fn decisions(&self) -> (u64, u64) {
        let digests = self.traces.iter().map(|trace| trace.decisions().digest());
        digests.fold((0, 0), |(all, digest): (u64, u64), (count, of_node)| {
            (all + count, digest.rotate_left(17) ^ of_node)
        })
    }

    /// Returns the errors of the nodes' cost models, by type of GPU and kind of turn: the number of
    /// predictions, and their mean error as a share of the measured time (L15). The warm-up is included.
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

    /// Returns the mean error of all predictions, as [`Self::predictions`] counts errors. Returns `None`
    /// without predictions.
    #[must_use]
    pub fn mean_prediction_error(&self) -> Option<f64> {
        let all = self.predictions().into_values();
        let (count, off) =
            all.fold((0, 0.0), |(sum, off), (count, by)| (sum + count, off + by * count as f64));
        (count > 0).then(|| off / count as f64)
    }

    /// Returns the number of handled events by kind of core. Empty unless the scenario is traced.
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

    /// Returns the sums of the run.
    #[must_use]
    pub fn summary(&self, functions: &[SimulatedFunction]) -> RunSummary {
        let mut latencies: Vec<Duration> = self.answered().map(SimulatedRequest::latency).collect();
        latencies.sort_unstable();
        let seconds = || latencies.iter().map(Duration::as_secs_f64);
        let count = latencies.len().max(1) as f64;
        let mean = seconds().sum::<f64>() / count;
        let variance = seconds().map(|latency| (latency - mean).powi(2)).sum::<f64>() / count;
        let sum = |count: fn(&DispatchStats) -> u64| {
            let of = |nodes: &[NodeSnapshot]| nodes.iter().map(|node| count(&node.dispatch)).sum::<u64>();
            of(&self.nodes).saturating_sub(of(&self.before))
        };
        let hits = sum(|stats| stats.hits);
        let misses = sum(|stats| stats.misses);
        let dispatched = hits + misses;
        let false_misses = sum(|stats| stats.false_misses);
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let loads = self.gpu_loads();
        let (met, held) = self.compliance(functions);
        RunSummary {
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

    /// Returns the billed usage of each function, by its index, since the end of the warm-up (T26). Each node
    /// counts a request's usage in whole milliseconds.
    #[must_use]
    pub fn usage(&self, functions: &[SimulatedFunction]) -> Vec<Usage> {
        let before = counted(&self.before);
        let after = counted(&self.nodes);
        let of = |(place, function): (usize, &SimulatedFunction)| {
            let key = function_key(place, function);
            let at = |counts: &BTreeMap<FunctionKey, Usage>| counts.get(&key).copied().unwrap_or(Usage::NONE);
            at(&after).since(at(&before))
        };
        functions.iter().enumerate().map(of).collect()
    }

    /// Returns the sums of each tenant's requests, in the order of the tenants' names.
    #[must_use]
    pub fn by_tenant(&self, functions: &[SimulatedFunction]) -> Vec<TenantSummary> {
        let mut records = BTreeMap::<&TenantName, Vec<&SimulatedRequest>>::new();
        functions.iter().for_each(|function| records.entry(&function.tenant).or_default().clear());
        for record in &self.records {
            records.entry(&functions[record.function as usize].tenant).or_default().push(record);
        }
        records.into_iter().map(|(tenant, records)| TenantSummary::of(tenant, &records)).collect()
    }

    fn answered(&self) -> impl Iterator<Item = &SimulatedRequest> {
        self.records.iter().filter(|record| record.answered())
    }

    /// Returns the share of time that each GPU computed.
    #[must_use]
    pub fn gpu_loads(&self) -> Vec<f64> {
        fn busy(nodes: &[NodeSnapshot]) -> impl Iterator<Item = Duration> {
            nodes.iter().flat_map(|node| &node.gpus).map(|gpu| gpu.busy)
        }
        let busy = busy(&self.nodes).zip(busy(&self.before)).map(|(end, before)| end.saturating_sub(before));
        busy.map(|busy| busy.as_secs_f64() / self.span.as_secs_f64().max(1e-9)).collect()
    }

    /// Returns the load of each link, by node and in link order: the bytes carried as a share of the link's
    /// capacity in one direction. A host link counts the bytes towards the GPUs. An NVLink counts the bytes
    /// of both directions together.
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

    /// Returns the number of functions that met their objectives, and the number of functions that have an
    /// objective and got a request. An objective is met if m/n >= p, recomputed from the records (T17). A
    /// request without an answer counts as late.
    #[must_use]
    pub fn compliance(&self, functions: &[SimulatedFunction]) -> (u64, u64) {
        let met = self.objectives_met(functions);
        (met.values().filter(|met| **met).count() as u64, met.len() as u64)
    }

    /// Returns whether each function with an objective and a request met its objective, as in
    /// [`Self::compliance`].
    #[must_use]
    pub fn objectives_met(&self, functions: &[SimulatedFunction]) -> BTreeMap<u32, bool> {
        let mut counts = BTreeMap::<u32, (u64, u64)>::new();
        for record in &self.records {
            let Some(slo) = functions[record.function as usize].slo else { continue };
            let (m, n) = counts.entry(record.function).or_default();
            *n += 1;
            *m += u64::from(record.answered() && record.latency() <= slo.deadline);
        }
        let met = |(function, (m, n)): (u32, (u64, u64))| {
            let percentile = functions[function as usize].slo.map_or(0.0, |slo| slo.percentile);
            (function, m as f64 >= percentile * n as f64)
        };
        counts.into_iter().map(met).collect()
    }

    /// Returns the latencies of the answers of the `wanted` functions, in ascending order.
    #[must_use]
    pub fn latencies_of(&self, wanted: impl Fn(u32) -> bool) -> Vec<Duration> {
        let mut latencies: Vec<_> =
            self.answered().filter(|record| wanted(record.function)).map(SimulatedRequest::latency).collect();
        latencies.sort_unstable();
        latencies
    }
}

/// Returns the billed usage of each function, added up over the nodes.
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

/// The sums of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunSummary {
    pub requests: u64,
    /// Requests without an answer.
    pub failed: u64,
    /// The mean latency of answers.
    pub mean: Duration,
    /// The variance of the latency of answers, in square seconds.
    pub variance: f64,
    /// The median latency of answers.
    pub p50: Duration,
    /// The 98th percentile of the latency of answers.
    pub p98: Duration,
    /// The 99th percentile of the latency of answers.
    pub p99: Duration,
    /// The share of dispatches that are misses: the GPU did not hold the model.
    pub miss_ratio: f64,
    /// The share of misses that are false misses: another GPU held the model.
    pub false_miss_ratio: f64,
    /// The number of GPUs that held the most popular model, on average over time.
    pub held_of_top: f64,
    /// The share of time that GPUs computed, on average over the GPUs.
    pub gpu_load: f64,
    /// The variance of the GPUs' loads, each divided by the highest load (Torpor, §7.4).
    pub gpu_load_variance: f64,
    /// The number of functions that met their objectives.
    pub compliant: u64,
    /// The number of functions that have an objective and got a request.
    pub with_objective: u64,
}

impl RunSummary {
    /// Returns the share of functions that met their objectives. Returns 1 if no function has an objective.
    #[must_use]
    pub fn compliance(&self) -> f64 {
        if self.with_objective == 0 { 1.0 } else { self.compliant as f64 / self.with_objective as f64 }
    }
}

/// The sums of a tenant's requests.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantSummary {
    pub tenant: TenantName,
    pub requests: u64,
    /// Requests without an answer.
    pub failed: u64,
    /// The mean latency of answers.
    pub mean: Duration,
    /// The median latency of answers.
    pub p50: Duration,
    /// The 98th percentile of the latency of answers.
    pub p98: Duration,
    /// The 99th percentile of the latency of answers.
    pub p99: Duration,
    /// The time that GPUs computed for the answered requests.
    pub gpu_time: Duration,
}

impl TenantSummary {
    fn of(tenant: &TenantName, records: &[&SimulatedRequest]) -> Self {
        let mut latencies = Vec::with_capacity(records.len());
        let mut gpu_time = Duration::ZERO;
        for record in records {
            if let RequestEnding::Answered { split, .. } = record.ending {
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

/// Returns the value that `percent` percent of the sorted values do not exceed (nearest rank). Returns zero
/// for no values.
#[must_use]
pub fn percentile(sorted: &[Duration], percent: f64) -> Duration {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or_default()
}

/// Returns the variance of the values, each divided by the largest value.
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
    fn percentile_takes_the_nearest_rank() {
        let sorted: Vec<_> = (1..=100).map(Duration::from_millis).collect();
        let ms = Duration::from_millis;
        assert_eq!(percentile(&sorted, 50.0), ms(50));
        assert_eq!(percentile(&sorted, 98.0), ms(98));
        assert_eq!(percentile(&sorted[..3], 98.0), ms(3));
        assert_eq!(percentile(&[], 98.0), ms(0));
    }

    #[test]
    fn load_variance_is_relative_to_the_highest_load() {
        assert_eq!(normalised_variance(&[0.5, 0.5]), 0.0);
        assert_eq!(normalised_variance(&[0.0, 0.5]), 0.25);
        assert_eq!(normalised_variance(&[0.0, 0.0]), 0.0);
    }
}
