//! Join requests of a controller that is not a member yet. The controller asks known addresses in turn,
//! and follows redirects to the leader.

use std::time::Duration;

use millrace_cluster_state::{CLUSTER_VERSION, ControllerId};
use millrace_proto::raft::{JoinIntent, JoinRequest, JoinResponse};
use millrace_proto::status::from_status;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::{ClusterId, Failure, Reason};
use tokio::time::Instant;
use tonic::Code;

use super::error::Error;
use super::peers::{connect, limited};
use super::timing::{JOIN_PAUSE, JOIN_TIMEOUT};
use super::world::RaftEnvironment;

/// The timeout of one controller's answer.
const JOIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(12);
/// Redirects to a leader that the controller follows before it starts over.
const REDIRECTS_MAX: usize = 3;

pub(super) fn join_request(id: ControllerId, directory: &str, intent: JoinIntent) -> JoinRequest {
    JoinRequest {
        protocol_version: PROTOCOL_VERSION,
        build: BUILD.into(),
        cluster_id: String::new(),
        id: id.0,
        directory: directory.to_owned(),
        address: String::new(),
        intent: intent.into(),
        cluster_version: CLUSTER_VERSION,
    }
}

/// Asks the controllers in turn, and the leaders named in the answers, until a controller gives a final
/// answer.
pub(super) async fn ask_to_join(
    world: &dyn RaftEnvironment,
    at: &[String],
    request: JoinRequest,
) -> Result<ClusterId, Error> {
    let until = Instant::now() + JOIN_TIMEOUT;
    let mut reason = "no address was given".to_owned();
    while Instant::now() < until && !at.is_empty() {
        for address in at {
            match ask_from(world, address, &request).await {
                Ok(answer) => return Ok(ClusterId(answer.cluster_id.into())),
                Err(failure) if failure.retryable || failure.may_have_executed => reason = failure.message,
                Err(failure) => return Err(Error::Refused(failure)),
            }
        }
        tracing::info!(reason, "cannot join the group yet: trying again");
        tokio::time::sleep(JOIN_PAUSE).await;
    }
    Err(Error::NotJoined { at: at.to_owned(), reason })
}

/// Asks a controller, and follows redirects to the leader.
pub(super) async fn ask_from(
    world: &dyn RaftEnvironment,
    address: &str,
    request: &JoinRequest,
) -> Result<JoinResponse, Failure> {
    let mut address = address.to_owned();
    for _ in 0..REDIRECTS_MAX {
        let answer = ask(world, &address, request).await?;
        if answer.leader_address.is_empty() {
            return Ok(answer);
        }
        address = answer.leader_address;
    }
    Err(Failure::new(Reason::NoLeader, "the controllers name each other as leader: an election is under way"))
}

async fn ask(
    world: &dyn RaftEnvironment,
    address: &str,
    request: &JoinRequest,
) -> Result<JoinResponse, Failure> {
    let lost = |why: String| Failure::new(Reason::NoLeader, format!("{address} does not answer: {why}"));
    let channel = connect(world, address).map_err(|error| {
        let message = format!("{address:?} is not an address ({error}): give host:port");
        Failure::malformed(message)
    })?;
    let mut client = limited(channel);
    let asked = tokio::time::timeout(JOIN_ANSWER_TIMEOUT, client.join(request.clone())).await;
    let answer = asked.map_err(|_| lost(format!("nothing within {JOIN_ANSWER_TIMEOUT:?}")))?;
    answer.map(tonic::Response::into_inner).map_err(|status| {
        // A status with a source was made locally, so no controller answered.
        let local = std::error::Error::source(&status).is_some();
        match status.code() {
            _ if local => lost(status.message().to_owned()),
            // That controller itself waits to join, and serves only `founding`.
            Code::Unimplemented => lost("the controller is not a member of a group yet".to_owned()),
            _ => from_status(&status),
        }
    })
}
