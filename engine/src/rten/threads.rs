//! The host threads of a queue's launches, which stand for the SMs of the GPU.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use millrace_types::slices::SmShare;
use rten::ThreadPool;

/// The threads of a queue: a pool for launches on the whole GPU, and a smaller pool for each number of
/// threads that a restricted launch used. The smaller pools are kept for later launches.
#[derive(Debug)]
pub(super) struct QueueThreads {
    count: NonZeroUsize,
    own: Arc<ThreadPool>,
    /// Smaller pools by number of threads.
    smaller: BTreeMap<usize, Arc<ThreadPool>>,
}

impl QueueThreads {
    pub(super) fn new(count: NonZeroUsize) -> Self {
        let own = Arc::new(ThreadPool::with_num_threads(count.get()));
        Self { count, own, smaller: BTreeMap::new() }
    }

    /// Returns the pool of launches on the whole GPU.
    pub(super) fn own(&self) -> Arc<ThreadPool> {
        Arc::clone(&self.own)
    }

    /// Returns the pool of launches on these SMs. The pool is created on first use.
    pub(super) fn for_share(&mut self, on: SmShare) -> Arc<ThreadPool> {
        let count = threads_of(self.count, on);
        if count == self.count.get() {
            // A launch from `enter` then needs no change of thread.
            return self.own();
        }
        let pool = || Arc::new(ThreadPool::with_num_threads(count));
        Arc::clone(self.smaller.entry(count).or_insert_with(pool))
    }
}

/// Returns the share of these threads that stands for the SMs, rounded up and at least 1.
fn threads_of(threads: NonZeroUsize, on: SmShare) -> usize {
    threads.get().saturating_mul(usize::from(on.units())).div_ceil(usize::from(on.whole())).max(1)
}

#[cfg(test)]
mod tests {
    use millrace_types::slices::{SmPercent, UnitSet};

    use super::*;

    fn block(width: u8) -> SmShare {
        SmShare::Block(UnitSet::block(0, width).unwrap())
    }

    fn cap(percent: u8) -> SmShare {
        SmShare::Cap(SmPercent::new(percent).unwrap())
    }

    #[test]
    fn a_share_of_the_threads_is_rounded_up_and_at_least_one() {
        let threads = |count, on| threads_of(NonZeroUsize::new(count).unwrap(), on);
        assert_eq!([1, 2, 4, 8, 16].map(|width| threads(4, block(width))), [1, 1, 1, 2, 4]);
        assert_eq!([1, 2, 4, 8, 16].map(|width| threads(1, block(width))), [1; 5]);
        assert_eq!([1, 25, 26, 75, 100].map(|percent| threads(4, cap(percent))), [1, 1, 2, 3, 4]);
        assert_eq!(threads(32, block(1)), 2);
    }

    #[test]
    fn a_pool_is_kept_for_each_number_of_threads() {
        let mut threads = QueueThreads::new(NonZeroUsize::new(4).unwrap());
        let half = threads.for_share(block(8));
        assert!(Arc::ptr_eq(&threads.for_share(cap(50)), &half));
        assert!(!Arc::ptr_eq(&threads.for_share(cap(25)), &half));
        assert_eq!(threads.smaller.keys().copied().collect::<Vec<_>>(), [1, 2]);
        for whole in [block(16), cap(100), cap(76)] {
            assert!(Arc::ptr_eq(&threads.for_share(whole), &threads.own()));
        }
    }
}
