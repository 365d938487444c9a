//! Handles the events of a GPU.

use millrace_types::Timestamp;

use super::completion::RunTimes;
use super::data_store::GpuDataStore;
use super::gpu_core::{ExecutorHealth, GpuCore, PrefetchProtection};
use super::protocol::{Action, Event};
use super::slots::AssignedRequest;
use millrace_core::Core;
use millrace_core::decision_text::DecisionText;
use millrace_memory::elastic;

impl Core for GpuCore {
    type Event = Event;
    type Action = Action;

    fn decision(action: &Action) -> Option<DecisionText> {
        let named = DecisionText::new;
        Some(match *action {
            Action::Run { key, model, .. } => named("run").request(key).model(model),
            Action::Unmap { model, .. } => named("unload").model(model),
            Action::Transfer { weights, ref chunks, .. } => {
                let bytes = chunks.iter().map(|chunks| weights.span(chunks).1);
                named("bring").model(weights.model).bytes(bytes.sum())
            }
            Action::Replace => named("replace the executor"),
            Action::EndProgram { model } => named("end the process").model(model),
            Action::RequestReturned { key, .. } => named("return").request(key),
            Action::Failed { key, .. } => named("fail on the GPU").request(key),
            Action::Data(ref action) => return action.decision(),
            Action::LoadProgram { .. }
            | Action::UnloadProgram { .. }
            | Action::Map { .. }
            | Action::CancelRun { .. }
            | Action::Grant { .. }
            | Action::Shorten { .. }
            | Action::Withdraw { .. }
            | Action::Hasten { .. }
            | Action::Locked { .. }
            | Action::NotLocked { .. }
            | Action::LockLost { .. }
            | Action::CancelTransfer { .. }
            | Action::Completed { .. }
            | Action::Up { .. }
            | Action::Down { .. }
            | Action::Ended { .. }
            | Action::Evicted { .. }
            | Action::ModelForgotten { .. } => return None,
        })
    }

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Install { model, memory, weights } => {
                self.programs.install(model, memory, weights, self.memory.block());
            }
            Event::Remove { model } => {
                self.awaited.remove(&model);
                self.kept.remove(&model);
                self.prefetched.remove(&model);
                self.programs.remove(model);
            }
            Event::Prefetch { model } => self.prefetch(model, PrefetchProtection::Used),
            Event::Prewarm { model } => self.prefetch(model, PrefetchProtection::Here),
            Event::CandidateChanged { model, candidate } => {
                self.programs.set_candidate(model, candidate);
                self.memory.rank(model, self.rank(model));
            }
            Event::Eviction(eviction) => {
                self.eviction = eviction;
                for model in self.memory.regions().map(|(model, _)| model).collect::<Vec<_>>() {
                    self.memory.rank(model, self.rank(model));
                }
            }
            Event::Residency { model, residency } => self.set_residency(now, model, residency),
            Event::Keep { model, kept } => self.keep(model, kept),
            Event::Pin { model } => {
                self.awaited.insert(model);
            }
            Event::Unpin { model } => {
                self.awaited.remove(&model);
                self.drop_part(model, actions);
            }
            // The node itself takes back a request that was assigned to a lost executor.
            Event::Assign { seat, key, model, incarnation, from, deadline, right }
                if self.incarnation == Some(incarnation) =>
            {
                self.lines.push(seat, AssignedRequest::new(key, model, from, deadline, right));
            }
            Event::Assign { .. } => {}
            Event::Recall { key } => self.recall(key, actions),
            Event::Cancel { key } => self.cancel(now, key, actions),
            Event::Up { incarnation } => self.up(incarnation, actions),
            Event::Down => self.lose_all(ExecutorHealth::Restarting, actions),
            Event::ProgramLoaded { model } => self.programs.loaded(now, model),
            Event::ProgramLost { model } => self.program_lost(now, model, actions),
            Event::ProgramFailed { model } => self.program_failed(now, model, actions),
            Event::MapFailed { model, generation } => {
                if self.memory.region(model).is_some_and(|region| region.generation() == generation) {
                    self.drop_region(model, actions);
                }
            }
            Event::Arrived { model, generation, chunks } => self.arrived(model, generation, chunks),
            Event::TransferEnded { transfer, outcome, from } => {
                self.transfer_ended(transfer, outcome, from, actions);
            }
            Event::Lock { transfer, model } => self.lock(transfer, model, actions),
            Event::Unlock { transfer } => self.unlock(transfer),
            Event::RunDone { run, started, finished, waited, held, sm, token } => {
                let on = self.token_after_run(now, run, token, actions);
                self.run_done(now, run, RunTimes { started, finished, waited, held, sm, on }, actions);
            }
            Event::TokenAsked { seat } => self.token_asked(now, seat, actions),
            Event::TokenSpent { seat, token, busy, more } => {
                self.token_spent(now, seat, token, busy, more, actions);
            }
            Event::Sharing(sharing) => self.share(sharing),
            Event::Slices(slices) => self.set_slices(now, slices, actions),
            Event::RunFailed { run, why } => self.run_failed(run, why, actions),
            Event::RunCancelled { run } => self.run_cancelled(run, actions),
            Event::DeviceFailed => self.replace(ExecutorHealth::Unhealthy, actions),
            Event::ContextLost => self.replace(ExecutorHealth::Restarting, actions),
            Event::Data(event) => self.on_data(now, event, actions),
            Event::Tick => {
                if self.data.as_ref().and_then(GpuDataStore::next_wake).is_some_and(|at| at <= now) {
                    self.tell_store(now, elastic::Event::Tick, actions);
                }
                if self.isolation.per_model() {
                    self.end_hung(now, actions);
                } else if self.hung_at().is_some_and(|at| at <= now) {
                    self.replace(ExecutorHealth::Restarting, actions);
                }
                self.drop_unused(now, actions);
                self.tick_tokens(now, actions);
            }
        }
        self.end_seat_periods(now, actions);
        self.give_back_workspaces();
        self.advance(now, actions);
        let before = self.memory.used_blocks();
        self.limit_data(now, actions);
        if self.memory.used_blocks() < before {
            self.advance(now, actions);
        }
        self.sweep(actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let data = self.data.as_ref().and_then(GpuDataStore::next_wake);
        let tokens = self.tokens_wake();
        [self.hung_at(), self.look_at, self.look_again, data, tokens].into_iter().flatten().min()
    }
}
