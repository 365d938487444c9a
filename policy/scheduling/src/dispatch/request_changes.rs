//! Changes of a request that dispatch knows: the locations of its inputs, and the rows of its batch.

use millrace_core::ids::RequestKey;

use super::dispatcher::{Dispatcher, RequestLocation};
use super::inputs::InputLocations;
use super::seats::Assignment;

impl Dispatcher {
    /// Sets the location of a request's inputs.
    pub(super) fn set_inputs(&mut self, key: RequestKey, inputs: InputLocations) {
        if inputs.is_empty() {
            self.inputs.remove(&key);
        } else {
            self.inputs.insert(key, inputs);
        }
    }

    /// Updates the location of a request's inputs, unless the request has left the node.
    pub(super) fn update_inputs(&mut self, key: RequestKey, inputs: InputLocations) {
        if self.places.contains_key(&key) {
            self.set_inputs(key, inputs);
        }
    }

    /// Notes that a request stands for a batch of `rows` rows, or for itself alone; a batch may
    /// grow on a GPU.
    pub(super) fn set_batch(&mut self, key: RequestKey, rows: u32, inputs: InputLocations) {
        self.update_rows(key, rows, &inputs);
        if rows > 1 {
            self.rows.insert(key, rows);
        } else {
            self.rows.remove(&key);
        }
        // The request may have left the node before the end of its batch is announced.
        let known = rows > 1 || self.places.contains_key(&key);
        self.set_inputs(key, if known { inputs } else { InputLocations::NONE });
    }

    /// Updates the rows of a request on a GPU, so that the cost model attributes the run to the
    /// actual number of rows.
    fn update_rows(&mut self, key: RequestKey, rows: u32, inputs: &InputLocations) {
        let Some(&RequestLocation::On(seat)) = self.places.get(&key) else { return };
        let gpu = self.fleet.gpu_of(seat);
        let it = self.fleet.get(gpu);
        let of_key = |held: &&Assignment| held.request.key == key && held.rows != rows;
        let Some(&held) = self.fleet.seat(seat).requests().find(of_key) else { return };
        let run = self.models.run_time_of(held.request.model, it.kind, rows);
        let predicted = run.map(|run| held.swap.saturating_add(run));
        let moves = !self.fleet.move_time(inputs, gpu).is_zero();
        self.fleet.change_seat(seat, |_, it| {
            for held in it.requests_mut().filter(|held| held.request.key == key) {
                (held.rows, held.predicted) = (rows, predicted);
                held.unlike |= moves;
            }
        });
    }

    /// Returns the recorded location of a request's inputs.
    #[cfg(test)]
    pub(crate) fn inputs_of(&self, key: RequestKey) -> InputLocations {
        self.inputs.get(&key).copied().unwrap_or_default()
    }
}
