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

use millrace_types::{Alpha, Alphas, GpuIndex, Priority, SloCounts, Timestamp};

use super::models::ModelTable;
use super::policy::{DispatchDecision, DispatchPolicy, DispatchStats, DispatchView, QueueEntry};
use super::protocol::LatencyObjective;
use super::queue::WaitingRequest;
use super::seats::ExpectedFinish;
use millrace_core::ids::{FunctionIndex, SeatIndex};

#[derive(Debug)]
struct Level {
    policy: Box<dyn DispatchPolicy>,
    waiting: usize,
    /// Whether the level was created after scores were reported, and has none of them yet.
    fresh: bool,
}

/// One policy instance for each priority in use.
pub(super) struct Prioritised {
    /// Levels by priority, the most urgent first.
    levels: BTreeMap<Priority, Level>,
    make: Box<dyn Fn() -> Box<dyn DispatchPolicy>>,
    /// Objectives of all functions, for levels that are created later.
    objectives: BTreeMap<FunctionIndex, LatencyObjective>,
    /// SLO counts of all functions, for levels that are created later.
    counts: BTreeMap<FunctionIndex, SloCounts>,
    /// Alphas of an earlier registration, for levels that are created later.
    committed: Alphas,
}

impl fmt::Debug for Prioritised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prioritised").field("levels", &self.levels).finish_non_exhaustive()
    }
}

impl Prioritised {
    pub(super) fn new(make: Box<dyn Fn() -> Box<dyn DispatchPolicy>>) -> Self {
        let usual = Level { policy: make(), waiting: 0, fresh: false };
        let levels = BTreeMap::from([(Priority::default(), usual)]);
        Self { levels, make, objectives: BTreeMap::new(), counts: BTreeMap::new(), committed: Alphas::new() }
    }

    fn level(&mut self, priority: Priority) -> &mut Level {
        self.levels.entry(priority).or_insert_with(|| {
            let mut policy = (self.make)();
            if let Some(&alpha) = self.committed.get(&priority) {
                policy.begin_with(priority, alpha);
            }
            for (&function, &objective) in &self.objectives {
                policy.objective(function, Some(objective));
            }
            Level { policy, waiting: 0, fresh: true }
        })
    }

    /// Returns the policy of the default priority, which answers questions that do not depend on
    /// the waiting requests.
    fn usual(&self) -> &dyn DispatchPolicy {
        self.levels[&Priority::default()].policy.as_ref()
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Box<dyn DispatchPolicy>> {
        self.levels.values_mut().map(|level| &mut level.policy)
    }
}

impl DispatchPolicy for Prioritised {
    fn push(&mut self, request: WaitingRequest, entry: QueueEntry) {
        let level = self.level(request.priority);
        level.waiting += 1;
        level.policy.push(request, entry);
    }

    fn remove(&mut self, request: &WaitingRequest) {
        let level = self.level(request.priority);
        level.waiting -= 1;
        level.policy.remove(request);
    }

    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        self.levels.values_mut().filter(|level| level.waiting > 0).find_map(|level| {
            let decision = level.policy.decide(view)?;
            // A request that waits for a GPU alone still waits.
            level.waiting -= usize::from(!matches!(decision, DispatchDecision::Reserve { .. }));
            Some(decision)
        })
    }

    fn recalls(&self) -> bool {
        self.usual().recalls()
    }

    fn expected_turn(&self, view: &DispatchView<'_>, seat: SeatIndex, ahead: usize) -> ExpectedFinish {
        self.usual().expected_turn(view, seat, ahead)
    }

    fn overdue_at(&self, view: &DispatchView<'_>, seat: SeatIndex) -> Option<Timestamp> {
        self.usual().overdue_at(view, seat)
    }

    fn bringing(&self, view: &DispatchView<'_>, gpu: GpuIndex, request: &WaitingRequest) -> Duration {
        self.usual().bringing(view, gpu, request)
    }

    fn on_seat_freed(&mut self, seat: SeatIndex, gpu: GpuIndex) {
        self.all().for_each(|policy| policy.on_seat_freed(seat, gpu));
    }

    fn on_gpu_lost(&mut self, gpu: GpuIndex) -> Vec<WaitingRequest> {
        self.all().flat_map(|policy| policy.on_gpu_lost(gpu)).collect()
    }

    fn uses_scores(&self) -> bool {
        self.usual().uses_scores()
    }

    fn objective(&mut self, function: FunctionIndex, objective: Option<LatencyObjective>) {
        match objective {
            Some(objective) => self.objectives.insert(function, objective),
            None => self.objectives.remove(&function),
        };
        self.all().for_each(|policy| policy.objective(function, objective));
    }

    fn score(&mut self, models: &ModelTable, function: FunctionIndex, counts: SloCounts) {
        self.counts.insert(function, counts);
        self.all().for_each(|policy| policy.score(models, function, counts));
    }

    fn forget(&mut self, function: FunctionIndex) {
        self.objectives.remove(&function);
        self.counts.remove(&function);
        self.all().for_each(|policy| policy.forget(function));
    }

    fn tick(&mut self, now: Timestamp, models: &ModelTable) {
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

    fn begin_with(&mut self, priority: Priority, alpha: Alpha) {
        self.committed.insert(priority, alpha);
        if let Some(level) = self.levels.get_mut(&priority) {
            level.policy.begin_with(priority, alpha);
        }
    }

    /// Combines the counters of all levels: sums of overtakings, the largest of maxima, and the
    /// alpha of each.
    fn add_stats(&self, stats: &mut DispatchStats) {
        for (&priority, level) in &self.levels {
            let mut of_level = DispatchStats::default();
            level.policy.add_stats(&mut of_level);
            stats.reserved += of_level.reserved;
            stats.overtakings += of_level.overtakings;
            stats.overtaken_max = stats.overtaken_max.max(of_level.overtaken_max);
            stats.visits_max = stats.visits_max.max(of_level.visits_max);
            stats.alphas.extend(level.policy.alpha().map(|alpha| (priority, alpha)));
        }
    }

    #[cfg(test)]
    fn check(&self, view: &DispatchView<'_>, models: &[super::models::ModelSlot]) {
        self.levels.values().for_each(|level| level.policy.check(view, models));
    }
}
