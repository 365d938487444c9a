//! Counts the time that functions are idle in a node's host memory. Idle residence costs a tenth of
//! the GPU's price (T26; `millrace_types::usage` has the tariff).
//!
//! ```text
//!   hosted, retired, removed          the revisions of a function that are ready here
//!   began, ended, lost                its requests on GPUs
//!        │
//!        ▼
//!   idle(now)                         per function, from here on cumulative
//! ```
//!
//! The clock of a function runs while at least one revision takes requests and no request of the
//! function is on a GPU. A request is on a GPU from the assignment to the GPU until the request has
//! left the GPU. So the time that a request waits for a model to be swapped in is not idle; nor is
//! this time billed as busy. A function has a single clock for any number of revisions.
//!
//! Bounds: a clock for each function ever hosted here, and a record for each request on a GPU.
//! Absent: GPU time, which [`crate::admission`] charges with the answer.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{FunctionKey, GpuIndex, Timestamp};

use millrace_core::ids::{FunctionIndex, RequestKey};

/// The idle clocks of a node.
#[derive(Debug, Default)]
pub struct IdleResidenceMeter {
    clocks: Vec<(FunctionKey, IdleClock)>,
    by_function: BTreeMap<FunctionKey, usize>,
    revisions: BTreeMap<FunctionIndex, Revision>,
    on_gpus: BTreeMap<(GpuIndex, RequestKey), usize>,
}

#[derive(Debug, Clone, Copy)]
struct Revision {
    clock: usize,
    takes_requests: bool,
}

#[derive(Debug, Default)]
struct IdleClock {
    /// Number of revisions that take requests.
    ready: u32,
    /// Number of requests on GPUs.
    running: u32,
    /// Start of the current idle time; `None` while the clock stands.
    since: Option<Timestamp>,
    /// Idle time up to the last stop of the clock.
    before: Duration,
}

impl IdleClock {
    fn change(&mut self, now: Timestamp, change: impl FnOnce(&mut Self)) {
        change(self);
        match (self.since, self.ready > 0 && self.running == 0) {
            (None, true) => self.since = Some(now),
            (Some(since), false) => {
                self.before += now.since(since);
                self.since = None;
            }
            _ => {}
        }
    }

    fn idle(&self, now: Timestamp) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now.since(since))
    }
}

impl IdleResidenceMeter {
    /// Records that a revision takes requests from now on.
    pub fn hosted(&mut self, now: Timestamp, revision: FunctionIndex, function: &FunctionKey) {
        if self.revisions.contains_key(&revision) {
            return;
        }
        let next = self.clocks.len();
        let clock = *self.by_function.entry(function.clone()).or_insert(next);
        if clock == next {
            self.clocks.push((function.clone(), IdleClock::default()));
        }
        self.revisions.insert(revision, Revision { clock, takes_requests: true });
        self.clocks[clock].1.change(now, |clock| clock.ready += 1);
    }

    /// Records that a revision takes no more requests.
    pub fn retired(&mut self, now: Timestamp, revision: FunctionIndex) {
        if let Some(revision) = self.revisions.get_mut(&revision)
            && std::mem::take(&mut revision.takes_requests)
        {
            self.clocks[revision.clock].1.change(now, |clock| clock.ready -= 1);
        }
    }

    /// Removes a revision. No request of it begins from now on.
    pub fn removed(&mut self, now: Timestamp, revision: FunctionIndex) {
        self.retired(now, revision);
        self.revisions.remove(&revision);
    }

    /// Records that a request of a revision was assigned to a GPU.
    pub fn began(&mut self, now: Timestamp, revision: FunctionIndex, gpu: GpuIndex, key: RequestKey) {
        let Some(&Revision { clock, .. }) = self.revisions.get(&revision) else { return };
        if self.on_gpus.insert((gpu, key), clock).is_none() {
            self.clocks[clock].1.change(now, |clock| clock.running += 1);
        }
    }

    /// Records that a request left a GPU.
    pub fn ended(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey) {
        if let Some(clock) = self.on_gpus.remove(&(gpu, key)) {
            self.clocks[clock].1.change(now, |clock| clock.running -= 1);
        }
    }

    /// Records that a GPU lost all its requests.
    pub fn lost(&mut self, now: Timestamp, gpu: GpuIndex) {
        let lost = self.on_gpus.range((gpu, RequestKey(0))..=(gpu, RequestKey(u64::MAX)));
        for key in lost.map(|(&(_, key), _)| key).collect::<Vec<_>>() {
            self.ended(now, gpu, key);
        }
    }

    /// Returns the total idle time of each function.
    pub fn idle(&self, now: Timestamp) -> impl Iterator<Item = (&FunctionKey, Duration)> {
        self.clocks.iter().map(move |(function, clock)| (function, clock.idle(now)))
    }
}

#[cfg(test)]
mod tests;
