//! The GPUs that a route crosses, without a heap allocation.

use std::fmt;

use millrace_types::GpuIndex;

/// Links of a route, at most: no loop-free route between eight GPUs is longer.
pub const HOPS_MAX: usize = 7;

/// One to eight GPUs, in the order in which bytes cross them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteHops {
    gpus: [GpuIndex; HOPS_MAX + 1],
    len: u8,
}

impl RouteHops {
    /// Returns the hops over the first of `gpus`, up to the length of a route, or over GPU 0 if
    /// there are none.
    #[must_use]
    pub fn of(gpus: impl IntoIterator<Item = GpuIndex>) -> Self {
        let mut hops = Self { gpus: [GpuIndex(0); HOPS_MAX + 1], len: 0 };
        for (to, gpu) in hops.gpus.iter_mut().zip(gpus) {
            *to = gpu;
            hops.len += 1;
        }
        hops.len = hops.len.max(1);
        hops
    }

    /// Returns the GPUs as a slice.
    #[must_use]
    pub fn as_slice(&self) -> &[GpuIndex] {
        &self.gpus[..self.len()]
    }

    /// Returns the number of GPUs: one more than links.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a route has at least one GPU")]
    pub fn len(&self) -> usize {
        self.len.into()
    }

    /// Returns the source of the bytes.
    #[must_use]
    pub fn first(&self) -> GpuIndex {
        self.gpus[0]
    }

    /// Returns the destination of the bytes.
    #[must_use]
    pub fn last(&self) -> GpuIndex {
        self.gpus[self.len() - 1]
    }

    /// Returns the links, as the pairs of GPUs that they join.
    pub fn links(&self) -> impl Iterator<Item = (GpuIndex, GpuIndex)> {
        self.as_slice().windows(2).map(|pair| (pair[0], pair[1]))
    }
}

impl fmt::Display for RouteHops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first().0)?;
        self.as_slice()[1..].iter().try_for_each(|gpu| write!(f, "-{}", gpu.0))
    }
}

impl fmt::Debug for RouteHops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice().iter().map(|gpu| gpu.0)).finish()
    }
}
