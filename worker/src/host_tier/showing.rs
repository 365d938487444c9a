//! What the host tier shows of itself: functions' states, models in memory, what they take and give.

use std::sync::Arc;

use millrace_proto::parts::cut_text;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest, RevisionKey};
use tokio::sync::watch;

use super::compile::HostModel;
use super::plan::Phase;
use super::{HostTier, Signatures, programs, state};

/// What the host tier did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Models that came into host memory again because requests asked for them.
    pub cold_starts: u64,
    /// Models that left host memory for others.
    pub evictions: u64,
}

/// What the host tier shows. Each changes only when its value does.
#[derive(Debug, Clone)]
pub struct View {
    /// How far each function is, in key order.
    pub statuses: watch::Receiver<Arc<Vec<wire::FunctionStatus>>>,
    /// The models in host memory.
    pub models: watch::Receiver<Arc<Vec<wire::HostModel>>>,
    /// What served functions take and give.
    pub signatures: watch::Receiver<Arc<Signatures>>,
    /// What it did.
    pub counts: watch::Receiver<Arc<Counts>>,
}

/// Where the host tier shows all that.
#[derive(Debug, Default)]
pub struct Showing {
    pub(super) statuses: watch::Sender<Arc<Vec<wire::FunctionStatus>>>,
    pub(super) models: watch::Sender<Arc<Vec<wire::HostModel>>>,
    pub(super) signatures: watch::Sender<Arc<Signatures>>,
    pub(super) counts: watch::Sender<Arc<Counts>>,
}

impl Showing {
    /// What is seen there.
    #[must_use]
    pub fn view(&self) -> View {
        View {
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
        set(&self.statuses_now, phases.into_iter().map(status).collect());
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

fn status((key, phase): (RevisionKey, Phase)) -> wire::FunctionStatus {
    let (phase, mut message) = match phase {
        Phase::Preparing(message) => (wire::FunctionPhase::Preparing, message),
        Phase::Ready => (wire::FunctionPhase::Ready, String::new()),
        Phase::Failed(message) => (wire::FunctionPhase::Failed, message),
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
