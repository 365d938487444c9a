//! Releases objects at workers.

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::worker as wire;

use super::values::{RemoteObject, RunTensor};
use crate::fleet::AttachedWorker;

/// The timeout of a release request.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

/// Releases the objects of these values at the workers.
pub(super) fn let_go_of<'v>(values: impl IntoIterator<Item = &'v RunTensor>) {
    let_go(values.into_iter().flat_map(RunTensor::held).map(|(_, held)| held));
}

/// Releases objects at workers, with one request per worker.
pub(super) fn let_go<'v>(held: impl Iterator<Item = &'v RemoteObject>) {
    let mut by_worker: Vec<(Arc<AttachedWorker>, Vec<wire::DataId>)> = Vec::new();
    for held in held {
        match by_worker.iter_mut().find(|(worker, _)| worker.is_process_of(&held.worker)) {
            Some((_, ids)) => ids.push(held.id.clone()),
            None => by_worker.push((held.worker.clone(), vec![held.id.clone()])),
        }
    }
    for (worker, ids) in by_worker {
        release(worker, ids);
    }
}

/// Asks a worker to release objects, without waiting. If the request is lost, the objects expire.
fn release(worker: Arc<AttachedWorker>, ids: Vec<wire::DataId>) {
    // Without a runtime the process is ending.
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    runtime.spawn(async move {
        let request = wire::ReleaseObjectsRequest { ids };
        let released = worker.calls.release_objects(tonic::Request::new(request));
        if let Ok(Err(status)) = tokio::time::timeout(RELEASE_PATIENCE, released).await {
            tracing::debug!(worker = %worker.name, %status, "cannot ask a worker to release objects");
        }
    });
}
