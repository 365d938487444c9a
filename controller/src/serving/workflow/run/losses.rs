//! Finds lost tensors of a run.

use millrace_proto::worker as wire;
use millrace_workflow::{TensorIndex, TensorLoss};

use super::WorkflowRunner;
use crate::serving::workflow::release::let_go;
use crate::serving::workflow::values::RunTensor;

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
            let gone =
                value.held().filter(|(_, held)| held.worker.stream_ended.is_cancelled()).map(|(row, _)| row);
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
