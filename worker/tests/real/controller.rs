//! A controller for tests, as workers see it: this controller sends the desired state, serves
//! artifacts and records the worker's messages.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use millrace_proto::parts::{
    DesiredHead, DesiredItem, ItemSet, PartAssembler, PartMessage as _, PartSender, control_server,
};
use millrace_proto::status::to_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::controller_message::Message as Said;
use millrace_proto::worker::worker_control_server::WorkerControl;
use millrace_proto::worker::worker_message::Message as Heard;
use millrace_proto::{BUILD, PROTOCOL_VERSION, convert};
use millrace_types::checkpoint::SyncBatch;
use millrace_types::{Digest, Failure, Reason};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::ledger::Ledger;
use crate::support::{PATIENCE, within};

/// A running controller. A drop ends the server and its connections.
pub(crate) struct Controller {
    pub(crate) addr: SocketAddr,
    state: Arc<State>,
    /// Sender that keeps the streams and the server alive until its drop.
    _alive: watch::Sender<()>,
}

struct State {
    cluster_id: String,
    /// Epoch under which the controller knows the worker.
    epoch: watch::Sender<u64>,
    /// Term of the controller, and whether the controller leads.
    leads: watch::Sender<(u64, bool)>,
    /// Whether checkpoints are committed and acknowledged.
    commits: watch::Sender<bool>,
    ledger: watch::Sender<Ledger>,
    goodbyes: watch::Sender<usize>,
    artifacts: Mutex<BTreeMap<String, Bytes>>,
    /// Bytes after which the transfer of an artifact breaks off.
    breaks_after: Mutex<Option<usize>>,
    fetches: AtomicUsize,
    desired: watch::Sender<wire::DesiredState>,
    hello: watch::Sender<Option<wire::WorkerHello>>,
    statuses: watch::Sender<Vec<wire::FunctionStatus>>,
    telemetry: watch::Sender<wire::Telemetry>,
    /// Number of batches received, committed or not.
    offered: watch::Sender<usize>,
    last_offered: watch::Sender<u64>,
    /// States of other workers' controllers, which belong to the same group.
    others: Mutex<Vec<Arc<State>>>,
    alive: watch::Receiver<()>,
}

impl Controller {
    pub(crate) async fn start(cluster_id: &str, epoch: u64) -> Self {
        Self::start_in(cluster_id, epoch, watch::Sender::default()).await
    }

    /// Starts a controller of a group that commits to this ledger.
    pub(crate) async fn start_in(cluster_id: &str, epoch: u64, ledger: watch::Sender<Ledger>) -> Self {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self::serve(incoming, cluster_id, epoch, ledger)
    }

    /// Starts a controller at the address of another controller that is ending.
    pub(crate) async fn start_at(addr: SocketAddr, cluster_id: &str, epoch: u64) -> Self {
        let free = async {
            loop {
                match TcpIncoming::bind(addr) {
                    Ok(incoming) => break incoming,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        let incoming = within("a free address", free).await;
        Self::serve(incoming, cluster_id, epoch, watch::Sender::default())
    }

    fn serve(incoming: TcpIncoming, cluster_id: &str, epoch: u64, ledger: watch::Sender<Ledger>) -> Self {
        let addr = incoming.local_addr().unwrap();
        let (alive, mut ends) = watch::channel(());
        let state = Arc::new(State {
            cluster_id: cluster_id.into(),
            epoch: watch::Sender::new(epoch),
            leads: watch::Sender::default(),
            commits: watch::Sender::new(true),
            ledger,
            goodbyes: watch::Sender::default(),
            artifacts: Mutex::default(),
            breaks_after: Mutex::default(),
            fetches: AtomicUsize::new(0),
            desired: watch::Sender::default(),
            hello: watch::Sender::default(),
            statuses: watch::Sender::default(),
            telemetry: watch::Sender::default(),
            offered: watch::Sender::default(),
            last_offered: watch::Sender::default(),
            others: Mutex::default(),
            alive: ends.clone(),
        });
        let service = control_server(Service(state.clone()));
        // Nothing is ever sent: an error means that the sender was dropped.
        let end = async move { while ends.changed().await.is_ok() {} };
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(async move { server.serve_with_incoming_shutdown(incoming, end).await.unwrap() });
        Self { addr, state, _alive: alive }
    }

    /// Adds an artifact to serve.
    pub(crate) fn publish(&self, model: &[u8]) -> Digest {
        let digest = Digest::of(model);
        self.publish_as(digest, model);
        digest
    }

    /// Serves `bytes` as the artifact `digest`, even if the digest does not match.
    pub(crate) fn publish_as(&self, digest: Digest, bytes: &[u8]) {
        let bytes = Bytes::copy_from_slice(bytes);
        self.state.artifacts.lock().unwrap().insert(digest.to_string(), bytes);
    }

    /// Breaks off every transfer of an artifact after this many bytes.
    pub(crate) fn break_off_after(&self, bytes: usize) {
        *self.state.breaks_after.lock().unwrap() = Some(bytes);
    }

    /// Sets the functions to serve, as pairs of name and digest, at revision 1.
    pub(crate) fn desire(&self, functions: &[(&str, Digest)]) {
        self.desire_with(functions, |_| {});
    }

    /// Sets the functions to serve, and changes the state before sending.
    pub(crate) fn desire_with(
        &self,
        functions: &[(&str, Digest)],
        change: impl FnOnce(&mut wire::DesiredState),
    ) {
        let function = |(name, digest): &(&str, Digest)| wire::DesiredFunction {
            tenant: "default".into(),
            name: (*name).into(),
            revision: 1,
            digest: digest.to_string(),
            artifact_bytes: 1 << 26,
            idempotent: true,
            // Functions with such a name have batching on.
            batch_max_size: if name.starts_with("batched") { 8 } else { 0 },
            ..Default::default()
        };
        let functions = functions.iter().map(function).collect();
        self.state.desired.send_modify(|state| {
            let index = state.index + 1;
            *state = wire::DesiredState { term: 1, index, functions, ..Default::default() };
            change(state);
        });
    }

    /// Claims to lead in this term from now on.
    pub(crate) fn lead(&self, term: u64) {
        self.state.leads.send_replace((term, true));
    }

    /// Claims no longer to lead, in this term.
    pub(crate) fn follow(&self, term: u64) {
        self.state.leads.send_replace((term, false));
    }

    /// Registers the worker under another epoch.
    pub(crate) fn register_again(&self, epoch: u64) {
        self.state.epoch.send_replace(epoch);
    }

    /// Turns the commits of checkpoints on or off.
    pub(crate) fn commit(&self, commits: bool) {
        self.state.commits.send_replace(commits);
    }

    pub(crate) fn ledger(&self) -> &watch::Sender<Ledger> {
        &self.state.ledger
    }

    /// Waits until the ledger satisfies the condition.
    pub(crate) async fn committed(&self, what: &str, says: impl FnMut(&Ledger) -> bool) -> Ledger {
        let mut ledger = self.state.ledger.subscribe();
        within(what, ledger.wait_for(says)).await.unwrap().clone()
    }

    /// Waits for another batch, committed or not.
    pub(crate) async fn offered_another(&self) {
        let mut offered = self.state.offered.subscribe();
        within("another batch", offered.changed()).await.unwrap();
    }

    /// Returns the number of the last batch received, repeated or not.
    pub(crate) fn last_offered(&self) -> u64 {
        *self.state.last_offered.borrow()
    }

    /// Returns the number of batches received.
    pub(crate) fn offered(&self) -> usize {
        *self.state.offered.borrow()
    }

    /// Waits for a goodbye, unless a goodbye was received.
    pub(crate) async fn said_goodbye(&self) {
        let mut goodbyes = self.state.goodbyes.subscribe();
        within("a goodbye", goodbyes.wait_for(|&heard| heard > 0)).await.unwrap();
    }

    /// Returns the number of goodbyes received.
    pub(crate) fn goodbyes(&self) -> usize {
        *self.state.goodbyes.borrow()
    }

    /// Returns the number of artifacts requested so far.
    pub(crate) fn fetches(&self) -> usize {
        self.state.fetches.load(Ordering::Relaxed)
    }

    /// Shares another controller's knowledge: the address of its worker, and the worker's data.
    pub(crate) fn meet(&self, other: &Self) {
        self.state.others.lock().unwrap().push(Arc::clone(&other.state));
    }

    /// Reports this address as its worker's from now on.
    pub(crate) fn send_to(&self, address: &str) {
        self.state.hello.send_modify(|hello| hello.as_mut().unwrap().address = address.to_owned());
    }

    pub(crate) async fn hello(&self) -> wire::WorkerHello {
        let mut hello = self.state.hello.subscribe();
        within("a worker's hello", hello.wait_for(Option::is_some)).await.unwrap().clone().unwrap()
    }

    /// Waits until a function is in this phase. Returns the status message.
    pub(crate) async fn phase(&self, name: &str, phase: wire::FunctionPhase) -> String {
        let mut statuses = self.state.statuses.subscribe();
        let there = |statuses: &Vec<wire::FunctionStatus>| {
            statuses.iter().any(|status| status.name == name && status.phase() == phase)
        };
        let statuses = within(&format!("{name} {phase:?}"), statuses.wait_for(there)).await.unwrap().clone();
        statuses.into_iter().find(|status| status.name == name).unwrap().message
    }

    /// Waits until the statuses satisfy the condition.
    pub(crate) async fn statuses(
        &self,
        wanted: impl Fn(&[wire::FunctionStatus]) -> bool,
    ) -> Vec<wire::FunctionStatus> {
        within("the statuses", self.statuses_however_long(wanted)).await
    }

    pub(crate) async fn statuses_however_long(
        &self,
        wanted: impl Fn(&[wire::FunctionStatus]) -> bool,
    ) -> Vec<wire::FunctionStatus> {
        let mut statuses = self.state.statuses.subscribe();
        statuses.wait_for(|statuses| wanted(statuses)).await.unwrap().clone()
    }

    /// Waits until the worker sends more than its greeting, which happens after the controller's
    /// greeting.
    pub(crate) async fn greeted(&self) {
        self.telemetry("telemetry", |telemetry| telemetry.seq > 0).await;
    }

    pub(crate) async fn ready(&self, name: &str) {
        self.phase(name, wire::FunctionPhase::Ready).await;
    }

    /// Returns the worker's last telemetry.
    pub(crate) fn latest_telemetry(&self) -> wire::Telemetry {
        self.state.telemetry.borrow().clone()
    }

    /// Waits for telemetry that satisfies the condition.
    pub(crate) async fn telemetry(
        &self,
        what: &str,
        says: impl FnMut(&wire::Telemetry) -> bool,
    ) -> wire::Telemetry {
        let mut telemetry = self.state.telemetry.subscribe();
        match tokio::time::timeout(PATIENCE, telemetry.wait_for(says)).await {
            Ok(said) => said.unwrap().clone(),
            Err(_) => panic!("not within {PATIENCE:?}: {what}; the last: {:#?}", self.latest_telemetry()),
        }
    }
}

impl State {
    fn all(self: &Arc<Self>) -> Vec<Arc<Self>> {
        let others = self.others.lock().unwrap();
        others.iter().chain([self]).cloned().collect()
    }

    /// Handles a worker's message. Returns the reply, if the message has one.
    fn hear(&self, heard: Heard) -> Option<Said> {
        match heard {
            Heard::Hello(hello) => panic!("greeted twice: {hello:?}"),
            Heard::Telemetry(telemetry) => drop(self.telemetry.send_replace(telemetry)),
            Heard::FunctionStatuses(statuses) => panic!("not put together: {statuses:?}"),
            Heard::Goodbye(_) => self.goodbyes.send_modify(|goodbyes| *goodbyes += 1),
            Heard::Checkpoint(wire::Checkpoint { batch }) => {
                self.offered.send_modify(|offered| *offered += 1);
                let batch: SyncBatch = rmp_serde::from_slice(&batch).unwrap();
                self.last_offered.send_replace(batch.seq);
                if *self.commits.borrow() {
                    let mut answer = None;
                    self.ledger.send_modify(|ledger| answer = Some(ledger.take(batch)));
                    return answer.map(Said::CheckpointAck);
                }
            }
        }
        None
    }

    /// Serves the stream until the worker ends its half. Sends each change once.
    async fn converse(&self, mut worker: Streaming<wire::WorkerMessage>, out: mpsc::Sender<Outgoing>) {
        let mut desired = self.desired.subscribe();
        let mut alive = self.alive.clone();
        let mut epoch = self.epoch.subscribe();
        let mut leads = self.leads.subscribe();
        let mut parts = PartSender::default();
        let mut heard_parts = PartAssembler::default();
        let mut statuses = ItemSet::<wire::FunctionStatuses>::default();
        leads.mark_changed();
        if desired.borrow().index > 0 {
            desired.mark_changed();
        }
        loop {
            let said: Vec<Said> = tokio::select! {
                heard = worker.message() => match heard {
                    Ok(Some(wire::WorkerMessage { message: Some(Heard::FunctionStatuses(part)) })) => {
                        if let Some(update) = heard_parts.take(part).unwrap() {
                            statuses.apply(update).unwrap();
                            self.statuses.send_replace(statuses.items().to_vec());
                        }
                        continue;
                    }
                    Ok(Some(heard)) => self.hear(heard.message.unwrap()).into_iter().collect(),
                    // The stream ends with the worker.
                    Ok(None) | Err(_) => return,
                },
                _ = alive.changed() => return,
                _ = desired.changed() => {
                    let state = desired.borrow_and_update().clone();
                    parts.next(&head(&state), &items(state)).into_iter().map(Said::DesiredState).collect()
                }
                _ = epoch.changed() => {
                    vec![Said::Registration(wire::Registration { epoch: *epoch.borrow_and_update() })]
                }
                _ = leads.changed() => {
                    let (term, leads) = *leads.borrow_and_update();
                    if !leads {
                        parts.forget();
                    }
                    vec![Said::Leadership(wire::Leadership { term, leads })]
                }
            };
            for said in said {
                if out.send(Ok(wire::ControllerMessage { message: Some(said) })).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Returns the fields that all parts of a state repeat.
fn head(state: &wire::DesiredState) -> DesiredHead {
    let scheduling = state.scheduling();
    DesiredHead {
        term: state.term,
        index: state.index,
        scheduling,
        policy: state.policy.clone(),
        alphas_ppm: state.alphas_ppm.clone(),
    }
}

/// Returns the items of a state in the order of their keys.
fn items(state: wire::DesiredState) -> Arc<Vec<DesiredItem>> {
    let functions = state.functions.into_iter().map(DesiredItem::Function);
    let mut items: Vec<_> = functions.chain(state.quotas.into_iter().map(DesiredItem::Quota)).collect();
    items.sort_by(|a, b| wire::DesiredState::key(a).cmp(&wire::DesiredState::key(b)));
    Arc::new(items)
}

struct Service(Arc<State>);

type Outgoing = Result<wire::ControllerMessage, Status>;
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WorkerControl for Service {
    type AttachStream = Messages<wire::ControllerMessage>;
    type FetchArtifactStream = Messages<wire::ArtifactChunk>;

    async fn attach(
        &self,
        request: Request<Streaming<wire::WorkerMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let state = self.0.clone();
        let mut messages = request.into_inner();
        let Some(Heard::Hello(hello)) = messages.message().await?.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("a worker greets first"));
        };
        if !hello.cluster_id.is_empty() && hello.cluster_id != state.cluster_id {
            let message = "another cluster's: give it a data directory of its own";
            return Err(to_status(&Failure::new(Reason::PeerMismatch, message)));
        }
        state.hello.send_replace(Some(hello));
        let hello = wire::ControllerHello {
            cluster_id: state.cluster_id.clone(),
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            epoch: *state.epoch.borrow(),
        };
        let (out, said) = mpsc::channel(16);
        let hello = wire::ControllerMessage { message: Some(Said::Hello(hello)) };
        out.send(Ok(hello)).await.unwrap();
        tokio::spawn(async move { state.converse(messages, out).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(said))))
    }

    async fn fetch_artifact(
        &self,
        request: Request<wire::FetchArtifactRequest>,
    ) -> Result<Response<Self::FetchArtifactStream>, Status> {
        self.0.fetches.fetch_add(1, Ordering::Relaxed);
        let artifacts = self.0.artifacts.lock().unwrap();
        let bytes = artifacts.get(&request.into_inner().digest).cloned();
        let bytes =
            bytes.ok_or_else(|| to_status(&Failure::new(Reason::ArtifactNotFound, "no such artifact")))?;
        let breaks_after = *self.0.breaks_after.lock().unwrap();
        let given = bytes.slice(..breaks_after.unwrap_or(bytes.len()).min(bytes.len()));
        let chunks: Vec<_> = given.chunks(1 << 20).map(|chunk| given.slice_ref(chunk)).collect();
        let chunks = stream::iter(chunks).map(|data| Ok(wire::ArtifactChunk { data }));
        let end = breaks_after.map(|_| Err(Status::unavailable("the disk is gone")));
        Ok(Response::new(Box::pin(chunks.chain(stream::iter(end)))))
    }

    async fn find_node(
        &self,
        request: Request<wire::FindNodeRequest>,
    ) -> Result<Response<wire::FindNodeResponse>, Status> {
        let node = request.into_inner().node;
        let hellos = self.0.all().into_iter().filter_map(|state| state.hello.borrow().clone());
        let address = hellos.filter(|hello| hello.node == node).map(|hello| hello.address).next();
        Ok(Response::new(wire::FindNodeResponse { address: address.unwrap_or_default() }))
    }

    async fn locate_data(
        &self,
        request: Request<wire::LocateDataRequest>,
    ) -> Result<Response<wire::LocateDataResponse>, Status> {
        let id = convert::data_id(&request.into_inner().id.unwrap()).unwrap();
        let holds = |state: &Arc<State>| state.ledger.borrow().kept.entries.contains(&id);
        let all = self.0.all().into_iter().filter(holds);
        let holders = all.filter_map(|state| Some(state.hello.borrow().as_ref()?.node.clone())).collect();
        let lost = self.0.ledger.borrow().lost.contains(&id);
        Ok(Response::new(wire::LocateDataResponse { holders, lost }))
    }
}
