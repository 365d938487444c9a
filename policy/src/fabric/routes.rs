//! The NVLink routes of objects that come from another GPU (D07, D20 to D22). Which routes there are is
//! decided by [`Paths`], anew whenever one of these transfers begins or ends; which of them takes the
//! next batch, by who is there first: so each carries as much as it is fast. A route that is taken
//! away gets no further batch, and what is out on it ends.
//!
//! Weights know nothing of these: they cross the link that joins their pair, in turns with the objects
//! that do.

use millrace_types::GpuIndex;
use millrace_types::topology::Topology;

use super::Fabric;
use super::lanes::{Lane, Route, joined};
use crate::ids::{FlowId, TransferId};
use crate::paths::{Change, Config, Error, Paths};

/// The NVLinks that objects may take, and neighbours for others.
///
/// # Errors
/// As [`Paths::new`], where a machine is larger than what that plans for: objects go by the host then, and
/// nobody forwards for others.
pub fn routes_of(topology: &Topology) -> Result<Paths, Error> {
    Paths::new(topology, Config::default())
}

impl Fabric {
    /// Gives a transfer its routes. False where there are none.
    pub(super) fn begin_routes(&mut self, transfer: TransferId, from: GpuIndex, to: GpuIndex) -> bool {
        let Some(routes) = &mut self.routes else { return false };
        let Ok(changes) = routes.begin(FlowId(transfer.0), from, to) else { return false };
        self.replan(changes);
        self.transfers.get(&transfer).is_some_and(|state| !state.routes.is_empty())
    }

    /// Drops a transfer that has nothing out, and its routes.
    pub(super) fn forget(&mut self, transfer: TransferId) {
        self.leave(transfer);
        let Some(state) = self.transfers.remove(&transfer) else { return };
        self.count(&state);
        self.cross(&state.routes, Lane::leave);
        let changes = self.routes.as_mut().map(|routes| routes.end(FlowId(transfer.0)));
        self.replan(changes.unwrap_or_default());
    }

    fn replan(&mut self, changes: Vec<Change>) {
        for Change { flow: FlowId(flow), routes } in changes {
            let routes: Vec<_> = routes.iter().map(|route| Route::Over(route.hops)).collect();
            for route in &routes {
                if !self.paths.contains_key(route)
                    && let Some(path) = route.hops().and_then(|hops| joined(&hops, &self.paths))
                {
                    self.paths.insert(*route, path);
                }
            }
            let Some(state) = self.transfers.get_mut(&TransferId(flow)) else { continue };
            let before = std::mem::replace(&mut state.routes, routes.clone());
            self.cross(&before, Lane::leave);
            self.cross(&routes, Lane::enter);
        }
    }

    fn cross(&mut self, routes: &[Route], does: fn(&mut Lane)) {
        for route in routes {
            for &lane in &self.paths[route].lanes {
                does(&mut self.lanes[lane]);
            }
        }
    }
}
