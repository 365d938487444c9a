//! Dispatch decides which request runs on which GPU. The dispatcher is a state machine of the Node
//! actor.
//!
//! All policies share a code path: a bounded queue, the checks on entry to the queue, retries
//! after the loss of a GPU, the early assignment of requests to busy GPUs, and recalls. The
//! configured policy ([`PolicyConfig`]) decides only the order of the queue and the GPU of each
//! request:
//!
//! | name | next request | GPU | assigns to busy GPUs |
//! |---|---|---|---|
//! | `fifo` | the oldest | an idle holder, else the idle GPU with most free memory | yes, see below |
//! | `lb` | the oldest | the GPU that has been idle longest (L18) | no |
//! | `lalb`, `lalb-o3` | a hit (bounded overtaking), else the oldest | an idle holder, the own queue of a busy holder, or a miss (L09 to L14) | from a GPU's own queue |
//! | `torpor` | by required request count (T18 to T21) | an idle holder, else by interference (T22) | no |
//! | `random` | as `torpor` | an idle holder, else any idle GPU (T28) | no |
//! | `unified` | the most pressing request that can still meet its deadline | the GPU with the least estimated finish: idle holder, peer copy, host copy, or behind a busy holder | hits, and requests without a deadline |
//! | `native`, `nonswap`, `infless-ka` | the oldest of the requests bound to a GPU | the bound GPU ([`early_binding`], T28) | no |
//! | `simpleswap` | the oldest | an idle holder, else any idle GPU (T28) | no |
//!
//! Each policy implements `policy::DispatchPolicy`. Each [priority](priority) in use has a policy
//! instance of its own.
//!
//! **Assignment to busy GPUs** (`fifo`). While no GPU is idle, the oldest request is assigned to a
//! busy GPU that has no next request yet. A holder of the model is preferred, else the GPU that is
//! expected to be free first. A GPU therefore never waits for a message between two runs. If a GPU
//! falls idle while the queue is empty, dispatch recalls a next request from a busy GPU.
//!
//! A busy GPU gets a second and later next request only if that delays no request: the GPU holds
//! the model and will begin the request sooner than a recall would take ([`RECALL_COST`]). If runs
//! last a few microseconds, several runs then share a wake of the executor.
//!
//! **Lost GPUs** ([`recovery`]). Models that requests still wait for, and that no other GPU holds,
//! are loaded onto other GPUs at once (T16).
//!
//! **Policy changes** ([`change`]). Another policy can take over at any time, with all waiting
//! requests.
//!
//! **Warm copies** ([`warm`]). An operator can require a minimum number of GPUs that hold a model,
//! even without requests.
//!
//! **Prewarming** ([`prewarming`], D29). The model that a workflow will need next is loaded onto a GPU
//! that has time.
//!
//! **Slices** ([`sliced`]). A function with slices of GPUs computes on the seats of its slices alone.
//!
//! A suspect is a request that was on a GPU when that GPU was lost. A suspect runs alone ([`suspects`]):
//! dispatch never assigns a suspect to a busy GPU, and assigns no request behind or beside a suspect.
//!
//! **Data locality** ([`locality`]). A workflow step that reads objects in GPU memory is sent to the
//! GPU that has them if the policy has no reason to prefer another GPU. `fifo`, `lalb` and `torpor`
//! break ties by data; `unified` adds the transfer time to the estimated finish.
//!
//! **Cost model** ([`cost`]). All policies share a model of run and swap times.
//!
//! **Complexity** (L16). The cost of a decision is logarithmic in the waiting requests, in the
//! models on one GPU and in the GPUs that hold one model (`benches/dispatch.rs`).
//!
//! ```text
//! Enqueue, Withdraw                      ┌───────┐  Assign, Recall, Cancel, Prefetch, …
//! ──────────────────────────────────────►│       ├──────────────────────────────────► Gpu
//! Up, Down, RequestEnded,                │       │  Fail
//! RequestReturned, ModelsEvicted         │       │
//! ──────────────────────────────────────►│       ├──────────────────────────────────► Function
//! Objective, SloCountsChanged,           │       │
//! FunctionRemoved, ProfileLoaded         │       │
//! ──────────────────────────────────────►└───────┘
//! ```

mod arrival;
mod assign;
mod change;
mod config;
mod cost;
mod create_policy;
mod departures;
mod dispatcher;
mod early_binding;
mod eviction_ranks;
mod fleet;
mod gpus;
mod holders;
mod inputs;
mod lalb;
mod learn;
mod load_class;
mod load_summary;
mod locality;
mod models;
mod node_work;
mod overtaking;
mod pins;
mod policy;
mod prewarm_hint;
mod prewarming;
mod priority;
mod protocol;
mod queue;
mod recall;
mod recovery;
mod request_changes;
mod seats;
mod setting;
mod size_rank;
mod slice_table;
mod sliced;
mod suspects;
mod torpor;
mod unified;
mod warm;
mod warm_copies;

use std::collections::BTreeSet;

use millrace_types::Timestamp;

pub use self::config::{
    AGED_EVERY, AlphaRule, BindingLifetime, BoundConfig, COLD_START, Config, FREE_OVERTAKES_MAX, GpuConfig,
    KEEP_ALIVE, OVERTAKES_MAX, POLICIES, PeerLink, PolicyConfig, RUNTIME_MEMORY, ScoreWindow, TorporConfig,
    TorporGpuChoice, TorporOrder, UNIFIED_OVERTAKES_MAX, UnifiedConfig, WINDOW_MAX, gpu_types, kind_of,
};
pub use self::cost::{PredictionError, TurnKind};
pub use self::dispatcher::Dispatcher;
pub use self::inputs::{INPUT_GPUS_MAX, InputLocations};
pub use self::node_work::NodeWork;
pub use self::policy::DispatchStats;
pub use self::prewarm_hint::PrewarmCounts;
pub use self::prewarming::{LIKELY_FOR, LIKELY_MAX};
pub use self::protocol::{Action, Event, LatencyObjective, ModelProfile, QueuedRequest};
pub use self::seats::{AHEAD_MAX, RECALL_COST};
pub use self::warm::WARM_RETRY;

use self::departures::TurnState;
use self::dispatcher::RequestLocation;
use self::policy::{DispatchDecision, DispatchView};
use self::seats::Assignment;
use millrace_core::Core;
use millrace_core::attempts::AttemptProgress;
use millrace_core::decision_text::DecisionText;

impl Dispatcher {
    /// Carries out every decision that the policy can make now.
    fn pump(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if !self.draining.is_empty() {
            self.assign_suspects(now, actions);
        }
        self.assign_sliced(now, actions);
        while self.queued > 0 {
            let view = DispatchView { now, fleet: &self.fleet, models: &self.models, inputs: &self.inputs };
            match self.policy.decide(&view) {
                None => break,
                Some(DispatchDecision::Reserve { request, gpu }) => self.reserve(&request, gpu, actions),
                Some(DispatchDecision::Refuse { request, reason }) => {
                    self.queued -= 1;
                    self.forget_request(&request);
                    let may_have_executed = request.attempts.begun;
                    actions.push(Action::Fail { key: request.key, reason, may_have_executed });
                }
                Some(DispatchDecision::Assign { request, seat, over }) => {
                    if self.has_to_drain(&request, seat) {
                        self.drain(request, self.fleet.gpu_of(seat), actions);
                    } else {
                        self.assign(now, request, seat, over, actions);
                    }
                }
            }
        }
        if self.policy.recalls() {
            self.recall(now, actions);
        }
    }
}

impl Core for Dispatcher {
    type Event = Event;
    type Action = Action;

    fn decision(action: &Action) -> Option<DecisionText> {
        let named = DecisionText::new;
        Some(match *action {
            Action::Assign { gpu, key, model, .. } => named("assign").request(key).model(model).gpu(gpu),
            Action::Prefetch { gpu, model } => named("prefetch").model(model).gpu(gpu),
            Action::Prewarm { gpu, model } => named("prewarm").model(model).gpu(gpu),
            Action::Recall { gpu, key } => named("recall").request(key).gpu(gpu),
            Action::Cancel { gpu, key } => named("cancel").request(key).gpu(gpu),
            Action::Fail { key, .. } => named("fail").request(key),
            Action::SetEvictionRank { .. }
            | Action::Pin { .. }
            | Action::Unpin { .. }
            | Action::SetWarmCopy { .. } => {
                return None;
            }
        })
    }

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        // These events free no capacity and add no request, so deadlines that passed can wait
        // for the next decision.
        match event {
            Event::BatchChanged { key, rows, inputs } => return self.set_batch(key, rows, inputs),
            Event::InputsMoved { key, inputs } => return self.update_inputs(key, inputs),
            Event::Withdraw { key } if matches!(self.places.get(&key), Some(RequestLocation::On(_))) => {
                return self.withdraw(key, actions);
            }
            _ => self.policy.tick(now, &self.models),
        }
        let loses_a_gpu = matches!(event, Event::Down { .. } | Event::Reset { .. });
        match event {
            Event::Install { model, memory, weights } => self.install(model, memory, weights),
            Event::WarmCopiesRequired { model, copies } => self.set_minimum_copies(model, copies, actions),
            Event::Remove { model } => {
                self.set_minimum_copies(model, 0, actions);
                self.keep_on(model, BTreeSet::new(), actions);
                self.models.remove(model);
            }
            Event::ProfileLoaded(ModelProfile { model, kind, load, swap, run }) => {
                if let Some(slot) = self.models.slot(model) {
                    let before = self.weights(slot, kind);
                    self.models.learn(slot, kind, |cost| cost.restore_profile(load, swap, run));
                    self.send_changed_weights(slot, before, actions);
                }
            }
            Event::Objective { function, objective } => {
                self.policy.objective(function, objective);
                self.policy.tick(now, &self.models);
            }
            Event::SloCountsChanged { function, counts } => self.policy.score(&self.models, function, counts),
            Event::FunctionRemoved { function } => self.policy.forget(function),
            Event::SlicesChanged { function, model, slices } => {
                self.set_slices(function, model, slices, actions);
            }
            Event::AlphasCommitted(alphas) => self.commit_alphas(now, alphas),
            Event::Enqueue(request) => self.enqueue(now, request, actions),
            Event::Withdraw { key } => self.withdraw(key, actions),
            Event::Up { gpu, incarnation } => {
                self.fleet.change(gpu, |it, _| it.executor = Some(incarnation));
                self.fleet.get(gpu).open_seats().for_each(|seat| self.policy.on_seat_freed(seat, gpu));
            }
            Event::Down { gpu, lost } => {
                // The GPU reports only requests that arrived there; the others were still in
                // transit.
                let said = |key| lost.iter().find(|(lost, _)| *lost == key).map(|&(_, progress)| progress);
                self.down(gpu, |held, _| said(held.request.key).unwrap_or(AttemptProgress::Waiting), actions);
            }
            Event::Reset { gpu } => {
                let running = self.fleet.seats_of(gpu).filter(|(_, seat)| seat.running.is_some());
                let begun = AttemptProgress::begun(running.count());
                let worst = |_: &Assignment, turn| match turn {
                    TurnState::Running => begun,
                    // The report of the end of the run before may be lost.
                    TurnState::Next => AttemptProgress::Starting,
                };
                self.down(gpu, worst, actions);
            }
            Event::RequestEnded { gpu, key, ran } => self.ended(now, gpu, key, ran, actions),
            Event::RequestReturned { gpu, key, why } => self.returned(now, gpu, key, why, actions),
            Event::ModelLoaded { gpu, model, from } => self.loaded(now, gpu, model, from, actions),
            Event::ModelsEvicted { gpu, models } => {
                for model in models {
                    if let Some(model) = self.models.slot(model) {
                        self.fleet.change(gpu, |it, _| it.remove_resident(model));
                        self.remove_warm_copy(now, model, gpu, actions);
                        self.remove_holder(model, gpu, actions);
                    }
                }
            }
            Event::PolicyChanged { policy, eviction, functions } => {
                self.change(now, policy, eviction, functions, actions);
            }
            Event::SeatsOpened { seats } => self.open_seats(seats),
            Event::PrewarmHint { model, after } => self.add_prewarm_hint(now, model, after),
            Event::BatchChanged { .. } | Event::InputsMoved { .. } | Event::Tick => {}
        }
        self.pump(now, actions);
        if loses_a_gpu {
            self.reload_lost_models(now, actions);
        }
        self.create_warm_copies(now, actions);
        self.prewarm_models(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        [self.look_again, self.policy.next_wake(), self.warm.next_wake()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests;
