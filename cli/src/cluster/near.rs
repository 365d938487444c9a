//! How the controller reaches workers of its own process: straight into their service. They start
//! after it, so a call waits until its worker's service is there.

use std::collections::BTreeMap;
use std::convert::Infallible;

use http::{Request, Response};
use millrace_controller::{ConnectError, Connector, Tcp, Transport, in_process};
use millrace_proto::worker::worker_server::WorkerServer;
use millrace_types::NodeName;
use millrace_worker::service::WorkerService;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tower::{ServiceExt as _, service_fn};

type Service = WorkerServer<WorkerService>;
type Place = watch::Receiver<Option<Service>>;

/// Connects to the workers of this process without a socket, and to any other over TCP.
#[derive(Debug)]
pub(super) struct Neighbours(BTreeMap<NodeName, Place>);

/// Where each worker's service is put once it runs.
#[derive(Debug)]
pub(super) struct Places(BTreeMap<NodeName, watch::Sender<Option<Service>>>);

impl Neighbours {
    pub(super) fn of(names: &[NodeName]) -> (Self, Places) {
        let (mut neighbours, mut places) = (BTreeMap::new(), BTreeMap::new());
        for name in names {
            let (sender, receiver) = watch::channel(None);
            neighbours.insert(name.clone(), receiver);
            places.insert(name.clone(), sender);
        }
        (Self(neighbours), Places(places))
    }
}

impl Places {
    pub(super) fn settle(&self, name: &NodeName, service: Service) {
        if let Some(place) = self.0.get(name) {
            place.send_replace(Some(service));
        }
    }
}

impl Connector for Neighbours {
    fn connect(&self, name: &NodeName, address: &str) -> Result<Transport, ConnectError> {
        match self.0.get(name) {
            Some(place) => {
                let place = place.clone();
                Ok(in_process(service_fn(move |request| call(place.clone(), request))))
            }
            None => Tcp.connect(name, address),
        }
    }
}

async fn call(mut place: Place, request: Request<Body>) -> Result<Response<Body>, Infallible> {
    // An error is the end of whoever would have started it: the service never comes.
    let service = place.wait_for(Option::is_some).await.ok().and_then(|service| service.clone());
    match service {
        Some(service) => service.oneshot(request).await,
        None => Ok(Status::unavailable("the worker did not start").into_http()),
    }
}
