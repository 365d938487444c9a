//! The service `grpc.health.v1`: serving while the gateway is ready.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream};
use tokio::time::{Instant, sleep_until};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::handler::InferenceHandler;

/// Interval at which a watched status is checked.
const WATCH_EVERY: Duration = Duration::from_millis(250);

/// The health of every service of the gateway, which is the same for all.
#[derive(Clone)]
pub(crate) struct FrontHealth {
    pub(crate) front: Arc<InferenceHandler>,
    /// Names of the services; the empty name stands for the server.
    pub(crate) services: Arc<BTreeSet<&'static str>>,
}

impl FrontHealth {
    fn status(front: &InferenceHandler) -> ServingStatus {
        if front.ready() { ServingStatus::Serving } else { ServingStatus::NotServing }
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for FrontHealth {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.get_ref().service.as_str();
        if !service.is_empty() && !self.services.contains(service) {
            return Err(Status::not_found(format!(
                "unknown service {service:?}: list the services with reflection"
            )));
        }
        Ok(Response::new(response(Self::status(&self.front))))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let service = request.get_ref().service.as_str();
        let known = service.is_empty() || self.services.contains(service);
        let front = Arc::clone(&self.front);
        // Sends the current status and then every change. The protocol requires that an unknown
        // service can be watched too.
        let changes = stream::unfold(None, move |last: Option<ServingStatus>| {
            let front = Arc::clone(&front);
            async move {
                loop {
                    let now = if known { Self::status(&front) } else { ServingStatus::ServiceUnknown };
                    if last != Some(now) {
                        return Some((Ok(response(now)), Some(now)));
                    }
                    if front.closing.is_closing() {
                        return None;
                    }
                    sleep_until(Instant::now() + WATCH_EVERY).await;
                }
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }
}
