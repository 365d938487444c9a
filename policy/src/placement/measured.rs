//! How much functions really pass to each other when a workflow runs (D19): declared shapes leave open
//! whatever they do not fix. In: what each controller counted of the runs that it drives, now and then.
//! Out: bytes in one run, for the planner. A guide: lost with whoever learned it, and learned again.
//!
//! A mean of the last runs: each look adds what was counted since the one before, and as much as is beyond
//! [`RUNS_WINDOW`] runs fades. What the planner is told stays until the mean is well away from it: with
//! numbers that waver it would group functions one way and the other, and move those that never ran.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{Bytes, FunctionKey, FunctionName, Revision};

/// Runs of a workflow that are seen before what they passed counts in place of what is declared.
pub const RUNS_MIN: u64 = 32;
/// Runs that a mean is of, at most.
pub const RUNS_WINDOW: u64 = 256;
/// Pairs of functions that are counted of one workflow. Of one with more of them nothing is known.
pub const PAIRS_MAX: usize = 256;
/// What is told stays while the mean is nearer to it than one part of it in so many,
const APART: u64 = 4;
/// or than so many bytes.
const APART_MIN: u64 = 1024;

/// Who makes data and who takes it, of the workflow's tenant.
pub type Pair = (FunctionName, FunctionName);

/// What one controller counted of a workflow, since it began to count it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tally {
    /// Which workflow.
    pub workflow: FunctionKey,
    /// Which version of it.
    pub generation: Revision,
    /// Runs that were answered.
    pub runs: u64,
    /// Bytes that were passed in all of them: who is not among these passed nothing. `None` where the
    /// controller had no room for all, or there are more than [`PAIRS_MAX`].
    pub pairs: Option<BTreeMap<Pair, u64>>,
}

/// What is known of all workflows. Bounded by the workflows that there are.
#[derive(Debug, Default)]
pub struct Measured {
    /// What each controller, by its number, said last.
    counted: BTreeMap<u64, BTreeMap<FunctionKey, Tally>>,
    means: BTreeMap<FunctionKey, Mean>,
    version: u64,
}

#[derive(Debug)]
struct Mean {
    generation: Revision,
    /// Runs that it is of.
    runs: u64,
    /// `None` once a controller could not count all of them: what went between the others nobody knows.
    pairs: Option<BTreeMap<Pair, Passed>>,
}

#[derive(Debug, Default)]
struct Passed {
    /// In all of these runs.
    bytes: u64,
    /// In one, as the planner knows it.
    told: Option<u64>,
}

impl Measured {
    /// Changes with what is told.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What two functions pass in one run of a version of a workflow; `None` before enough runs were seen,
    /// and where not all pairs could be counted.
    #[must_use]
    pub fn passed(&self, workflow: &FunctionKey, generation: Revision, pair: &Pair) -> Option<Bytes> {
        let mean = self.means.get(workflow).filter(|it| it.generation == generation && it.is_known())?;
        let passed = mean.pairs.as_ref()?.get(pair);
        passed.map_or(Some(Bytes::ZERO), |passed| passed.told.map(Bytes))
    }

    /// Takes in all that a controller counted. What it names no more it has forgotten.
    pub fn take(&mut self, controller: u64, tallies: Vec<Tally>) {
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
                // A counter that went back began anew.
                let last = last.get(&tally.workflow);
                let last = last.filter(|it| it.generation == tally.generation && it.runs <= tally.runs);
                news |= mean.add(tally, last);
            }
        }
        self.version += u64::from(news);
        let by_workflow = tallies.into_iter().map(|tally| (tally.workflow.clone(), tally));
        self.counted.insert(controller, by_workflow.collect());
    }

    /// Forgets controllers that are no more, and workflows that are no more or have another version.
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

    /// Adds what was counted since the last look. Says whether the planner is told something else now.
    fn add(&mut self, tally: &Tally, last: Option<&Tally>) -> bool {
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

impl Passed {
    /// Has the mean told, where it is well away from what was. Says whether it was.
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

    /// So many runs, of each of which so many KiB went from `a` to `b`.
    fn tally(generation: Revision, runs: u64, kib: u64) -> Tally {
        let pairs = BTreeMap::from([((name("a"), name("b")), runs * kib * KIB)]);
        Tally { workflow: key(), generation, runs, pairs: Some(pairs) }
    }

    /// KiB in one run.
    fn passed(measured: &Measured, generation: Revision) -> Option<u64> {
        let bytes = measured.passed(&key(), generation, &(name("a"), name("b")))?;
        Some(bytes.0 / KIB)
    }

    const FIRST: Revision = Revision::FIRST;

    #[test]
    fn what_is_declared_counts_until_there_were_enough_runs_wherever() {
        let mut measured = Measured::default();
        measured.take(1, vec![tally(FIRST, RUNS_MIN - 2, 100)]);
        measured.take(2, vec![tally(FIRST, 1, 68)]);
        assert_eq!((passed(&measured, FIRST), measured.version()), (None, 0));
        // The same again is nothing new.
        measured.take(2, vec![tally(FIRST, 1, 68)]);
        assert_eq!(passed(&measured, FIRST), None);
        measured.take(2, vec![tally(FIRST, 2, 68)]);
        assert_eq!((passed(&measured, FIRST), measured.version()), (Some(98), 1));
        let pair = (name("a"), name("c"));
        assert_eq!(measured.passed(&key(), FIRST, &pair), Some(Bytes::ZERO), "nothing went there");
        assert_eq!(passed(&measured, FIRST.next()), None, "of another version nothing is known");
    }

    #[test]
    fn what_is_told_stays_until_the_mean_is_well_away_from_it() {
        let mut measured = Measured::default();
        let (mut runs, mut bytes) = (0, 0);
        let mut run = |measured: &mut Measured, count: u64, kib: u64| {
            (runs, bytes) = (runs + count, bytes + count * kib * KIB);
            let pairs = Some(BTreeMap::from([((name("a"), name("b")), bytes)]));
            measured.take(1, vec![Tally { workflow: key(), generation: FIRST, runs, pairs }]);
            (passed(measured, FIRST), measured.version())
        };
        assert_eq!(run(&mut measured, 1_000, 100), (Some(100), 1));
        for kib in [80, 120].repeat(20) {
            assert_eq!(run(&mut measured, 100, kib), (Some(100), 1), "{kib}");
        }
        let (told, version) = run(&mut measured, 1_000, 200);
        assert!((170..=200).contains(&told.unwrap()) && version == 2, "{told:?}");
        // It had faded: only the last runs count.
        for _ in 0..9 {
            run(&mut measured, RUNS_WINDOW, 50);
        }
        let (told, _) = run(&mut measured, RUNS_WINDOW, 50);
        assert!((50..=62).contains(&told.unwrap()), "{told:?}");
    }

    #[test]
    fn a_controller_that_began_anew_counts_from_nothing() {
        let mut measured = Measured::default();
        measured.take(1, vec![tally(FIRST, 100, 100)]);
        measured.take(1, vec![tally(FIRST, 50, 400)]);
        assert_eq!(passed(&measured, FIRST), Some(200));
        // It forgot it for a while.
        measured.take(1, Vec::new());
        measured.take(1, vec![tally(FIRST, 150, 200)]);
        assert_eq!(passed(&measured, FIRST), Some(200));
    }

    #[test]
    fn another_version_begins_anew_and_what_is_gone_is_forgotten() {
        let (mut measured, next) = (Measured::default(), FIRST.next());
        measured.take(1, vec![tally(FIRST, 100, 100)]);
        measured.take(2, vec![tally(next, RUNS_MIN, 10)]);
        // The other controller has not heard of it.
        measured.take(1, vec![tally(FIRST, 200, 100)]);
        assert_eq!((passed(&measured, FIRST), passed(&measured, next)), (None, Some(10)));
        let both = BTreeSet::from([1, 2]);
        measured.retain(&both, |_| Some(next));
        assert_eq!(passed(&measured, next), Some(10));
        measured.retain(&BTreeSet::from([2]), |_| None);
        assert!(measured.means.is_empty() && measured.counted.keys().eq([&2]));
    }

    /// A pair that the full table of one controller has no room for would be told as nothing.
    #[test]
    fn where_not_all_pairs_are_counted_nothing_is_known() {
        let to = |at: usize| (name("a"), name(&format!("f{at}")));
        // As many as are counted, from one on.
        let tally = |first: Option<usize>, runs: u64| {
            let pairs =
                |first: usize| (first..).take(PAIRS_MAX).map(|at| (to(at), runs * 64 * KIB)).collect();
            Tally { workflow: key(), generation: FIRST, runs, pairs: first.map(pairs) }
        };
        let known = |measured: &Measured| [0, PAIRS_MAX].map(|at| measured.passed(&key(), FIRST, &to(at)));
        for other in [Some(1), None] {
            let mut measured = Measured::default();
            measured.take(1, vec![tally(Some(0), RUNS_MIN)]);
            assert_eq!(known(&measured), [Some(Bytes(64 * KIB)), Some(Bytes::ZERO)]);
            measured.take(2, vec![tally(other, 1)]);
            assert_eq!((known(&measured), measured.version()), ([None, None], 2));
            // However many runs there are of those that fit.
            measured.take(1, vec![tally(Some(0), 2 * RUNS_MIN)]);
            assert_eq!((known(&measured), measured.version()), ([None, None], 2));
        }
    }
}
