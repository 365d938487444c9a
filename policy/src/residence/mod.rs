//! Counts how long functions are idle in a node's host memory: what the tenth of the GPU's price is
//! paid for (T26; `millrace_types::usage` has the tariff).
//!
//! ```text
//!   hosted, retired, removed          the revisions of a function that are ready here
//!   began, ended, lost                its requests on GPUs
//!        │
//!        ▼
//!   idle(now)                         per function, from here on cumulative
//! ```
//!
//! The clock of a function runs while at least one of its revisions takes requests and none of its
//! requests is on a GPU. A request is on a GPU from the moment it is given to one until it has left
//! it, so waiting for the model to be swapped in is not idle; nor is it billed as busy. However many
//! revisions are kept, a function has one clock.
//!
//! Bounded: a clock for each function ever hosted here, a record for each request on a GPU. Not
//! here: GPU time, which [`crate::admission`] charges with the answer.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{FunctionKey, GpuIndex, Timestamp};

use crate::ids::{FunctionIndex, RequestKey};

/// The idle clocks of a node.
#[derive(Debug, Default)]
pub struct Residence {
    clocks: Vec<(FunctionKey, Clock)>,
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
struct Clock {
    /// Revisions that take requests.
    ready: u32,
    /// Requests on GPUs.
    running: u32,
    /// Since when it runs, while it does.
    since: Option<Timestamp>,
    before: Duration,
}

impl Clock {
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

impl Residence {
    /// A revision takes requests from now on.
    pub fn hosted(&mut self, now: Timestamp, revision: FunctionIndex, function: &FunctionKey) {
        if self.revisions.contains_key(&revision) {
            return;
        }
        let next = self.clocks.len();
        let clock = *self.by_function.entry(function.clone()).or_insert(next);
        if clock == next {
            self.clocks.push((function.clone(), Clock::default()));
        }
        self.revisions.insert(revision, Revision { clock, takes_requests: true });
        self.clocks[clock].1.change(now, |clock| clock.ready += 1);
    }

    /// It takes no more.
    pub fn retired(&mut self, now: Timestamp, revision: FunctionIndex) {
        if let Some(revision) = self.revisions.get_mut(&revision)
            && std::mem::take(&mut revision.takes_requests)
        {
            self.clocks[revision.clock].1.change(now, |clock| clock.ready -= 1);
        }
    }

    /// It is gone, and will be heard of no more.
    pub fn removed(&mut self, now: Timestamp, revision: FunctionIndex) {
        self.retired(now, revision);
        self.revisions.remove(&revision);
    }

    /// A request of a revision was given to a GPU.
    pub fn began(&mut self, now: Timestamp, revision: FunctionIndex, gpu: GpuIndex, key: RequestKey) {
        let Some(&Revision { clock, .. }) = self.revisions.get(&revision) else { return };
        if self.on_gpus.insert((gpu, key), clock).is_none() {
            self.clocks[clock].1.change(now, |clock| clock.running += 1);
        }
    }

    /// It left it.
    pub fn ended(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey) {
        if let Some(clock) = self.on_gpus.remove(&(gpu, key)) {
            self.clocks[clock].1.change(now, |clock| clock.running -= 1);
        }
    }

    /// A GPU lost whatever it had.
    pub fn lost(&mut self, now: Timestamp, gpu: GpuIndex) {
        let lost = self.on_gpus.range((gpu, RequestKey(0))..=(gpu, RequestKey(u64::MAX)));
        for key in lost.map(|(&(_, key), _)| key).collect::<Vec<_>>() {
            self.ended(now, gpu, key);
        }
    }

    /// How long each function was idle here, all in all.
    pub fn idle(&self, now: Timestamp) -> impl Iterator<Item = (&FunctionKey, Duration)> {
        self.clocks.iter().map(move |(function, clock)| (function, clock.idle(now)))
    }
}

#[cfg(test)]
mod tests;
