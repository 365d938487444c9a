//! The client of the object directory, which the controllers serve. The directory gives a worker's
//! address by its name; an address is cached until a fetch there fails. The directory also gives
//! the holders of data that its owner node no longer has (tier 2 of the index, D09). Any controller
//! can answer, controllers with a stream to this worker first, because a stale answer costs only
//! one call.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use millrace_proto::convert::data_id_wire;
use millrace_proto::parts::control_client;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_proto::worker::{FindNodeRequest, LocateDataRequest};
use millrace_types::{DataId, NodeName};
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Response, Status};

/// Time that one controller has to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Maximum number of cached addresses. Beyond this number the cache is cleared. The bound exceeds
/// the nodes of a cluster.
const ADDRESSES_MAX: usize = 8192;

/// A pending response of a controller.
type PendingResponse<T> = BoxFuture<'static, Result<Response<T>, Status>>;

/// The controllers, and the cached addresses of nodes. Clones share both.
#[derive(Debug, Clone)]
pub(crate) struct DirectoryClient(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    controllers: Vec<(String, Channel)>,
    attached: watch::Receiver<BTreeSet<usize>>,
    addresses: Mutex<HashMap<NodeName, String>>,
    asked_for: AtomicU64,
}

/// No controller has answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no controller answers ({0})")]
pub(super) struct DirectoryUnavailable(String);

/// The nodes that hold an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DataHolders {
    pub(super) nodes: Vec<NodeName>,
    /// Whether the object is known to be on no node.
    pub(super) lost: bool,
}

impl DirectoryClient {
    /// Returns a client of these controllers. The controllers at the positions in `attached` are
    /// asked first.
    pub(crate) fn new(
        controllers: Vec<(String, Channel)>,
        attached: watch::Receiver<BTreeSet<usize>>,
    ) -> Self {
        Self(Arc::new(Inner {
            controllers,
            attached,
            addresses: Mutex::default(),
            asked_for: AtomicU64::new(0),
        }))
    }

    fn addresses(&self) -> MutexGuard<'_, HashMap<NodeName, String>> {
        self.0.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cached address of a worker.
    pub(super) fn known(&self, node: &NodeName) -> Option<String> {
        self.addresses().get(node).cloned()
    }

    /// Returns how often an address was requested.
    pub(super) fn asked_for(&self) -> u64 {
        self.0.asked_for.load(Ordering::Relaxed)
    }

    /// Requests the present address of a worker. Returns `None` if no controller knows the worker.
    pub(super) async fn ask_for(&self, node: &NodeName) -> Result<Option<String>, DirectoryUnavailable> {
        self.0.asked_for.fetch_add(1, Ordering::Relaxed);
        let request = FindNodeRequest { node: node.to_string() };
        let ask = |mut client: WorkerControlClient<Channel>| -> PendingResponse<_> {
            let request = request.clone();
            Box::pin(async move { client.find_node(request).await })
        };
        // Each controller knows only its attached workers.
        let found = self.ask(ask, |answer| !answer.address.is_empty()).await?;
        let address = Some(found.address).filter(|address| !address.is_empty());
        let mut addresses = self.addresses();
        match &address {
            None => drop(addresses.remove(node)),
            Some(address) => {
                if addresses.len() >= ADDRESSES_MAX {
                    addresses.clear();
                }
                addresses.insert(node.clone(), address.clone());
            }
        }
        Ok(address)
    }

    /// Requests the nodes that hold an object, from tier 2.
    pub(super) async fn holders(&self, id: &DataId) -> Result<DataHolders, DirectoryUnavailable> {
        let request = LocateDataRequest { id: Some(data_id_wire(id)) };
        let ask = |mut client: WorkerControlClient<Channel>| -> PendingResponse<_> {
            let request = request.clone();
            Box::pin(async move { client.locate_data(request).await })
        };
        let found = self.ask(ask, |_| true).await?;
        // Invalid node names are skipped.
        let nodes = found.holders.iter().filter_map(|name| NodeName::new(name).ok()).collect();
        Ok(DataHolders { nodes, lost: found.lost })
    }

    /// Asks the controllers in order. Returns the first acceptable answer, otherwise the last
    /// answer.
    async fn ask<T>(
        &self,
        ask: impl Fn(WorkerControlClient<Channel>) -> PendingResponse<T>,
        will_do: impl Fn(&T) -> bool,
    ) -> Result<T, DirectoryUnavailable> {
        let mut last = Err(DirectoryUnavailable("none is configured".to_owned()));
        for (address, channel) in self.in_order() {
            match within(ask(control_client(channel))).await {
                Ok(answer) => {
                    let done = will_do(&answer);
                    last = Ok(answer);
                    if done {
                        break;
                    }
                }
                Err(why) if last.is_err() => last = Err(DirectoryUnavailable(format!("{address}: {why}"))),
                Err(_) => {}
            }
        }
        last
    }

    fn in_order(&self) -> Vec<(String, Channel)> {
        let attached = self.0.attached.borrow().clone();
        let (there, others): (Vec<_>, Vec<_>) =
            self.0.controllers.iter().cloned().enumerate().partition(|(place, _)| attached.contains(place));
        there.into_iter().chain(others).map(|(_, controller)| controller).collect()
    }
}

async fn within<T>(answer: PendingResponse<T>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_MAX, answer).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(status.message().to_owned()),
        Err(_late) => Err(format!("no answer within {ANSWER_MAX:?}")),
    }
}
