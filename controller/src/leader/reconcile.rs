//! Brings what is placed in line with what is wanted, in small steps: plan, carry out what the plan
//! says, look again. Level-triggered: every plan is made from the state as it is, so that a step
//! that was lost, refused or repeated does no harm.
//!
//! What nodes should serve is said only when a plan has no more steps, so that a node that came
//! back, or a cluster that was upgraded, is not told to drop what it is about to be given.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use millrace_cluster_state::{Caller, Command, NodeStatus, PlacementReason, Scheduling, State};
use millrace_policy::placement::{self, Limits, Plan, Step};
use millrace_types::{Failure, FunctionKey};
use tokio::time::{Instant, sleep_until, timeout};

use super::load::{LOOK_EVERY, Loads};
use super::scaling::Scaler;
use super::view::{Flows, view};
use super::{Duties, Leadership};
use crate::fleet::desired::Desired;

/// Steps carried out before the next plan.
const STEPS_MAX: usize = 256;
/// Plans with steps in a row before nodes are told what to serve all the same.
const ROUNDS_MAX: u32 = 64;
/// The least time between two plans of the leader, so that a burst of reports is one.
const PLAN_PAUSE: Duration = Duration::from_millis(20);
/// The same of a controller that only says why functions are not placed.
const IDLE_PLAN_PAUSE: Duration = Duration::from_millis(500);
/// How long a step that failed waits for its next chance when nothing changes.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// What a plan was made from. The same again needs no other plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Basis {
    state: u64,
    fleet: u64,
    leadership: Leadership,
}

/// Plans on every change, for ever; carries plans out while this controller leads.
pub(super) async fn run(duties: &Duties) {
    let mut state = duties.replica.changes();
    let mut fleet = duties.fleet.changes();
    let mut leadership = duties.leadership.subscribe();
    let mut reconciler = Reconciler::new(duties);
    loop {
        let again = reconciler.plan_if_changed().await;
        let mut elected = leadership.clone();
        let leader_pause = async {
            if elected.wait_for(|it| it.leads).await.is_ok() {
                tokio::time::sleep(PLAN_PAUSE).await;
            }
        };
        // The shorter of both, once this controller leads.
        let _over = timeout(IDLE_PLAN_PAUSE, leader_pause).await;
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

/// When to plan next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Now: there is more to do.
    Plan,
    /// After a change.
    Wait,
    /// After a change, and soon in any case: something failed.
    Retry,
}

struct Reconciler<'a> {
    duties: &'a Duties,
    loads: Loads,
    flows: Flows,
    scaler: Scaler,
    /// When counters are looked at next.
    look_at: Instant,
    planned: Option<Basis>,
    /// Plans with steps in a row.
    rounds: u32,
    /// The state of the last plan, and functions that lost a copy with its node since.
    last: Option<State>,
    bereaved: BTreeSet<FunctionKey>,
}

impl<'a> Reconciler<'a> {
    fn new(duties: &'a Duties) -> Self {
        Self {
            duties,
            loads: Loads::default(),
            flows: Flows::default(),
            scaler: Scaler::new(),
            look_at: Instant::now(),
            planned: None,
            rounds: 0,
            last: None,
            bereaved: BTreeSet::new(),
        }
    }

    fn wake(&self, next: Next) -> Instant {
        match next {
            Next::Retry => self.look_at.min(Instant::now() + RETRY_PAUSE),
            Next::Plan | Next::Wait => self.look_at,
        }
    }

    async fn plan_if_changed(&mut self) -> Next {
        let duties = self.duties;
        // Before the state and the workers are read, so that what changes in between counts next time.
        let (fleet, leadership) = (duties.fleet.version(), *duties.leadership.borrow());
        let (state, workers) = (duties.replica.state(), duties.fleet.workers());
        if self.look_at <= Instant::now() {
            self.loads.look(duties.fleet.now(), &state, &workers);
            self.look_at = Instant::now() + LOOK_EVERY;
            self.planned = None;
        }
        let basis = Basis { state: state.version(), fleet, leadership };
        if self.planned.replace(basis) == Some(basis) {
            return Next::Wait;
        }
        self.mourn(&state);
        let view = view(&state, &workers, &self.loads, &mut self.flows, &duties.measured.borrow());
        let plan = placement::plan(&view, &Limits { steps_max: STEPS_MAX });
        self.report(&plan);
        self.scaler.observe(duties.fleet.now(), &state, &view, &plan, duties);
        if !leadership.leads {
            return Next::Wait;
        }
        let (steps, failed) = (plan.steps.len(), self.carry_out(&state, plan).await);
        self.rounds = if steps == 0 || failed { 0 } else { self.rounds + 1 };
        if (1..ROUNDS_MAX).contains(&self.rounds) {
            return Next::Plan;
        }
        self.rounds = 0;
        self.publish(leadership.term);
        if failed {
            self.planned = None;
            Next::Retry
        } else {
            Next::Wait
        }
    }

    /// Remembers whose copies went with their nodes: why they are placed again.
    fn mourn(&mut self, state: &State) {
        if let Some(last) = self.last.replace(state.clone()) {
            let lost = state.nodes().filter(|node| node.status == NodeStatus::Lost);
            for node in lost {
                self.bereaved.extend(last.placements_on(&node.name).cloned());
            }
        }
        self.bereaved.retain(|function| state.function(function).is_some());
    }

    /// Says why functions have fewer copies than they should.
    fn report(&self, plan: &Plan) {
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

    /// Whether any step failed. Each waits for its commit.
    async fn carry_out(&mut self, state: &State, plan: Plan) -> bool {
        if !plan.steps.is_empty() {
            tracing::info!(steps = plan.steps.len(), more = plan.more, "placements change");
        }
        let steps = plan.steps.into_iter().map(|step| self.command(state, step)).collect::<Vec<_>>();
        let proposals = steps.into_iter().map(|command| self.propose(command));
        join_all(proposals).await.iter().any(Result::is_err)
    }

    fn command(&mut self, state: &State, step: Step) -> Command {
        match step {
            Step::Place { function, node } => {
                let reason = self.reason(state, &function);
                Command::Place { function, node, reason }
            }
            Step::Unplace { function, node } => Command::Unplace { function, node },
        }
    }

    fn reason(&mut self, state: &State, function: &FunctionKey) -> PlacementReason {
        if self.bereaved.remove(function) {
            return PlacementReason::NodeLost;
        }
        let wanted = state.function(function).map_or(0, |function| function.latest().spec.replicas);
        let draining = |node| state.node(node).is_some_and(|node| node.scheduling == Scheduling::Draining);
        if state.placements_of(function).any(|placement| draining(&placement.node)) {
            PlacementReason::Drain
        } else if state.placements_of(function).count() >= wanted as usize {
            PlacementReason::Rebalance
        } else {
            PlacementReason::MissingReplica
        }
    }

    async fn propose(&self, command: Command) -> Result<(), Failure> {
        tracing::debug!(?command, "a step");
        let proposed = self.duties.replica.propose(Caller("placement".into()), None, command).await;
        proposed.map(drop).inspect_err(|failure| {
            tracing::info!(error = failure.message, "a placement was not made: it is planned again");
        })
    }

    /// Says what each node should serve.
    fn publish(&self, term: u64) {
        // The leadership may have ended while steps were committed.
        if *self.duties.leadership.borrow() != (Leadership { term, leads: true }) {
            return;
        }
        let applied = self.duties.replica.reader.latest();
        if applied.last.is_some_and(|last| last.leader_id.term > term) {
            // It ended, and its successor's entries are here before the news. Stamped with this term
            // they would be older than what the successor said of a state before them.
            return;
        }
        self.duties.desired.send_modify(|last| {
            *last = Some(Arc::new(Desired::of_state(&applied.state, term, last.as_deref())));
        });
    }
}
