//! A worker's place in the replicated state: taken when it comes, given up when it goes.

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Applied, Caller, Command, NodeGpu, NodeStatus, State};
use millrace_policy::lease::Member;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Epoch, Failure, GpuIndex, NodeName, Reason, Timestamp};

use super::{Fleet, Worker};
use crate::raft::Replica;

/// The epoch of a worker's process: the one it has, or a new one.
///
/// # Errors
/// `NODE_NAME_TAKEN` while another process of its name is believed alive.
pub(crate) async fn register(
    replica: &Replica,
    name: &NodeName,
    hello: &wire::WorkerHello,
    seen: Epoch,
) -> Result<Epoch, Failure> {
    match held(&replica.state(), name) {
        // Known already: another controller took it in, or this one before its stream broke. That
        // needs no majority, so that a worker finds back to controllers that have none.
        Some((instance, epoch)) if instance == hello.instance => return Ok(epoch),
        Some(_) => return Err(taken(name)),
        None => {}
    }
    let command = Command::RegisterNode {
        name: name.clone(),
        instance: hello.instance.clone(),
        address: hello.address.clone(),
        gpus: hello.gpus.iter().map(gpu).collect(),
        topology: hello.topology.clone(),
        host_memory: Bytes(hello.host_memory_bytes),
        seen,
    };
    match replica.propose(Caller(format!("worker/{name}").into()), None, command).await {
        Ok(Applied::Registered { epoch } | Applied::AlreadyRegistered { epoch }) => Ok(epoch),
        Ok(other) => Err(Failure::new(Reason::Internal, format!("a registration answered {other:?}"))),
        Err(failure) if failure.reason == Reason::NodeNameTaken => Err(taken(name)),
        Err(failure) => Err(failure),
    }
}

/// Which process has a name, while it is believed alive, and its epoch.
fn held(state: &State, name: &NodeName) -> Option<(String, Epoch)> {
    let node = state.node(name).filter(|node| node.status == NodeStatus::Live)?;
    Some((node.instance.clone(), node.epoch))
}

fn taken(name: &NodeName) -> Failure {
    Failure::new(
        Reason::NodeNameTaken,
        format!(
            "a worker named {name} is believed alive: if it is gone, its name is free when its lease is over; otherwise give this one another name, or stop the other"
        ),
    )
}

fn gpu(gpu: &wire::GpuCapacity) -> NodeGpu {
    NodeGpu { index: GpuIndex(gpu.index), gpu_type: gpu.gpu_type.clone(), memory: Bytes(gpu.memory_bytes) }
}

/// Commits that a registration is over: its worker left. If the name was registered again meanwhile,
/// that one stays.
pub(crate) async fn end(replica: &Replica, member: Member) -> Result<(), Failure> {
    replica.propose(caller(), None, lost(member)).await.map(drop)
}

/// Commits that a registration is over, as the leader of a term found. Its successor grants every
/// node a full lease, and must find so itself.
pub(crate) async fn declare_lost(replica: &Replica, term: u64, member: Member) -> Result<(), Failure> {
    replica.propose_leading(term, caller(), lost(member)).await.map(drop)
}

fn caller() -> Caller {
    Caller("fleet".into())
}

fn lost(member: Member) -> Command {
    Command::NodeLost { name: member.node, epoch: member.epoch }
}

/// Brings the attached workers in line with the state: one that was taken in again learns its new
/// epoch, and one whose name went to another process is let go.
pub(super) fn follow(fleet: &Fleet, state: &State) {
    for worker in fleet.workers().values() {
        match held(state, &worker.name) {
            Some((instance, epoch)) if instance == worker.hello.instance => worker.adopt(epoch),
            Some((_, epoch)) if epoch > worker.epoch() => supersede(fleet, worker, epoch),
            // Lost, or this state is behind what took the worker in.
            Some(_) | None => {}
        }
    }
}

/// Sends no more requests to workers that the state has lost and that were silent here for a lease as
/// well, and those under way there to others: the end of a connection over which nothing comes is
/// noticed only later. Whoever is heard here goes on serving: that the leader does not hear it says
/// nothing of the way from here. Returns when to look again, while one that is lost is attached.
pub(super) fn presume_lost(fleet: &Fleet, state: &State, lease: Duration) -> Option<Timestamp> {
    let now = fleet.now();
    let mut again: Option<Timestamp> = None;
    for worker in fleet.workers().values() {
        let node = state.node(&worker.name);
        // Of an older epoch: this state is behind what took the worker in.
        let lost = node.is_some_and(|node| node.status == NodeStatus::Lost && node.epoch >= worker.epoch());
        if !lost {
            continue;
        }
        let heard = worker.heard();
        let silent = now.since(heard) >= lease;
        if silent && worker.presume_lost() {
            tracing::warn!(worker = %worker.name, epoch = %worker.epoch(), "worker is lost and silent: nothing is routed to it until it is heard");
            fleet.changed();
        }
        // One that is silent may be heard once more, and the leader hear nothing of it.
        let due = if silent { now + lease } else { heard + lease };
        again = Some(again.map_or(due, |again| again.min(due)));
    }
    again
}

fn supersede(fleet: &Fleet, worker: &Arc<Worker>, epoch: Epoch) {
    tracing::warn!(worker = %worker.name, epoch = worker.epoch().0, %epoch, "another process has the worker's name now: its stream ends");
    fleet.detach(worker);
}
