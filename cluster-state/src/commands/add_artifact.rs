//! Records that a controller holds a model file durably.

use std::sync::Arc;

use imbl::OrdSet;
use millrace_types::{Bytes, Digest};

use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::{Artifact, ControllerId, ModelSummary};
use crate::state::{ARTIFACTS_MAX, State};

pub(crate) fn add_artifact(
    state: &mut State,
    context: CommandContext<'_>,
    digest: Digest,
    bytes: Bytes,
    model: &ModelSummary,
    holder: ControllerId,
) -> CommandOutcome {
    match state.artifacts.get(&digest).cloned() {
        None => create(state, context, digest, bytes, model, holder),
        Some(artifact) if artifact.bytes != bytes => Err(CommandRefusal::ArtifactDiffers {
            digest,
            actual: artifact.bytes.get(),
            claimed: bytes.get(),
        }),
        Some(artifact) => Ok(refresh_artifact(state, context, artifact, holder)),
    }
}

fn create(
    state: &mut State,
    context: CommandContext<'_>,
    digest: Digest,
    bytes: Bytes,
    model: &ModelSummary,
    holder: ControllerId,
) -> CommandOutcome {
    if state.artifacts.len() >= ARTIFACTS_MAX {
        return Err(CommandRefusal::Full { what: "artifacts".into(), limit: ARTIFACTS_MAX as u64 });
    }
    let artifact = Artifact {
        profiles: Vec::new(),
        digest,
        bytes,
        model: model.clone(),
        holders: OrdSet::unit(holder),
        uses: 0,
        touched_at: context.now,
        created_by: context.caller.clone(),
    };
    state.artifacts.insert(digest, Arc::new(artifact));
    Ok(CommandEffect::Created { version: state.next_version() })
}

/// Restarts the grace period of a known file that is uploaded again, because a revision is about to
/// refer to the file.
fn refresh_artifact(
    state: &mut State,
    context: CommandContext<'_>,
    mut artifact: Arc<Artifact>,
    holder: ControllerId,
) -> CommandEffect {
    let known = artifact.holders.contains(&holder);
    if known && artifact.touched_at == context.now {
        return CommandEffect::Unchanged;
    }
    let changed = Arc::make_mut(&mut artifact);
    changed.holders.insert(holder);
    changed.touched_at = context.now;
    state.artifacts.insert(changed.digest, artifact);
    CommandEffect::Changed { version: state.next_version() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{TestLog, digest, model};

    fn add(bytes: u64, holder: u64) -> StateCommand {
        StateCommand::AddArtifact {
            digest: digest("m"),
            bytes: Bytes(bytes),
            model: model(),
            holder: ControllerId(holder),
        }
    }

    #[test]
    fn uploads_of_one_file_add_holders_and_another_size_is_refused() {
        let mut log = TestLog::new();
        let version = log.state.version();
        assert_eq!(log.apply(add(10, 1)), Ok(CommandEffect::Created { version: version + 1 }));
        assert_eq!(log.apply(add(10, 2)), Ok(CommandEffect::Changed { version: version + 2 }));
        let refused = log.refused(add(11, 1));
        assert_eq!(refused, CommandRefusal::ArtifactDiffers { digest: digest("m"), actual: 10, claimed: 11 });
        let holders: Vec<_> = log.state.artifact(&digest("m")).unwrap().holders.iter().copied().collect();
        assert_eq!(holders, vec![ControllerId(1), ControllerId(2)]);
    }

    #[test]
    fn a_second_upload_restarts_the_grace_period() {
        let mut log = TestLog::new();
        log.apply(add(10, 1)).unwrap();
        assert_eq!(log.apply(add(10, 1)), Ok(CommandEffect::Unchanged), "at the same moment");
        log.tick(1000);
        assert!(log.apply(add(10, 1)).unwrap().changed());
        assert_eq!(log.state.artifact(&digest("m")).unwrap().touched_at, log.state.clock());
    }
}
