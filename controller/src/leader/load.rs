//! Smoothed load of functions and nodes, from the growth of GPU time counters. The load guides
//! spreading and scaling only, never correctness: a controller loses the load when it stops, and learns
//! it again.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_cluster_state::State;
use millrace_nodes::placement::GpuLoad;
use millrace_types::{FunctionKey, NodeName, Timestamp};

use crate::fleet::Workers;

/// The interval between looks at the counters: several checkpoints, so that each look sees new values.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The divisor of the smoothing: each look contributes a sixth, so half of the smoothed load comes from
/// the last 4 looks.
const WEIGHT: u64 = 6;

/// A counter of GPU time, and the load computed from its growth.
#[derive(Debug, Clone, Copy)]
struct Gauge {
    /// The last counter value, in nanoseconds.
    gpu_ns: u64,
    /// The load in millionths of a GPU, so that rounding does not stop the smoothing.
    fine: u64,
}

/// The loads of all functions and nodes.
#[derive(Debug, Default)]
pub(super) struct Loads {
    looked: Option<Timestamp>,
    functions: BTreeMap<FunctionKey, Gauge>,
    nodes: BTreeMap<NodeName, Gauge>,
}

impl Loads {
    /// Updates the loads from the current counters.
    pub(super) fn look(&mut self, now: Timestamp, state: &State, workers: &Workers) {
        let span = self.looked.replace(now).map_or(Duration::ZERO, |last| now.since(last));
        let functions = state.usages().filter(|(key, _)| state.function(key).is_some());
        let functions = functions.map(|(key, usage)| (key.clone(), usage.gpu_ns));
        self.functions = advance(&self.functions, functions, span);
        let nodes = workers.values().filter_map(|worker| {
            let busy = worker.telemetry()?.gpus.iter().fold(0u64, |sum, gpu| sum.saturating_add(gpu.busy_ns));
            Some((worker.name.clone(), busy))
        });
        self.nodes = advance(&self.nodes, nodes, span);
    }

    /// Returns the load of all requests of a function.
    pub(super) fn of_function(&self, key: &FunctionKey) -> GpuLoad {
        load(self.functions.get(key))
    }

    /// Returns the load of a node's GPUs.
    pub(super) fn of_node(&self, name: &NodeName) -> GpuLoad {
        load(self.nodes.get(name))
    }
}

fn load(gauge: Option<&Gauge>) -> GpuLoad {
    gauge.map_or(GpuLoad::default(), |gauge| GpuLoad(gauge.fine / 1000))
}

/// Advances gauges to new counter values. A gauge without a counter is dropped. A counter that
/// decreased was restarted, and counts as no growth.
fn advance<K: Ord>(
    known: &BTreeMap<K, Gauge>,
    counters: impl Iterator<Item = (K, u64)>,
    span: Duration,
) -> BTreeMap<K, Gauge> {
    let span_us = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
    let next = |key: &K, gpu_ns: u64| {
        let Some(last) = known.get(key) else { return Gauge { gpu_ns, fine: 0 } };
        if span_us == 0 {
            return Gauge { gpu_ns, ..*last };
        }
        let grown = gpu_ns.saturating_sub(last.gpu_ns);
        // One nanosecond per microsecond is a thousandth of a GPU. The factor 1000 converts to
        // millionths.
        let seen = grown.saturating_mul(1000) / span_us;
        Gauge { gpu_ns, fine: last.fine - last.fine / WEIGHT + seen / WEIGHT }
    };
    counters
        .map(|(key, gpu_ns)| {
            let gauge = next(&key, gpu_ns);
            (key, gauge)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_the_growth_of_its_counter_smoothed() {
        let second = Duration::from_secs(1);
        let at = |known: &BTreeMap<&'static str, Gauge>, gpu_ns| {
            advance(known, [("a", gpu_ns)].into_iter(), second)
        };
        let mut known = at(&BTreeMap::new(), 7);
        assert_eq!(load(known.get("a")), GpuLoad(0), "a single look shows no growth");
        let half = 500_000_000;
        for look in 1..60 {
            known = at(&known, 7 + look * half);
        }
        let steady = load(known.get("a")).0;
        assert!((498..=500).contains(&steady), "{steady}");
        known = at(&known, 3);
        assert!(load(known.get("a")).0 < steady, "the counter restarted");
        assert!(advance(&known, std::iter::empty(), second).is_empty());
    }
}
