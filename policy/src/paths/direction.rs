//! The two directions between the host and GPUs, and pairs of values with one for each direction.

use std::ops::{Index, IndexMut};

/// The direction of a host transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From host memory to a GPU.
    ToGpu,
    /// From a GPU to host memory.
    FromGpu,
}

impl Direction {
    /// Both directions.
    pub const BOTH: [Self; 2] = [Self::ToGpu, Self::FromGpu];
}

/// A value for each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Each<T> {
    /// The value for [`Direction::ToGpu`].
    pub to_gpu: T,
    /// The value for [`Direction::FromGpu`].
    pub from_gpu: T,
}

impl<T> Index<Direction> for Each<T> {
    type Output = T;

    fn index(&self, direction: Direction) -> &T {
        match direction {
            Direction::ToGpu => &self.to_gpu,
            Direction::FromGpu => &self.from_gpu,
        }
    }
}

impl<T> IndexMut<Direction> for Each<T> {
    fn index_mut(&mut self, direction: Direction) -> &mut T {
        match direction {
            Direction::ToGpu => &mut self.to_gpu,
            Direction::FromGpu => &mut self.from_gpu,
        }
    }
}
