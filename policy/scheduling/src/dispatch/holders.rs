//! GPUs that hold a model. Searches walk through all holders, hundreds in a large domain, far
//! more often than a holder is added or removed, so the holders are a sorted vector.

use millrace_types::GpuIndex;

/// Each GPU once, in index order.
#[derive(Debug, Default)]
pub(super) struct ModelHolders(Vec<GpuIndex>);

impl ModelHolders {
    pub(super) fn insert(&mut self, gpu: GpuIndex) {
        if let Err(place) = self.0.binary_search(&gpu) {
            self.0.insert(place, gpu);
        }
    }

    pub(super) fn remove(&mut self, gpu: GpuIndex) {
        if let Ok(place) = self.0.binary_search(&gpu) {
            self.0.remove(place);
        }
    }

    pub(super) fn contains(&self, gpu: GpuIndex) -> bool {
        self.0.binary_search(&gpu).is_ok()
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = GpuIndex> {
        self.0.iter().copied()
    }

    pub(super) fn first(&self) -> Option<GpuIndex> {
        self.0.first().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
