//! How much functions pass to each other in the runs of workflows that are driven here: counted for the
//! leader, which places them by it (D19). A run counts when it is answered, with what each of its calls
//! took, those of workflows inside it too.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_cluster_state::State;
use millrace_policy::placement::{PAIRS_MAX, Pair, Tally};
use millrace_types::{FunctionKey, FunctionName, Revision};
use serde::{Deserialize, Serialize};

use crate::everyone::ASK_TIMEOUT;
use crate::raft::Peer;

/// Pairs of functions that are counted here, of all workflows. Of one whose pairs find no room none is
/// counted any more, until it has another version: what is declared counts.
const ALL_PAIRS_MAX: usize = 8192;
/// Workflows that are counted.
const WORKFLOWS_MAX: usize = 1024;

/// What was counted since this process began. Cheap to clone. Runs end on any thread, hence the lock; never
/// held across a wait.
#[derive(Debug, Clone, Default)]
pub(crate) struct Passed(Arc<Mutex<Counted>>);

#[derive(Debug, Default)]
struct Counted {
    workflows: BTreeMap<FunctionKey, Tally>,
    /// Of all of them.
    pairs: usize,
}

/// What one run passed so far. Runs of workflows inside it count into it, from under a shared reference,
/// hence the lock.
#[derive(Debug, Default)]
pub(crate) struct Passing(Mutex<BTreeMap<Pair, u64>>);

/// A tally as controllers tell each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Told {
    workflow: FunctionKey,
    generation: Revision,
    runs: u64,
    /// `None` where there was no room for all of them.
    pairs: Option<Vec<(FunctionName, FunctionName, u64)>>,
}

impl From<Told> for Tally {
    fn from(Told { workflow, generation, runs, pairs }: Told) -> Self {
        let pair = |(from, to, bytes)| ((from, to), bytes);
        let pairs = pairs.map(|pairs| pairs.into_iter().map(pair).collect());
        Self { workflow, generation, runs, pairs }
    }
}

impl From<&Tally> for Told {
    fn from(tally: &Tally) -> Self {
        let Tally { workflow, generation, runs, pairs } = tally;
        let pair = |((from, to), bytes): (&Pair, &u64)| (from.clone(), to.clone(), *bytes);
        let pairs = pairs.as_ref().map(|pairs| pairs.iter().map(pair).collect());
        Self { workflow: workflow.clone(), generation: *generation, runs: *runs, pairs }
    }
}

/// What a controller counted, by its number; `None` where it does not answer. Nothing of it is lost then: it
/// says so the next time.
pub(crate) async fn ask(peer: Peer) -> (u64, Option<Vec<Told>>) {
    let told = peer.call(ASK_TIMEOUT, &(), async |mut it, message| it.get_passed(message).await).await;
    let id = peer.id();
    match told {
        Ok(told) => (id, Some(told)),
        Err(failure) => {
            tracing::debug!(controller = id, error = failure.message, "what workflows passed is not known");
            (id, None)
        }
    }
}

/// What several counted of one version of a workflow, together; of pairs nothing, where one of them had no
/// room for all.
pub(crate) fn together(
    workflow: &FunctionKey,
    generation: Revision,
    told: impl IntoIterator<Item = Told>,
) -> Tally {
    let (mut runs, mut pairs) = (0, Some(BTreeMap::new()));
    let its = |tally: &Tally| tally.workflow == *workflow && tally.generation == generation;
    for tally in told.into_iter().map(Tally::from).filter(its) {
        runs += tally.runs;
        match (&mut pairs, tally.pairs) {
            (Some(sum), Some(pairs)) => pairs.into_iter().for_each(|(pair, bytes)| add(sum, pair, bytes)),
            _ => pairs = None,
        }
    }
    Tally { workflow: workflow.clone(), generation, runs, pairs }
}

/// Adds to what a pair passed.
fn add(pairs: &mut BTreeMap<Pair, u64>, pair: Pair, bytes: u64) {
    let sum = pairs.entry(pair).or_default();
    *sum = sum.saturating_add(bytes);
}

impl Passing {
    /// A call took so much of what another function made.
    pub(crate) fn took(&self, from: FunctionName, to: &FunctionName, bytes: u64) {
        let mut pairs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = (from, to.clone());
        // One more than are counted, by which it shows that they are too many.
        if pairs.len() <= PAIRS_MAX || pairs.contains_key(&pair) {
            add(&mut pairs, pair, bytes);
        }
    }
}

impl Passed {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A run was answered.
    pub(crate) fn ran(&self, workflow: &FunctionKey, generation: Revision, passing: Passing) {
        let pairs = passing.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.lock().count(workflow, generation, pairs);
    }

    /// All that was counted of the workflows that there are. What is gone is forgotten.
    pub(crate) fn told(&self, state: &State) -> Vec<Told> {
        let mut counted = self.lock();
        counted.retain(|tally| {
            state.workflow(&tally.workflow).is_some_and(|it| it.generation == tally.generation)
        });
        counted.workflows.values().map(Told::from).collect()
    }
}

impl Counted {
    fn count(&mut self, workflow: &FunctionKey, generation: Revision, pairs: BTreeMap<Pair, u64>) {
        let known = self.workflows.get(workflow).map(|tally| tally.generation);
        // A late run of a version before. Where the numbers of a name begin again, what was counted of the last
        // ones goes as the leader asks the next time: the state has no such version.
        if known > Some(generation) {
            return;
        }
        if known.is_some_and(|known| known < generation) {
            self.forget(workflow);
        }
        if self.workflows.len() >= WORKFLOWS_MAX && !self.workflows.contains_key(workflow) {
            return;
        }
        let tally = self.workflows.entry(workflow.clone()).or_insert_with(|| Tally {
            workflow: workflow.clone(),
            generation,
            runs: 0,
            pairs: Some(BTreeMap::new()),
        });
        let Some(counted) = &mut tally.pairs else { return };
        let new = pairs.keys().filter(|pair| !counted.contains_key(*pair)).count();
        if counted.len() + new > PAIRS_MAX || self.pairs + new > ALL_PAIRS_MAX {
            // All of it or nothing, from now on: who is not among those told of is taken to pass nothing, and
            // the runs that fit are those without it.
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

    fn retain(&mut self, keep: impl Fn(&Tally) -> bool) {
        self.workflows.retain(|_, tally| keep(tally));
        self.pairs = self.workflows.values().map(pairs_of).sum();
    }
}

fn pairs_of(tally: &Tally) -> usize {
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

    fn passing(taken: &[(&str, &str, u64)]) -> Passing {
        let passing = Passing::default();
        taken.iter().for_each(|&(from, to, bytes)| passing.took(name(from), &name(to), bytes));
        passing
    }

    fn told(passed: &Passed) -> Vec<Told> {
        passed.lock().workflows.values().map(Told::from).collect()
    }

    #[test]
    fn runs_are_counted_with_what_their_calls_took() {
        let passed = Passed::default();
        passed.ran(&key("w"), FIRST, passing(&[("a", "b", 4), ("a", "b", 5), ("b", "c", 1)]));
        passed.ran(&key("w"), FIRST, passing(&[("a", "b", 1)]));
        let pairs = Some(vec![(name("a"), name("b"), 10), (name("b"), name("c"), 1)]);
        let expected = Told { workflow: key("w"), generation: FIRST, runs: 2, pairs };
        assert_eq!(told(&passed), std::slice::from_ref(&expected));
        assert_eq!(Told::from(&Tally::from(expected.clone())), expected);
        // Another version begins anew, and a late run of the one before is not of it.
        passed.ran(&key("w"), FIRST.next(), passing(&[("a", "c", 7)]));
        passed.ran(&key("w"), FIRST, passing(&[("a", "b", 1)]));
        let pairs = Some(vec![(name("a"), name("c"), 7)]);
        assert_eq!(told(&passed), [Told { workflow: key("w"), generation: FIRST.next(), runs: 1, pairs }]);
        assert_eq!(passed.lock().pairs, 1);
        assert_eq!(passed.told(&State::default()), [], "there is no such workflow");
        assert_eq!(passed.lock().pairs, 0);
    }

    #[test]
    fn what_controllers_counted_of_one_version_is_added_up() {
        let [one, another] = [FIRST, FIRST.next()].map(|generation| {
            let passed = Passed::default();
            passed.ran(&key("w"), FIRST, passing(&[("a", "b", 4)]));
            passed.ran(&key("v"), FIRST, passing(&[("a", "b", 100)]));
            passed.ran(&key("u"), generation, passing(&[("b", "c", 1)]));
            told(&passed)
        });
        let all = || one.iter().chain(&another).cloned();
        let sum = |of: &str| together(&key(of), FIRST, all());
        let pairs = |from, to, bytes| Some(BTreeMap::from([((name(from), name(to)), bytes)]));
        assert_eq!((sum("w").runs, sum("w").pairs), (2, pairs("a", "b", 8)));
        assert_eq!((sum("u").runs, sum("u").pairs), (1, pairs("b", "c", 1)), "the other is of the next");
        assert_eq!(sum("none").runs, 0);
        let uncounted = Told { workflow: key("w"), generation: FIRST, runs: 1, pairs: None };
        let all = all().chain([uncounted]).chain(all());
        assert_eq!(together(&key("w"), FIRST, all).pairs, None, "one had no room");
    }

    #[test]
    fn what_has_no_room_is_not_counted_in_part() {
        let passed = Passed::default();
        let names: Vec<_> = (0..=PAIRS_MAX).map(|at| format!("f{at}")).collect();
        let taken: Vec<_> = names.iter().map(|to| ("a", to.as_str(), 1)).collect();
        let (fits, rare) = taken.split_at(PAIRS_MAX);
        let ran = |workflow: &str, taken: &[_]| passed.ran(&key(workflow), FIRST, passing(taken));
        // Too many in one run, or in several: the next ones fit, and are not what all runs pass.
        for runs in [[&taken[..], fits], [fits, rare]] {
            runs.into_iter().chain([fits]).for_each(|taken| ran("many", taken));
            let of_none = Told { workflow: key("many"), generation: FIRST, runs: 0, pairs: None };
            let told = told(&passed).remove(0);
            assert_eq!((passed.lock().pairs, Told { runs: 0, ..told }), (0, of_none));
            passed.lock().forget(&key("many"));
        }
        // Too many workflows.
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
