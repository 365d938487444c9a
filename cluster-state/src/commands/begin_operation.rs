//! Records that a change of the controller group or a profile has begun. The controller that makes the
//! change, or the leader, records the end.

use crate::context::CommandContext;
use crate::operation_record::OperationKind;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::state::State;

pub(crate) fn begin_operation(
    state: &mut State,
    context: CommandContext<'_>,
    kind: &OperationKind,
) -> CommandOutcome {
    if let OperationKind::DrainNode { node } = kind {
        let problem = format!("a drain begins with the wish: say that {node} is to be drained");
        return Err(CommandRefusal::InvalidSpec { problem });
    }
    match kind {
        OperationKind::ProfileFunction { function, digest, .. } => state.check_profile(function, *digest)?,
        _ => state.check_changes()?,
    }
    let version = state.next_version();
    state.begin_operation(context, kind.clone());
    Ok(CommandEffect::Created { version })
}
