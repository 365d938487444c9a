//! Which bytes cross which link when. One core of the Node actor; it keeps the state of all links,
//! so that a transfer is given whole paths and never holds one link while it waits for another.
//!
//! A transfer moves in chunks of 2 MiB (D12), granted in batches of five (D13). Per path one batch
//! runs and at most one more is queued, which can be taken back: a link never idles for a message,
//! and a newcomer waits for one batch at most. Batches are paced: the next may begin when the
//! previous would have ended at the link's rate, so a slowed link really is slow.
//!
//! Who is next: the transfer that was served longest ago. A newcomer counts as served two batches
//! ago, so it overtakes only those which were served since: nobody starves.
//!
//! ```text
//! Start, Cancel ───────────────────────► ┌────────┐ ──► Arrived, Ended          to the Gpu
//! Done, Failed (from the path's Link) ─► │ fabric │ ──► Grant, Revoke, Carried  to the Links
//! Down ────────────────────────────────► └────────┘
//! ```

mod lanes;
pub mod link;
mod protocol;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{Bytes, GpuIndex, Timestamp};

pub use self::protocol::{Action, BatchFailure, Cargo, Event, Grant, Outcome};

use self::lanes::{Lane, Path};
use crate::core::Core;
use crate::ids::{BatchId, TransferId};
use crate::memory::BLOCK;

/// Chunks in a batch (D13).
pub const BATCH_CHUNKS: u32 = 5;
/// How much later than planned a batch may begin; after that it is refused and granted again.
pub const START_SLACK: Duration = Duration::from_millis(250);
/// How long after the end of its window a batch that nobody reported counts as failed.
pub const REPORT_SLACK: Duration = Duration::from_secs(5);
/// Failures in a row that end a transfer.
pub const FAILURES_MAX: u32 = 3;
/// Batches that a transfer has out: one runs, one is queued.
const OUT_MAX: usize = 2;

#[derive(Debug)]
struct Batch {
    id: BatchId,
    chunks: Range<u32>,
    /// Its name on the lanes.
    hold: u64,
    /// When it counts as lost.
    give_up: Timestamp,
    revoked: bool,
}

#[derive(Debug)]
struct Transfer {
    gpu: GpuIndex,
    cargo: Cargo,
    /// What is still to be granted, last first.
    waiting: Vec<Range<u32>>,
    /// What is out, in the order granted: the first runs.
    out: Vec<Batch>,
    next_batch: BatchId,
    failures: u32,
    /// When it was served last, and the grant's number to tell equals apart.
    served: (Timestamp, u64),
    /// How it ends once nothing is out, where that is decided already.
    ending: Option<Outcome>,
}

/// All links of a node, towards its GPUs.
#[derive(Debug)]
pub struct Fabric {
    lanes: Vec<Lane>,
    /// By GPU.
    paths: Vec<Path>,
    transfers: BTreeMap<TransferId, Transfer>,
    grants: u64,
}

impl Fabric {
    /// Idle links.
    ///
    /// # Panics
    /// When a GPU has no path from the host: such a topology is not one.
    #[must_use]
    pub fn new(topology: &Topology) -> Self {
        let rate = |link: LinkId| topology.links[link.0 as usize].rate;
        let mut lanes: Vec<Lane> = Vec::new();
        let mut paths = Vec::new();
        for gpu in &topology.gpus {
            let path_rate = gpu.host_path.iter().map(|&link| rate(link)).min();
            let path_rate = path_rate.unwrap_or_else(|| panic!("GPU {} has no host path", gpu.index));
            let mut crossed = Vec::with_capacity(gpu.host_path.len());
            for &link in &gpu.host_path {
                let lane = lanes.iter().position(|lane| lane.link == link).unwrap_or_else(|| {
                    lanes.push(Lane::new(link, rate(link)));
                    lanes.len() - 1
                });
                lanes[lane].crossed_by(path_rate);
                crossed.push(lane);
            }
            paths.push(Path { lanes: crossed, rate: path_rate });
        }
        Self { lanes, paths, transfers: BTreeMap::new(), grants: 0 }
    }

    /// Transfers that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.transfers.len()
    }

    /// The first link of a GPU's path: its Link actor issues the path's grants.
    fn first_link(&self, gpu: GpuIndex) -> Option<LinkId> {
        self.paths[gpu.0 as usize].lanes.first().map(|&lane| self.lanes[lane].link)
    }

    fn start(
        &mut self,
        now: Timestamp,
        transfer: TransferId,
        gpu: GpuIndex,
        cargo: Cargo,
        chunks: Vec<Range<u32>>,
    ) {
        let batch = Bytes(BLOCK.0 * u64::from(BATCH_CHUNKS));
        let head_start = self.paths[gpu.0 as usize].time_for(batch).saturating_mul(2);
        let head_start = u64::try_from(head_start.as_nanos()).unwrap_or(u64::MAX);
        let waiting = chunks.into_iter().rev().filter(|range| !range.is_empty()).collect();
        let transfer_state = Transfer {
            gpu,
            cargo,
            waiting,
            out: Vec::with_capacity(OUT_MAX),
            next_batch: BatchId(0),
            failures: 0,
            served: (Timestamp(now.0.saturating_sub(head_start)), self.grants),
            ending: None,
        };
        self.transfers.insert(transfer, transfer_state);
    }

    /// Takes a batch that ended off its transfer and gives its chunks and its name on the lanes.
    fn take_batch(&mut self, transfer: TransferId, batch: BatchId) -> Option<(Batch, GpuIndex)> {
        let state = self.transfers.get_mut(&transfer)?;
        let place = state.out.iter().position(|out| out.id == batch)?;
        Some((state.out.remove(place), state.gpu))
    }

    fn done(&mut self, transfer: TransferId, batch: BatchId, actions: &mut Vec<Action>) {
        let Some((batch, gpu)) = self.take_batch(transfer, batch) else { return };
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        state.failures = 0;
        let size = state.cargo.span(&batch.chunks).1;
        let Cargo { model, generation, .. } = state.cargo;
        for (place, &lane) in self.paths[gpu.0 as usize].lanes.iter().enumerate() {
            self.lanes[lane].carried(batch.hold);
            if place > 0 {
                actions.push(Action::Carried { link: self.lanes[lane].link, size });
            }
        }
        actions.push(Action::Arrived { gpu, model, generation, chunks: batch.chunks });
        self.end_if_over(transfer, actions);
    }

    fn failed(&mut self, transfer: TransferId, batch: BatchId, why: BatchFailure, actions: &mut Vec<Action>) {
        let Some((batch, gpu)) = self.take_batch(transfer, batch) else { return };
        for &lane in &self.paths[gpu.0 as usize].lanes {
            self.lanes[lane].release(batch.hold);
        }
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        state.waiting.push(batch.chunks);
        if why == BatchFailure::Faulty {
            state.failures += 1;
            if state.failures >= FAILURES_MAX && state.ending.is_none() {
                state.ending = Some(Outcome::Failed);
            }
        }
        self.end_if_over(transfer, actions);
    }

    fn end_if_over(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get(&transfer) else { return };
        if !state.out.is_empty() {
            return;
        }
        let outcome = if state.waiting.is_empty() { Some(Outcome::Complete) } else { state.ending };
        if let Some(outcome) = outcome {
            actions.push(Action::Ended { gpu: state.gpu, transfer, outcome });
            self.transfers.remove(&transfer);
        }
    }

    fn cancel(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        state.ending.get_or_insert(Outcome::Cancelled);
        for place in 1..self.transfers.get(&transfer).map_or(0, |state| state.out.len()) {
            self.revoke(transfer, place, actions);
        }
        self.end_if_over(transfer, actions);
    }

    fn revoke(&mut self, transfer: TransferId, place: usize, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let gpu = state.gpu;
        let Some(batch) = state.out.get_mut(place).filter(|batch| !batch.revoked) else { return };
        batch.revoked = true;
        let batch = batch.id;
        if let Some(link) = self.first_link(gpu) {
            actions.push(Action::Revoke { link, gpu, transfer, batch });
        }
    }

    fn down(&mut self, gpu: GpuIndex) {
        for state in self.transfers.values().filter(|state| state.gpu == gpu) {
            for batch in &state.out {
                for &lane in &self.paths[gpu.0 as usize].lanes {
                    self.lanes[lane].release(batch.hold);
                }
            }
        }
        self.transfers.retain(|_, state| state.gpu != gpu);
    }

    fn lose_unreported(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let overdue = self.transfers.iter().flat_map(|(&transfer, state)| {
            let late = state.out.iter().filter(|batch| batch.give_up <= now);
            late.map(move |batch| (transfer, batch.id))
        });
        for (transfer, batch) in overdue.collect::<Vec<_>>() {
            self.failed(transfer, batch, BatchFailure::Faulty, actions);
        }
    }

    /// Grants whatever can be granted, those served longest ago first.
    fn pump(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        loop {
            let wants = |state: &&Transfer| state.ending.is_none() && !state.waiting.is_empty();
            let takes = |state: &&Transfer| state.out.len() < OUT_MAX && self.path_takes_more(state.gpu);
            let candidates = self.transfers.iter().filter(|(_, state)| wants(state) && takes(state));
            let Some((&next, _)) = candidates.min_by_key(|(_, state)| state.served) else { break };
            self.grant(now, next, actions);
        }
        self.make_way(actions);
    }

    /// Whether a path takes another batch: one runs on it, one is queued, and each of its lanes
    /// agrees.
    fn path_takes_more(&self, gpu: GpuIndex) -> bool {
        let same = self.transfers.values().filter(|state| state.gpu == gpu);
        let out: usize = same.map(|state| state.out.len()).sum();
        out < OUT_MAX && self.paths[gpu.0 as usize].lanes.iter().all(|&lane| self.lanes[lane].takes_more())
    }

    fn grant(&mut self, now: Timestamp, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(mut range) = state.waiting.pop() else { return };
        if range.len() > BATCH_CHUNKS as usize {
            state.waiting.push(range.start + BATCH_CHUNKS..range.end);
            range.end = range.start + BATCH_CHUNKS;
        }
        self.grants += 1;
        let hold = self.grants;
        let path = &self.paths[state.gpu.0 as usize];
        let size = state.cargo.span(&range).1;
        let free = path.lanes.iter().map(|&lane| self.lanes[lane].free_at()).fold(now, Timestamp::max);
        for &lane in &path.lanes {
            self.lanes[lane].hold(hold, free, size);
        }
        let not_after = free + START_SLACK;
        let give_up = not_after + path.time_for(size).saturating_mul(2) + REPORT_SLACK;
        let batch = state.next_batch;
        state.next_batch = BatchId(batch.0 + 1);
        state.served = (now, hold);
        state.out.push(Batch { id: batch, chunks: range.clone(), hold, give_up, revoked: false });
        let (gpu, cargo) = (state.gpu, state.cargo);
        let grant = Grant { transfer, batch, gpu, cargo, chunks: range, not_before: free, not_after };
        if let Some(link) = self.first_link(gpu) {
            actions.push(Action::Grant { link, grant });
        }
    }

    /// Takes queued batches back for transfers that have nothing out and find their path full.
    fn make_way(&mut self, actions: &mut Vec<Action>) {
        let stuck = |state: &&Transfer| {
            state.out.is_empty() && state.ending.is_none() && !self.path_takes_more(state.gpu)
        };
        let stuck: Vec<_> =
            self.transfers.values().filter(stuck).map(|state| (state.gpu, state.served)).collect();
        for (gpu, served) in stuck {
            let in_the_way =
                |state: &Transfer| state.out.len() == OUT_MAX && self.shares_a_full_lane(gpu, state.gpu);
            let mut blockers = self.transfers.iter().filter(|(_, state)| in_the_way(state));
            // One at a time: who waits needs one place.
            if blockers.clone().any(|(_, state)| state.out[OUT_MAX - 1].revoked) {
                continue;
            }
            let served_since = blockers.find(|(_, state)| state.served > served);
            if let Some(transfer) = served_since.map(|(&transfer, _)| transfer) {
                self.revoke(transfer, OUT_MAX - 1, actions);
            }
        }
    }

    fn shares_a_full_lane(&self, a: GpuIndex, b: GpuIndex) -> bool {
        let (a_lanes, b_lanes) = (&self.paths[a.0 as usize].lanes, &self.paths[b.0 as usize].lanes);
        a == b || a_lanes.iter().any(|lane| b_lanes.contains(lane) && !self.lanes[*lane].takes_more())
    }
}

impl Core for Fabric {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Start { transfer, gpu, cargo, chunks } => {
                self.start(now, transfer, gpu, cargo, chunks);
                self.end_if_over(transfer, actions);
            }
            Event::Cancel { transfer } => self.cancel(transfer, actions),
            Event::Done { transfer, batch } => self.done(transfer, batch, actions),
            Event::Failed { transfer, batch, why } => self.failed(transfer, batch, why, actions),
            Event::Down { gpu } => self.down(gpu),
            Event::Tick => self.lose_unreported(now, actions),
        }
        self.pump(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let out = self.transfers.values().flat_map(|state| &state.out);
        out.map(|batch| batch.give_up).min()
    }
}

#[cfg(test)]
mod tests;
