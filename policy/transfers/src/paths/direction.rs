//! The two directions between the host and GPUs, and pairs of values with one for each direction.

use std::ops::{Index, IndexMut};

/// The direction of a host transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostDirection {
    /// From host memory to a GPU.
    ToGpu,
    /// From a GPU to host memory.
    FromGpu,
}

impl HostDirection {
    /// Both directions.
    pub const BOTH: [Self; 2] = [Self::ToGpu, Self::FromGpu];
}

/// A value for each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PerDirection<T> {
    /// The value for [`HostDirection::ToGpu`].
    pub to_gpu: T,
    /// The value for [`HostDirection::FromGpu`].
    pub from_gpu: T,
}

impl<T> Index<HostDirection> for PerDirection<T> {
    type Output = T;

    fn index(&self, direction: HostDirection) -> &T {
        match direction {
            HostDirection::ToGpu => &self.to_gpu,
            HostDirection::FromGpu => &self.from_gpu,
        }
    }
}

impl<T> IndexMut<HostDirection> for PerDirection<T> {
    fn index_mut(&mut self, direction: HostDirection) -> &mut T {
        match direction {
            HostDirection::ToGpu => &mut self.to_gpu,
            HostDirection::FromGpu => &mut self.from_gpu,
        }
    }
}
