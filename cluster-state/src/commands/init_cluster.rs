//! Gives the cluster its permanent name.

use millrace_types::ClusterId;

use crate::outcome::{Applied, Outcome, Refusal};
use crate::record::Cluster;
use crate::state::{Context, State};

pub(crate) fn init_cluster(state: &mut State, context: Context<'_>, id: &ClusterId) -> Outcome {
    if let Some(cluster) = &state.cluster {
        return if cluster.id == *id {
            Ok(Applied::Unchanged)
        } else {
            Err(Refusal::OtherCluster { actual: cluster.id.clone(), asked: id.clone() })
        };
    }
    if id.0.is_empty() {
        return Err(Refusal::InvalidSpec { problem: "the cluster id is empty".into() });
    }
    state.cluster = Some(Cluster { id: id.clone(), created_at: context.now });
    Ok(Applied::Created { version: state.next_version() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::{Log, digest};
    use crate::{Command, UnixMillis};

    fn init(id: &str) -> Command {
        Command::InitCluster { cluster_id: ClusterId(id.into()) }
    }

    #[test]
    fn a_second_cluster_name_is_refused() {
        let mut log = Log::empty();
        assert_eq!(log.apply(init("a")), Ok(Applied::Created { version: 1 }));
        assert_eq!(log.apply(init("a")), Ok(Applied::Unchanged));
        let refused = log.refused(init("b"));
        assert_eq!(
            refused,
            Refusal::OtherCluster { actual: ClusterId("a".into()), asked: ClusterId("b".into()) }
        );
    }

    #[test]
    fn commands_before_init_cluster_and_an_empty_name_are_refused() {
        let remove = Command::RemoveArtifact { digest: digest("m"), unused_since: UnixMillis(0) };
        assert_eq!(Log::empty().refused(remove), Refusal::NotInitialized);
        assert!(matches!(Log::empty().refused(init("")), Refusal::InvalidSpec { .. }));
    }
}
