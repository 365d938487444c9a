//! Measured traffic between functions in one run of a workflow (D19), because declared shapes leave
//! open dimensions. Each controller reports counts of its runs from time to time; the planner reads
//! bytes per run. The measurements are soft state: a new leader learns them again.
//!
//! The value is a mean over the last runs. Each sample adds the counts since the sample before, and
//! the share beyond [`RUNS_WINDOW`] runs fades. The planner's value stays until the mean differs
//! clearly. A value that wavers would group functions back and forth, and move functions that never
//! ran.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{Bytes, FunctionKey, FunctionName, Revision};

/// Runs of a workflow after which measured traffic replaces the declared traffic.
pub const RUNS_MIN: u64 = 32;
/// Maximum number of runs that a mean covers.
pub const RUNS_WINDOW: u64 = 256;
/// Maximum number of pairs counted per workflow. The traffic of a workflow with more pairs is
/// unknown.
pub const PAIRS_MAX: usize = 256;
/// Divisor of the planner's value: the value stays while the mean differs by at most that share.
const APART: u64 = 4;
/// Difference in bytes up to which the planner's value stays in any case.
const APART_MIN: u64 = 1024;

/// Producer and consumer of data, both of the workflow's tenant.
pub type FunctionPair = (FunctionName, FunctionName);

/// Counts of a workflow by one controller, since that controller began to count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficCounts {
    pub workflow: FunctionKey,
    /// Version of the workflow.
    pub generation: Revision,
    /// Answered runs.
    pub runs: u64,
    /// Bytes passed in all these runs. A missing pair passed nothing. `None` if the controller had
    /// no room for all pairs, or there are more than [`PAIRS_MAX`].
    pub pairs: Option<BTreeMap<FunctionPair, u64>>,
}

/// Measurements of all workflows, bounded by the number of workflows.
#[derive(Debug, Default)]
pub struct MeasuredTraffic {
    /// Last counts of each controller, by its number.
    counted: BTreeMap<u64, BTreeMap<FunctionKey, TrafficCounts>>,
    means: BTreeMap<FunctionKey, Mean>,
    version: u64,
}

#[derive(Debug)]
struct Mean {
    generation: Revision,
    /// Number of runs that the mean covers.
    runs: u64,
    /// `None` once a controller could not count all pairs: the traffic of the remaining pairs is
    /// unknown.
    pairs: Option<BTreeMap<FunctionPair, PairTraffic>>,
}

#[derive(Debug, Default)]
struct PairTraffic {
    /// Bytes in all runs of the mean.
    bytes: u64,
    /// Bytes in one run, as the planner reads them.
    told: Option<u64>,
}

impl MeasuredTraffic {
    /// Returns a number that changes whenever the planner's values change.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the bytes that two functions pass in one run of a version of a workflow. Returns
    /// `None` before enough runs, and if not all pairs could be counted.
    #[must_use]
    pub fn passed(&self, workflow: &FunctionKey, generation: Revision, pair: &FunctionPair) -> Option<Bytes> {
        let mean = self.means.get(workflow).filter(|it| it.generation == generation && it.is_known())?;
        let passed = mean.pairs.as_ref()?.get(pair);
        passed.map_or(Some(Bytes::ZERO), |passed| passed.told.map(Bytes))
    }

    /// Replaces a controller's counts. Workflows missing from `tallies` count as forgotten by the
    /// controller.
    pub fn take(&mut self, controller: u64, tallies: Vec<TrafficCounts>) {
        let last = self.counted.remove(&controller).unwrap_or_default();
        let mut news = false;
        for tally in &tallies {
            let mean =
                self.means.entry(tally.workflow.clone()).or_insert_with(|| Mean::new(tally.generation));
            if mean.generation < tally.generation {
                *mean = Mean::new(tally.generation);
                news = true;
            }
            if mean.generation == tally.generation {
                // A counter that went back was restarted from zero.
                let last = last.get(&tally.workflow);
                let last = last.filter(|it| it.generation == tally.generation && it.runs <= tally.runs);
                news |= mean.add(tally, last);
            }
        }
        self.version += u64::from(news);
        let by_workflow = tallies.into_iter().map(|tally| (tally.workflow.clone(), tally));
        self.counted.insert(controller, by_workflow.collect());
    }

    /// Forgets removed controllers, and workflows that were removed or have another version.
    pub fn retain(
        &mut self,
        controllers: &BTreeSet<u64>,
        generation: impl Fn(&FunctionKey) -> Option<Revision>,
    ) {
        self.counted.retain(|controller, _| controllers.contains(controller));
        let before = self.means.len();
        self.means.retain(|workflow, mean| generation(workflow) == Some(mean.generation));
        self.version += u64::from(self.means.len() != before);
    }
}

impl Mean {
    fn new(generation: Revision) -> Self {
        Self { generation, runs: 0, pairs: Some(BTreeMap::new()) }
    }

    fn is_known(&self) -> bool {
        self.runs >= RUNS_MIN && self.pairs.is_some()
    }

    /// Adds the counts since the last sample. Returns whether the planner's values changed.
    fn add(&mut self, tally: &TrafficCounts, last: Option<&TrafficCounts>) -> bool {
        let was_known = self.is_known();
        let (Some(pairs), Some(counted)) = (&mut self.pairs, &tally.pairs) else {
            self.pairs = None;
            return was_known;
        };
        let runs = tally.runs - last.map_or(0, |last| last.runs);
        if runs == 0 {
            return false;
        }
        self.runs = self.runs.saturating_add(runs);
        for (pair, bytes) in counted {
            let before = last.and_then(|last| last.pairs.as_ref()?.get(pair)).copied().unwrap_or(0);
            let passed = pairs.entry(pair.clone()).or_default();
            passed.bytes = passed.bytes.saturating_add(bytes.saturating_sub(before));
        }
        if pairs.len() > PAIRS_MAX {
            self.pairs = None;
            return was_known;
        }
        if self.runs > RUNS_WINDOW {
            for passed in pairs.values_mut() {
                let kept = u128::from(passed.bytes) * u128::from(RUNS_WINDOW) / u128::from(self.runs);
                passed.bytes = u64::try_from(kept).unwrap_or(u64::MAX);
            }
            self.runs = RUNS_WINDOW;
        }
        if self.runs < RUNS_MIN {
            return false;
        }
        let mut news = !was_known;
        for passed in pairs.values_mut() {
            news |= passed.settle(self.runs);
        }
        news
    }
}

impl PairTraffic {
    /// Updates the planner's value if the mean differs clearly. Returns whether the value changed.
    fn settle(&mut self, runs: u64) -> bool {
        let mean = self.bytes / runs;
        let is_near = |told: u64| mean.abs_diff(told) <= (told / APART).max(APART_MIN);
        let stays = self.told.is_some_and(is_near);
        if !stays {
            self.told = Some(mean);
        }
        !stays
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::TenantName;

    use super::*;

    const KIB: u64 = 1024;

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn key() -> FunctionKey {
        FunctionKey { tenant: TenantName::default(), name: name("w") }
    }

    /// Returns counts of `runs` runs, each of which passed `kib` KiB from `a` to `b`.
    fn tally(generation: Revision, runs: u64, kib: u64) -> TrafficCounts {
        let pairs = BTreeMap::from([((name("a"), name("b")), runs * kib * KIB)]);
        TrafficCounts { workflow: key(), generation, runs, pairs: Some(pairs) }
    }

    /// Returns the KiB in one run.
    fn passed(measured: &MeasuredTraffic, generation: Revision) -> Option<u64> {
        let bytes = measured.passed(&key(), generation, &(name("a"), name("b")))?;
        Some(bytes.0 / KIB)
    }

    const FIRST: Revision = Revision::FIRST;

    #[test]
    fn measurements_count_after_enough_runs_over_all_controllers() {
        let mut measured = MeasuredTraffic::default();
        measured.take(1, vec![tally(FIRST, RUNS_MIN - 2, 100)]);
        measured.take(2, vec![tally(FIRST, 1, 68)]);
        assert_eq!((passed(&measured, FIRST), measured.version()), (None, 0));
        // The same counts again add nothing.
        measured.take(2, vec![tally(FIRST, 1, 68)]);
        assert_eq!(passed(&measured, FIRST), None);
        measured.take(2, vec![tally(FIRST, 2, 68)]);
        assert_eq!((passed(&measured, FIRST), measured.version()), (Some(98), 1));
        let pair = (name("a"), name("c"));
        assert_eq!(measured.passed(&key(), FIRST, &pair), Some(Bytes::ZERO), "a to c passed nothing");
        assert_eq!(passed(&measured, FIRST.next()), None, "another version has no measurements");
    }

    #[test]
    fn the_planned_value_stays_until_the_mean_differs_clearly() {
        let mut measured = MeasuredTraffic::default();
        let mut runs = 0;
        let mut bytes = 0;
        let mut run = |measured: &mut MeasuredTraffic, count: u64, kib: u64| {
            (runs, bytes) = (runs + count, bytes + count * kib * KIB);
            let pairs = Some(BTreeMap::from([((name("a"), name("b")), bytes)]));
            measured.take(1, vec![TrafficCounts { workflow: key(), generation: FIRST, runs, pairs }]);
            (passed(measured, FIRST), measured.version())
        };
        assert_eq!(run(&mut measured, 1_000, 100), (Some(100), 1));
        for kib in [80, 120].repeat(20) {
            assert_eq!(run(&mut measured, 100, kib), (Some(100), 1), "{kib}");
        }
        let (told, version) = run(&mut measured, 1_000, 200);
        assert!((170..=200).contains(&told.unwrap()) && version == 2, "{told:?}");
        // The older runs had faded: only the last ones count.
        for _ in 0..9 {
            run(&mut measured, RUNS_WINDOW, 50);
        }
        let (told, _) = run(&mut measured, RUNS_WINDOW, 50);
        assert!((50..=62).contains(&told.unwrap()), "{told:?}");
    }

    #[test]
    fn counts_of_a_restarted_controller_start_from_zero() {
        let mut measured = MeasuredTraffic::default();
        measured.take(1, vec![tally(FIRST, 100, 100)]);
        measured.take(1, vec![tally(FIRST, 50, 400)]);
        assert_eq!(passed(&measured, FIRST), Some(200));
        // The controller forgot the workflow for a while.
        measured.take(1, Vec::new());
        measured.take(1, vec![tally(FIRST, 150, 200)]);
        assert_eq!(passed(&measured, FIRST), Some(200));
    }

    #[test]
    fn a_new_version_starts_empty_and_removed_workflows_are_forgotten() {
        let mut measured = MeasuredTraffic::default();
        let next = FIRST.next();
        measured.take(1, vec![tally(FIRST, 100, 100)]);
        measured.take(2, vec![tally(next, RUNS_MIN, 10)]);
        // Controller 1 has not heard of the new version.
        measured.take(1, vec![tally(FIRST, 200, 100)]);
        assert_eq!((passed(&measured, FIRST), passed(&measured, next)), (None, Some(10)));
        let both = BTreeSet::from([1, 2]);
        measured.retain(&both, |_| Some(next));
        assert_eq!(passed(&measured, next), Some(10));
        measured.retain(&BTreeSet::from([2]), |_| None);
        assert!(measured.means.is_empty() && measured.counted.keys().eq([&2]));
    }

    /// A pair that one controller's full table has no room for would be reported as 0 bytes.
    #[test]
    fn an_incomplete_count_makes_the_workflow_unknown() {
        let to = |at: usize| (name("a"), name(&format!("f{at}")));
        // `PAIRS_MAX` pairs from index `first` on.
        let tally = |first: Option<usize>, runs: u64| {
            let pairs =
                |first: usize| (first..).take(PAIRS_MAX).map(|at| (to(at), runs * 64 * KIB)).collect();
            TrafficCounts { workflow: key(), generation: FIRST, runs, pairs: first.map(pairs) }
        };
        let known =
            |measured: &MeasuredTraffic| [0, PAIRS_MAX].map(|at| measured.passed(&key(), FIRST, &to(at)));
        for other in [Some(1), None] {
            let mut measured = MeasuredTraffic::default();
            measured.take(1, vec![tally(Some(0), RUNS_MIN)]);
            assert_eq!(known(&measured), [Some(Bytes(64 * KIB)), Some(Bytes::ZERO)]);
            measured.take(2, vec![tally(other, 1)]);
            assert_eq!((known(&measured), measured.version()), ([None, None], 2));
            // More runs of the counted pairs do not help.
            measured.take(1, vec![tally(Some(0), 2 * RUNS_MIN)]);
            assert_eq!((known(&measured), measured.version()), ([None, None], 2));
        }
    }
}
