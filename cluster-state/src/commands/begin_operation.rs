//! Records that a change of the controller group has begun. The controller that makes the change
//! records its end.

use crate::operations::Kind;
use crate::outcome::{Applied, Outcome, Refusal};
use crate::state::{Context, State};

pub(crate) fn begin_operation(state: &mut State, context: Context<'_>, kind: &Kind) -> Outcome {
    if let Kind::DrainNode { node } = kind {
        let problem = format!("a drain begins with the wish: say that {node} is to be drained");
        return Err(Refusal::InvalidSpec { problem });
    }
    state.check_changes()?;
    let version = state.next_version();
    state.begin_operation(context, kind.clone());
    Ok(Applied::Created { version })
}
