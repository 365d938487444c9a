//! A bounded queue from the control thread to another thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A queue of at most `max` items, from which the first due item is taken. Closing the queue ends the
/// consumer.
#[derive(Debug)]
pub(crate) struct WorkQueue<T> {
    max: usize,
    state: Mutex<QueueState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct QueueState<T> {
    waiting: VecDeque<T>,
    /// Whether the consumer may still work on the last popped item.
    busy: bool,
    closed: bool,
}

impl<T> WorkQueue<T> {
    pub(crate) fn new(max: usize) -> Self {
        let state = QueueState { waiting: VecDeque::new(), busy: false, closed: false };
        Self { max, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds an item, or returns it as an error if the queue is full.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.state();
        if state.waiting.len() >= self.max {
            return Err(item);
        }
        state.waiting.push_back(item);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for the next item. Returns `None` once the queue is closed, even if items are left.
    pub(crate) fn pop(&self) -> Option<T> {
        self.pop_when(|_| Duration::ZERO)
    }

    /// Waits for the first due item. `wait` returns the time until an item is due. Until then the
    /// item stays in the queue, can be removed, and is passed by due items.
    pub(crate) fn pop_when(&self, wait: impl Fn(&T) -> Duration) -> Option<T> {
        let mut state = self.state();
        state.busy = false;
        loop {
            if state.closed {
                return None;
            }
            state = match next(&state.waiting, &wait) {
                Some((place, Duration::ZERO)) => {
                    state.busy = true;
                    return state.waiting.remove(place);
                }
                Some((_, time)) => {
                    let waited = self.changed.wait_timeout(state, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Removes the first queued item for which `wanted` is true.
    pub(crate) fn remove(&self, wanted: impl FnMut(&T) -> bool) -> Option<T> {
        let mut state = self.state();
        let index = state.waiting.iter().position(wanted)?;
        let removed = state.waiting.remove(index);
        self.changed.notify_one();
        removed
    }

    /// Whether no item is queued, and the consumer has asked for the next item after the last one.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state();
        state.waiting.is_empty() && !state.busy
    }

    /// Makes the consumer evaluate `wait` again, because a condition may have changed.
    pub(crate) fn reconsider(&self) {
        // Notifies under the lock. Otherwise the notification could fall between an evaluation of
        // `wait` and the wait that follows.
        let _state = self.state();
        self.changed.notify_one();
    }

    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, QueueState<T>> {
        // Ignores a poisoned lock: no foreign code runs under the lock, so the state is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the index of the next item and the time until that item is due: the first of the items that are
/// due soonest.
fn next<T>(waiting: &VecDeque<T>, wait: impl Fn(&T) -> Duration) -> Option<(usize, Duration)> {
    let mut soonest: Option<(usize, Duration)> = None;
    for (place, item) in waiting.iter().enumerate() {
        let time = wait(item);
        if soonest.is_none_or(|(_, least)| time < least) {
            soonest = Some((place, time));
        }
        if time.is_zero() {
            break;
        }
    }
    soonest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_popped_in_order_and_a_full_queue_returns_the_item() {
        let queue = WorkQueue::new(2);
        assert_eq!((queue.push(1), queue.push(2), queue.push(3)), (Ok(()), Ok(()), Err(3)));
        assert_eq!(queue.pop(), Some(1));
        assert_eq!(queue.push(4), Ok(()));
        assert_eq!(queue.remove(|&item| item == 4), Some(4));
        assert_eq!(queue.remove(|&item| item == 4), None);
        assert_eq!(queue.pop(), Some(2));
    }

    #[test]
    fn a_queue_is_idle_after_the_consumer_returns_for_more() {
        let queue = WorkQueue::new(1);
        assert!(queue.is_idle());
        queue.push(1).unwrap();
        assert!(!queue.is_idle(), "an item is queued");
        assert_eq!(queue.pop(), Some(1));
        assert!(!queue.is_idle(), "the consumer may still work on the item");
        queue.close();
        assert_eq!(queue.pop(), None);
        assert!(queue.is_idle());
    }

    #[test]
    fn an_item_that_is_not_due_can_still_be_removed_or_become_due() {
        let queue = WorkQueue::new(2);
        let due = Mutex::new(false);
        let wait = |item: &u32| {
            let now = *item != 1 || *due.lock().unwrap();
            if now { Duration::ZERO } else { Duration::MAX }
        };
        std::thread::scope(|scope| {
            queue.push(1).unwrap();
            queue.push(2).unwrap();
            let popped = scope.spawn(|| queue.pop_when(wait));
            assert_eq!(queue.remove(|&item| item == 1), Some(1));
            assert_eq!(popped.join().unwrap(), Some(2));
            queue.push(1).unwrap();
            let popped = scope.spawn(|| queue.pop_when(wait));
            *due.lock().unwrap() = true;
            queue.reconsider();
            assert_eq!(popped.join().unwrap(), Some(1));
        });
    }

    /// Items are a name and their wait in seconds.
    #[test]
    fn due_items_are_popped_in_order_before_items_that_are_not_due() {
        let wait = |item: &(char, u64)| Duration::from_secs(item.1);
        let queue = WorkQueue::new(5);
        for item in [('a', 60), ('b', 0), ('c', 30), ('d', 0), ('e', 30)] {
            queue.push(item).unwrap();
        }
        let pop = || queue.pop_when(wait);
        assert_eq!([pop(), pop()], [Some(('b', 0)), Some(('d', 0))]);
        // The result is the first of the items that are due soonest.
        assert_eq!(next(&queue.state().waiting, wait), Some((1, Duration::from_secs(30))));
        assert_eq!(next(&VecDeque::new(), wait), None);
    }

    /// The consumer is already waiting for an item that is due later.
    #[test]
    fn a_due_item_ends_the_wait_for_an_item_that_is_not_due() {
        let queue = WorkQueue::new(2);
        let wait = |&item: &u32| if item == 1 { Duration::MAX } else { Duration::ZERO };
        queue.push(1).unwrap();
        std::thread::scope(|scope| {
            let popped = scope.spawn(|| queue.pop_when(wait));
            queue.push(2).unwrap();
            assert_eq!(popped.join().unwrap(), Some(2));
        });
    }

    #[test]
    fn closing_ends_the_consumer_and_drops_queued_items() {
        let queue = WorkQueue::<u32>::new(1);
        std::thread::scope(|scope| {
            let popped = scope.spawn(|| queue.pop());
            queue.close();
            assert_eq!(popped.join().unwrap(), None);
        });
        assert_eq!((queue.push(1), queue.pop()), (Ok(()), None));
    }
}
