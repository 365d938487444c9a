//! A worker's registration in the replicated state, from the first hello until the worker leaves or is
//! declared lost.

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{CallerName, CommandEffect, NodeGpu, NodeStatus, State, StateCommand};
use millrace_nodes::lease::NodeRegistration;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Epoch, Failure, GpuIndex, NodeName, Reason, Timestamp};
use tokio_util::sync::CancellationToken;

use super::worker::AttachedWorker;
use super::worker_fleet::WorkerFleet;
use crate::raft::Replica;

/// Returns the epoch of a worker's process: the current epoch, or a new epoch.
///
/// # Errors
/// `NODE_NAME_TAKEN` while another process of the same name is believed alive.
pub(crate) async fn register(
    replica: &Replica,
    name: &NodeName,
    hello: &wire::WorkerHello,
    seen: Epoch,
) -> Result<Epoch, Failure> {
    match held(&replica.state(), name) {
        // The process is registered already, by another controller or before the stream broke.
        // Answering needs no majority, so workers can attach again to controllers without a majority.
        Some((instance, epoch)) if instance == hello.instance => return Ok(epoch),
        Some(_) => return Err(taken(name)),
        None => {}
    }
    let command = StateCommand::RegisterNode {
        name: name.clone(),
        instance: hello.instance.clone(),
        address: hello.address.clone(),
        gpus: hello.gpus.iter().map(gpu).collect(),
        topology: hello.topology.clone(),
        host_memory: Bytes(hello.host_memory_bytes),
        seen,
    };
    match replica.propose(CallerName(format!("worker/{name}").into()), None, command).await {
        Ok(CommandEffect::Registered { epoch } | CommandEffect::AlreadyRegistered { epoch }) => Ok(epoch),
        Ok(other) => Err(Failure::new(
            Reason::Internal,
            format!("registering a node gave {other:?} instead of an epoch"),
        )),
        Err(failure) if failure.reason == Reason::NodeNameTaken => Err(taken(name)),
        Err(failure) => Err(failure),
    }
}

/// Returns the process that has a name, while believed alive, and the epoch.
fn held(state: &State, name: &NodeName) -> Option<(String, Epoch)> {
    let node = state.node(name).filter(|node| node.status == NodeStatus::Live)?;
    Some((node.instance.clone(), node.epoch))
}

fn taken(name: &NodeName) -> Failure {
    Failure::new(
        Reason::NodeNameTaken,
        format!(
            "another worker named {name} is believed alive: if that worker is gone, wait until its lease expires; otherwise stop it, or give this worker another name"
        ),
    )
}

fn gpu(gpu: &wire::GpuCapacity) -> NodeGpu {
    NodeGpu { index: GpuIndex(gpu.index), gpu_type: gpu.gpu_type.clone(), memory: Bytes(gpu.memory_bytes) }
}

/// Commits the end of a registration, because the worker left. A newer registration of the same name
/// stays.
pub(crate) async fn end(replica: &Replica, member: NodeRegistration) -> Result<(), Failure> {
    replica.propose(caller(), None, lost(member)).await.map(drop)
}

/// Commits the end of a registration with an expired lease, as the leader of `term`. A later leader
/// refuses the command: that leader grants every node a full lease and must judge by itself.
pub(crate) async fn declare_lost(
    replica: &Replica,
    term: u64,
    member: NodeRegistration,
) -> Result<(), Failure> {
    replica.propose_leading(term, caller(), lost(member)).await.map(drop)
}

fn caller() -> CallerName {
    CallerName("fleet".into())
}

fn lost(member: NodeRegistration) -> StateCommand {
    StateCommand::NodeLost { name: member.node, epoch: member.epoch }
}

impl WorkerFleet {
    /// Updates the attached workers' registrations from the state, until stopped. A worker that is lost
    /// in the state gets no requests once this controller, too, has heard nothing for a `lease`. That
    /// may be later than the last change of the state.
    pub(crate) async fn follow_until(self, stop: CancellationToken, replica: Replica, lease: Duration) {
        let mut changes = replica.changes();
        let follow = async {
            let mut seen = 0;
            let mut look_at = None;
            loop {
                let silent = async {
                    match look_at {
                        Some(at) => tokio::time::sleep_until(self.instant(at)).await,
                        None => std::future::pending().await,
                    }
                };
                let due = tokio::select! {
                    changed = changes.changed() => match changed {
                        Ok(()) => false,
                        Err(_) => return,
                    },
                    () = silent => true,
                };
                let state = replica.state();
                let news = std::mem::replace(&mut seen, state.version()) != state.version();
                if news {
                    follow(&self, &state);
                }
                if news || due {
                    look_at = presume_lost(&self, &state, lease);
                }
            }
        };
        // The result is `None` after a stop; both cases end the task.
        stop.run_until_cancelled(follow).await;
    }
}

/// Updates the attached workers from the state. A worker that was registered again adopts the new
/// epoch. A worker whose name belongs to another process now is detached.
pub(super) fn follow(fleet: &WorkerFleet, state: &State) {
    for worker in fleet.workers().values() {
        match held(state, &worker.name) {
            Some((instance, epoch)) if instance == worker.hello.instance => worker.adopt(epoch),
            Some((_, epoch)) if epoch > worker.epoch() => supersede(fleet, worker, epoch),
            // The node is lost, or the local state lags behind the worker's registration.
            Some(_) | None => {}
        }
    }
}

/// Stops routing to attached workers that are lost in the state and were silent on this controller for
/// a lease too, because the end of a dead connection is noticed late. A worker that this controller
/// hears keeps serving, because only the leader's path may be broken. Returns the time of the next
/// check while a lost worker is attached.
fn presume_lost(fleet: &WorkerFleet, state: &State, lease: Duration) -> Option<Timestamp> {
    let now = fleet.now();
    let mut again: Option<Timestamp> = None;
    for worker in fleet.workers().values() {
        let node = state.node(&worker.name);
        // A lost node with an older epoch means that the local state lags behind the worker's
        // registration.
        let lost = node.is_some_and(|node| node.status == NodeStatus::Lost && node.epoch >= worker.epoch());
        if !lost {
            continue;
        }
        let heard = worker.heard();
        let silent = now.since(heard) >= lease;
        if silent && worker.presume_lost() {
            tracing::warn!(worker = %worker.name, epoch = %worker.epoch(), "worker is lost and silent: routing no requests to it until it is heard again");
            fleet.changed();
        }
        // A silent worker may be heard once more by this controller alone, so check again.
        let due = if silent { now + lease } else { heard + lease };
        again = Some(again.map_or(due, |again| again.min(due)));
    }
    again
}

fn supersede(fleet: &WorkerFleet, worker: &Arc<AttachedWorker>, epoch: Epoch) {
    tracing::warn!(worker = %worker.name, epoch = worker.epoch().0, %epoch, "another process has the worker's name now: ending the stream");
    fleet.detach(worker);
}
