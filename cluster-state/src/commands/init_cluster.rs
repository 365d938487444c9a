//! Gives the cluster its permanent name.

use millrace_types::ClusterId;

use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::ClusterRecord;
use crate::state::State;

pub(crate) fn init_cluster(state: &mut State, context: CommandContext<'_>, id: &ClusterId) -> CommandOutcome {
    if let Some(cluster) = &state.cluster {
        return if cluster.id == *id {
            Ok(CommandEffect::Unchanged)
        } else {
            Err(CommandRefusal::OtherCluster { actual: cluster.id.clone(), asked: id.clone() })
        };
    }
    if id.0.is_empty() {
        return Err(CommandRefusal::InvalidSpec { problem: "the cluster id is empty".into() });
    }
    state.cluster = Some(ClusterRecord { id: id.clone(), created_at: context.now });
    Ok(CommandEffect::Created { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::{TestLog, digest};
    use crate::{StateCommand, UnixMillis};

    fn init(id: &str) -> StateCommand {
        StateCommand::InitCluster { cluster_id: ClusterId(id.into()) }
    }

    #[test]
    fn a_second_cluster_name_is_refused() {
        let mut log = TestLog::empty();
        assert_eq!(log.apply(init("a")), Ok(CommandEffect::Created { version: 1 }));
        assert_eq!(log.apply(init("a")), Ok(CommandEffect::Unchanged));
        let refused = log.refused(init("b"));
        assert_eq!(
            refused,
            CommandRefusal::OtherCluster { actual: ClusterId("a".into()), asked: ClusterId("b".into()) }
        );
    }

    #[test]
    fn commands_before_init_cluster_and_an_empty_name_are_refused() {
        let remove = StateCommand::RemoveArtifact { digest: digest("m"), unused_since: UnixMillis(0) };
        assert_eq!(TestLog::empty().refused(remove), CommandRefusal::NotInitialized);
        assert!(matches!(TestLog::empty().refused(init("")), CommandRefusal::InvalidSpec { .. }));
    }
}
