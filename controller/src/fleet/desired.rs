//! What every worker should serve. For now each worker gets every enabled function: its newest
//! revision, and the one before it, which goes on serving until the newest is ready and for
//! clients that name it (`REVISIONS_SERVED`).

use std::sync::Arc;

use millrace_cluster_state::{Function, RevisionRecord, State};
use millrace_proto::convert::duration_wire;
use millrace_proto::worker as wire;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::raft::Replica;

/// The desired state as it is sent; `None` before this controller first led.
pub(crate) type Desired = Option<Arc<wire::DesiredState>>;

/// Keeps the desired state up to date for as long as this controller leads, until stopped.
pub(crate) async fn publish_until(
    stop: CancellationToken,
    replica: Replica,
    desired: watch::Sender<Desired>,
) {
    let mut changes = replica.changes();
    let follow = async {
        loop {
            if let Some(term) = replica.leading_term() {
                publish(&replica.state(), term, &desired);
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    // `None` when stopped: nothing is left to do either way.
    stop.run_until_cancelled(follow).await;
}

/// Sends the state's wishes unless they were sent already in this term.
fn publish(state: &State, term: u64, desired: &watch::Sender<Desired>) {
    let next = desired_state(state, term);
    desired.send_if_modified(|last| {
        let news = last.as_ref().is_none_or(|last| last.term < term || last.functions != next.functions);
        if news {
            *last = Some(Arc::new(next));
        }
        news
    });
}

fn desired_state(state: &State, term: u64) -> wire::DesiredState {
    let enabled = state.functions().filter(|function| function.enabled);
    let functions = enabled.flat_map(|function| {
        function.served().iter().map(|revision| desired_function(state, function, revision))
    });
    wire::DesiredState { term, index: state.applied_index(), functions: functions.collect() }
}

fn desired_function(state: &State, function: &Function, revision: &RevisionRecord) -> wire::DesiredFunction {
    let slo = revision.spec.slo;
    wire::DesiredFunction {
        tenant: function.key.tenant.to_string(),
        name: function.key.name.to_string(),
        revision: revision.number.get(),
        digest: revision.digest.to_string(),
        artifact_bytes: state.artifact(&revision.digest).map_or(0, |artifact| artifact.bytes.get()),
        idempotent: revision.spec.idempotent,
        slo_deadline: slo.map(|slo| duration_wire(slo.deadline)),
        slo_percentile: slo.map_or(0.0, |slo| slo.percentile),
        gpu_memory_bytes: revision.spec.resources.gpu_memory.map_or(0, |memory| memory.get()),
    }
}
