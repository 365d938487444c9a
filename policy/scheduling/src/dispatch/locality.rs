//! Data locality: how long bringing a request's inputs to a GPU takes (D06, D07, D19). A workflow
//! step then runs where the step before left its output, unless the policy has a stronger reason for
//! another GPU.
//!
//! The FaaSTube paper places a workflow's functions before requests arrive, so that functions that
//! exchange data share fast links (MAPA). Here the GPU is chosen when a request arrives, and so is
//! this locality.

use std::time::Duration;

use millrace_types::{Bytes, GpuIndex};

use super::fleet::GpuTable;
use super::inputs::InputLocations;
use super::size_rank::SizeRank;
use millrace_core::ids::SeatIndex;

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

    /// Returns the first idle seat on a GPU of at least this rank; among GPUs of the same `class`, a
    /// seat of the GPU that the inputs reach soonest. Examines the first idle seat, the GPUs that
    /// have some of the inputs, and the GPUs that routes lead to from there: to all others the inputs
    /// travel over the host.
    pub(super) fn nearest_idle<C: Ord>(
        &self,
        inputs: &InputLocations,
        rank: SizeRank,
        class: impl Fn(GpuIndex) -> C,
    ) -> Option<SeatIndex> {
        let first = self.first_idle(rank)?;
        if inputs.is_empty() {
            return Some(first);
        }
        let near = self.near(inputs).filter_map(|gpu| self.idle_seat(gpu, rank));
        let key = |&seat: &SeatIndex| {
            let gpu = self.gpu_of(seat);
            (class(gpu), self.move_time(inputs, gpu), self.idle_place(seat), seat)
        };
        near.chain([first]).min_by_key(key)
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
    use millrace_transfers::paths::PairRate;
    use millrace_types::BytesPerSec;

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
