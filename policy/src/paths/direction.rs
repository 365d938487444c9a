//! The two directions between the host and GPUs, and things that there is one of for each.

use std::ops::{Index, IndexMut};

/// Which way a host transfer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From host memory.
    ToGpu,
    /// Into host memory.
    FromGpu,
}

impl Direction {
    /// Both of them.
    pub const BOTH: [Self; 2] = [Self::ToGpu, Self::FromGpu];
}

/// One for each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Each<T> {
    /// That of [`Direction::ToGpu`].
    pub to_gpu: T,
    /// That of [`Direction::FromGpu`].
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
