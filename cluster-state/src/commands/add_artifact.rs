//! Records that a controller holds a model file durably.

use std::sync::Arc;

use imbl::OrdSet;
use millrace_types::{Bytes, Digest};

use crate::outcome::{Applied, Outcome, Refusal};
use crate::record::{Artifact, ControllerId, ModelSummary};
use crate::state::{ARTIFACTS_MAX, Context, State};

pub(crate) fn add_artifact(
    state: &mut State,
    context: Context<'_>,
    digest: Digest,
    bytes: Bytes,
    model: &ModelSummary,
    holder: ControllerId,
) -> Outcome {
    match state.artifacts.get(&digest).cloned() {
        None => create(state, context, digest, bytes, model, holder),
        Some(artifact) if artifact.bytes != bytes => {
            Err(Refusal::ArtifactDiffers { digest, actual: artifact.bytes.get(), claimed: bytes.get() })
        }
        Some(artifact) => Ok(touch(state, context, artifact, holder)),
    }
}

fn create(
    state: &mut State,
    context: Context<'_>,
    digest: Digest,
    bytes: Bytes,
    model: &ModelSummary,
    holder: ControllerId,
) -> Outcome {
    if state.artifacts.len() >= ARTIFACTS_MAX {
        return Err(Refusal::Full { what: "artifacts".into(), limit: ARTIFACTS_MAX as u64 });
    }
    let artifact = Artifact {
        digest,
        bytes,
        model: model.clone(),
        holders: OrdSet::unit(holder),
        uses: 0,
        touched_at: context.now,
        created_by: context.caller.clone(),
    };
    state.artifacts.insert(digest, Arc::new(artifact));
    Ok(Applied::Created { version: state.next_version() })
}

/// Restarts the grace period of a known file that is uploaded again, because a revision is about to
/// refer to the file.
fn touch(
    state: &mut State,
    context: Context<'_>,
    mut artifact: Arc<Artifact>,
    holder: ControllerId,
) -> Applied {
    let known = artifact.holders.contains(&holder);
    if known && artifact.touched_at == context.now {
        return Applied::Unchanged;
    }
    let changed = Arc::make_mut(&mut artifact);
    changed.holders.insert(holder);
    changed.touched_at = context.now;
    state.artifacts.insert(changed.digest, artifact);
    Applied::Changed { version: state.next_version() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Command;
    use crate::commands::testing::{Log, digest, model};

    fn add(bytes: u64, holder: u64) -> Command {
        Command::AddArtifact {
            digest: digest("m"),
            bytes: Bytes(bytes),
            model: model(),
            holder: ControllerId(holder),
        }
    }

    #[test]
    fn uploads_of_one_file_add_holders_and_another_size_is_refused() {
        let mut log = Log::new();
        let version = log.state.version();
        assert_eq!(log.apply(add(10, 1)), Ok(Applied::Created { version: version + 1 }));
        assert_eq!(log.apply(add(10, 2)), Ok(Applied::Changed { version: version + 2 }));
        let refused = log.refused(add(11, 1));
        assert_eq!(refused, Refusal::ArtifactDiffers { digest: digest("m"), actual: 10, claimed: 11 });
        let holders: Vec<_> = log.state.artifact(&digest("m")).unwrap().holders.iter().copied().collect();
        assert_eq!(holders, vec![ControllerId(1), ControllerId(2)]);
    }

    #[test]
    fn a_second_upload_restarts_the_grace_period() {
        let mut log = Log::new();
        log.apply(add(10, 1)).unwrap();
        assert_eq!(log.apply(add(10, 1)), Ok(Applied::Unchanged), "at the same moment");
        log.tick(1000);
        assert!(log.apply(add(10, 1)).unwrap().changed());
        assert_eq!(log.state.artifact(&digest("m")).unwrap().touched_at, log.state.clock());
    }
}
