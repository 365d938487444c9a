//! Samples for the [cost model](super::cost), taken from the turns on GPUs (L15).

use std::time::Duration;

use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::cost::SwapSource;
use super::dispatcher::Dispatcher;
use super::load_class::LoadClass;
use super::protocol::Action;
use super::seats::Assignment;

impl Dispatcher {
    /// Adds a finished turn to the cost model and to its prediction errors.
    pub(super) fn learn(
        &mut self,
        held: &Assignment,
        gpu: GpuIndex,
        turn: Duration,
        ran: Duration,
        actions: &mut Vec<Action>,
    ) {
        let kind = self.fleet.get(gpu).kind;
        let before = self.weights(held.request.model, kind);
        let gpu = self.fleet.get(gpu);
        let model = held.request.model;
        let nominal = gpu.nominal(&self.models, model, held.source);
        let whole = !held.ahead || held.source == SwapSource::Here;
        if let Some(predicted) = held.predicted.filter(|_| whole) {
            self.errors.add(gpu.kind, held.source, predicted, turn.max(ran));
        }
        // A peer copy counts only after its arrival: until then the copy may have failed over to
        // the host.
        let told = !matches!(held.source, SwapSource::Peer(_)) || held.loading == LoadClass::Nothing;
        // A turn shorter than its run began before dispatch learned of its start.
        let added = turn.checked_sub(ran).filter(|_| whole && told && !held.unlike);
        self.models.learn(model, gpu.kind, |cost| {
            cost.ran(held.rows, ran);
            if let Some(added) = added {
                cost.swapped(held.source, added, nominal);
            }
        });
        self.send_changed_weights(model, before, actions);
    }

    /// Notes that all of a model arrived on a GPU, so its links are free again.
    pub(super) fn loaded(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        model: ModelId,
        from: Option<GpuIndex>,
        actions: &mut Vec<Action>,
    ) {
        let Some(model) = self.models.slot(model) else { return };
        let it = self.fleet.get(gpu);
        let before = self.weights(model, it.kind);
        let its = |held: &&Assignment| held.request.model == model && held.loading != LoadClass::Nothing;
        let kind = it.kind;
        let running = self.fleet.seats_of(gpu).filter_map(|(_, seat)| seat.running.as_ref());
        let alone = running.filter(its).find(|held| !held.ahead && !held.unlike);
        if let Some(since) = alone.filter(|held| held.source == SwapSource::Host).map(|held| held.since) {
            self.models.learn(model, kind, |cost| cost.transferred(now.since(since)));
        }
        self.fleet.change(gpu, |it, seats| {
            it.arrived(model);
            seats.iter_mut().for_each(|seat| seat.loaded(model, from));
        });
        self.send_changed_weights(model, before, actions);
    }
}
