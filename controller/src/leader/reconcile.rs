//! Reconciles placements with the desired copies in small steps: plan, carry out the steps of the plan,
//! and look again. Level-triggered: each plan is made from the current state, so a lost, refused or
//! repeated step does no harm.
//!
//! The desired state of nodes is published after a plan without steps, after a failed step, and after
//! [`ROUNDS_MAX`] plans with steps. Published earlier, a node that came back, or any node after an upgrade,
//! would drop functions that the next steps place on it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use millrace_cluster_state::{CallerName, NodeStatus, PlacementReason, SchedulingState, State, StateCommand};
use millrace_nodes::placement::{self, PlacementChange, PlacementPlan, PlanLimits};
use millrace_types::{Failure, FunctionKey};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::duties::Duties;
use super::load::{LOOK_EVERY, Loads};
use super::scaling::Scaler;
use super::slice_scaling::SCALE_EVERY;
use super::slices::{self, SlicePlanner};
use super::view::{WorkflowFlows, view};
use crate::leadership::{DesiredStates, Leadership, MissingSlices};

/// Steps carried out before the next plan.
const STEPS_MAX: usize = 256;
/// Consecutive plans with steps after which the desired state is published regardless.
const ROUNDS_MAX: u32 = 64;
/// The minimum time between two plans of the leader, so that a burst of reports yields one plan.
const PLAN_PAUSE: Duration = Duration::from_millis(20);
/// The maximum pause between two plans of the leader.
const PLAN_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The pause after a plan without steps, as a multiple of the time that the plan computed. A plan reads all
/// functions: without the pause, plans of a large cluster under a stream of writes would take a whole processor
/// from the requests.
const REST: u32 = 4;
/// The multiple after a plan with steps, for example with new copies of a lost node's functions.
const REST_WITH_STEPS: u32 = 1;
/// The minimum time between two plans of a controller that plans only to report shortages.
const IDLE_PLAN_PAUSE: Duration = Duration::from_millis(500);
/// The wait after a failed step before the next plan, if nothing changes.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The inputs of a plan. The same inputs need no new plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Basis {
    state: u64,
    fleet: u64,
    leadership: Leadership,
}

/// Plans after every change, without end. Carries plans out while this controller leads.
pub(super) async fn run(duties: &Duties) {
    let mut state = duties.replica.changes();
    let mut fleet = duties.fleet.changes();
    let mut leadership = duties.leadership.subscribe();
    let mut reconciler = Reconciler::new(duties);
    loop {
        let again = reconciler.plan_if_changed().await;
        if leadership.borrow().leads {
            sleep(PLAN_PAUSE).await;
            let rest = pause_after(reconciler.computed, again).saturating_sub(PLAN_PAUSE);
            // A lost node and a lost leadership need a plan at once.
            let _over = timeout(rest, reconciler.urgent()).await;
        } else {
            // A controller that becomes leader during the long pause continues after the short one.
            let mut elected = leadership.clone();
            let elected = async {
                if elected.wait_for(|it| it.leads).await.is_ok() {
                    sleep(PLAN_PAUSE).await;
                }
            };
            let _over = timeout(IDLE_PLAN_PAUSE, elected).await;
        }
        if again == Next::Plan {
            continue;
        }
        let changed = async {
            tokio::select! {
                changed = state.changed() => changed.is_ok(),
                changed = fleet.changed() => changed.is_ok(),
                changed = leadership.changed() => changed.is_ok(),
                () = sleep_until(reconciler.wake(again)) => true,
            }
        };
        if !changed.await {
            return;
        }
    }
}

/// The time of the next plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Plan at once, because more steps remain.
    Plan,
    /// Plan after a change.
    Wait,
    /// Plan after a change, or soon, because a step failed.
    Retry,
}

/// Returns the pause of a leader after a plan that computed for this long.
fn pause_after(computed: Duration, next: Next) -> Duration {
    let rest = if next == Next::Plan { REST_WITH_STEPS } else { REST };
    (computed * rest).clamp(PLAN_PAUSE, PLAN_PAUSE_MAX)
}

struct Reconciler<'a> {
    duties: &'a Duties,
    loads: Loads,
    flows: WorkflowFlows,
    scaler: Scaler,
    slices: SlicePlanner,
    /// The time of the next look at the GPU time counters.
    look_at: Instant,
    /// The time of the next look at the load of slices.
    scale_at: Instant,
    planned: Option<Basis>,
    /// The time that the last plan computed, without the wait for the commits of its steps.
    computed: Duration,
    /// Consecutive plans with steps.
    rounds: u32,
    /// The state of the last plan.
    last: Option<State>,
    /// Functions that lost a copy together with a node, and that wait for a new placement.
    bereaved: BTreeSet<FunctionKey>,
}

impl<'a> Reconciler<'a> {
    fn new(duties: &'a Duties) -> Self {
        Self {
            duties,
            loads: Loads::default(),
            flows: WorkflowFlows::default(),
            scaler: Scaler::new(),
            slices: SlicePlanner::new(),
            look_at: Instant::now(),
            scale_at: Instant::now(),
            planned: None,
            computed: Duration::ZERO,
            rounds: 0,
            last: None,
            bereaved: BTreeSet::new(),
        }
    }

    /// Waits until a node is lost since the last plan, or the leadership changes.
    async fn urgent(&self) {
        let lost = |state: &State| state.nodes().filter(|node| node.status == NodeStatus::Lost).count();
        let before = self.last.as_ref().map_or(0, lost);
        let mut leadership = self.duties.leadership.subscribe();
        let mut state = self.duties.replica.changes();
        while lost(&self.duties.replica.state()) <= before {
            tokio::select! {
                _changed = leadership.changed() => return,
                changed = state.changed() => if changed.is_err() { return },
            }
        }
    }

    fn wake(&self, next: Next) -> Instant {
        let look = self.look_at.min(self.scale_at);
        match next {
            Next::Retry => look.min(Instant::now() + RETRY_PAUSE),
            Next::Plan | Next::Wait => look,
        }
    }

    async fn plan_if_changed(&mut self) -> Next {
        let duties = self.duties;
        // Read the versions before the state and the workers, so that a change in between causes
        // another plan.
        let fleet = duties.fleet.version();
        let leadership = *duties.leadership.borrow();
        let state = duties.replica.state();
        let workers = duties.fleet.workers();
        if self.look_at <= Instant::now() {
            self.loads.look(duties.fleet.now(), &state, &workers);
            self.look_at = Instant::now() + LOOK_EVERY;
            self.planned = None;
        }
        if self.scale_at <= Instant::now() {
            if self.slices.scalers.look(duties.fleet.now(), &state, &workers) {
                self.planned = None;
            }
            self.scale_at = Instant::now() + SCALE_EVERY;
        }
        let basis = Basis { state: state.version(), fleet, leadership };
        self.computed = Duration::ZERO;
        if self.planned.replace(basis) == Some(basis) {
            return Next::Wait;
        }
        let began = Instant::now();
        self.record_lost_placements(&state);
        let view = view(&state, &workers, &self.loads, &mut self.flows, &duties.measured.borrow());
        let plan = placement::plan(&view, &PlanLimits { steps_max: STEPS_MAX });
        self.report(&plan);
        self.scaler.observe(duties.fleet.now(), &state, &view, &plan, duties);
        let slices = self.slices.plan(&state, &workers);
        self.report_missing(slices::missing(&slices));
        self.computed = began.elapsed();
        if !leadership.leads {
            return Next::Wait;
        }
        // Slices follow the placements of their functions.
        let changes = if plan.steps.is_empty() { slices::commands(&state, &slices) } else { Vec::new() };
        let steps = plan.steps.len() + changes.len();
        let failed = self.carry_out(&state, plan).await || self.change_slices(changes).await;
        self.rounds = if steps == 0 || failed { 0 } else { self.rounds + 1 };
        if (1..ROUNDS_MAX).contains(&self.rounds) {
            return Next::Plan;
        }
        self.rounds = 0;
        let began = Instant::now();
        self.publish(leadership.term);
        self.computed += began.elapsed();
        if failed {
            self.planned = None;
            Next::Retry
        } else {
            Next::Wait
        }
    }

    /// Records the functions that lost copies with lost nodes, as the reason of their new placements.
    fn record_lost_placements(&mut self, state: &State) {
        if let Some(last) = self.last.replace(state.clone()) {
            let lost = state.nodes().filter(|node| node.status == NodeStatus::Lost);
            for node in lost {
                self.bereaved.extend(last.placements_on(&node.name).cloned());
            }
        }
        self.bereaved.retain(|function| state.function(function).is_some());
    }

    /// Publishes the functions with fewer copies than requested.
    fn report(&self, plan: &PlacementPlan) {
        let next: std::collections::BTreeMap<_, _> =
            plan.unplaced.iter().map(|it| (it.function.clone(), it.clone())).collect();
        self.duties.shortages.send_if_modified(|last| {
            let news = **last != next;
            if news {
                *last = Arc::new(next);
            }
            news
        });
    }

    /// Publishes the slices without a GPU.
    fn report_missing(&self, next: MissingSlices) {
        self.duties.missing_slices.send_if_modified(|last| {
            let news = *last != next;
            if news {
                *last = next;
            }
            news
        });
    }

    /// Proposes the slices of one node after another: the numbers of new slices rise from node to node, and a
    /// number below a stored number would be refused. Returns whether a proposal failed.
    async fn change_slices(&self, changes: Vec<StateCommand>) -> bool {
        if !changes.is_empty() {
            tracing::info!(nodes = changes.len(), "changing slices of GPUs");
        }
        for change in changes {
            if self.propose(change).await.is_err() {
                return true;
            }
        }
        false
    }

    /// Proposes all steps and waits for their commits. Returns whether any step failed.
    async fn carry_out(&mut self, state: &State, plan: PlacementPlan) -> bool {
        if !plan.steps.is_empty() {
            tracing::info!(steps = plan.steps.len(), more = plan.more, "changing placements");
        }
        let steps = plan.steps.into_iter().map(|step| self.command(state, step)).collect::<Vec<_>>();
        let proposals = steps.into_iter().map(|command| self.propose(command));
        join_all(proposals).await.iter().any(Result::is_err)
    }

    fn command(&mut self, state: &State, step: PlacementChange) -> StateCommand {
        match step {
            PlacementChange::Place { function, node } => {
                let reason = self.reason(state, &function);
                StateCommand::Place { function, node, reason }
            }
            PlacementChange::Unplace { function, node } => StateCommand::Unplace { function, node },
        }
    }

    fn reason(&mut self, state: &State, function: &FunctionKey) -> PlacementReason {
        if self.bereaved.remove(function) {
            return PlacementReason::NodeLost;
        }
        let wanted = state.function(function).map_or(0, |function| function.latest().spec.replicas);
        let draining =
            |node| state.node(node).is_some_and(|node| node.scheduling == SchedulingState::Draining);
        if state.placements_of(function).any(|placement| draining(&placement.node)) {
            PlacementReason::Drain
        } else if state.placements_of(function).count() >= wanted as usize {
            PlacementReason::Rebalance
        } else {
            PlacementReason::MissingReplica
        }
    }

    async fn propose(&self, command: StateCommand) -> Result<(), Failure> {
        tracing::debug!(?command, "proposing a placement step");
        let proposed = self.duties.replica.propose(CallerName("placement".into()), None, command).await;
        proposed.map(drop).inspect_err(|failure| {
            tracing::info!(error = failure.message, "cannot make a placement: planning again");
        })
    }

    /// Publishes the desired state of each node.
    fn publish(&self, term: u64) {
        // The leadership may have ended while steps were being committed.
        if *self.duties.leadership.borrow() != (Leadership { term, leads: true }) {
            return;
        }
        let applied = self.duties.replica.reader.latest();
        if applied.last.is_some_and(|last| last.leader_id.term > term) {
            // The successor's entries arrived before the news of the lost leadership. A desired state
            // with this term would carry an older stamp than the successor's, but be made from a newer
            // state.
            return;
        }
        self.duties.desired.send_modify(|last| {
            *last = Some(Arc::new(DesiredStates::of_state(&applied.state, term, last.as_deref())));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_rests_in_proportion_to_the_time_of_a_plan() {
        let ms = Duration::from_millis;
        for (computed, without_steps, with_steps) in
            [(0, 20, 20), (4, 20, 20), (30, 120, 30), (250, 1_000, 250), (3_000, 1_000, 1_000)]
        {
            for next in [Next::Wait, Next::Retry] {
                assert_eq!(pause_after(ms(computed), next), ms(without_steps), "{computed} ms, {next:?}");
            }
            assert_eq!(pause_after(ms(computed), Next::Plan), ms(with_steps), "{computed} ms");
        }
    }
}
