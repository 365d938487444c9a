//! The executor of a GPU: its start, its loss, and the time at which it counts as hung.

use std::time::Duration;

use millrace_types::{Incarnation, Timestamp};

use super::data_store::GpuDataStore;
use super::gpu_core::{ExecutorHealth, GpuCore};
use super::lines::LinePlace;
use super::programs::ProgramLoadState;
use super::protocol::Action;
use super::seat_tokens::TokenHold;
use super::slots::{AssignedRequest, RequestStage};
use millrace_core::attempts::AttemptProgress;

/// Time that a cancelled run may take before its executor counts as hung.
pub const HANG_AFTER: Duration = Duration::from_secs(30);

impl GpuCore {
    pub(super) fn up(&mut self, incarnation: Incarnation, actions: &mut Vec<Action>) {
        self.totals.restarts += u64::from(self.health != ExecutorHealth::Starting);
        self.health = ExecutorHealth::Up;
        self.incarnation = Some(incarnation);
        actions.push(Action::Up { incarnation });
    }

    /// Clears the state of the GPU after everything on it is lost.
    pub(super) fn lose_all(&mut self, health: ExecutorHealth, actions: &mut Vec<Action>) {
        if self.incarnation.take().is_some() {
            let lost = self.progress_of(|_| true).into_iter();
            let not_cancelled = lost.filter(|(slot, _)| slot.cancelled.is_none());
            let lost = not_cancelled.map(|(slot, progress)| (slot.key, progress)).collect();
            self.lines.clear();
            self.lose_tokens();
            self.workspaces.clear();
            self.moving.clear();
            self.lent.clear();
            self.leftovers.clear();
            self.look_again = None;
            self.memory.clear();
            self.data.iter_mut().for_each(GpuDataStore::clear);
            self.awaited.clear();
            self.prefetched.clear();
            self.kept.clear();
            self.look_at = None;
            self.programs.forget_all();
            actions.push(Action::Down { lost });
        }
        if !(health == ExecutorHealth::Restarting && self.health == ExecutorHealth::Unhealthy) {
            self.health = health;
        }
    }

    /// Returns the requests of a process that died, with their progress. `its` says which requests are
    /// of that process.
    pub(super) fn progress_of(
        &self,
        its: impl Fn(&AssignedRequest) -> bool,
    ) -> Vec<(AssignedRequest, AttemptProgress)> {
        let there = self.lines.places().filter(|(_, slot)| its(slot));
        let mut lost: Vec<_> =
            there.map(|(place, slot)| (*slot, self.progress_before_reports(place, slot))).collect();
        // A cancelled run may be the cause too.
        let may_have_run = |progress| matches!(progress, AttemptProgress::Begun | AttemptProgress::Starting);
        let begun = lost.iter().filter(|(_, progress)| may_have_run(*progress)).count();
        for (_, progress) in &mut lost {
            if *progress == AttemptProgress::Begun {
                *progress = AttemptProgress::begun(begun);
            }
        }
        lost
    }

    /// Returns a request's progress while reports of the last copies may be missing: they are lost with the
    /// executor, and take a longer way than the report of a run. So a run that the executor had while its weights
    /// were copied may have begun.
    pub(super) fn progress_before_reports(
        &self,
        place: LinePlace,
        slot: &AssignedRequest,
    ) -> AttemptProgress {
        match (self.progress(place, slot), slot.stage) {
            (AttemptProgress::Preparing, RequestStage::Sent { generation, .. })
                if place.is_first() && self.moving.iter().any(|moving| moving.generation == generation) =>
            {
                AttemptProgress::Starting
            }
            (progress, _) => progress,
        }
    }

    /// Returns a request's progress: whether the request may have run, and whether the request may
    /// be the cause of a failure. Only the first request of a seat may have begun.
    pub(super) fn progress(&self, place: LinePlace, slot: &AssignedRequest) -> AttemptProgress {
        let sent = matches!(slot.stage, RequestStage::Sent { .. });
        if !place.is_first() {
            let harmless = !sent || self.programs.known(slot.model) == ProgramLoadState::Loaded;
            return if harmless { AttemptProgress::Waiting } else { AttemptProgress::Preparing };
        }
        let loaded = self.memory.region(slot.model).map(|region| region.loaded());
        let readable = loaded.is_some_and(|loaded| loaded.held() > 0 || loaded.complete());
        if sent && readable { AttemptProgress::Begun } else { AttemptProgress::Preparing }
    }

    pub(super) fn replace(&mut self, health: ExecutorHealth, actions: &mut Vec<Action>) {
        if self.incarnation.is_some() {
            self.lose_all(health, actions);
            actions.push(Action::Replace);
        }
    }

    /// Returns the time at which the executor counts as hung if a cancelled run does not end. The time
    /// in which a run waits for a token is not the executor's fault.
    pub(super) fn hung_at(&self) -> Option<Timestamp> {
        let cancelled = self.lines.sent_by_seat().filter_map(|(seat, slot)| Some((seat, slot.cancelled?)));
        let blamed = cancelled.filter_map(|(seat, since)| match self.token_hold(seat) {
            TokenHold::Unneeded => Some(since),
            TokenHold::Since(held) => Some(since.max(held)),
            TokenHold::Awaited => None,
        });
        blamed.min().map(|since| since + HANG_AFTER)
    }
}
