//! The log lines of another controller.

use millrace_proto::decoding::{WalkLimits, decode};
use millrace_proto::log::{Page, Query};
use millrace_proto::logs;
use millrace_types::{Failure, Reason};
use prost::Message as _;

use super::fanout::ASK_TIMEOUT;
use crate::raft::PeerClient;

/// Asks a controller for a page of log lines.
pub(crate) async fn ask(peer: &PeerClient, query: &Query) -> Result<Page, Failure> {
    let query = query.encode_to_vec();
    let page: Vec<u8> =
        peer.call(ASK_TIMEOUT, &query, async |mut it, message| it.get_logs(message).await).await?;
    decode(page.into(), WalkLimits::PEER).map_err(|error| Failure::new(Reason::Internal, error.to_string()))
}

/// Returns this process's lines, encoded for another controller.
pub(super) fn given(query: Vec<u8>) -> Vec<u8> {
    let query = decode(query.into(), WalkLimits::PEER);
    query.map(|query: Query| logs::local_page(&query)).unwrap_or_default().encode_to_vec()
}
