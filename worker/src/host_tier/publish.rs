//! The snapshots that the host tier publishes: the states of functions, the models in host memory, and the
//! signatures of functions.

use std::sync::Arc;

use millrace_proto::parts::cut_text;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest, RevisionKey};
use tokio::sync::watch;

use super::compile::HostModel;
use super::plan::ServingPhase;
use super::{HostTier, Signatures, programs, state};

/// Cumulative counts of the host tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostTierCounts {
    /// Loads of evicted models into host memory because requests waited for them.
    pub cold_starts: u64,
    /// Models that were evicted from host memory to make room for others.
    pub evictions: u64,
}

/// The receivers of the host tier's snapshots. A receiver is notified only when its value changes.
#[derive(Debug, Clone)]
pub struct HostTierSnapshot {
    /// The state of each function, in key order.
    pub statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
    /// The models in host memory.
    pub models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    /// The signatures of the functions that are ready.
    pub signatures: watch::Receiver<Arc<Signatures>>,
    /// The cumulative counts.
    pub counts: watch::Receiver<Arc<HostTierCounts>>,
}

/// The senders of the host tier's snapshots.
#[derive(Debug, Default)]
pub struct HostTierPublisher {
    pub(super) statuses: watch::Sender<Arc<Vec<wire::FunctionStatus>>>,
    pub(super) models: watch::Sender<Arc<Vec<wire::HostModel>>>,
    pub(super) signatures: watch::Sender<Arc<Signatures>>,
    pub(super) counts: watch::Sender<Arc<HostTierCounts>>,
}

impl HostTierPublisher {
    /// Returns the receivers.
    #[must_use]
    pub fn view(&self) -> HostTierSnapshot {
        HostTierSnapshot {
            statuses: self.statuses.subscribe(),
            models: self.models.subscribe(),
            signatures: self.signatures.subscribe(),
            counts: self.counts.subscribe(),
        }
    }
}

impl HostTier {
    pub(super) fn publish(&self) {
        let mut phases = self.plan.phases();
        if let Some(programs) = &self.config.programs {
            let healths = programs.healths();
            let healths = healths.borrow();
            for (key, phase) in &mut phases {
                let digest = self.functions.get(key).map(|function| function.digest);
                let model = digest.and_then(|digest| self.models.get(&digest));
                if model.is_some_and(HostModel::is_program) {
                    programs::judge(phase, healths.get(key));
                }
            }
        }
        let ready = state::signatures(&mut phases, &self.functions, &self.known);
        set(&self.signatures_now, ready);
        let statuses = phases.into_iter().map(|(key, phase)| status(&key, phase));
        set(&self.statuses_now, statuses.collect());
        let model = |(digest, bytes): (Digest, Bytes)| wire::HostModel {
            digest: digest.to_string(),
            bytes: bytes.get(),
        };
        set(&self.models_now, self.plan.resident().into_iter().map(model).collect());
        set(&self.counts_now, self.counts);
    }
}

fn set<T: PartialEq>(channel: &watch::Sender<Arc<T>>, value: T) {
    channel.send_if_modified(|last| {
        let differs = **last != value;
        if differs {
            *last = Arc::new(value);
        }
        differs
    });
}

fn status(key: &RevisionKey, phase: ServingPhase) -> wire::FunctionStatus {
    let (phase, mut message) = match phase {
        ServingPhase::Preparing(message) => (wire::FunctionPhase::Preparing, message),
        ServingPhase::Ready => (wire::FunctionPhase::Ready, String::new()),
        ServingPhase::Failed(message) => (wire::FunctionPhase::Failed, message),
    };
    cut_text(&mut message);
    wire::FunctionStatus {
        tenant: key.function.tenant.to_string(),
        name: key.function.name.to_string(),
        revision: key.revision.get(),
        phase: phase.into(),
        message,
    }
}
