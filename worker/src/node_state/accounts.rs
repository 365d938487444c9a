//! The accounts of functions and tenants: SLO counts, idle residence and caps. The accounts survive
//! restarts of the actors.

use std::cell::RefMut;
use std::sync::Arc;

use millrace_core::ids::{FunctionIndex, TenantIndex};
use millrace_scheduling::residence::IdleResidenceMeter;
use millrace_scheduling::tenancy;
use millrace_types::{FunctionKey, RevisionKey, SloCounts};

use super::slo_counts::slo_counts;
use super::state::NodeState;
use crate::desired_state::TenantQuotas;
use crate::messages::{function, gpu, link};
use crate::snapshot::{SnapshotPart, SnapshotScope, SnapshotSender};

impl NodeState {
    /// Borrows the idle residence of functions. The borrow must end before any other call into this node,
    /// which may need the same borrow.
    pub(crate) fn residence(&self) -> RefMut<'_, IdleResidenceMeter> {
        self.residence.borrow_mut()
    }

    /// Sets the caps of tenants, and returns the changes for the Node's tenancy gate.
    pub(crate) fn set_caps(&self, quotas: Arc<TenantQuotas>) -> Vec<tenancy::Event> {
        self.tenants.borrow_mut().change(quotas, self.registry.borrow().owners())
    }

    /// Returns a function's index and tenant, if the tenant has caps.
    pub(crate) fn capped(&self, key: &RevisionKey) -> Option<(FunctionIndex, TenantIndex)> {
        let tenant = self.tenants.borrow().capped(&key.function.tenant)?;
        Some((self.registry.borrow().index_of(key)?, tenant))
    }

    /// Returns the SLO counts of each function since its installation on this node.
    pub(crate) fn scored(&self) -> Vec<(FunctionIndex, FunctionKey, SloCounts)> {
        let registry = self.registry.borrow();
        let scored = registry.indexed().map(|(index, hosted)| {
            (index, hosted.config.key.function.clone(), slo_counts(&hosted.score.get()))
        });
        scored.collect()
    }

    /// Asks the actors below the Node for parts of a snapshot. `SnapshotScope::Machine` leaves out the
    /// functions.
    pub(crate) fn report(&self, look: SnapshotScope, parts: &SnapshotSender) {
        let registry = self.registry.borrow();
        let users = Arc::new(registry.users());
        for gpu in &self.gpus {
            gpu.post(gpu::Message::Report { parts: parts.clone(), users: Arc::clone(&users) });
        }
        for link in self.links.values() {
            link.post(link::Message::Report { parts: parts.clone() });
        }
        if look == SnapshotScope::Machine {
            return;
        }
        // The counts of removed functions are sent in the same step as the requests to the present
        // functions, so a function that is being removed is counted exactly once. The reader of the
        // snapshot may have given up.
        parts.send(SnapshotPart::Past(registry.past().clone())).unwrap_or_default();
        let idle = self.residence().idle(self.clock.now()).map(|(key, idle)| (key.clone(), idle)).collect();
        parts.send(SnapshotPart::Idle(idle)).unwrap_or_default();
        for hosted in registry.functions() {
            hosted.slot.post(function::Message::Report { parts: parts.clone() });
        }
    }
}
