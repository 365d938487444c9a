//! One link in one direction, as the fabric books it: how many batches are out on it, and until
//! when it is taken.

use std::time::Duration;

use millrace_types::topology::LinkId;
use millrace_types::{Bytes, BytesPerSec, Timestamp};

/// Batches queued behind the running ones of a lane.
const QUEUED_MAX: usize = 1;

/// A batch's hold on a lane.
#[derive(Debug, Clone, Copy)]
struct Hold {
    batch: u64,
    until: Timestamp,
}

/// A link in one direction.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) link: LinkId,
    rate: BytesPerSec,
    /// Batches that can cross at full speed at one time: more than one where the lane is faster
    /// than the paths that cross it.
    width: usize,
    holds: Vec<Hold>,
    /// Until when batches that have ended would have taken it at its rate.
    floor: Timestamp,
}

impl Lane {
    pub(super) fn new(link: LinkId, rate: BytesPerSec) -> Self {
        Self { link, rate, width: 1, holds: Vec::new(), floor: Timestamp::ZERO }
    }

    /// Notes that a path of this rate crosses the lane.
    pub(super) fn crossed_by(&mut self, path_rate: BytesPerSec) {
        let times = self.rate.0.div_ceil(path_rate.0.max(1));
        self.width = self.width.max(usize::try_from(times).unwrap_or(usize::MAX));
    }

    /// Whether another batch may be granted on it: one runs, or as many as it is wide, and one
    /// more is queued, so that it never idles for a message.
    pub(super) fn takes_more(&self) -> bool {
        self.holds.len() < self.width.saturating_add(QUEUED_MAX)
    }

    /// From when on it is free, at its rate.
    pub(super) fn free_at(&self) -> Timestamp {
        self.holds.iter().map(|hold| hold.until).fold(self.floor, Timestamp::max)
    }

    pub(super) fn hold(&mut self, batch: u64, start: Timestamp, size: Bytes) {
        self.holds.push(Hold { batch, until: start + self.rate.time_for(size) });
    }

    /// The batch has crossed: its time stays taken, so that the next is paced.
    pub(super) fn carried(&mut self, batch: u64) {
        if let Some(hold) = self.take(batch) {
            self.floor = self.floor.max(hold.until);
        }
    }

    /// The batch will not cross: its time is free again.
    pub(super) fn release(&mut self, batch: u64) {
        self.take(batch);
    }

    fn take(&mut self, batch: u64) -> Option<Hold> {
        let place = self.holds.iter().position(|hold| hold.batch == batch)?;
        Some(self.holds.swap_remove(place))
    }

    #[cfg(test)]
    pub(super) fn outstanding(&self) -> usize {
        self.holds.len()
    }

    #[cfg(test)]
    pub(super) fn width(&self) -> usize {
        self.width
    }
}

/// The lanes that a GPU's models cross from the host, narrowest rate included.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) lanes: Vec<usize>,
    pub(super) rate: BytesPerSec,
}

impl Path {
    /// How long a batch takes from end to end.
    pub(super) fn time_for(&self, size: Bytes) -> Duration {
        self.rate.time_for(size)
    }
}
