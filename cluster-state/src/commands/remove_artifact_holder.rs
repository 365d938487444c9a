//! Records that a controller, or the object store, no longer holds a model file: its copy was lost,
//! damaged or collected, or the controller left the group. The last copy of a file is never
//! removed.

use std::sync::Arc;

use millrace_types::Digest;

use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::ControllerId;
use crate::state::State;

pub(crate) fn remove_artifact_holder(
    state: &mut State,
    digest: Digest,
    holder: ControllerId,
) -> CommandOutcome {
    let Some(mut artifact) = state.artifacts.get(&digest).cloned() else {
        return Err(CommandRefusal::ArtifactNotFound { digest });
    };
    if !artifact.holders.contains(&holder) {
        return Ok(CommandEffect::Unchanged);
    }
    if artifact.holders.len() == 1 {
        return Err(CommandRefusal::LastHolder { digest, holder });
    }
    Arc::make_mut(&mut artifact).holders.remove(&holder);
    state.artifacts.insert(digest, artifact);
    Ok(CommandEffect::Changed { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use millrace_types::Bytes;

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, digest, model};

    fn remove(holder: u64) -> StateCommand {
        StateCommand::RemoveArtifactHolder { digest: digest("m"), holder: ControllerId(holder) }
    }

    #[test]
    fn removing_the_last_holder_of_an_artifact_is_refused() {
        let mut log = TestLog::new();
        assert_eq!(log.refused(remove(1)), CommandRefusal::ArtifactNotFound { digest: digest("m") });
        for holder in [1, 2] {
            let holder = ControllerId(holder);
            log.apply(StateCommand::AddArtifact {
                digest: digest("m"),
                bytes: Bytes(1),
                model: model(),
                holder,
            })
            .unwrap();
        }
        assert_eq!(log.apply(remove(3)), Ok(CommandEffect::Unchanged));
        assert!(log.apply(remove(1)).unwrap().changed());
        let last = CommandRefusal::LastHolder { digest: digest("m"), holder: ControllerId(2) };
        assert_eq!(log.refused(remove(2)), last);
    }
}
