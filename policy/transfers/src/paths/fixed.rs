//! The baselines that ignore the rates that other flows use (D31). Each transfer always has the
//! same paths, and the routes that cross a link share it max-min fairly, as hardware does.

use super::config::UCX_ROUTES;
use super::matrix::ResourceSet;
use super::running::{FlowKind, FlowTable, PathFlow, PathShare, PathShares};

/// A route that shares every link that it crosses.
struct FixedRoute {
    flow: usize,
    path: usize,
    /// The rate of the route if it were alone.
    ceiling: u64,
    rate: Option<u64>,
}

impl FlowTable {
    /// Returns the direct path of a pair, if there is one.
    pub(super) fn direct_parts(&self, from: usize, to: usize) -> PathShares {
        self.parts_of(self.matrix.direct(from, to).into_iter())
    }

    /// Returns the first paths of a pair.
    pub(super) fn shortest_parts(&self, from: usize, to: usize) -> PathShares {
        self.parts_of(self.matrix.paths_of(from, to).take(UCX_ROUTES))
    }

    fn parts_of(&self, paths: impl Iterator<Item = usize>) -> PathShares {
        paths.map(|path| PathShare { path, rate: self.matrix.path(path).width }).collect()
    }

    /// Gives every flow its fixed routes again, at the rates that the other flows leave.
    pub(super) fn share_out(&mut self) {
        for at in 0..self.flows.len() {
            self.strip(at, ResourceSet::MAX);
        }
        let lane = |flow: usize, part: &PathShare| FixedRoute {
            flow,
            path: part.path,
            ceiling: part.rate,
            rate: None,
        };
        let of = |(flow, it): (usize, &PathFlow)| {
            it.fixed.as_slice().iter().map(move |part| lane(flow, part)).collect::<Vec<_>>()
        };
        let mut lanes: Vec<FixedRoute> = self.flows.iter().enumerate().flat_map(of).collect();
        self.fill(&mut lanes);
        for flow in lanes.chunk_by(|a, b| a.flow == b.flow) {
            let divided = self.flows[flow[0].flow].role == FlowKind::Transfer;
            // The slowest route has the least part of the rate that it would have alone.
            let rate = |lane: &FixedRoute| u128::from(lane.rate.unwrap_or(0));
            let worse = |a: &&FixedRoute, b: &&FixedRoute| {
                (rate(a) * u128::from(b.ceiling)).cmp(&(rate(b) * u128::from(a.ceiling)))
            };
            let Some(slowest) = flow.iter().min_by(worse).filter(|_| divided) else {
                flow.iter().for_each(|lane| self.lay_lane(lane, rate(lane)));
                continue;
            };
            for lane in flow {
                let kept = u128::from(lane.ceiling) * rate(slowest) / u128::from(slowest.ceiling.max(1));
                self.lay_lane(lane, kept);
            }
        }
    }

    fn lay_lane(&mut self, lane: &FixedRoute, rate: u128) {
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        let laid = self.lay(lane.flow, lane.path, rate);
        debug_assert!(laid, "a flow has room for its fixed routes");
    }

    /// Fills the lanes progressively: all lanes grow alike until a lane meets a full link or the
    /// lane's ceiling. That lane keeps the rate, and the others continue.
    fn fill(&self, lanes: &mut [FixedRoute]) {
        let mut left: Vec<u64> = (0..self.matrix.resources()).map(|at| self.matrix.left(at)).collect();
        let mut active = vec![0u64; left.len()];
        for lane in &*lanes {
            self.matrix.path(lane.path).resources().for_each(|at| active[at] += 1);
        }
        while lanes.iter().any(|lane| lane.rate.is_none()) {
            let limit = |lane: &FixedRoute| {
                let shares = self.matrix.path(lane.path).resources().map(|at| left[at] / active[at]);
                shares.min().unwrap_or(0).min(lane.ceiling)
            };
            let open = lanes.iter().filter(|lane| lane.rate.is_none());
            let Some(lowest) = open.map(limit).min() else { return };
            let stay: Vec<bool> =
                lanes.iter().map(|lane| lane.rate.is_none() && limit(lane) == lowest).collect();
            for (lane, _) in lanes.iter_mut().zip(stay).filter(|(_, stays)| *stays) {
                lane.rate = Some(lowest);
                for at in self.matrix.path(lane.path).resources() {
                    left[at] -= lowest;
                    active[at] -= 1;
                }
            }
        }
    }
}
