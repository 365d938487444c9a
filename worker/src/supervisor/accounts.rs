//! What the supervisor knows of functions and tenants besides how they are started: their scores,
//! how long they were idle, what they may use. It outlives the actors that go by it.

use std::cell::RefMut;
use std::sync::Arc;

use millrace_policy::ids::{FunctionIndex, TenantIndex};
use millrace_policy::residence::Residence;
use millrace_policy::tenancy;
use millrace_types::{FunctionKey, RevisionKey, SloCounts};

use super::Supervisor;
use crate::actors::function::{self, counts};
use crate::actors::{gpu, link};
use crate::control::desired::Quotas;
use crate::handle::Parts;
use crate::snapshot::{Look, SnapshotPart};

impl Supervisor {
    /// The idle clocks. Not to be held across anything else of this node.
    pub(crate) fn residence(&self) -> RefMut<'_, Residence> {
        self.residence.borrow_mut()
    }

    /// Other caps hold. What the Node has to know of them.
    pub(crate) fn cap(&self, quotas: Arc<Quotas>) -> Vec<tenancy::Event> {
        self.tenants.borrow_mut().change(quotas, self.registry.borrow().owners())
    }

    /// Whose a function is, if its tenant has caps.
    pub(crate) fn capped(&self, key: &RevisionKey) -> Option<(FunctionIndex, TenantIndex)> {
        let tenant = self.tenants.borrow().capped(&key.function.tenant)?;
        Some((self.registry.borrow().index_of(key)?, tenant))
    }

    /// What each function here has scored since it is.
    pub(crate) fn scored(&self) -> Vec<(FunctionIndex, FunctionKey, SloCounts)> {
        let registry = self.registry.borrow();
        let scored = registry
            .indexed()
            .map(|(index, hosted)| (index, hosted.config.key.function.clone(), counts(&hosted.score.get())));
        scored.collect()
    }

    /// Has the actors below the Node that are looked at send their parts of a snapshot.
    pub(crate) fn report(&self, look: Look, parts: &Parts) {
        let registry = self.registry.borrow();
        let users = Arc::new(registry.users());
        for gpu in &self.gpus {
            gpu.post(gpu::Message::Report { parts: parts.clone(), users: Arc::clone(&users) });
        }
        for link in self.links.values() {
            link.post(link::Message::Report { parts: parts.clone() });
        }
        if look == Look::Machine {
            return;
        }
        // Together with the rest: a function that goes meanwhile is counted here or there, once.
        // Whoever asked may have given up.
        parts.send(SnapshotPart::Past(registry.past().clone())).unwrap_or_default();
        let idle = self.residence().idle(self.clock.now()).map(|(key, idle)| (key.clone(), idle)).collect();
        parts.send(SnapshotPart::Idle(idle)).unwrap_or_default();
        for hosted in registry.functions() {
            hosted.slot.post(function::Message::Report { parts: parts.clone() });
        }
    }
}
