//! Computes the changes of the node between two observations.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_nodes::checkpoint::Event;
use millrace_proto::worker as wire;
use millrace_types::{Alphas, Bytes, FunctionKey, MemoryTier, ModelCopy, SloCounts, Usage};

use crate::snapshot::NodeSnapshot;

/// Smallest idle time that is reported alone, without other news of the function. A quiet node thus
/// causes at most one command a minute for each function. Unreported usage of a worker that dies is
/// not billed: here, at most the price of 6 s of a GPU.
const IDLE_TOLD_MIN: Duration = Duration::from_secs(60);

/// Whether this look may postpone small changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReportThreshold {
    /// A periodic look: small changes may wait for the next look.
    Usual,
    /// The last look before a shutdown: all changes are reported.
    Last,
}

/// The state of the node at the last look.
#[derive(Debug, Default)]
pub(super) struct NodeObservation {
    copies: BTreeMap<ModelCopy, Bytes>,
    totals: BTreeMap<FunctionKey, Totals>,
    alphas: Alphas,
}

/// A function's counters on this node since the worker began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Totals {
    counts: SloCounts,
    usage: Usage,
}

impl Totals {
    fn plus(self, other: Self) -> Self {
        Self { counts: self.counts.plus(other.counts), usage: self.usage.plus(other.usage) }
    }
}

impl NodeObservation {
    /// Observes the node again and returns the changes since the last look.
    pub(super) fn look(
        &mut self,
        look: ReportThreshold,
        snapshot: &NodeSnapshot,
        host: &[wire::HostModel],
    ) -> Vec<Event> {
        let mut events = Vec::new();
        self.models(copies(snapshot, host), &mut events);
        for (function, now) in totals(snapshot) {
            self.count(look, function, now, &mut events);
        }
        if snapshot.dispatch.alphas != self.alphas {
            self.alphas.clone_from(&snapshot.dispatch.alphas);
            events.push(Event::AlphasSet(self.alphas.clone()));
        }
        events
    }

    fn models(&mut self, now: BTreeMap<ModelCopy, Bytes>, events: &mut Vec<Event>) {
        let gone = self.copies.keys().filter(|copy| !now.contains_key(copy));
        events.extend(gone.map(|&copy| Event::ModelDropped { copy }));
        let new = now.iter().filter(|&(copy, bytes)| self.copies.get(copy) != Some(bytes));
        events.extend(new.map(|(&copy, &bytes)| Event::ModelLoaded { copy, bytes }));
        self.copies = now;
    }

    /// Reports the growth of a function's counters. Counters only grow: a smaller value means that
    /// an actor died during the snapshot, and a later look sees the counters whole again.
    fn count(&mut self, look: ReportThreshold, function: FunctionKey, now: Totals, events: &mut Vec<Event>) {
        let last = self.totals.entry(function.clone()).or_default();
        let counts = now.counts.since(last.counts);
        if counts != SloCounts::default() {
            events.push(Event::Scored { function: function.clone(), counts });
        }
        last.counts = now.counts.merge(last.counts);
        let usage = now.usage.since(last.usage);
        let quiet = Usage { idle_ms: 0, ..usage } == Usage::NONE && usage.idle() < IDLE_TOLD_MIN;
        if usage != Usage::NONE && (look == ReportThreshold::Last || !quiet) {
            last.usage = now.usage.merge(last.usage);
            events.push(Event::Used { function, usage });
        }
    }
}

fn copies(snapshot: &NodeSnapshot, host: &[wire::HostModel]) -> BTreeMap<ModelCopy, Bytes> {
    let mut copies = BTreeMap::new();
    for model in host {
        // The host tier published this digest in printed form, so the digest parses.
        if let Ok(digest) = model.digest.parse() {
            copies.insert(ModelCopy { digest, tier: MemoryTier::Host }, Bytes(model.bytes));
        }
    }
    for gpu in &snapshot.gpus {
        for model in &gpu.models {
            // Functions that reserve different amounts of memory do not share a copy.
            let copy = ModelCopy { digest: model.digest, tier: MemoryTier::Gpu(gpu.index) };
            *copies.entry(copy).or_default() += model.bytes;
        }
    }
    copies
}

fn totals(snapshot: &NodeSnapshot) -> BTreeMap<FunctionKey, Totals> {
    let scored = snapshot.scores().into_iter().map(|(function, (score, _))| {
        let totals = Totals {
            counts: SloCounts { m: score.in_time, n: score.scored },
            usage: Usage {
                gpu_ns: score.billed_ms.saturating_mul(1_000_000),
                requests: score.completed,
                idle_ms: 0,
            },
        };
        (function.clone(), totals)
    });
    let idle = snapshot.idle.iter().map(|(function, idle)| {
        let idle_ms = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
        (function.clone(), Totals { usage: Usage { idle_ms, ..Usage::NONE }, ..Totals::default() })
    });
    let mut sums = BTreeMap::<FunctionKey, Totals>::new();
    for (function, totals) in scored.chain(idle) {
        let sum = sums.entry(function).or_default();
        *sum = sum.plus(totals);
    }
    sums
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_scheduling::admission::FunctionTotals;
    use millrace_types::{Digest, FunctionName, GpuIndex, Incarnation, Revision, RevisionKey, TenantName};

    use super::*;
    use crate::snapshot::{FunctionSnapshot, GpuHealth, GpuSnapshot, ResidentModel};

    fn key() -> FunctionKey {
        FunctionKey { tenant: TenantName::default(), name: FunctionName::new("f").unwrap() }
    }

    fn function(revision: u64, completed: u64, in_time: u64) -> FunctionSnapshot {
        let key = RevisionKey { function: key(), revision: Revision::new(revision).unwrap() };
        FunctionSnapshot { key, in_flight: 0, score: score(completed, in_time) }
    }

    fn score(completed: u64, in_time: u64) -> FunctionTotals {
        FunctionTotals {
            completed,
            in_time,
            scored: completed,
            billed_ms: completed * 2,
            ..FunctionTotals::default()
        }
    }

    fn node(functions: Vec<FunctionSnapshot>, past: Option<FunctionTotals>) -> NodeSnapshot {
        let past = past.into_iter().map(|score| (key(), score)).collect();
        NodeSnapshot { functions, past, ..NodeSnapshot::default() }
    }

    fn counted(m: u64, n: u64) -> [Event; 2] {
        let usage = Usage { gpu_ns: n * 2_000_000, requests: n, idle_ms: 0 };
        [
            Event::Scored { function: key(), counts: SloCounts { m, n } },
            Event::Used { function: key(), usage },
        ]
    }

    #[test]
    fn each_request_is_reported_once_over_changes_of_revisions() {
        let mut seen = NodeObservation::default();
        assert_eq!(
            seen.look(ReportThreshold::Usual, &node(vec![function(1, 3, 2)], None), &[]),
            counted(2, 3)
        );
        assert_eq!(seen.look(ReportThreshold::Usual, &node(vec![function(1, 3, 2)], None), &[]), []);
        let both = node(vec![function(1, 4, 3), function(2, 1, 1)], None);
        assert_eq!(seen.look(ReportThreshold::Usual, &both, &[]), counted(2, 2));
        // The first revision answers another request and is removed.
        assert_eq!(
            seen.look(ReportThreshold::Usual, &node(vec![function(2, 1, 1)], Some(score(5, 3))), &[]),
            counted(0, 1)
        );
    }

    #[test]
    fn an_actor_missing_from_a_snapshot_loses_and_repeats_no_count() {
        let mut seen = NodeObservation::default();
        seen.look(ReportThreshold::Usual, &node(vec![function(1, 3, 2)], Some(score(10, 10))), &[]);
        assert_eq!(seen.look(ReportThreshold::Usual, &node(Vec::new(), Some(score(10, 10))), &[]), []);
        let again = node(vec![function(1, 4, 3)], Some(score(10, 10)));
        assert_eq!(seen.look(ReportThreshold::Usual, &again, &[]), counted(1, 1));
    }

    fn idle(node: NodeSnapshot, ms: u64) -> NodeSnapshot {
        NodeSnapshot { idle: [(key(), Duration::from_millis(ms))].into(), ..node }
    }

    fn used(n: u64, idle_ms: u64) -> Event {
        let usage = Usage { gpu_ns: n * 2_000_000, requests: n, idle_ms };
        Event::Used { function: key(), usage }
    }

    #[test]
    fn idle_time_is_reported_with_other_usage_each_minute_or_at_the_last_look() {
        let mut seen = NodeObservation::default();
        let quiet = |ms| idle(node(Vec::new(), Some(score(0, 0))), ms);
        assert_eq!(seen.look(ReportThreshold::Usual, &quiet(59_999), &[]), []);
        let served = idle(node(Vec::new(), Some(score(2, 0))), 59_999);
        assert_eq!(seen.look(ReportThreshold::Usual, &served, &[])[1..], [used(2, 59_999)]);
        let served = |ms| idle(node(Vec::new(), Some(score(2, 0))), ms);
        assert_eq!(seen.look(ReportThreshold::Usual, &served(60_500), &[]), []);
        assert_eq!(seen.look(ReportThreshold::Usual, &served(119_999), &[]), [used(0, 60_000)]);
        assert_eq!(seen.look(ReportThreshold::Last, &served(120_004), &[]), [used(0, 5)]);
        assert_eq!(seen.look(ReportThreshold::Last, &served(120_004), &[]), []);
    }

    #[test]
    fn reported_usage_sums_to_the_usage() {
        // In some looks the function's actor, its past or its idle clock is missing.
        let mut seen = NodeObservation::default();
        let mut told = Usage::NONE;
        for at in 0..500_u64 {
            let functions = if at % 7 == 3 { Vec::new() } else { vec![function(1, at / 3, 0)] };
            let snapshot = node(functions, (at % 5 != 2).then(|| score(at / 90, 0)));
            let snapshot = if at % 11 == 5 { snapshot } else { idle(snapshot, at * 1_234) };
            for event in seen.look(ReportThreshold::Usual, &snapshot, &[]) {
                if let Event::Used { usage, .. } = event {
                    told = told.plus(usage);
                }
            }
            let requests = at / 3 + at / 90;
            let most = Usage { gpu_ns: requests * 2_000_000, requests, idle_ms: at * 1_234 };
            assert_eq!(told.merge(most), most, "reported usage never exceeds the usage");
        }
        let last = idle(node(vec![function(1, 200, 0)], Some(score(9, 0))), 700_000);
        for event in seen.look(ReportThreshold::Last, &last, &[]) {
            if let Event::Used { usage, .. } = event {
                told = told.plus(usage);
            }
        }
        assert_eq!(told, Usage { gpu_ns: 209 * 2_000_000, requests: 209, idle_ms: 700_000 });
    }

    fn gpu(models: &[(&[u8], u64)]) -> NodeSnapshot {
        let model = |&(name, bytes): &(&[u8], u64)| ResidentModel {
            digest: Digest::of(name),
            functions: Vec::new(),
            bytes: Bytes(bytes),
            loaded: Bytes(bytes),
            idle: Duration::ZERO,
            executor_pid: None,
        };
        let gpu = GpuSnapshot {
            index: GpuIndex(1),
            gpu_type: "test".into(),
            health: GpuHealth::Up,
            memory: Bytes(100),
            used: Bytes(10),
            models: models.iter().map(model).collect(),
            running: Vec::new(),
            sm_violations: 0,
            slices: Vec::new(),
            incarnation: Incarnation(1),
            executor_pid: None,
            executor_pids: Vec::new(),
            restarts: 0,
            swaps: 0,
            peer_swaps: 0,
            evictions: 0,
            busy: Duration::ZERO,
            data: crate::snapshot::GpuData::default(),
        };
        NodeSnapshot { gpus: vec![gpu], ..NodeSnapshot::default() }
    }

    #[test]
    fn loaded_and_dropped_copies_are_reported_by_tier() {
        let copy = |name: &[u8], tier| ModelCopy { digest: Digest::of(name), tier };
        let host = [wire::HostModel { digest: Digest::of(b"a").to_string(), bytes: 7, load_ns: 0 }];
        let mut seen = NodeObservation::default();
        let on_host = copy(b"a", MemoryTier::Host);
        let on_gpu = copy(b"a", MemoryTier::Gpu(GpuIndex(1)));
        let loaded = [
            Event::ModelLoaded { copy: on_host, bytes: Bytes(7) },
            Event::ModelLoaded { copy: on_gpu, bytes: Bytes(30) },
        ];
        assert_eq!(seen.look(ReportThreshold::Usual, &gpu(&[(b"a", 10), (b"a", 20)]), &host), loaded);
        let swapped = [
            Event::ModelDropped { copy: on_gpu },
            Event::ModelLoaded { copy: copy(b"b", MemoryTier::Gpu(GpuIndex(1))), bytes: Bytes(5) },
        ];
        assert_eq!(seen.look(ReportThreshold::Usual, &gpu(&[(b"b", 5)]), &host), swapped);
    }
}
