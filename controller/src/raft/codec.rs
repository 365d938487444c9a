//! What controllers send each other, on the wire: MessagePack with field names, as in the log, and
//! on each message who sends it and for whom. Every message is checked, not only the first of a
//! connection: addresses are reused, and a controller that lost its data directory must not answer
//! for the one that had it. So are versions: a process may be replaced by another build at any time, and
//! a build that shares no rules with this one must not vote, lead or follow.

use millrace_cluster_state::{CLUSTER_VERSION, KnownRules, RulesVersion, packed};
use millrace_proto::PROTOCOL_VERSION;
use millrace_proto::raft::Message;
use millrace_proto::status::to_status;
use millrace_raft_store::Identity;
use millrace_types::{Failure, Reason};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;

/// For whom a message is: a member, and its data directory as the group knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) id: u64,
    pub(super) directory: String,
}

impl Target {
    /// Whoever sent this message.
    pub(super) fn sender(message: &Message) -> Self {
        Self { id: message.from, directory: message.from_directory.clone() }
    }
}

/// Wraps a payload.
pub(super) fn message(own: &Identity, to: &Target, payload: Vec<u8>) -> Message {
    Message {
        cluster_id: own.cluster.to_string(),
        protocol_version: PROTOCOL_VERSION,
        payload: payload.into(),
        from: own.controller.0,
        from_directory: own.directory.clone(),
        to: to.id,
        to_directory: to.directory.clone(),
        cluster_version: CLUSTER_VERSION,
    }
}

/// Encodes a message.
pub(super) fn encode<T: Serialize>(own: &Identity, to: &Target, value: &T) -> Result<Message, Failure> {
    let payload = rmp_serde::to_vec_named(value).map_err(|error| {
        Failure::new(Reason::Internal, format!("a raft message cannot be encoded: {error}"))
    })?;
    Ok(message(own, to, payload))
}

/// Checks where a message comes from, and that it is meant for this controller.
pub(super) fn check(own: &Identity, message: &Message) -> Result<(), Failure> {
    let mismatch = |text: String| Err(Failure::new(Reason::PeerMismatch, text));
    let cluster = &own.cluster;
    if *message.cluster_id != *cluster.0 {
        return mismatch(format!(
            "a controller of cluster {} called one of cluster {cluster}",
            message.cluster_id
        ));
    }
    check_versions(message.protocol_version, message.cluster_version)?;
    if message.to != own.controller.0 {
        return mismatch(format!("controller {} was called and this is {}", message.to, own.controller.0));
    }
    if message.to_directory != own.directory {
        return mismatch(format!(
            "the group knows controller {} with another data directory: if that is lost, remove it ('millrace cluster remove {0}') and let this one join with a new id",
            own.controller.0
        ));
    }
    Ok(())
}

/// Checks the protocol of a peer, and that its build and this one share a version of the rules: each knows
/// its own and the one before. Which of them is in force, the log says.
pub(super) fn check_versions(protocol: u32, cluster: u64) -> Result<(), Failure> {
    let mismatch = |text: String| Err(Failure::new(Reason::PeerMismatch, text));
    if protocol != PROTOCOL_VERSION {
        return mismatch(format!(
            "controllers speak protocols {protocol} and {PROTOCOL_VERSION}: run the same version of both"
        ));
    }
    let (own, other) = (KnownRules::THIS_BUILD, KnownRules::up_to(RulesVersion(cluster)));
    if !own.overlaps(other) {
        return mismatch(format!(
            "controllers know cluster versions {} to {} and {} to {}, none of which they share: upgrade one version at a time, all controllers to one before any to the next",
            other.oldest(),
            other.newest(),
            own.oldest(),
            own.newest()
        ));
    }
    Ok(())
}

/// Checks and decodes a message.
pub(super) fn decode<T: DeserializeOwned>(own: &Identity, message: &Message) -> Result<T, Failure> {
    check(own, message)?;
    packed::from_slice(&message.payload)
        .map_err(|error| Failure::malformed(format!("a raft message cannot be read: {error}")))
}

/// A failure as an answer to a peer.
pub(super) fn status(failure: Failure) -> Status {
    to_status(&failure)
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::ControllerId;
    use millrace_types::ClusterId;

    use super::*;

    fn identity(cluster: &str, controller: u64, directory: &str) -> Identity {
        Identity {
            cluster: ClusterId(cluster.into()),
            controller: ControllerId(controller),
            directory: directory.into(),
        }
    }

    #[test]
    fn only_the_member_that_is_meant_reads_a_message() {
        let sender = identity("ours", 1, "a");
        let to = Target { id: 2, directory: "b".into() };
        let sent = encode(&sender, &to, &7u32).unwrap();
        assert_eq!(decode::<u32>(&identity("ours", 2, "b"), &sent), Ok(7));
        assert_eq!(Target::sender(&sent), Target { id: 1, directory: "a".into() });
        for other in [identity("theirs", 2, "b"), identity("ours", 3, "b"), identity("ours", 2, "new")] {
            assert_eq!(decode::<u32>(&other, &sent).unwrap_err().reason, Reason::PeerMismatch, "{other}");
        }
        let newer = Message { protocol_version: PROTOCOL_VERSION + 1, ..sent };
        let refused = decode::<u32>(&identity("ours", 2, "b"), &newer).unwrap_err();
        assert_eq!(refused.reason, Reason::PeerMismatch);
    }

    #[test]
    fn only_a_member_whose_build_shares_rules_with_this_one_is_heard() {
        let to = Target { id: 2, directory: "b".into() };
        let sent = encode(&identity("ours", 1, "a"), &to, &7u32).unwrap();
        let read = |cluster_version| {
            decode::<u32>(&identity("ours", 2, "b"), &Message { cluster_version, ..sent.clone() })
        };
        for heard in [CLUSTER_VERSION - 1, CLUSTER_VERSION, CLUSTER_VERSION + 1] {
            assert_eq!(read(heard), Ok(7), "{heard}");
        }
        // 0: a build from before the version was part of a message.
        for other in [0, CLUSTER_VERSION - 2, CLUSTER_VERSION + 2] {
            let refused = read(other).unwrap_err();
            assert_eq!(refused.reason, Reason::PeerMismatch);
            assert!(refused.message.contains("upgrade one version at a time"), "{}", refused.message);
        }
    }

    #[test]
    fn what_does_not_decode_is_an_error() {
        let own = identity("ours", 1, "a");
        let to = Target { id: 1, directory: "a".into() };
        assert!(decode::<u32>(&own, &message(&own, &to, vec![0xc1])).is_err());
    }
}
