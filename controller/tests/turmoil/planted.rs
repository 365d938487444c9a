//! Entries for histories with planted violations: a check that cannot fail proves nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_cluster_state::{CallerName, NodeGpu, Proposal, State, StateCommand, UnixMillis};
use millrace_raft_store::{Entry, LogId};
use millrace_types::{Bytes, ClusterId, Epoch, GpuIndex, NodeName};
use openraft::{CommittedLeaderId, EntryPayload};

pub(crate) fn position(term: u64, index: u64) -> LogId {
    LogId::new(CommittedLeaderId::new(term, 1), index)
}

pub(crate) fn blank(term: u64, index: u64) -> Entry<State> {
    Entry::<State> { log_id: position(term, index), payload: EntryPayload::Blank }
}

pub(crate) fn commands(term: u64, index: u64, commands: Vec<StateCommand>) -> Entry<State> {
    commands_of("test", term, index, commands)
}

pub(crate) fn commands_of(caller: &str, term: u64, index: u64, commands: Vec<StateCommand>) -> Entry<State> {
    let propose = |command| Proposal {
        stamp: UnixMillis(index),
        caller: CallerName(caller.into()),
        idempotency: None,
        command,
    };
    let proposals = commands.into_iter().map(propose).collect();
    Entry::<State> { log_id: position(term, index), payload: EntryPayload::Normal(proposals) }
}

pub(crate) fn name(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

pub(crate) fn init() -> StateCommand {
    StateCommand::InitCluster { cluster_id: ClusterId("test".into()) }
}

pub(crate) fn registration(node: &str) -> StateCommand {
    registered(node, Vec::new())
}

pub(crate) fn registration_with_gpu(node: &str) -> StateCommand {
    registered(node, vec![NodeGpu { index: GpuIndex(0), gpu_type: "test".into(), memory: Bytes::gib(1) }])
}

fn registered(node: &str, gpus: Vec<NodeGpu>) -> StateCommand {
    StateCommand::RegisterNode {
        name: name(node),
        instance: "a".into(),
        address: String::new(),
        gpus,
        topology: String::new(),
        host_memory: Bytes(1),
        seen: Epoch(0),
    }
}

pub(crate) fn register(term: u64, index: u64, node: &str) -> Entry<State> {
    commands(term, index, vec![registration(node)])
}

/// Returns an applied log, with one millisecond between entries.
pub(crate) fn applied(entries: Vec<Entry<State>>) -> BTreeMap<u64, (Duration, Entry<State>)> {
    let at = |entry: Entry<State>| {
        let index = entry.log_id.index;
        (index, (Duration::from_millis(index), entry))
    };
    entries.into_iter().map(at).collect()
}
