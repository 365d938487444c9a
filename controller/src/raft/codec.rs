//! Messages between controllers: MessagePack with field names, as in the log. Each message names the
//! sender and the receiver.
//!
//! The receiver checks every message, not only the first message of a connection. Addresses are reused,
//! and a controller that lost its data directory must not answer for the former owner. The versions are
//! checked too: a process may be replaced by another build at any time, and a build that shares no
//! rules with this build must not vote, lead or follow.

use millrace_cluster_state::{CLUSTER_VERSION, KnownRules, RulesVersion, packed};
use millrace_proto::PROTOCOL_VERSION;
use millrace_proto::raft::Message;
use millrace_proto::status::to_status;
use millrace_raft_store::DirectoryOwner;
use millrace_types::{Failure, Reason};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;

/// The receiver of a message: a member, and the data directory that the group knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MessageReceiver {
    pub(super) id: u64,
    pub(super) directory: String,
}

impl MessageReceiver {
    /// Returns the sender of a message.
    pub(crate) fn sender(message: &Message) -> Self {
        Self { id: message.from, directory: message.from_directory.clone() }
    }
}

/// Wraps a payload with sender and receiver.
pub(crate) fn message(own: &DirectoryOwner, to: &MessageReceiver, payload: Vec<u8>) -> Message {
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

/// Encodes a value as a message.
pub(super) fn encode<T: Serialize>(
    own: &DirectoryOwner,
    to: &MessageReceiver,
    value: &T,
) -> Result<Message, Failure> {
    let payload = rmp_serde::to_vec_named(value)
        .map_err(|error| Failure::new(Reason::Internal, format!("cannot encode a raft message: {error}")))?;
    Ok(message(own, to, payload))
}

/// Checks the sender's cluster and versions, and that this controller is the receiver.
pub(crate) fn check(own: &DirectoryOwner, message: &Message) -> Result<(), Failure> {
    let mismatch = |text: String| Err(Failure::new(Reason::PeerMismatch, text));
    let cluster = &own.cluster;
    if *message.cluster_id != *cluster.0 {
        return mismatch(format!(
            "a controller of cluster {} called a controller of cluster {cluster}",
            message.cluster_id
        ));
    }
    check_versions(message.protocol_version, message.cluster_version)?;
    if message.to != own.controller.0 {
        return mismatch(format!(
            "the message is for controller {}, and this is controller {}",
            message.to, own.controller.0
        ));
    }
    if message.to_directory != own.directory {
        return mismatch(format!(
            "the group knows controller {} with another data directory: if that directory is lost, remove the controller ('millrace cluster remove {0}') and join with a new id",
            own.controller.0
        ));
    }
    Ok(())
}

/// Checks a peer's protocol, and that the peer's build and this build share a version of the rules.
/// Each build knows its own version and the version before; the log says which version is in force.
pub(super) fn check_versions(protocol: u32, cluster: u64) -> Result<(), Failure> {
    let mismatch = |text: String| Err(Failure::new(Reason::PeerMismatch, text));
    if protocol != PROTOCOL_VERSION {
        return mismatch(format!(
            "controllers speak protocols {protocol} and {PROTOCOL_VERSION}: run the same version of both"
        ));
    }
    let own = KnownRules::THIS_BUILD;
    let other = KnownRules::up_to(RulesVersion(cluster));
    if !own.overlaps(other) {
        return mismatch(format!(
            "controllers know cluster versions {} to {} and {} to {}, and share none: upgrade one version at a time, all controllers to a version before any to the next",
            other.oldest(),
            other.newest(),
            own.oldest(),
            own.newest()
        ));
    }
    Ok(())
}

/// Checks and decodes a message.
pub(super) fn decode<T: DeserializeOwned>(own: &DirectoryOwner, message: &Message) -> Result<T, Failure> {
    check(own, message)?;
    packed::from_slice(&message.payload)
        .map_err(|error| Failure::malformed(format!("cannot read a raft message: {error}")))
}

/// Converts a failure into a response for a peer.
pub(crate) fn status(failure: Failure) -> Status {
    to_status(&failure)
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::ControllerId;
    use millrace_types::ClusterId;

    use super::*;

    fn identity(cluster: &str, controller: u64, directory: &str) -> DirectoryOwner {
        DirectoryOwner {
            cluster: ClusterId(cluster.into()),
            controller: ControllerId(controller),
            directory: directory.into(),
        }
    }

    #[test]
    fn only_the_intended_receiver_reads_a_message() {
        let sender = identity("ours", 1, "a");
        let to = MessageReceiver { id: 2, directory: "b".into() };
        let sent = encode(&sender, &to, &7u32).unwrap();
        assert_eq!(decode::<u32>(&identity("ours", 2, "b"), &sent), Ok(7));
        assert_eq!(MessageReceiver::sender(&sent), MessageReceiver { id: 1, directory: "a".into() });
        for other in [identity("theirs", 2, "b"), identity("ours", 3, "b"), identity("ours", 2, "new")] {
            assert_eq!(decode::<u32>(&other, &sent).unwrap_err().reason, Reason::PeerMismatch, "{other}");
        }
        let newer = Message { protocol_version: PROTOCOL_VERSION + 1, ..sent };
        let refused = decode::<u32>(&identity("ours", 2, "b"), &newer).unwrap_err();
        assert_eq!(refused.reason, Reason::PeerMismatch);
    }

    #[test]
    fn a_message_of_a_build_without_shared_rules_is_refused() {
        let to = MessageReceiver { id: 2, directory: "b".into() };
        let sent = encode(&identity("ours", 1, "a"), &to, &7u32).unwrap();
        let read = |cluster_version| {
            decode::<u32>(&identity("ours", 2, "b"), &Message { cluster_version, ..sent.clone() })
        };
        for heard in [CLUSTER_VERSION - 1, CLUSTER_VERSION, CLUSTER_VERSION + 1] {
            assert_eq!(read(heard), Ok(7), "{heard}");
        }
        // Version 0 is a build older than the version field.
        for other in [0, CLUSTER_VERSION - 2, CLUSTER_VERSION + 2] {
            let refused = read(other).unwrap_err();
            assert_eq!(refused.reason, Reason::PeerMismatch);
            assert!(refused.message.contains("upgrade one version at a time"), "{}", refused.message);
        }
    }

    #[test]
    fn an_undecodable_payload_is_an_error() {
        let own = identity("ours", 1, "a");
        let to = MessageReceiver { id: 1, directory: "a".into() };
        assert!(decode::<u32>(&own, &message(&own, &to, vec![0xc1])).is_err());
    }
}
