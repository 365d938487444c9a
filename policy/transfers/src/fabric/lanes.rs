//! One direction of a link, as the fabric books the link: the number of batches in flight and the
//! time until which the lane is busy. This module also maps each route to the crossed lanes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::topology::{LinkId, LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};

use crate::paths::{HostDirection, RouteHops};

/// Batches of a transfer in flight on a route: a running batch and a queued batch.
pub(super) const OUT_MAX: usize = 2;

/// Batches queued behind the running batches of a lane.
const QUEUED_MAX: usize = 1;
/// Tracks of a lane at most, even if the lane is much faster than the paths that cross it.
const TRACKS_MAX: u64 = 64;

/// The time that a batch occupies on a lane.
#[derive(Debug, Clone, Copy)]
struct LaneReservation {
    batch: u64,
    track: usize,
    until: Timestamp,
}

/// One direction of a link. A lane that is faster than the paths over the lane has a track for each
/// path that can cross side by side at full speed.
#[derive(Debug)]
pub(super) struct LinkLane {
    pub(super) link: LinkId,
    /// The direction of a host link. Both directions of an NVLink lead to a GPU, so both are
    /// `ToGpu`.
    pub(super) direction: HostDirection,
    rate: BytesPerSec,
    /// By track: the time until which batches that have ended would have occupied the track at the
    /// track's rate.
    tracks: Vec<Timestamp>,
    holds: Vec<LaneReservation>,
    /// The number of batches that may be in flight on all lanes that lead to this lane, if this
    /// lane can carry as much as all of the others together; else 0.
    fed: usize,
    /// The number of routes of objects that cross the lane now.
    routes: usize,
}

impl LinkLane {
    pub(super) fn new(link: LinkId, direction: HostDirection, rate: BytesPerSec) -> Self {
        Self { link, direction, rate, tracks: vec![Timestamp::ZERO], holds: Vec::new(), fed: 0, routes: 0 }
    }

    /// Counts an object's route that crosses the lane from now on.
    pub(super) fn enter(&mut self) {
        self.routes += 1;
    }

    /// Removes a route that no longer crosses the lane from the count.
    pub(super) fn leave(&mut self) {
        self.routes -= 1;
    }

    /// Adds tracks for a path of this rate that crosses the lane.
    pub(super) fn crossed_by(&mut self, path_rate: BytesPerSec) {
        let tracks = (self.rate.0 / path_rate.0.max(1)).clamp(1, TRACKS_MAX);
        self.tracks.resize(self.tracks.len().max(tracks as usize), Timestamp::ZERO);
    }

    /// Whether another batch may be granted on the lane. A batch runs on each track and another
    /// batch is queued, so that the lane never idles while a message is in flight. A lane that
    /// carries as much as all preceding lanes never makes a batch wait. Each route of an object may
    /// have as many batches in flight as a track has: a route that is slower elsewhere leaves part
    /// of the lane to the others.
    pub(super) fn takes_more(&self) -> bool {
        self.holds.len() < self.holds_max()
    }

    pub(super) fn holds_max(&self) -> usize {
        (self.tracks.len() + QUEUED_MAX).max(self.fed).max(self.routes * OUT_MAX)
    }

    /// Returns the time from which the lane is idle, after the batches that crossed at the lane's
    /// rate; `None` while a batch is in flight.
    pub(super) fn idle_from(&self) -> Option<Timestamp> {
        let free = self.tracks.iter().copied().max();
        free.filter(|_| self.holds.is_empty())
    }

    /// Returns the time from which a batch can cross the lane.
    pub(super) fn free_at(&self) -> Timestamp {
        let free = (0..self.tracks.len()).map(|track| self.track_free_at(track));
        free.min().unwrap_or_default()
    }

    fn track_free_at(&self, track: usize) -> Timestamp {
        let held = self.holds.iter().filter(|hold| hold.track == track);
        held.map(|hold| hold.until).fold(self.tracks[track], Timestamp::max)
    }

    /// Occupies a track from `start` on. Of the tracks that are free by then, the track that has
    /// been free for the shortest time is chosen, so that the others stay open for batches that can
    /// begin sooner.
    pub(super) fn hold(&mut self, batch: u64, start: Timestamp, size: Bytes) {
        let rank = |&track: &usize| {
            let free = self.track_free_at(track);
            if free <= start { (0, start.since(free)) } else { (1, free.since(start)) }
        };
        let track = (0..self.tracks.len()).min_by_key(rank).unwrap_or_default();
        let rate = BytesPerSec(self.rate.0 / self.tracks.len() as u64);
        self.holds.push(LaneReservation { batch, track, until: start + rate.time_for(size) });
    }

    /// Ends the hold of a batch that has crossed. Its time stays occupied, so that the next batch
    /// is paced.
    pub(super) fn carried(&mut self, batch: u64) {
        if let Some(hold) = self.take(batch) {
            self.tracks[hold.track] = self.tracks[hold.track].max(hold.until);
        }
    }

    /// Ends the hold of a batch that will not cross, and frees its time.
    pub(super) fn release(&mut self, batch: u64) {
        self.take(batch);
    }

    fn take(&mut self, batch: u64) -> Option<LaneReservation> {
        let place = self.holds.iter().position(|hold| hold.batch == batch)?;
        Some(self.holds.swap_remove(place))
    }

    #[cfg(test)]
    pub(super) fn outstanding(&self) -> usize {
        self.holds.len()
    }

    #[cfg(test)]
    pub(super) fn routes(&self) -> usize {
        self.routes
    }
}

/// The way that bytes take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TransferRoute {
    /// Between the host and a GPU.
    Host(HostDirection, GpuIndex),
    /// From GPU to GPU, directly or over other GPUs; both ends included.
    Over(RouteHops),
    /// Between the host and a GPU over another GPU's host path, and over NVLinks between the two
    /// GPUs. Both GPUs are included, in the order in which bytes cross them.
    Forwarded(HostDirection, RouteHops),
}

impl TransferRoute {
    /// Returns the route over the NVLink that joins two GPUs.
    pub(super) fn direct(from: GpuIndex, to: GpuIndex) -> Self {
        Self::Over(RouteHops::of([from, to]))
    }

    /// Returns the GPU whose executor copies: the destination, or the source of data for the host.
    pub(super) fn gpu(&self) -> GpuIndex {
        match self {
            Self::Host(_, gpu) => *gpu,
            Self::Forwarded(HostDirection::FromGpu, hops) => hops.first(),
            Self::Over(hops) | Self::Forwarded(HostDirection::ToGpu, hops) => hops.last(),
        }
    }

    /// Returns the GPUs of a route between GPUs; `None` for a route to or from the host.
    pub(super) fn hops(&self) -> Option<RouteHops> {
        match self {
            Self::Host(..) | Self::Forwarded(..) => None,
            Self::Over(hops) => Some(*hops),
        }
    }

    /// Returns the GPUs that a forwarded host transfer crosses, its own GPU included; `None` if no
    /// other GPU forwards.
    pub(super) fn forwarded(&self) -> Option<RouteHops> {
        match self {
            Self::Host(..) | Self::Over(_) => None,
            Self::Forwarded(_, hops) => Some(*hops),
        }
    }

    /// Returns the direction of a route between the host and a GPU that no other GPU forwards.
    pub(super) fn host_way(&self) -> Option<HostDirection> {
        match self {
            Self::Host(direction, _) => Some(*direction),
            Self::Over(_) | Self::Forwarded(..) => None,
        }
    }
}

/// Returns the lanes of a node, and the path of each route.
///
/// # Panics
/// If a GPU has no path from the host: such a topology is invalid.
pub(super) fn lanes_and_paths(topology: &Topology) -> (Vec<LinkLane>, BTreeMap<TransferRoute, LanePath>) {
    let rate = |link: LinkId| topology.links[link.0 as usize].rate;
    let mut lanes: Vec<LinkLane> = Vec::new();
    let mut paths = BTreeMap::new();
    for gpu in &topology.gpus {
        let path_rate = gpu.host_path.iter().map(|&link| rate(link)).min();
        let path_rate = path_rate.unwrap_or_else(|| panic!("GPU {} has no host path", gpu.index));
        // The directions of a link do not share its rate.
        for direction in HostDirection::BOTH {
            let mut crossed = Vec::with_capacity(gpu.host_path.len());
            for &link in &gpu.host_path {
                let found = lanes.iter().position(|it| (it.link, it.direction) == (link, direction));
                let lane = found.unwrap_or_else(|| {
                    lanes.push(LinkLane::new(link, direction, rate(link)));
                    lanes.len() - 1
                });
                lanes[lane].crossed_by(path_rate);
                crossed.push(lane);
            }
            paths.insert(
                TransferRoute::Host(direction, gpu.index),
                LanePath { lanes: crossed, rate: path_rate },
            );
        }
    }
    set_feeding_bounds(&mut lanes, &paths);
    for (link, wire) in (0..).map(LinkId).zip(&topology.links) {
        let LinkKind::NvLink { a, b } = wire.kind else { continue };
        for (from, to) in [(a, b), (b, a)] {
            lanes.push(LinkLane::new(link, HostDirection::ToGpu, wire.rate));
            let path = LanePath { lanes: vec![lanes.len() - 1], rate: wire.rate };
            paths.insert(TransferRoute::direct(from, to), path);
        }
    }
    (lanes, paths)
}

/// Sets `fed` for each lane that carries as much as all preceding lanes. A batch without room there
/// actually waits for another lane, and the turn is counted at the lane that fills up
/// (`rates::links`). The rates there are rounded, so rates count as equal up to a byte per second
/// for each lane.
fn set_feeding_bounds(lanes: &mut [LinkLane], paths: &BTreeMap<TransferRoute, LanePath>) {
    let mut leading: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); lanes.len()];
    let mut steps = vec![0; lanes.len()];
    for path in paths.values() {
        for (step, &lane) in path.lanes.iter().enumerate() {
            steps[lane] = step.max(steps[lane]);
        }
        for pair in path.lanes.windows(2) {
            leading[pair[1]].insert(pair[0]);
        }
    }
    // Visit a lane after all lanes that lead to it.
    let mut order: Vec<usize> = (0..lanes.len()).collect();
    order.sort_by_key(|&lane| steps[lane]);
    for lane in order {
        let leading = &leading[lane];
        let offered = leading.iter().map(|&from| lanes[from].rate.0).fold(0, u64::saturating_add);
        if offered <= lanes[lane].rate.0.saturating_add(leading.len() as u64) {
            lanes[lane].fed = leading.iter().map(|&from| lanes[from].holds_max()).sum();
        }
    }
}

/// Returns the path of a route over several GPUs; `None` if two of them are not joined. The path
/// begins with the link nearest to the destination, as paths from the host do, because the executor
/// at the destination copies.
pub(super) fn joined(hops: &RouteHops, paths: &BTreeMap<TransferRoute, LanePath>) -> Option<LanePath> {
    let steps = hops.links().map(|(from, to)| paths.get(&TransferRoute::direct(from, to)));
    let steps: Vec<_> = steps.collect::<Option<_>>()?;
    let rate = steps.iter().map(|step| step.rate).min()?;
    Some(LanePath { lanes: steps.iter().rev().flat_map(|step| &step.lanes).copied().collect(), rate })
}

/// Returns the path of a forwarded route: from the host over the first of some GPUs, or to the host
/// over the last. Returns `None` if two of the GPUs are not joined. The path begins at the GPU
/// whose executor copies, and ends at the host.
pub(super) fn forwarded(
    direction: HostDirection,
    hops: &RouteHops,
    paths: &BTreeMap<TransferRoute, LanePath>,
) -> Option<LanePath> {
    let nvlinks = joined(hops, paths)?;
    let (by, mut lanes) = match direction {
        HostDirection::ToGpu => (hops.first(), nvlinks.lanes),
        HostDirection::FromGpu => (hops.last(), nvlinks.lanes.into_iter().rev().collect()),
    };
    let own = paths.get(&TransferRoute::Host(direction, by))?;
    lanes.extend(&own.lanes);
    Some(LanePath { lanes, rate: nvlinks.rate.min(own.rate) })
}

/// The lanes that the bytes of a route cross, and the rate of the slowest.
#[derive(Debug)]
pub(super) struct LanePath {
    pub(super) lanes: Vec<usize>,
    pub(super) rate: BytesPerSec,
}

impl LanePath {
    /// Returns the time that a batch takes from end to end.
    pub(super) fn time_for(&self, size: Bytes) -> Duration {
        self.rate.time_for(size)
    }
}
