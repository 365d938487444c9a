//! The NVLink routes of objects that are copied from another GPU (D07, D20 to D22).
//! [`PathPlanner`](crate::paths::PathPlanner)
//! chooses the routes of all such transfers again whenever a transfer begins or ends. Each batch
//! takes the route with the earliest arrival, so each route carries bytes in proportion to the
//! route's rate. A route that is taken away gets no further batch, and batches in flight there end
//! normally.
//!
//! Weights do not use such routes: weights cross the link that joins the two GPUs, in turn with the
//! objects that cross that link.

use millrace_types::GpuIndex;

use super::lanes::{LinkLane, TransferRoute, joined};
use super::scheduler::LinkScheduler;
use crate::paths::RouteChange;
use millrace_core::ids::{FlowId, TransferId};

impl LinkScheduler {
    /// Assigns routes to a transfer. Returns false if no route exists.
    pub(super) fn begin_routes(&mut self, transfer: TransferId, from: GpuIndex, to: GpuIndex) -> bool {
        let Some(routes) = &mut self.routes else { return false };
        let Ok(changes) = routes.begin(FlowId(transfer.0), from, to) else { return false };
        self.replan(changes);
        self.transfers.get(&transfer).is_some_and(|state| !state.routes.is_empty())
    }

    /// Removes a transfer without batches in flight, and its routes.
    pub(super) fn forget(&mut self, transfer: TransferId) {
        self.end_rate(transfer);
        let Some(state) = self.transfers.remove(&transfer) else { return };
        self.count(&state);
        self.cross(&state.routes, LinkLane::leave);
        let changes = self.routes.as_mut().map(|routes| routes.end(FlowId(transfer.0)));
        self.replan(changes.unwrap_or_default());
    }

    fn replan(&mut self, changes: Vec<RouteChange>) {
        for RouteChange { flow: FlowId(flow), routes } in changes {
            let routes: Vec<_> = routes.iter().map(|route| TransferRoute::Over(route.hops)).collect();
            for route in &routes {
                if !self.paths.contains_key(route)
                    && let Some(path) = route.hops().and_then(|hops| joined(&hops, &self.paths))
                {
                    self.paths.insert(*route, path);
                }
            }
            let Some(state) = self.transfers.get_mut(&TransferId(flow)) else { continue };
            let before = std::mem::replace(&mut state.routes, routes.clone());
            self.cross(&before, LinkLane::leave);
            self.cross(&routes, LinkLane::enter);
        }
    }

    fn cross(&mut self, routes: &[TransferRoute], does: fn(&mut LinkLane)) {
        for route in routes {
            for &lane in &self.paths[route].lanes {
                does(&mut self.lanes[lane]);
            }
        }
    }
}
