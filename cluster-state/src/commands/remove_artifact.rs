//! Removes the record of a model file that no revision uses. The file itself is deleted after this
//! command is committed.

use millrace_types::Digest;

use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::state::State;
use crate::time::UnixMillis;

pub(crate) fn remove_artifact(state: &mut State, digest: Digest, unused_since: UnixMillis) -> CommandOutcome {
    let artifact = state.artifacts.get(&digest).ok_or(CommandRefusal::ArtifactNotFound { digest })?;
    if artifact.uses > 0 || artifact.touched_at > unused_since {
        return Err(CommandRefusal::ArtifactInUse { digest });
    }
    state.artifacts.remove(&digest);
    Ok(CommandEffect::Deleted { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, apply, delete, digest};

    fn remove(unused_since: UnixMillis) -> StateCommand {
        StateCommand::RemoveArtifact { digest: digest("m"), unused_since }
    }

    #[test]
    fn an_artifact_in_use_or_in_its_grace_period_is_not_removed() {
        let mut log = TestLog::with_artifacts(&["m"]);
        log.apply(apply("f", "m")).unwrap();
        let in_use = CommandRefusal::ArtifactInUse { digest: digest("m") };
        assert_eq!(log.refused(remove(UnixMillis(u64::MAX))), in_use);
        log.tick(5);
        log.apply(delete("f")).unwrap();
        let released_at = log.state.clock();
        assert_eq!(
            log.refused(remove(UnixMillis(released_at.0 - 1))),
            in_use,
            "the grace period has not ended"
        );
        assert!(log.apply(remove(released_at)).unwrap().changed());
        assert_eq!(
            log.refused(remove(released_at)),
            CommandRefusal::ArtifactNotFound { digest: digest("m") }
        );
    }
}
