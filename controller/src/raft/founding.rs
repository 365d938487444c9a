//! Cluster bootstrap of several controllers that start together with empty directories.
//!
//! A controller with an empty data directory reports this on the internal port while waiting to join. A
//! controller that is told to found a cluster with others does so only if each other controller reports
//! an empty directory. A controller that is away may have a cluster, and a controller with a lost
//! directory must not begin a second cluster. If several controllers are told to found the cluster, the
//! controller with the lowest id does.
//!
//! The answers of the other controllers are not stored: an interrupted controller asks again.

use std::net::SocketAddr;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_proto::raft::founding_client::FoundingClient;
use millrace_proto::raft::founding_server::{Founding, FoundingServer};
use millrace_proto::raft::{JoinRequest, LookRequest, LookResponse};
use millrace_proto::status::of_code;
use millrace_transport::{PortLimits, serve_while_polled};
use millrace_types::ClusterId;
use tokio::time::Instant;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};

use super::asking::ask_from;
use super::error::Error;
use super::peers::connect;
use super::timing::{JOIN_PAUSE, JOIN_TIMEOUT};
use super::world::RaftEnvironment;
use crate::config::{ClusterStart, internal_server};

/// The timeout of another controller's report of an empty directory.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// The outcome of asking the other controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BootstrapOutcome {
    /// All listed controllers have empty directories and wait for a cluster.
    Nothing,
    /// A cluster accepts this controller.
    Cluster(ClusterId),
}

/// Asks all controllers until each reports an empty directory, or a controller reports a cluster.
pub(super) async fn found_or_join(
    world: &dyn RaftEnvironment,
    with: &[String],
    request: JoinRequest,
) -> Result<BootstrapOutcome, Error> {
    let until = Instant::now() + JOIN_TIMEOUT;
    let mut reason = "no address was given".to_owned();
    let mut told = String::new();
    while Instant::now() < until && !with.is_empty() {
        let mut empty = 0;
        for address in with {
            match look(world, address, request.id).await {
                Ok(()) => empty += 1,
                Err(why) => reason = why,
            }
            match ask_from(world, address, &request).await {
                Ok(answer) => return Ok(BootstrapOutcome::Cluster(ClusterId(answer.cluster_id.into()))),
                Err(failure) if failure.retryable || failure.may_have_executed => {}
                Err(failure) => return Err(Error::Refused(failure)),
            }
        }
        if empty == with.len() {
            return Ok(BootstrapOutcome::Nothing);
        }
        if told != reason {
            tracing::info!(
                reason,
                "waiting until each of the other controllers reports an empty data directory"
            );
            told.clone_from(&reason);
        }
        tokio::time::sleep(JOIN_PAUSE).await;
    }
    Err(Error::NotFounded { with: with.to_owned(), reason })
}

/// Checks that a controller has an empty directory and lets this controller found the cluster. The
/// error is the reason if not.
async fn look(world: &dyn RaftEnvironment, address: &str, own: u64) -> Result<(), String> {
    let channel =
        connect(world, address).map_err(|error| format!("{address:?} is not an address: {error}"))?;
    let mut client = FoundingClient::new(channel);
    let looked = tokio::time::timeout(LOOK_TIMEOUT, client.look(LookRequest {})).await;
    let answer = looked
        .map_err(|_| format!("{address} does not answer within {LOOK_TIMEOUT:?}"))?
        .map_err(|status| match status.code() {
            Code::Unimplemented => format!("{address} has a cluster, but its leader is not known yet"),
            _ => format!("{address} does not answer: {}", status.message()),
        })?
        .into_inner();
    if answer.founds && answer.id <= own {
        return Err(format!(
            "{address} founds the cluster: controller {} was told to as well and has the lower id",
            answer.id
        ));
    }
    Ok(())
}

/// Connections that a controller with an empty directory accepts: a few from each of the other
/// controllers.
const FOUNDING_CONNECTIONS_MAX: usize = 64;

/// A controller with an empty data directory.
#[derive(Debug, Clone, Copy)]
struct EmptyController {
    id: ControllerId,
    /// Whether the controller is told to found a cluster.
    founds: bool,
}

#[tonic::async_trait]
impl Founding for EmptyController {
    async fn look(&self, _request: Request<LookRequest>) -> Result<Response<LookResponse>, Status> {
        Ok(Response::new(LookResponse { id: self.id.0, founds: self.founds }))
    }
}

/// Reports on `address` that this controller has an empty directory, until the future is dropped. The
/// address is then free at once for the member's own server.
pub(crate) async fn say_empty(address: SocketAddr, id: ControllerId, start: &ClusterStart) {
    let empty = EmptyController { id, founds: matches!(start, ClusterStart::Found { .. }) };
    let serve = async {
        let (listener, _) = millrace_transport::listen(address)?;
        let routes = Routes::new(FoundingServer::new(empty));
        serve_while_polled(
            listener,
            internal_server(PortLimits::new(FOUNDING_CONNECTIONS_MAX)),
            routes,
            of_code,
        )
        .await;
        Ok::<_, std::io::Error>(())
    };
    if let Err(error) = serve.await {
        tracing::warn!(%address, %error, "cannot report the empty data directory to the other controllers");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use futures::stream;
    use hyper_util::rt::TokioIo;
    use millrace_cluster_state::State;
    use millrace_proto::raft::JoinIntent;
    use millrace_raft_store::{DataDir, DirectoryOwner, RaftStore};
    use tokio::io::duplex;
    use tonic::codegen::http::Uri;
    use tonic::transport::{Channel, Endpoint, Server};

    use super::*;
    use crate::raft::asking::join_request;

    /// Waiting controllers by address; any other address refuses connections.
    #[derive(Debug, Clone, Default)]
    struct Waiting(BTreeMap<String, EmptyController>);

    impl RaftEnvironment for Waiting {
        fn dial(&self, endpoint: &Endpoint) -> Channel {
            let world = self.clone();
            let connect = move |to: Uri| {
                let found = to.host().and_then(|host| world.0.get(host)).copied();
                async move {
                    let empty = found.ok_or(io::ErrorKind::ConnectionRefused)?;
                    let (ours, theirs) = duplex(4096);
                    let incoming = stream::iter([Ok::<_, io::Error>(theirs)]);
                    let server = Server::builder().add_service(FoundingServer::new(empty));
                    tokio::spawn(server.serve_with_incoming(incoming));
                    Ok::<_, io::Error>(TokioIo::new(ours))
                }
            };
            endpoint.connect_with_connector_lazy(tower::service_fn(connect))
        }

        fn open(
            &self,
            _dir: DataDir,
            _identity: &DirectoryOwner,
        ) -> Result<RaftStore<State>, millrace_raft_store::Error> {
            unreachable!("no directory is opened before the cluster is founded")
        }
    }

    /// Returns the outcome for controller 2, which founds a cluster with `a` and `b`.
    async fn found(waiting: &[(&str, u64, bool)]) -> Result<BootstrapOutcome, String> {
        let empty = |&(name, id, founds): &(&str, u64, bool)| {
            (name.to_owned(), EmptyController { id: ControllerId(id), founds })
        };
        let world = Waiting(waiting.iter().map(empty).collect());
        let request = join_request(ControllerId(2), "new", JoinIntent::Check);
        let with = ["a:1".to_owned(), "b:1".to_owned()];
        found_or_join(&world, &with, request).await.map_err(|error| error.to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn a_cluster_is_founded_only_if_all_other_controllers_are_empty() {
        assert_eq!(found(&[("a", 1, false), ("b", 3, false)]).await, Ok(BootstrapOutcome::Nothing));
        let refused = found(&[("b", 3, false)]).await.unwrap_err();
        assert!(refused.contains("a:1 does not answer"), "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_lowest_id_of_several_founders_founds_the_cluster() {
        assert_eq!(found(&[("a", 4, true), ("b", 3, true)]).await, Ok(BootstrapOutcome::Nothing));
        let refused = found(&[("a", 1, true), ("b", 3, true)]).await.unwrap_err();
        assert!(refused.contains("controller 1 was told to as well"), "{refused}");
    }
}
