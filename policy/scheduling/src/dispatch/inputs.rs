//! Data locality: how many bytes of a request's inputs each GPU of the node has, and how long
//! bringing them to another GPU takes (D06, D07, D19). A workflow step then runs where the step
//! before left its output, unless the policy has a stronger reason for another GPU.
//!
//! The FaaSTube paper places a workflow's functions before requests arrive, so that functions that
//! exchange data share fast links (MAPA). Here the GPU is chosen when a request arrives, and so is
//! this locality. Only inputs on GPUs of this node count, because inputs from the host or from
//! another node reach all GPUs alike.

use std::hash::{Hash, Hasher};
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex};

use super::fleet::GpuTable;
use super::gpus::Assignment;
use super::queue::SizeRank;
use super::{Dispatcher, RequestLocation};
use millrace_core::ids::RequestKey;

/// Maximum number of GPUs listed for a request's inputs; GPUs with the least bytes are omitted. A
/// step with inputs from more GPUs runs on a listed GPU, and most of its data crosses links on any
/// GPU.
pub const INPUT_GPUS_MAX: usize = 4;

/// Bytes of a request's inputs on each GPU of the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InputLocations {
    /// GPUs in descending order of bytes, each once; unused entries have zero bytes.
    on: [(GpuIndex, Bytes); INPUT_GPUS_MAX],
}

impl InputLocations {
    /// Inputs of which none is on a GPU.
    pub const NONE: Self = Self { on: [(GpuIndex(0), Bytes::ZERO); INPUT_GPUS_MAX] };

    /// Adds up pieces on GPUs, in any order.
    #[must_use]
    pub fn of(pieces: impl IntoIterator<Item = (GpuIndex, Bytes)>) -> Self {
        let mut all: Vec<(GpuIndex, Bytes)> = Vec::new();
        for (gpu, bytes) in pieces.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO) {
            match all.iter_mut().find(|(known, _)| *known == gpu) {
                Some((_, sum)) => *sum = Bytes(sum.0.saturating_add(bytes.0)),
                None => all.push((gpu, bytes)),
            }
        }
        all.sort_unstable_by_key(|&(gpu, bytes)| (u64::MAX - bytes.0, gpu));
        let mut inputs = Self::NONE;
        inputs.on.iter_mut().zip(all).for_each(|(place, it)| *place = it);
        inputs
    }

    /// Returns the inputs of both requests.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        if other.is_empty() { self } else { Self::of(self.iter().chain(other.iter())) }
    }

    /// Returns whether no GPU has any of the inputs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Returns the GPUs that have some of the inputs, most bytes first.
    pub fn iter(&self) -> impl Iterator<Item = (GpuIndex, Bytes)> + use<> {
        self.on.into_iter().take_while(|(_, bytes)| *bytes > Bytes::ZERO)
    }
}

/// Empty inputs hash to nothing, so that a node without objects has the same event trace as a node
/// that never heard of objects (`policy::trace`).
impl Hash for InputLocations {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.iter().for_each(|it| it.hash(state));
    }
}

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
        let Some(&RequestLocation::On(gpu)) = self.places.get(&key) else { return };
        let it = self.fleet.get(gpu);
        let of_key = |held: &&Assignment| held.request.key == key && held.rows != rows;
        let Some(&held) = it.running.iter().chain(&it.ahead).find(of_key) else { return };
        let run = self.models.run_time_of(held.request.model, it.kind, rows);
        let predicted = run.map(|run| held.swap.saturating_add(run));
        let moves = !self.fleet.move_time(inputs, gpu).is_zero();
        self.fleet.change(gpu, |it| {
            for held in it.running.iter_mut().chain(&mut it.ahead).filter(|held| held.request.key == key) {
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

impl GpuTable {
    /// Returns the time of bringing inputs to a GPU. Inputs travel over all NVLink routes from each
    /// GPU that has some, at the rate of otherwise idle links (D20). Inputs without a route travel
    /// over the host, which receives all bytes before forwarding the first.
    pub(super) fn move_time(&self, inputs: &InputLocations, to: GpuIndex) -> Duration {
        let host = |gpu: GpuIndex, bytes| self.get(gpu).host_rate.time_for(bytes);
        let time = |(from, bytes): (GpuIndex, Bytes)| match self.way(from, to) {
            Some(rate) => rate.time_for(bytes),
            None => host(from, bytes).saturating_add(host(to, bytes)),
        };
        inputs.iter().filter(|&(from, _)| from != to).map(time).fold(Duration::ZERO, Duration::saturating_add)
    }

    /// Returns the first idle GPU of at least this rank; among GPUs of the same `class`, the GPU
    /// that the inputs reach soonest. Examines the first idle GPU, the GPUs that have some of the
    /// inputs, and the GPUs that routes lead to from there: to all others the inputs travel over
    /// the host.
    pub(super) fn nearest_idle<C: Ord>(
        &self,
        inputs: &InputLocations,
        rank: SizeRank,
        class: impl Fn(GpuIndex) -> C,
    ) -> Option<GpuIndex> {
        let first = self.first_idle(rank)?;
        if inputs.is_empty() {
            return Some(first);
        }
        let near = self.near(inputs).filter(|&gpu| self.takes_now(gpu, rank));
        let key = |gpu| (class(gpu), self.move_time(inputs, gpu), self.idle_place(gpu), gpu);
        near.chain([first]).min_by_key(|&gpu| key(gpu))
    }

    /// Returns the GPUs that have some of the inputs and the GPUs that routes lead to from there;
    /// may repeat a GPU.
    pub(super) fn near(&self, inputs: &InputLocations) -> impl Iterator<Item = GpuIndex> {
        inputs.iter().flat_map(|(gpu, _)| std::iter::once(gpu).chain(self.reached(gpu).iter().copied()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::config::{Config, GpuConfig};
    use crate::dispatch::fleet::IdleOrder;
    use crate::dispatch::queue::SizeRank;
    use millrace_transfers::paths::PairRate;
    use millrace_types::BytesPerSec;

    fn on(pieces: &[(u32, u64)]) -> InputLocations {
        InputLocations::of(pieces.iter().map(|&(gpu, mib)| (GpuIndex(gpu), Bytes::mib(mib))))
    }

    #[test]
    fn inputs_sum_pieces_by_gpu_and_list_the_gpus_with_most_bytes() {
        let told = |inputs: InputLocations| {
            inputs.iter().map(|(gpu, bytes)| (gpu.0, bytes.0 >> 20)).collect::<Vec<_>>()
        };
        assert_eq!(told(on(&[(3, 1), (0, 0), (1, 2), (3, 2)])), [(3, 3), (1, 2)]);
        let many = on(&[(0, 1), (1, 5), (2, 1), (3, 4), (4, 3), (5, 2)]);
        assert_eq!(told(many), [(1, 5), (3, 4), (4, 3), (5, 2)]);
        assert_eq!(told(many.plus(on(&[(5, 9)]))), [(5, 11), (1, 5), (3, 4), (4, 3)]);
        assert!(on(&[(7, 0)]).is_empty() && on(&[]) == InputLocations::NONE);
        assert_eq!(InputLocations::NONE.plus(many), many);
    }

    #[test]
    fn move_time_uses_the_nvlink_route_or_both_host_links() {
        let gpus = [1, 1, 2].map(|gb| GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(gb)));
        let ways = vec![PairRate { from: GpuIndex(0), to: GpuIndex(1), rate: BytesPerSec::gb(10) }];
        let config = Config { ways, ..Config::new(gpus.to_vec(), 1) };
        let fleet = GpuTable::new(&config, &[SizeRank(0); 3], IdleOrder::Emptiest);
        let inputs = InputLocations::of([(GpuIndex(0), Bytes(10_000_000)), (GpuIndex(2), Bytes(4_000_000))]);
        let micros = |to| fleet.move_time(&inputs, GpuIndex(to)).as_micros();
        assert_eq!([micros(0), micros(1), micros(2)], [2_000 + 4_000, 1_000 + 2_000 + 4_000, 10_000 + 5_000]);
        assert_eq!(fleet.move_time(&InputLocations::NONE, GpuIndex(1)), Duration::ZERO);
    }
}
