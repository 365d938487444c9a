//! Locations of a request's inputs: how many bytes each GPU of the node has. Only inputs on GPUs of
//! this node count, because inputs from the host or from another node reach all GPUs alike.

use std::hash::{Hash, Hasher};

use millrace_types::{Bytes, GpuIndex};

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
/// that never heard of objects (`core::trace`).
impl Hash for InputLocations {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.iter().for_each(|it| it.hash(state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
