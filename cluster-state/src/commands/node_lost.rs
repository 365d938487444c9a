//! Fences a lost worker. A loss of a registration that has already ended changes nothing.
//!
//! The node's placements and checkpoint are removed. The counts of its functions wait for their
//! next placements, and their usage is already billed. The node keeps its alphas. Data that no other
//! node holds is lost.

use std::sync::Arc;

use millrace_types::{Epoch, NodeName};

use crate::context::CommandContext;
use crate::index::LOST_ENTRIES_MAX;
use crate::outcome::{CommandEffect, CommandOutcome};
use crate::record::NodeStatus;
use crate::state::State;

pub(crate) fn node_lost(
    state: &mut State,
    context: CommandContext<'_>,
    name: &NodeName,
    epoch: Epoch,
) -> CommandOutcome {
    let Some(mut node) = state.nodes.get(name).cloned() else { return Ok(CommandEffect::Unchanged) };
    if node.epoch != epoch || node.status == NodeStatus::Lost {
        return Ok(CommandEffect::Unchanged);
    }
    let version = state.next_version();
    let lost = Arc::make_mut(&mut node);
    lost.status = NodeStatus::Lost;
    lost.resource_version = version;
    lost.changed_at = context.now;
    if let Some(checkpoint) = state.checkpoints.get(name)
        && !checkpoint.alphas.is_empty()
    {
        lost.alphas.clone_from(&checkpoint.alphas);
    }
    state.nodes.insert(name.clone(), node);
    let placed: Vec<_> = state.placements.on(name).cloned().collect();
    for function in &placed {
        state.placements.remove(function, name);
    }
    drop_checkpoint(state, name, version);
    Ok(CommandEffect::Changed { version })
}

fn drop_checkpoint(state: &mut State, name: &NodeName, version: u64) {
    let Some(checkpoint) = state.checkpoints.remove(name) else { return };
    for (function, score) in &checkpoint.scores {
        state.add_unclaimed_counts(function, score.effective());
    }
    for (id, bytes) in &checkpoint.entries {
        state.index.record_loss(id, *bytes, name, version);
    }
    state.index.forget_oldest_losses(LOST_ENTRIES_MAX);
}

#[cfg(test)]
mod tests {
    use millrace_types::Bytes;

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, node_name};

    fn lost(epoch: u64) -> StateCommand {
        StateCommand::NodeLost { name: node_name("n1"), epoch: Epoch(epoch) }
    }

    #[test]
    fn only_the_current_epoch_can_be_lost_and_only_once() {
        let mut log = TestLog::new();
        assert_eq!(log.apply(lost(1)), Ok(CommandEffect::Unchanged), "never heard of");
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        assert!(log.apply(lost(1)).unwrap().changed());
        assert_eq!(log.apply(lost(1)), Ok(CommandEffect::Unchanged));
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        assert_eq!(log.apply(lost(1)), Ok(CommandEffect::Unchanged), "an older epoch");
        assert!(log.apply(lost(2)).unwrap().changed());
        assert_eq!(log.state.node(&node_name("n1")).unwrap().status, NodeStatus::Lost);
        assert_eq!(log.state.largest_gpu(), None, "a lost node's GPUs do not count");
    }
}
