//! What dispatch learns from the turns it gave: the samples of the [cost model](super::cost) (L15).

use std::time::Duration;

use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::cost::Source;
use super::gpus::{Held, Loading};
use super::{Action, Dispatch};

impl Dispatch {
    /// Takes in what a turn took.
    pub(super) fn learn(
        &mut self,
        held: &Held,
        gpu: GpuIndex,
        turn: Duration,
        ran: Duration,
        actions: &mut Vec<Action>,
    ) {
        let kind = self.fleet.get(gpu).kind;
        let before = self.weights(held.request.model, kind);
        let (gpu, model) = (self.fleet.get(gpu), held.request.model);
        let nominal = gpu.nominal(&self.models, model, held.source);
        let whole = !held.ahead || held.source == Source::Here;
        if let Some(predicted) = held.predicted.filter(|_| whole) {
            self.errors.add(gpu.kind, held.source, predicted, turn.max(ran));
        }
        // From another GPU, unless that failed: nothing is known of it before it has arrived.
        let told = !matches!(held.source, Source::Peer(_)) || held.loading == Loading::Nothing;
        // A turn shorter than its run began before we heard of it.
        let added = turn.checked_sub(ran).filter(|_| whole && told && !held.unlike);
        self.models.learn(model, gpu.kind, |cost| {
            cost.ran(held.rows, ran);
            if let Some(added) = added {
                cost.swapped(held.source, added, nominal);
            }
        });
        self.reweighed(model, before, actions);
    }

    /// All of a model is on a GPU: its links are free again.
    pub(super) fn loaded(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        (model, from): (ModelId, Option<GpuIndex>),
        actions: &mut Vec<Action>,
    ) {
        let Some(model) = self.models.slot(model) else { return };
        let it = self.fleet.get(gpu);
        let before = self.weights(model, it.kind);
        let its = |held: &&Held| held.request.model == model && held.loading != Loading::Nothing;
        let alone = it.running.as_ref().filter(its).filter(|held| !held.ahead && !held.unlike);
        if let Some(held) = alone.filter(|held| held.source == Source::Host) {
            self.models.learn(model, it.kind, |cost| cost.transferred(now.since(held.since)));
        }
        self.fleet.change(gpu, |it| it.loaded(model, from));
        self.reweighed(model, before, actions);
    }
}
