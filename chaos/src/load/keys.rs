//! The functions that writers and readers use. Each function is used for a bounded number of
//! operations, so that the search for a linear order of them stays short. Later a function is deleted, so
//! that the state, and with it the cost of the servers' work, stays the same throughout a run.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use millrace_types::{Digest, FunctionKey, FunctionName, FunctionSpec, TenantName};
use rand::Rng as _;
use rand::rngs::StdRng;

/// Maximum number of operations on a function, before its last deletion.
const OPERATIONS_MAX: u32 = 24;
/// Number of unused functions that stay. An older function is deleted.
const UNUSED_MAX: usize = 256;
/// Number of functions in use at a time: few, so that clients collide.
const IN_USE: usize = 3;
/// The prefix of these functions' names.
pub(super) const PREFIX: &str = "register-";
/// The label with the value that an apply writes.
pub(super) const VALUE: &str = "chaos-value";

#[derive(Debug)]
pub(super) struct Keys {
    /// The model of all these functions.
    pub(super) model: Digest,
    in_use: Mutex<Vec<FunctionSlot>>,
    /// Functions that are no longer in use, the oldest first.
    unused: Mutex<VecDeque<String>>,
    made: AtomicU64,
    /// The last value written to any function.
    value: AtomicU64,
}

#[derive(Debug)]
struct FunctionSlot {
    name: String,
    left: u32,
}

impl Keys {
    pub(super) fn new(model: Digest) -> Self {
        Self {
            model,
            in_use: Mutex::default(),
            unused: Mutex::default(),
            made: AtomicU64::new(0),
            value: AtomicU64::new(0),
        }
    }

    /// Returns the function of the next operation.
    pub(super) fn pick(&self, rng: &mut StdRng) -> String {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        while in_use.len() < IN_USE {
            let name = format!("{PREFIX}{}", self.made.fetch_add(1, Ordering::Relaxed));
            in_use.push(FunctionSlot { name, left: OPERATIONS_MAX });
        }
        let index = rng.random_range(0..in_use.len());
        in_use[index].left -= 1;
        if in_use[index].left > 0 {
            return in_use[index].name.clone();
        }
        let name = in_use.remove(index).name;
        self.unused.lock().unwrap_or_else(PoisonError::into_inner).push_back(name.clone());
        name
    }

    /// Returns a function that is to be deleted, because there are more than [`UNUSED_MAX`].
    pub(super) fn pick_unused(&self) -> Option<String> {
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        if unused.len() > UNUSED_MAX { unused.pop_front() } else { None }
    }

    /// Returns a value that was never written before.
    pub(super) fn value(&self) -> u64 {
        self.value.fetch_add(1, Ordering::Relaxed) + 1
    }
}

pub(super) fn key(name: &str) -> FunctionKey {
    let name = FunctionName::new(name).expect("the harness's names are valid");
    FunctionKey { tenant: TenantName::default(), name }
}

/// Returns the function that an apply of a value asks for.
pub(super) fn spec(name: &str, value: u64) -> FunctionSpec {
    let mut spec = FunctionSpec::new(key(name));
    spec.labels.insert(VALUE.to_owned(), value.to_string());
    spec
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn every_function_is_picked_a_bounded_number_of_times() {
        let keys = Keys::new(Digest::of(b"model"));
        let mut rng = StdRng::seed_from_u64(7);
        let mut counts: BTreeMap<String, u32> = BTreeMap::new();
        for _ in 0..1000 {
            *counts.entry(keys.pick(&mut rng)).or_default() += 1;
        }
        assert!(counts.values().all(|&count| count <= OPERATIONS_MAX), "{counts:?}");
        assert!(counts.values().filter(|&&count| count < OPERATIONS_MAX).count() <= IN_USE, "{counts:?}");
    }

    #[test]
    fn the_oldest_unused_functions_are_deleted_once_there_are_many() {
        let keys = Keys::new(Digest::of(b"model"));
        let mut rng = StdRng::seed_from_u64(7);
        let mut used = BTreeMap::new();
        let mut deleted = Vec::new();
        for _ in 0..OPERATIONS_MAX as usize * 2 * UNUSED_MAX {
            *used.entry(keys.pick(&mut rng)).or_insert(0) += 1;
            deleted.extend(keys.pick_unused());
        }
        assert!(deleted.iter().all(|name| used.remove(name) == Some(OPERATIONS_MAX)));
        assert!((UNUSED_MAX..=UNUSED_MAX + IN_USE).contains(&used.len()), "{}", used.len());
    }
}
