//! The publication of the host tier's snapshots.

use std::sync::Arc;

use millrace_proto::parts::cut_text;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest, RevisionKey};
use tokio::sync::watch;

use super::compile::HostModel;
use super::plan::ServingPhase;
use super::{HostTier, programs, state};

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
            load_ns: 0,
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
