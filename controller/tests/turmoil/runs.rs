//! The runs of this test: the seeds, each run once for all invariants, and the results.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::group;
use crate::history::{Created, History, NodeAnswer, RegisterAnswer, Verdict};

/// The default seeds: few, which together cover every kind of event.
const SEEDS: [u64; 2] = [2, 5];

type Check = fn(&History) -> Verdict;

/// The invariants, by file name.
const INVARIANTS: [(&str, Check); 10] = [
    ("election safety", crate::election_safety::check),
    ("log matching", crate::log_matching::check),
    ("state machine safety", crate::state_machine_safety::check),
    ("no lost write", crate::no_lost_write::check),
    ("epoch fencing", crate::epoch_fencing::check),
    ("lease", crate::lease::check),
    ("acknowledged checkpoints", crate::acknowledged_checkpoints::check),
    ("desired state", crate::desired_state::check),
    ("placements converge", crate::placements_converge::check),
    ("linearizability", crate::linearizability::check),
];

/// The result of a run.
#[derive(Default)]
struct Run {
    seed: u64,
    /// The reason why the run broke off, if any.
    broke_off: Option<String>,
    violations: BTreeMap<&'static str, String>,
    faults: Vec<String>,
    halts: Vec<String>,
    met: Met,
}

/// Event counts of a run: a run without events proves nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Met {
    pub(crate) terms: usize,
    pub(crate) entries: usize,
    pub(crate) acknowledged: usize,
    pub(crate) refused: usize,
    pub(crate) unknown: usize,
    pub(crate) reads: usize,
    pub(crate) registered: usize,
    pub(crate) synced: usize,
    pub(crate) fenced: usize,
    pub(crate) streamed: usize,
    pub(crate) safe: usize,
    pub(crate) told: usize,
    pub(crate) lost: usize,
    pub(crate) goodbyes: usize,
    pub(crate) snapshots: usize,
    pub(crate) installed: usize,
    pub(crate) regrouped: usize,
}

impl Met {
    /// Adds the counts of two runs.
    fn and(self, other: Self) -> Self {
        Self {
            terms: self.terms + other.terms,
            entries: self.entries + other.entries,
            acknowledged: self.acknowledged + other.acknowledged,
            refused: self.refused + other.refused,
            unknown: self.unknown + other.unknown,
            reads: self.reads + other.reads,
            registered: self.registered + other.registered,
            synced: self.synced + other.synced,
            fenced: self.fenced + other.fenced,
            streamed: self.streamed + other.streamed,
            safe: self.safe + other.safe,
            told: self.told + other.told,
            lost: self.lost + other.lost,
            goodbyes: self.goodbyes + other.goodbyes,
            snapshots: self.snapshots + other.snapshots,
            installed: self.installed + other.installed,
            regrouped: self.regrouped + other.regrouped,
        }
    }

    fn of(history: &History) -> Self {
        let created =
            |answer| history.creations.iter().filter(|call| call.ended.map(|(_, it)| it) == answer).count();
        let nodes = |wanted: fn(&NodeAnswer) -> bool| {
            history.nodes.iter().filter(|call| call.ended.as_ref().is_some_and(|(_, it)| wanted(it))).count()
        };
        use millrace_cluster_state::CommandEffect;
        Self {
            terms: history.leaders.len(),
            entries: history.applied.len(),
            acknowledged: created(Some(Created::Acknowledged)),
            refused: created(Some(Created::Refused)),
            unknown: created(None),
            reads: history
                .registers
                .iter()
                .filter(|call| matches!(call.ended, Some((_, RegisterAnswer::Value(_)))))
                .count(),
            registered: nodes(|it| matches!(it, NodeAnswer::Applied(CommandEffect::Registered { .. }))),
            synced: nodes(|it| matches!(it, NodeAnswer::Applied(CommandEffect::Synced { .. }))),
            fenced: nodes(|it| matches!(it, NodeAnswer::Refused)),
            streamed: history.registered.len(),
            safe: history.acknowledged.len(),
            told: history.told.len(),
            lost: history.found_lost.len(),
            goodbyes: history.goodbyes.len(),
            snapshots: history.snapshots,
            installed: history.installed,
            regrouped: history.regrouped,
        }
    }
}

/// Returns the seeds from the environment, or the default seeds.
fn seeds() -> Vec<u64> {
    let number = |it: &str| it.parse::<u64>().expect("a number");
    match (std::env::var("MILLRACE_SEED"), std::env::var("MILLRACE_SEEDS")) {
        (Ok(seed), _) => vec![number(&seed)],
        (_, Ok(seeds)) => match seeds.split_once("..=") {
            Some((first, last)) => (number(first)..=number(last)).collect(),
            None => (1..=number(&seeds)).collect(),
        },
        (Err(_), Err(_)) => SEEDS.to_vec(),
    }
}

#[allow(clippy::disallowed_methods, reason = "reports the duration of a run, on which nothing depends")]
fn run(seed: u64) -> Run {
    let began = std::time::Instant::now();
    let judged = || {
        let history = group::run(seed);
        let ran = began.elapsed();
        let violations = INVARIANTS.iter();
        let violations = violations.filter_map(|&(name, check)| Some((name, check(&history).err()?.0)));
        (ran, violations.collect(), history)
    };
    let (ran, violations, history): (_, BTreeMap<_, _>, _) = match std::panic::catch_unwind(judged) {
        Ok(judged) => judged,
        // Record the panic once, so that the other runs continue and not every test panics again.
        Err(panic) => {
            let why = panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "see above".to_owned());
            eprintln!("MILLRACE_SEED={seed} broke off after {:.1?}", began.elapsed());
            return Run { seed, broke_off: Some(why), ..Run::default() };
        }
    };
    let elapsed = history.elapsed;
    let met = Met::of(&history);
    let run = Run { seed, broke_off: None, violations, met, faults: history.faults, halts: history.halts };
    eprintln!(
        "MILLRACE_SEED={seed} {elapsed:?} simulated in {ran:.1?}, checked in {:.1?}: {:?} {:?}",
        began.elapsed() - ran,
        run.met,
        run.violations
    );
    run
}

/// Returns all runs. The first caller makes all runs.
fn runs() -> &'static [Run] {
    static RUNS: OnceLock<Vec<Run>> = OnceLock::new();
    RUNS.get_or_init(|| {
        let seeds = seeds();
        let next = AtomicU64::new(0);
        let take = || {
            let at = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap();
            seeds.get(at).copied()
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let work = || std::iter::from_fn(take).map(run).collect::<Vec<_>>();
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("a run")).collect()
        })
    })
}

/// Panics with the seed to reproduce, if an invariant does not hold in a run.
pub(crate) fn hold(invariant: &str) {
    let failed: Vec<_> = runs().iter().filter(|run| run.violations.contains_key(invariant)).collect();
    if let Some(run) = failed.first() {
        let seeds: Vec<_> = failed.iter().map(|run| run.seed).collect();
        panic!(
            "{invariant} does not hold under the seeds {seeds:?}; with MILLRACE_SEED={}: {}\nfaults:\n{}",
            run.seed,
            run.violations[invariant],
            run.faults.join("\n")
        );
    }
}

#[test]
fn every_run_completes() {
    let broken: Vec<_> = runs().iter().filter_map(|run| Some((run.seed, run.broke_off.as_ref()?))).collect();
    if let Some((seed, why)) = broken.first() {
        let seeds: Vec<_> = broken.iter().map(|(seed, _)| seed).collect();
        panic!("the seeds {seeds:?} break off; with MILLRACE_SEED={seed}: {why}");
    }
}

#[test]
fn no_log_halts_on_a_healthy_disk() {
    for run in runs() {
        assert!(run.halts.is_empty(), "MILLRACE_SEED={}: {:?}", run.seed, run.halts);
    }
}

#[test]
fn the_runs_cover_every_kind_of_event() {
    let met = runs().iter().map(|run| run.met).fold(Met::default(), Met::and);
    eprintln!("{met:?}");
    let Met { acknowledged, unknown, reads, registered, synced, fenced, .. } = met;
    let Met { streamed, safe, told, lost, goodbyes, snapshots, installed, regrouped, .. } = met;
    assert!(met.terms > runs().len(), "no leader was ever deposed: {met:?}");
    for (count, what) in [
        (acknowledged, "write acknowledged"),
        (unknown, "write left unknown"),
        (reads, "value read"),
        (registered, "node registered"),
        (synced, "checkpoint taken"),
        (fenced, "checkpoint fenced"),
        (streamed, "worker attached"),
        (safe, "worker's checkpoint acknowledged"),
        (told, "desired state sent to a worker"),
        (lost, "worker found lost"),
        (goodbyes, "worker left in order"),
        (snapshots, "snapshot taken"),
        (installed, "snapshot installed"),
        (regrouped, "membership change"),
    ] {
        assert_ne!(count, 0, "no {what}: {met:?}");
    }
}

/// Returns a digest that is equal for equal values in every run.
pub(crate) fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
