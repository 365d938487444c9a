//! The traffic matrix: bytes passed between functions in the workflow runs that this controller drives.
//! The leader places functions by these counts (D19). A run counts when the answer is sent, with the
//! inputs of all calls, including the calls of nested workflows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_cluster_state::State;
use millrace_nodes::placement::{FunctionPair, PAIRS_MAX, TrafficCounts};
use millrace_types::{FunctionKey, FunctionName, Revision};
use serde::{Deserialize, Serialize};

/// Function pairs counted by this controller, over all workflows. A workflow with too many pairs is not
/// counted until the next version: the declared traffic applies instead.
const ALL_PAIRS_MAX: usize = 8192;
/// Counted workflows.
const WORKFLOWS_MAX: usize = 1024;

/// Traffic counted since this process began. Cheap to clone. Runs end on any thread, so a lock guards
/// the counts; no thread holds the lock across an await.
#[derive(Debug, Clone, Default)]
pub(crate) struct TrafficMatrix(Arc<Mutex<Counted>>);

#[derive(Debug, Default)]
struct Counted {
    workflows: BTreeMap<FunctionKey, TrafficCounts>,
    /// Pairs of all workflows together.
    pairs: usize,
}

/// Traffic of one run so far. Nested workflow runs add to the same counts through a shared reference,
/// so a lock guards the counts.
#[derive(Debug, Default)]
pub(crate) struct RunTraffic(Mutex<BTreeMap<FunctionPair, u64>>);

/// A traffic count in the form that controllers exchange.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrafficReport {
    workflow: FunctionKey,
    generation: Revision,
    runs: u64,
    /// Bytes by producer and consumer. `None` if the pairs did not all fit.
    pairs: Option<Vec<(FunctionName, FunctionName, u64)>>,
}

impl From<TrafficReport> for TrafficCounts {
    fn from(TrafficReport { workflow, generation, runs, pairs }: TrafficReport) -> Self {
        let pair = |(from, to, bytes)| ((from, to), bytes);
        let pairs = pairs.map(|pairs| pairs.into_iter().map(pair).collect());
        Self { workflow, generation, runs, pairs }
    }
}

impl From<&TrafficCounts> for TrafficReport {
    fn from(tally: &TrafficCounts) -> Self {
        let TrafficCounts { workflow, generation, runs, pairs } = tally;
        let pair = |((from, to), bytes): (&FunctionPair, &u64)| (from.clone(), to.clone(), *bytes);
        let pairs = pairs.as_ref().map(|pairs| pairs.iter().map(pair).collect());
        Self { workflow: workflow.clone(), generation: *generation, runs: *runs, pairs }
    }
}

/// Adds up the traffic that several controllers counted for one version of a workflow. The sum has no
/// pairs if a controller's pairs did not fit.
pub(crate) fn sum_traffic(
    workflow: &FunctionKey,
    generation: Revision,
    told: impl IntoIterator<Item = TrafficReport>,
) -> TrafficCounts {
    let mut runs = 0;
    let mut pairs = Some(BTreeMap::new());
    let its = |tally: &TrafficCounts| tally.workflow == *workflow && tally.generation == generation;
    for tally in told.into_iter().map(TrafficCounts::from).filter(its) {
        runs += tally.runs;
        match (&mut pairs, tally.pairs) {
            (Some(sum), Some(pairs)) => pairs.into_iter().for_each(|(pair, bytes)| add(sum, pair, bytes)),
            _ => pairs = None,
        }
    }
    TrafficCounts { workflow: workflow.clone(), generation, runs, pairs }
}

/// Adds bytes to the traffic of a pair.
fn add(pairs: &mut BTreeMap<FunctionPair, u64>, pair: FunctionPair, bytes: u64) {
    let sum = pairs.entry(pair).or_default();
    *sum = sum.saturating_add(bytes);
}

impl RunTraffic {
    /// Records that a call of `to` read `bytes` bytes that `from` produced.
    pub(crate) fn took(&self, from: FunctionName, to: &FunctionName, bytes: u64) {
        let mut pairs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = (from, to.clone());
        // Keep one pair more than the limit, so that `count` notices the overflow.
        if pairs.len() <= PAIRS_MAX || pairs.contains_key(&pair) {
            add(&mut pairs, pair, bytes);
        }
    }
}

impl TrafficMatrix {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the traffic of an answered run.
    pub(crate) fn ran(&self, workflow: &FunctionKey, generation: Revision, passing: RunTraffic) {
        let pairs = passing.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.lock().count(workflow, generation, pairs);
    }

    /// Returns the counts of all existing workflows, and forgets the counts of deleted workflows and
    /// old versions.
    pub(crate) fn told(&self, state: &State) -> Vec<TrafficReport> {
        let mut counted = self.lock();
        counted.retain(|tally| {
            state.workflow(&tally.workflow).is_some_and(|it| it.generation == tally.generation)
        });
        counted.workflows.values().map(TrafficReport::from).collect()
    }
}

impl Counted {
    fn count(&mut self, workflow: &FunctionKey, generation: Revision, pairs: BTreeMap<FunctionPair, u64>) {
        let known = self.workflows.get(workflow).map(|tally| tally.generation);
        // This is a late run of an older version. If a workflow was deleted and the version numbers
        // began again, `told` drops the old counts at the leader's next request, because the state has
        // no such version.
        if known > Some(generation) {
            return;
        }
        if known.is_some_and(|known| known < generation) {
            self.forget(workflow);
        }
        if self.workflows.len() >= WORKFLOWS_MAX && !self.workflows.contains_key(workflow) {
            return;
        }
        let tally = self.workflows.entry(workflow.clone()).or_insert_with(|| TrafficCounts {
            workflow: workflow.clone(),
            generation,
            runs: 0,
            pairs: Some(BTreeMap::new()),
        });
        let Some(counted) = &mut tally.pairs else { return };
        let new = pairs.keys().filter(|pair| !counted.contains_key(*pair)).count();
        if counted.len() + new > PAIRS_MAX || self.pairs + new > ALL_PAIRS_MAX {
            // Stop counting this workflow: a partial count would mislead. The leader takes a missing
            // pair as a pair without traffic, and only the runs without the rare pairs would still fit.
            self.pairs -= counted.len();
            tally.pairs = None;
            return;
        }
        self.pairs += new;
        tally.runs += 1;
        pairs.into_iter().for_each(|(pair, bytes)| add(counted, pair, bytes));
    }

    fn forget(&mut self, workflow: &FunctionKey) {
        if let Some(tally) = self.workflows.remove(workflow) {
            self.pairs -= pairs_of(&tally);
        }
    }

    fn retain(&mut self, keep: impl Fn(&TrafficCounts) -> bool) {
        self.workflows.retain(|_, tally| keep(tally));
        self.pairs = self.workflows.values().map(pairs_of).sum();
    }
}

fn pairs_of(tally: &TrafficCounts) -> usize {
    tally.pairs.as_ref().map_or(0, BTreeMap::len)
}

#[cfg(test)]
mod tests {
    use millrace_types::TenantName;

    use super::*;

    const FIRST: Revision = Revision::FIRST;

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn key(of: &str) -> FunctionKey {
        FunctionKey { tenant: TenantName::default(), name: name(of) }
    }

    fn passing(taken: &[(&str, &str, u64)]) -> RunTraffic {
        let passing = RunTraffic::default();
        taken.iter().for_each(|&(from, to, bytes)| passing.took(name(from), &name(to), bytes));
        passing
    }

    fn told(passed: &TrafficMatrix) -> Vec<TrafficReport> {
        passed.lock().workflows.values().map(TrafficReport::from).collect()
    }

    #[test]
    fn runs_are_counted_with_the_inputs_of_their_calls() {
        let passed = TrafficMatrix::default();
        passed.ran(&key("w"), FIRST, passing(&[("a", "b", 4), ("a", "b", 5), ("b", "c", 1)]));
        passed.ran(&key("w"), FIRST, passing(&[("a", "b", 1)]));
        let pairs = Some(vec![(name("a"), name("b"), 10), (name("b"), name("c"), 1)]);
        let expected = TrafficReport { workflow: key("w"), generation: FIRST, runs: 2, pairs };
        assert_eq!(told(&passed), std::slice::from_ref(&expected));
        assert_eq!(TrafficReport::from(&TrafficCounts::from(expected.clone())), expected);
        // Another version starts from zero, and a late run of the previous version does not count.
        passed.ran(&key("w"), FIRST.next(), passing(&[("a", "c", 7)]));
        passed.ran(&key("w"), FIRST, passing(&[("a", "b", 1)]));
        let pairs = Some(vec![(name("a"), name("c"), 7)]);
        assert_eq!(
            told(&passed),
            [TrafficReport { workflow: key("w"), generation: FIRST.next(), runs: 1, pairs }]
        );
        assert_eq!(passed.lock().pairs, 1);
        assert_eq!(passed.told(&State::default()), [], "there is no such workflow");
        assert_eq!(passed.lock().pairs, 0);
    }

    #[test]
    fn traffic_of_one_version_is_added_up_over_controllers() {
        let [one, another] = [FIRST, FIRST.next()].map(|generation| {
            let passed = TrafficMatrix::default();
            passed.ran(&key("w"), FIRST, passing(&[("a", "b", 4)]));
            passed.ran(&key("v"), FIRST, passing(&[("a", "b", 100)]));
            passed.ran(&key("u"), generation, passing(&[("b", "c", 1)]));
            told(&passed)
        });
        let all = || one.iter().chain(&another).cloned();
        let sum = |of: &str| sum_traffic(&key(of), FIRST, all());
        let pairs = |from, to, bytes| Some(BTreeMap::from([((name(from), name(to)), bytes)]));
        assert_eq!((sum("w").runs, sum("w").pairs), (2, pairs("a", "b", 8)));
        assert_eq!((sum("u").runs, sum("u").pairs), (1, pairs("b", "c", 1)), "the other is of the next");
        assert_eq!(sum("none").runs, 0);
        let uncounted = TrafficReport { workflow: key("w"), generation: FIRST, runs: 1, pairs: None };
        let all = all().chain([uncounted]).chain(all());
        assert_eq!(sum_traffic(&key("w"), FIRST, all).pairs, None, "one had no room");
    }

    #[test]
    fn a_workflow_with_too_many_pairs_is_not_counted_in_part() {
        let passed = TrafficMatrix::default();
        let names: Vec<_> = (0..=PAIRS_MAX).map(|at| format!("f{at}")).collect();
        let taken: Vec<_> = names.iter().map(|to| ("a", to.as_str(), 1)).collect();
        let (fits, rare) = taken.split_at(PAIRS_MAX);
        let ran = |workflow: &str, taken: &[_]| passed.ran(&key(workflow), FIRST, passing(taken));
        // The pairs are too many in a single run, or over several runs: later runs that fit would
        // misrepresent all runs.
        for runs in [[&taken[..], fits], [fits, rare]] {
            runs.into_iter().chain([fits]).for_each(|taken| ran("many", taken));
            let of_none = TrafficReport { workflow: key("many"), generation: FIRST, runs: 0, pairs: None };
            let told = told(&passed).remove(0);
            assert_eq!((passed.lock().pairs, TrafficReport { runs: 0, ..told }), (0, of_none));
            passed.lock().forget(&key("many"));
        }
        // There are too many workflows.
        let full = ALL_PAIRS_MAX / PAIRS_MAX;
        for workflow in 0..=full {
            let workflow = format!("w{workflow}");
            [fits, fits, &[]].into_iter().for_each(|taken| ran(&workflow, taken));
        }
        let (whole, others): (Vec<_>, Vec<_>) = told(&passed).into_iter().partition(|it| it.pairs.is_some());
        assert_eq!((whole.len(), others.len(), passed.lock().pairs), (full, 1, ALL_PAIRS_MAX));
        assert!(whole.iter().all(|it| it.runs == 3));
    }
}
