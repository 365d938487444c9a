//! Removes the record of a lost node, with its scheduling state. The counts and the usage of its
//! functions were handed over when the node was lost.

use millrace_types::NodeName;

use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::NodeStatus;
use crate::state::State;

pub(crate) fn remove_node(state: &mut State, name: &NodeName) -> CommandOutcome {
    let node = state.nodes.get(name).ok_or_else(|| CommandRefusal::NodeNotFound { name: name.clone() })?;
    if node.status == NodeStatus::Live {
        return Err(CommandRefusal::NodeIsLive { name: name.clone() });
    }
    state.nodes.remove(name);
    Ok(CommandEffect::Deleted { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use millrace_types::{Bytes, Epoch};

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, node_name};

    #[test]
    fn removing_a_live_node_is_refused() {
        let mut log = TestLog::new();
        let name = node_name("n1");
        let remove = || StateCommand::RemoveNode { name: node_name("n1") };
        assert_eq!(log.refused(remove()), CommandRefusal::NodeNotFound { name: name.clone() });
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        assert_eq!(log.refused(remove()), CommandRefusal::NodeIsLive { name: name.clone() });
        log.apply(StateCommand::NodeLost { name: name.clone(), epoch: Epoch(1) }).unwrap();
        assert!(log.apply(remove()).unwrap().changed());
        assert!(log.state.node(&name).is_none());
        assert_eq!(log.register("n1", "a", Bytes::gib(1)), Ok(CommandEffect::Registered { epoch: Epoch(2) }));
    }
}
