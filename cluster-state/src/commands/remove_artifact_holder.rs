//! Records that a controller, or the object store, no longer holds a model file: its copy was lost,
//! damaged or collected, or the controller left the group. The last copy of a file is never
//! removed.

use std::sync::Arc;

use millrace_types::Digest;

use crate::outcome::{Applied, Outcome, Refusal};
use crate::record::ControllerId;
use crate::state::State;

pub(crate) fn remove_artifact_holder(state: &mut State, digest: Digest, holder: ControllerId) -> Outcome {
    let Some(mut artifact) = state.artifacts.get(&digest).cloned() else {
        return Err(Refusal::ArtifactNotFound { digest });
    };
    if !artifact.holders.contains(&holder) {
        return Ok(Applied::Unchanged);
    }
    if artifact.holders.len() == 1 {
        return Err(Refusal::LastHolder { digest, holder });
    }
    Arc::make_mut(&mut artifact).holders.remove(&holder);
    state.artifacts.insert(digest, artifact);
    Ok(Applied::Changed { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use millrace_types::Bytes;

    use super::*;
    use crate::Command;
    use crate::commands::testing::{Log, digest, model};

    fn remove(holder: u64) -> Command {
        Command::RemoveArtifactHolder { digest: digest("m"), holder: ControllerId(holder) }
    }

    #[test]
    fn removing_the_last_holder_of_an_artifact_is_refused() {
        let mut log = Log::new();
        assert_eq!(log.refused(remove(1)), Refusal::ArtifactNotFound { digest: digest("m") });
        for holder in [1, 2] {
            let holder = ControllerId(holder);
            log.apply(Command::AddArtifact { digest: digest("m"), bytes: Bytes(1), model: model(), holder })
                .unwrap();
        }
        assert_eq!(log.apply(remove(3)), Ok(Applied::Unchanged));
        assert!(log.apply(remove(1)).unwrap().changed());
        let last = Refusal::LastHolder { digest: digest("m"), holder: ControllerId(2) };
        assert_eq!(log.refused(remove(2)), last);
    }
}
