//! Finds lost tensors of a run, and releases objects at workers.

use std::sync::Arc;

use millrace_proto::worker as wire;
use millrace_workflow::{TensorIndex, TensorLoss};

use super::WorkflowRunner;
use crate::fleet::AttachedWorker;
use crate::serving::ServingBackend;
use crate::serving::workflow::values::{RemoteObject, RunTensor};

impl WorkflowRunner<'_> {
    /// Returns the losses among the tensors that a call read, for the given lost objects. Lost inputs
    /// of the run are recorded for the run's caller instead.
    pub(super) fn losses(
        &mut self,
        takes: Vec<(TensorLoss, wire::DataId)>,
        lost: &[wire::DataId],
    ) -> Vec<TensorLoss> {
        let inputs = self.engine.plan().inputs().len();
        let mut losses = Vec::new();
        for (loss, id) in takes.into_iter().filter(|(_, id)| lost.contains(id)) {
            if loss.slot.0 < inputs {
                self.lost.push(id);
                continue;
            }
            // The tensor may have been produced again for another call since, so compare object ids.
            if let (Some(value), Some(row)) = (&mut self.values[loss.slot.0], loss.row)
                && value.held().any(|(of, held)| of == row && held.id == id)
            {
                drop_row(value, row);
            }
            losses.push(loss);
        }
        losses
    }

    /// Returns the tensors on workers with ended streams: everything that such workers held is lost.
    pub(super) fn dead(&mut self) -> Vec<TensorLoss> {
        let inputs = self.engine.plan().inputs().len();
        let mut losses = Vec::new();
        for (at, value) in self.values.iter_mut().enumerate().skip(inputs) {
            let Some(value) = value else { continue };
            let gone = value.held().filter(|(_, held)| held.worker.lost.is_cancelled()).map(|(row, _)| row);
            let mut gone: Vec<u64> = gone.collect();
            gone.dedup();
            for row in gone {
                drop_row(value, row);
                losses.push(TensorLoss { slot: TensorIndex(at), row: Some(row) });
            }
        }
        losses
    }
}

/// Removes the parts that the call for a row produced. The worker may still hold the objects and only
/// be unreachable from the caller's worker, so release the objects.
fn drop_row(value: &mut RunTensor, row: u64) {
    let_go(value.held().filter(|(of, _)| *of == row).map(|(_, held)| held));
    value.lose(row);
}

/// Releases the objects of these values at the workers.
pub(in crate::serving::workflow) fn let_go_of<'v>(values: impl IntoIterator<Item = &'v RunTensor>) {
    let_go(values.into_iter().flat_map(RunTensor::held).map(|(_, held)| held));
}

/// Releases objects at workers, with one request per worker.
fn let_go<'v>(held: impl Iterator<Item = &'v RemoteObject>) {
    let mut by_worker: Vec<(Arc<AttachedWorker>, Vec<wire::DataId>)> = Vec::new();
    for held in held {
        match by_worker.iter_mut().find(|(worker, _)| worker.is_process_of(&held.worker)) {
            Some((_, ids)) => ids.push(held.id.clone()),
            None => by_worker.push((held.worker.clone(), vec![held.id.clone()])),
        }
    }
    for (worker, ids) in by_worker {
        ServingBackend::release(worker, ids);
    }
}
