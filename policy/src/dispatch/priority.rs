//! Priorities, on top of any policy. Each priority level in use has a queue and a policy instance
//! of its own, and a level decides only if the levels above it have no decision to make. A request
//! therefore goes before all requests of lower priority that could go to the same GPU, but preempts
//! no running or assigned request. A node with a single level behaves as the policy alone.
//!
//! Lower levels starve while higher ones fill the GPUs. Strict priorities mean exactly that, and
//! Triton's behave the same. The early-binding baselines have a single level: their functions wait
//! for GPUs of their own.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use millrace_types::{GpuIndex, Priority, SloCounts, Timestamp};

use super::gpus::Expected;
use super::models::Models;
use super::policy::{Decision, Entry, Policy, Stats, View};
use super::protocol::Objective;
use super::queue::Waiting;
use crate::ids::FunctionIndex;

#[derive(Debug)]
struct Level {
    policy: Box<dyn Policy>,
    waiting: usize,
    /// Whether the level was created after scores were reported, and has none of them yet.
    fresh: bool,
}

/// One policy instance for each priority in use.
pub(super) struct Prioritised {
    /// Levels by priority, the most urgent first.
    levels: BTreeMap<Priority, Level>,
    make: Box<dyn Fn() -> Box<dyn Policy>>,
    /// Objectives of all functions, for levels that are created later.
    objectives: BTreeMap<FunctionIndex, Objective>,
    /// SLO counts of all functions, for levels that are created later.
    counts: BTreeMap<FunctionIndex, SloCounts>,
}

impl fmt::Debug for Prioritised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prioritised").field("levels", &self.levels).finish_non_exhaustive()
    }
}

impl Prioritised {
    pub(super) fn new(make: Box<dyn Fn() -> Box<dyn Policy>>) -> Self {
        let usual = Level { policy: make(), waiting: 0, fresh: false };
        let levels = BTreeMap::from([(Priority::default(), usual)]);
        Self { levels, make, objectives: BTreeMap::new(), counts: BTreeMap::new() }
    }

    fn level(&mut self, priority: Priority) -> &mut Level {
        self.levels.entry(priority).or_insert_with(|| {
            let mut policy = (self.make)();
            for (&function, &objective) in &self.objectives {
                policy.objective(function, Some(objective));
            }
            Level { policy, waiting: 0, fresh: true }
        })
    }

    /// Returns the policy of the default priority, which answers questions that do not depend on
    /// the waiting requests.
    fn usual(&self) -> &dyn Policy {
        self.levels[&Priority::default()].policy.as_ref()
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn Policy>> {
        self.levels.values_mut().map(|level| &mut level.policy)
    }
}

impl Policy for Prioritised {
    fn push(&mut self, request: Waiting, entry: Entry) {
        let level = self.level(request.priority);
        level.waiting += 1;
        level.policy.push(request, entry);
    }

    fn remove(&mut self, request: &Waiting) {
        let level = self.level(request.priority);
        level.waiting -= 1;
        level.policy.remove(request);
    }

    fn decide(&mut self, view: &View<'_>) -> Option<Decision> {
        self.levels.values_mut().filter(|level| level.waiting > 0).find_map(|level| {
            let decision = level.policy.decide(view)?;
            // A request that waits for a GPU alone still waits.
            level.waiting -= usize::from(!matches!(decision, Decision::Reserve { .. }));
            Some(decision)
        })
    }

    fn recalls(&self) -> bool {
        self.usual().recalls()
    }

    fn turn(&self, view: &View<'_>, gpu: GpuIndex, ahead: usize) -> Expected {
        self.usual().turn(view, gpu, ahead)
    }

    fn late_at(&self, view: &View<'_>, gpu: GpuIndex) -> Option<Timestamp> {
        self.usual().late_at(view, gpu)
    }

    fn bringing(&self, view: &View<'_>, gpu: GpuIndex, request: &Waiting) -> Duration {
        self.usual().bringing(view, gpu, request)
    }

    fn freed(&mut self, gpu: GpuIndex) {
        self.all().for_each(|policy| policy.freed(gpu));
    }

    fn lost(&mut self, gpu: GpuIndex) -> Vec<Waiting> {
        self.all().flat_map(|policy| policy.lost(gpu)).collect()
    }

    fn scores(&self) -> bool {
        self.usual().scores()
    }

    fn objective(&mut self, function: FunctionIndex, objective: Option<Objective>) {
        match objective {
            Some(objective) => self.objectives.insert(function, objective),
            None => self.objectives.remove(&function),
        };
        self.all().for_each(|policy| policy.objective(function, objective));
    }

    fn score(&mut self, models: &Models, function: FunctionIndex, counts: SloCounts) {
        self.counts.insert(function, counts);
        self.all().for_each(|policy| policy.score(models, function, counts));
    }

    fn forget(&mut self, function: FunctionIndex) {
        self.objectives.remove(&function);
        self.counts.remove(&function);
        self.all().for_each(|policy| policy.forget(function));
    }

    fn tick(&mut self, now: Timestamp, models: &Models) {
        for level in self.levels.values_mut() {
            if std::mem::take(&mut level.fresh) {
                let counts = self.counts.iter();
                counts.for_each(|(&function, &counts)| level.policy.score(models, function, counts));
            }
            level.policy.tick(now, models);
        }
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.levels.values().filter_map(|level| level.policy.next_wake()).min()
    }

    /// Combines the counters of all levels: sums of overtakings, the largest of maxima, and alpha
    /// of the default priority.
    fn count(&self, stats: &mut Stats) {
        for level in self.levels.values() {
            let mut of_level = Stats::default();
            level.policy.count(&mut of_level);
            stats.reserved += of_level.reserved;
            stats.passed += of_level.passed;
            stats.overtaken_max = stats.overtaken_max.max(of_level.overtaken_max);
            stats.visits_max = stats.visits_max.max(of_level.visits_max);
        }
        let mut usual = Stats::default();
        self.usual().count(&mut usual);
        stats.alpha = usual.alpha;
    }

    #[cfg(test)]
    fn check(&self, view: &View<'_>, models: &[super::models::Slot]) {
        self.levels.values().for_each(|level| level.policy.check(view, models));
    }
}
