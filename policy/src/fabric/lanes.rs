//! One link in one direction, as the fabric books it: how many batches are out on it, and until
//! when it is taken; and which of them each route crosses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::topology::{LinkId, LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};

use super::transfer::OUT_MAX;
use crate::paths::{Direction, Hops};

/// Batches queued behind the running ones of a lane.
const QUEUED_MAX: usize = 1;
/// Tracks of a lane, however much faster it is than the paths that cross it.
const TRACKS_MAX: u64 = 64;

/// A batch's hold on a lane.
#[derive(Debug, Clone, Copy)]
struct Hold {
    batch: u64,
    track: usize,
    until: Timestamp,
}

/// A link in one direction. One that is faster than the paths which cross it has as many tracks as
/// paths can cross it at full speed side by side.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) link: LinkId,
    /// Of an NVLink both are towards a GPU.
    pub(super) direction: Direction,
    rate: BytesPerSec,
    /// By track: until when batches that have ended would have taken it at its rate.
    tracks: Vec<Timestamp>,
    holds: Vec<Hold>,
    /// Batches that may be out on all that leads to it, where it carries as much as all of that.
    fed: usize,
    /// Routes of objects that cross it now.
    routes: usize,
}

impl Lane {
    pub(super) fn new((link, direction): (LinkId, Direction), rate: BytesPerSec) -> Self {
        Self { link, direction, rate, tracks: vec![Timestamp::ZERO], holds: Vec::new(), fed: 0, routes: 0 }
    }

    /// An object has a route that crosses it.
    pub(super) fn enter(&mut self) {
        self.routes += 1;
    }

    /// It has no longer.
    pub(super) fn leave(&mut self) {
        self.routes -= 1;
    }

    /// Notes that a path of this rate crosses the lane.
    pub(super) fn crossed_by(&mut self, path_rate: BytesPerSec) {
        let tracks = (self.rate.0 / path_rate.0.max(1)).clamp(1, TRACKS_MAX);
        self.tracks.resize(self.tracks.len().max(tracks as usize), Timestamp::ZERO);
    }

    /// Whether another batch may be granted on it: one runs on each track, and one more is queued,
    /// so that the lane never idles for a message. One that carries as much as all that leads to it keeps
    /// nobody waiting. Each route of an object may have as much as a track, for one that is slower
    /// elsewhere leaves part of the lane to the others.
    pub(super) fn takes_more(&self) -> bool {
        self.holds.len() < self.holds_max()
    }

    pub(super) fn holds_max(&self) -> usize {
        (self.tracks.len() + QUEUED_MAX).max(self.fed).max(self.routes * OUT_MAX)
    }

    /// From when on nothing crosses it, what has being over by its rate; `None` while something is out.
    pub(super) fn idle_from(&self) -> Option<Timestamp> {
        let free = self.tracks.iter().copied().max();
        free.filter(|_| self.holds.is_empty())
    }

    /// From when on a batch can cross it.
    pub(super) fn free_at(&self) -> Timestamp {
        let free = (0..self.tracks.len()).map(|track| self.track_free_at(track));
        free.min().unwrap_or_default()
    }

    fn track_free_at(&self, track: usize) -> Timestamp {
        let held = self.holds.iter().filter(|hold| hold.track == track);
        held.map(|hold| hold.until).fold(self.tracks[track], Timestamp::max)
    }

    /// Takes a track from `start` on, when one is free: the one that has been free for the least
    /// time, so that the others stay open for whoever can begin sooner.
    pub(super) fn hold(&mut self, batch: u64, start: Timestamp, size: Bytes) {
        let rank = |&track: &usize| {
            let free = self.track_free_at(track);
            if free <= start { (0, start.since(free)) } else { (1, free.since(start)) }
        };
        let track = (0..self.tracks.len()).min_by_key(rank).unwrap_or_default();
        let rate = BytesPerSec(self.rate.0 / self.tracks.len() as u64);
        self.holds.push(Hold { batch, track, until: start + rate.time_for(size) });
    }

    /// The batch has crossed: its time stays taken, so that the next is paced.
    pub(super) fn carried(&mut self, batch: u64) {
        if let Some(hold) = self.take(batch) {
            self.tracks[hold.track] = self.tracks[hold.track].max(hold.until);
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
    pub(super) fn routes(&self) -> usize {
        self.routes
    }
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Route {
    /// Between the host and a GPU.
    Host(Direction, GpuIndex),
    /// From GPU to GPU, over others or not; both ends included.
    Over(Hops),
    /// Between the host and a GPU by the way of another, and over NVLinks between the two; both included, in
    /// the order in which bytes cross them.
    Forwarded(Direction, Hops),
}

impl Route {
    /// Over the NVLink that joins two GPUs.
    pub(super) fn direct(from: GpuIndex, to: GpuIndex) -> Self {
        Self::Over(Hops::of([from, to]))
    }

    /// Whose executor copies: where they go, unless that is the host.
    pub(super) fn gpu(&self) -> GpuIndex {
        match self {
            Self::Host(_, gpu) => *gpu,
            Self::Forwarded(Direction::FromGpu, hops) => hops.first(),
            Self::Over(hops) | Self::Forwarded(Direction::ToGpu, hops) => hops.last(),
        }
    }

    /// The GPUs that it leads over, where it does not lead to the host or from there.
    pub(super) fn hops(&self) -> Option<Hops> {
        match self {
            Self::Host(..) | Self::Forwarded(..) => None,
            Self::Over(hops) => Some(*hops),
        }
    }

    /// The GPUs that forward what crosses between the host and a GPU, and that one, where others do.
    pub(super) fn forwarded(&self) -> Option<Hops> {
        match self {
            Self::Host(..) | Self::Over(_) => None,
            Self::Forwarded(_, hops) => Some(*hops),
        }
    }

    /// Which way it leads between the host and a GPU, where no other GPU has a part in it.
    pub(super) fn host_way(&self) -> Option<Direction> {
        match self {
            Self::Host(direction, _) => Some(*direction),
            Self::Over(_) | Self::Forwarded(..) => None,
        }
    }
}

/// The lanes of each route of a node, and the path of each.
///
/// # Panics
/// When a GPU has no path from the host: such a topology is not one.
pub(super) fn lay(topology: &Topology) -> (Vec<Lane>, BTreeMap<Route, Path>) {
    let rate = |link: LinkId| topology.links[link.0 as usize].rate;
    let mut lanes: Vec<Lane> = Vec::new();
    let mut paths = BTreeMap::new();
    for gpu in &topology.gpus {
        let path_rate = gpu.host_path.iter().map(|&link| rate(link)).min();
        let path_rate = path_rate.unwrap_or_else(|| panic!("GPU {} has no host path", gpu.index));
        // The directions of a link do not share its rate.
        for direction in Direction::BOTH {
            let mut crossed = Vec::with_capacity(gpu.host_path.len());
            for &link in &gpu.host_path {
                let found = lanes.iter().position(|it| (it.link, it.direction) == (link, direction));
                let lane = found.unwrap_or_else(|| {
                    lanes.push(Lane::new((link, direction), rate(link)));
                    lanes.len() - 1
                });
                lanes[lane].crossed_by(path_rate);
                crossed.push(lane);
            }
            paths.insert(Route::Host(direction, gpu.index), Path { lanes: crossed, rate: path_rate });
        }
    }
    feed(&mut lanes, &paths);
    for (link, wire) in (0..).map(LinkId).zip(&topology.links) {
        let LinkKind::NvLink { a, b } = wire.kind else { continue };
        for (from, to) in [(a, b), (b, a)] {
            lanes.push(Lane::new((link, Direction::ToGpu), wire.rate));
            let path = Path { lanes: vec![lanes.len() - 1], rate: wire.rate };
            paths.insert(Route::direct(from, to), path);
        }
    }
    (lanes, paths)
}

/// Notes which lanes carry as much as all that leads to them. Who finds no room waits for another lane
/// then, and his turn is counted where that fills up (`rates::links`, whose rates are rounded: as much is
/// to within a byte a second of each).
fn feed(lanes: &mut [Lane], paths: &BTreeMap<Route, Path>) {
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
    // What leads to a lane comes before it.
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

/// The path of a route over several GPUs; `None` where two of them are not joined. It begins with the
/// link that is nearest to where it goes, as those from the host do: the executor there copies.
pub(super) fn joined(hops: &Hops, paths: &BTreeMap<Route, Path>) -> Option<Path> {
    let steps = hops.links().map(|(from, to)| paths.get(&Route::direct(from, to)));
    let steps: Vec<_> = steps.collect::<Option<_>>()?;
    let rate = steps.iter().map(|step| step.rate).min()?;
    Some(Path { lanes: steps.iter().rev().flat_map(|step| &step.lanes).copied().collect(), rate })
}

/// The path of a route by the way of the first of some GPUs from the host, or of the last to it; `None` where
/// two of them are not joined. It begins at the GPU whose executor copies, and ends at the host.
pub(super) fn forwarded(direction: Direction, hops: &Hops, paths: &BTreeMap<Route, Path>) -> Option<Path> {
    let nvlinks = joined(hops, paths)?;
    let (by, mut lanes) = match direction {
        Direction::ToGpu => (hops.first(), nvlinks.lanes),
        Direction::FromGpu => (hops.last(), nvlinks.lanes.into_iter().rev().collect()),
    };
    let own = paths.get(&Route::Host(direction, by))?;
    lanes.extend(&own.lanes);
    Some(Path { lanes, rate: nvlinks.rate.min(own.rate) })
}

/// The lanes that bytes of a route cross, narrowest rate included.
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
