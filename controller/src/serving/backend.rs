//! The data of the gateway's backend.

use millrace_cluster_state::State;
use millrace_types::RevisionKey;
use prometheus_client::registry::Registry;

use super::catalog::{Candidates, Catalog, CatalogInputs};
use super::runs::RevisionEstimateMap;
use super::workflow::Workflows;
use crate::fleet::WorkerFleet;
use crate::leadership::LeaderStatus;
use crate::passed::TrafficMatrix;
use crate::raft::Replica;

/// The gateway's backend.
#[derive(Debug)]
pub(crate) struct ServingBackend {
    pub(super) replica: Replica,
    pub(super) fleet: WorkerFleet,
    pub(super) outlook: LeaderStatus,
    pub(super) catalog: Catalog,
    pub(super) runs: RevisionEstimateMap,
    pub(super) workflows: Workflows,
}

impl ServingBackend {
    pub(crate) fn new(
        replica: Replica,
        fleet: WorkerFleet,
        outlook: LeaderStatus,
        passed: TrafficMatrix,
    ) -> Self {
        Self {
            replica,
            fleet,
            outlook,
            catalog: Catalog::default(),
            runs: RevisionEstimateMap::default(),
            workflows: Workflows::new(passed),
        }
    }

    /// Returns the inputs of look-ups in a state.
    pub(super) fn sight<'a>(&'a self, state: &'a State) -> CatalogInputs<'a> {
        CatalogInputs { state, fleet: &self.fleet, outlook: &self.outlook }
    }

    /// Returns the workers that are ready for a revision now.
    pub(super) fn candidates(&self, key: &RevisionKey) -> Option<Candidates> {
        self.catalog.candidates(&self.sight(&self.replica.state()), key)
    }

    /// Registers the metrics of all steps of workflows.
    pub(crate) fn show_steps(&self, registry: &mut Registry) {
        self.workflows.show_steps(registry);
    }
}
