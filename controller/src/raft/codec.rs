//! openraft's messages on the wire: MessagePack with field names, as in the log, and the sender's
//! cluster and protocol version on each message. A peer of another is refused on every call, not
//! only at the first: addresses are reused.

use millrace_proto::PROTOCOL_VERSION;
use millrace_proto::raft::Message;
use millrace_proto::status::to_status;
use millrace_types::{ClusterId, Failure, Reason};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;

/// Wraps a payload.
pub(super) fn message(cluster: &ClusterId, payload: Vec<u8>) -> Message {
    Message { cluster_id: cluster.to_string(), protocol_version: PROTOCOL_VERSION, payload: payload.into() }
}

/// Encodes a message.
pub(super) fn encode<T: Serialize>(cluster: &ClusterId, value: &T) -> Result<Message, Failure> {
    let payload = rmp_serde::to_vec_named(value).map_err(|error| {
        Failure::new(Reason::Internal, format!("a raft message cannot be encoded: {error}"))
    })?;
    Ok(message(cluster, payload))
}

/// Checks where a message comes from.
pub(super) fn check(cluster: &ClusterId, message: &Message) -> Result<(), Failure> {
    if *message.cluster_id != *cluster.0 {
        let text = format!("a controller of cluster {} called one of cluster {cluster}", message.cluster_id);
        return Err(Failure::new(Reason::PeerMismatch, text));
    }
    if message.protocol_version != PROTOCOL_VERSION {
        let text = format!(
            "controllers speak protocols {} and {PROTOCOL_VERSION}: run the same version of both",
            message.protocol_version
        );
        return Err(Failure::new(Reason::PeerMismatch, text));
    }
    Ok(())
}

/// Checks and decodes a message.
pub(super) fn decode<T: DeserializeOwned>(cluster: &ClusterId, message: &Message) -> Result<T, Failure> {
    check(cluster, message)?;
    rmp_serde::from_slice(&message.payload).map_err(|error| {
        Failure::new(Reason::MalformedRequest, format!("a raft message cannot be read: {error}"))
    })
}

/// A failure as an answer to a peer.
pub(super) fn status(failure: Failure) -> Status {
    to_status(&failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_of_another_cluster_or_protocol_is_refused() {
        let (ours, theirs) = (ClusterId("ours".into()), ClusterId("theirs".into()));
        let sent = encode(&ours, &7u32).unwrap();
        assert_eq!(decode::<u32>(&ours, &sent), Ok(7));
        assert_eq!(decode::<u32>(&theirs, &sent).unwrap_err().reason, Reason::PeerMismatch);
        let newer = Message { protocol_version: PROTOCOL_VERSION + 1, ..sent };
        assert_eq!(decode::<u32>(&ours, &newer).unwrap_err().reason, Reason::PeerMismatch);
    }

    #[test]
    fn what_does_not_decode_is_an_error() {
        let ours = ClusterId("ours".into());
        assert!(decode::<u32>(&ours, &message(&ours, vec![0xc1])).is_err());
    }
}
