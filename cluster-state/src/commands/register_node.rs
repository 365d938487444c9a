//! Registers a worker under a new epoch. A name that another live process holds is refused. The
//! same process keeps its epoch, because a worker attaches to several controllers at once.
//!
//! The state trusts no earlier report of the node's contents: the node starts with an empty
//! checkpoint, until its full sync. The node begins with the alphas of its last registration.

use std::sync::Arc;

use millrace_types::{Alphas, Bytes, Epoch, NodeName};

use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::{NodeGpu, NodeRecord, NodeStatus, SchedulingState};
use crate::state::{NODES_MAX, State};

/// The properties that a worker reports of itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RegistrationRequest<'a> {
    pub(crate) instance: &'a str,
    pub(crate) address: &'a str,
    pub(crate) gpus: &'a [NodeGpu],
    pub(crate) topology: &'a str,
    pub(crate) host_memory: Bytes,
    pub(crate) seen: Epoch,
}

/// The highest epoch that a worker may report as seen: a cluster counts up from there.
const EPOCH_SEEN_MAX: Epoch = Epoch(1 << 48);

pub(crate) fn register_node(
    state: &mut State,
    context: CommandContext<'_>,
    name: &NodeName,
    registration: RegistrationRequest<'_>,
) -> CommandOutcome {
    if registration.seen > EPOCH_SEEN_MAX {
        let problem = format!("node {name} claims to have seen epoch {}", registration.seen);
        return Err(CommandRefusal::InvalidSpec { problem });
    }
    let (scheduling, alphas) = match state.nodes.get(name) {
        Some(node) if node.status == NodeStatus::Live && node.instance != registration.instance => {
            return Err(CommandRefusal::NodeNameTaken { name: name.clone() });
        }
        Some(node) if node.status == NodeStatus::Live => {
            return Ok(CommandEffect::AlreadyRegistered { epoch: node.epoch });
        }
        Some(node) => (node.scheduling, node.alphas.clone()),
        None => {
            evict_lost_node(state)?;
            (SchedulingState::default(), Alphas::new())
        }
    };
    state.epochs_given = state.epochs_given.max(registration.seen.0) + 1;
    let node = NodeRecord {
        name: name.clone(),
        epoch: Epoch(state.epochs_given),
        status: NodeStatus::Live,
        scheduling,
        instance: registration.instance.to_owned(),
        address: registration.address.to_owned(),
        gpus: registration.gpus.to_vec(),
        topology: registration.topology.to_owned(),
        host_memory: registration.host_memory,
        alphas,
        resource_version: state.next_version(),
        changed_at: context.now,
    };
    let epoch = node.epoch;
    state.nodes.insert(name.clone(), Arc::new(node));
    Ok(CommandEffect::Registered { epoch })
}

/// Frees a slot for a new node. A lost node stays listed until its slot is needed; then the node
/// lost first is removed.
fn evict_lost_node(state: &mut State) -> Result<(), CommandRefusal> {
    if state.nodes.len() < NODES_MAX {
        return Ok(());
    }
    let lost = state.nodes.values().filter(|node| node.status == NodeStatus::Lost);
    let oldest = lost.min_by_key(|node| node.resource_version).map(|node| node.name.clone());
    let oldest = oldest.ok_or(CommandRefusal::Full { what: "nodes".into(), limit: NODES_MAX as u64 })?;
    state.nodes.remove(&oldest);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, node_name};

    const GPU: Bytes = Bytes::gib(1);

    #[test]
    fn every_registration_gets_a_new_epoch() {
        let mut log = TestLog::new();
        assert_eq!(log.register("n1", "a", GPU), Ok(CommandEffect::Registered { epoch: Epoch(1) }));
        assert_eq!(log.register("n2", "b", GPU), Ok(CommandEffect::Registered { epoch: Epoch(2) }));
        let again = CommandEffect::AlreadyRegistered { epoch: Epoch(1) };
        assert_eq!(log.register("n1", "a", GPU), Ok(again), "the same process");
        log.apply(StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(1) }).unwrap();
        assert_eq!(log.register("n1", "a", GPU), Ok(CommandEffect::Registered { epoch: Epoch(3) }));
    }

    #[test]
    fn a_rebuilt_cluster_assigns_epochs_above_those_that_workers_have_seen() {
        let mut log = TestLog::new();
        let mut seen = |name: &str, seen| {
            log.apply(StateCommand::RegisterNode {
                name: node_name(name),
                instance: "a".into(),
                address: String::new(),
                gpus: Vec::new(),
                topology: String::new(),
                host_memory: GPU,
                seen: Epoch(seen),
            })
        };
        assert_eq!(seen("n1", 7), Ok(CommandEffect::Registered { epoch: Epoch(8) }));
        assert_eq!(seen("n2", 3), Ok(CommandEffect::Registered { epoch: Epoch(9) }));
        assert!(matches!(seen("n3", u64::MAX), Err(CommandRefusal::InvalidSpec { .. })));
    }

    #[test]
    fn a_live_nodes_name_is_taken_until_it_is_lost() {
        let mut log = TestLog::new();
        log.register("n1", "a", GPU).unwrap();
        let taken = Err(CommandRefusal::NodeNameTaken { name: node_name("n1") });
        assert_eq!(log.register("n1", "b", GPU), taken);
        log.apply(StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(1) }).unwrap();
        assert_eq!(log.register("n1", "b", GPU), Ok(CommandEffect::Registered { epoch: Epoch(2) }));
    }

    #[test]
    fn a_full_cluster_replaces_a_lost_node_and_never_a_live_one() {
        let mut state = TestLog::new().state;
        let caller = crate::CallerName("test".into());
        let context = CommandContext { now: state.clock, caller: &caller };
        let none = RegistrationRequest {
            instance: "i",
            address: "",
            gpus: &[],
            topology: "",
            host_memory: GPU,
            seen: Epoch(0),
        };
        for n in 0..NODES_MAX {
            register_node(&mut state, context, &node_name(&format!("n{n}")), none).unwrap();
        }
        let full = CommandRefusal::Full { what: "nodes".into(), limit: NODES_MAX as u64 };
        assert_eq!(register_node(&mut state, context, &node_name("extra"), none), Err(full));
        crate::commands::node_lost(&mut state, context, &node_name("n7"), Epoch(8)).unwrap();
        assert!(register_node(&mut state, context, &node_name("extra"), none).is_ok());
        assert!(state.node(&node_name("n7")).is_none());
        assert_eq!(state.check_invariants(), Ok(()));
    }
}
