//! Removes the record of a model file that no revision uses. The file itself is deleted after this
//! command is committed.

use millrace_types::Digest;

use crate::command::UnixMillis;
use crate::outcome::{Applied, Outcome, Refusal};
use crate::state::State;

pub(crate) fn remove_artifact(state: &mut State, digest: Digest, unused_since: UnixMillis) -> Outcome {
    let artifact = state.artifacts.get(&digest).ok_or(Refusal::ArtifactNotFound { digest })?;
    if artifact.uses > 0 || artifact.touched_at > unused_since {
        return Err(Refusal::ArtifactInUse { digest });
    }
    state.artifacts.remove(&digest);
    Ok(Applied::Deleted { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Command;
    use crate::commands::testing::{Log, apply, delete, digest};

    fn remove(unused_since: UnixMillis) -> Command {
        Command::RemoveArtifact { digest: digest("m"), unused_since }
    }

    #[test]
    fn an_artifact_in_use_or_in_its_grace_period_is_not_removed() {
        let mut log = Log::with_artifacts(&["m"]);
        log.apply(apply("f", "m")).unwrap();
        let in_use = Refusal::ArtifactInUse { digest: digest("m") };
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
        assert_eq!(log.refused(remove(released_at)), Refusal::ArtifactNotFound { digest: digest("m") });
    }
}
