//! [`NodeHandle`]: the way into the actors from any thread. A semaphore bounds the requests inside:
//! a request holds a permit until its answer. New requests are refused while the actors have too
//! many unread messages.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use millrace_core::ids::{FunctionIndex, RequestKey};
use millrace_proto::executor::Fault;
use millrace_types::{
    Alphas, Bytes, Digest, Failure, GpuIndex, ModelId, Priority, Reason, RevisionKey, Timestamp,
};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::actor_runtime::{LETTERS_PER_REQUEST, Mailbox};
use crate::clock::Clock;
use crate::desired_state::{NodeSlices, TenantQuotas};
use crate::faults::FaultError;
use crate::install::{FunctionConfig, InstallError, PreparedModel, Profile};
use crate::messages::function::NewRequest;
use crate::messages::request_update::RequestUpdate;
use crate::messages::work::RequestWork;
use crate::messages::{function, node};
use crate::object_handle::{InputMoved, QueueAddress};
use crate::policy::DesiredPolicy;
use crate::programs::HostedProgram;
use crate::request::{Attempt, AttemptOutcome};
use crate::slo_scores::SloScores;
use crate::snapshot::{NodeSnapshot, SnapshotScope};

/// A handle to a node's actors for other threads. Cheap to clone.
#[derive(Clone)]
pub struct NodeHandle {
    directory: Arc<ActorDirectory>,
    permits: Arc<Semaphore>,
    permits_max: u32,
    clock: Arc<dyn Clock>,
}

/// The addresses of the actors. Written on the actor thread when actors start and end, read when
/// requests enter.
#[derive(Debug)]
pub(crate) struct ActorDirectory {
    functions: RwLock<BTreeMap<RevisionKey, FunctionEntry>>,
    node: RwLock<Option<Mailbox<node::Message>>>,
    /// The address of the Node's queue, for the handles of objects.
    queue: Arc<QueueAddress>,
    keys: AtomicU64,
    draining: AtomicBool,
    changes: watch::Sender<u64>,
    /// Size of a weight group, in bytes; 0 before the measurement.
    group: AtomicU64,
}

/// The address and the settings of an installed function.
#[derive(Debug, Clone)]
pub(crate) struct FunctionEntry {
    pub(crate) index: FunctionIndex,
    pub(crate) model: ModelId,
    pub(crate) priority: Priority,
    /// Whether a request may run again although it may have run before.
    pub(crate) idempotent: bool,
    /// Time within which requests are to be answered, from the function's objective.
    pub(crate) deadline: Option<Duration>,
    pub(crate) mailbox: Mailbox<function::Message>,
    /// The address of the same actor, for updates on requests.
    pub(crate) updates: Mailbox<RequestUpdate>,
}

impl ActorDirectory {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            functions: RwLock::default(),
            node: RwLock::default(),
            queue: Arc::default(),
            keys: AtomicU64::new(1),
            draining: AtomicBool::new(false),
            changes: watch::Sender::new(0),
            group: AtomicU64::new(0),
        })
    }

    pub(crate) fn publish_function(&self, key: RevisionKey, entry: FunctionEntry) {
        write(&self.functions).insert(key, entry);
        self.changed();
    }

    pub(crate) fn withdraw_function(&self, key: &RevisionKey) {
        write(&self.functions).remove(key);
        self.changed();
    }

    /// Records the group size measured on one GPU. A model is cut once for all GPUs, so the largest
    /// size is used, which makes copies to every GPU fast.
    pub(crate) fn record_weight_group(&self, group: Bytes) {
        self.group.fetch_max(group.get(), Ordering::Relaxed);
    }

    /// Publishes the addresses of the Node actor and of the node's queue.
    pub(crate) fn publish_node(&self, node: Mailbox<node::Message>, queue: Mailbox<InputMoved>) {
        *write(&self.node) = Some(node);
        self.queue.publish(Some(queue));
        self.changed();
    }

    /// Withdraws the addresses of the Node actor, because the node is down for good.
    pub(crate) fn withdraw_node(&self) {
        *write(&self.node) = None;
        self.queue.publish(None);
        self.changed();
    }

    /// Returns the address of the Node's queue, for the handles of objects.
    pub(crate) fn queue(&self) -> &Arc<QueueAddress> {
        &self.queue
    }

    /// Notifies the watchers of [`NodeHandle::changes`].
    pub(crate) fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    fn function(&self, key: &RevisionKey) -> Option<FunctionEntry> {
        self.functions.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Returns the number of messages that the Node actor has not read yet.
    fn node_unread(&self) -> usize {
        let node = self.node.read().unwrap_or_else(PoisonError::into_inner);
        node.as_ref().map_or(0, Mailbox::unread)
    }

    /// Sends a message to the Node actor; without a Node actor, drops the message.
    pub(crate) fn post(&self, message: node::Message) {
        if let Some(node) = &*self.node.read().unwrap_or_else(PoisonError::into_inner) {
            node.post(message);
        }
    }
}

/// Locks a map of the directory for writing. No panic leaves these maps half-written, so a poisoned
/// lock still guards a valid map.
fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl NodeHandle {
    pub(crate) fn new(directory: Arc<ActorDirectory>, permits_max: u32, clock: Arc<dyn Clock>) -> Self {
        let permits = Arc::new(Semaphore::new(permits_max as usize));
        Self { directory, permits, permits_max, clock }
    }

    /// Runs a request and waits for its answer. Dropping the future cancels the request: the
    /// request leaves the queues, and the result of a run that has begun on a GPU is dropped when
    /// the run ends.
    ///
    /// # Errors
    /// [`Reason::QueueFull`], [`Reason::TimedOut`], [`Reason::Quarantined`],
    /// [`Reason::AttemptsExhausted`], [`Reason::ExecutorLost`], [`Reason::ModelFailed`],
    /// [`Reason::NoGpuMemory`], [`Reason::FunctionNotReady`] if the revision is not installed
    /// here, [`Reason::ShuttingDown`], [`Reason::Internal`] if an actor died with the request.
    pub async fn invoke(&self, invocation: Attempt) -> Result<AttemptOutcome, Failure> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| self.refused())?;
        let Some(entry) = self.directory.function(&invocation.revision) else {
            let message = format!("{} is not installed on this worker: try again soon", invocation.revision);
            return Err(Failure::new(Reason::FunctionNotReady, message));
        };
        let letters_max = LETTERS_PER_REQUEST.saturating_mul(self.permits_max as usize);
        let unread = entry.mailbox.unread().max(self.directory.node_unread());
        if unread > letters_max {
            let message = format!(
                "the worker's actors have {unread} unread messages, more than their limit of {letters_max}: try again soon"
            );
            return Err(Failure::new(Reason::QueueFull, message));
        }
        let key = RequestKey(self.directory.keys.fetch_add(1, Ordering::Relaxed));
        let (answer, answered) = oneshot::channel();
        let waited = (invocation.cold + invocation.behind).as_nanos();
        let waited = u64::try_from(waited).unwrap_or(u64::MAX);
        let accepted = Timestamp(self.clock.now().as_nanos().saturating_sub(waited));
        let work = Arc::new(RequestWork {
            key,
            function: entry.index,
            model: entry.model,
            priority: entry.priority.asked(invocation.priority),
            accepted,
            invocation,
            home: entry.updates,
            span: tracing::Span::current(),
        });
        entry.mailbox.post(function::Message::Invoke(NewRequest { work, answer, permit }));
        let mut caller = CancelOnDrop { key, function: Some(entry.mailbox) };
        let result = answered.await;
        caller.function = None;
        // The sender is dropped without an answer only if its actor died.
        result.unwrap_or_else(|_| Err(self.lost()))
    }

    /// Returns the time on the node's clock.
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Waits until this time has passed on the node's clock.
    pub(crate) async fn pause(&self, span: Duration) {
        tokio::time::sleep(self.clock.sleep_for(span)).await;
    }

    /// Whether requests of a revision may run again although they may have run before.
    pub(crate) fn is_idempotent(&self, revision: &RevisionKey) -> bool {
        self.directory.function(revision).is_some_and(|entry| entry.idempotent)
    }

    /// Returns the time within which requests of a revision without an objective of their own are
    /// to be answered.
    pub(crate) fn deadline_of(&self, revision: &RevisionKey) -> Option<Duration> {
        self.directory.function(revision)?.deadline
    }

    fn lost(&self) -> Failure {
        if self.directory.draining.load(Ordering::Relaxed) {
            return Failure::new(
                Reason::ShuttingDown,
                "the worker shut down before it answered: ask another worker",
            )
            .after_execution();
        }
        let message = "the worker lost track of the request: see the worker's log";
        Failure::new(Reason::Internal, message).after_execution()
    }

    fn refused(&self) -> Failure {
        if self.directory.draining.load(Ordering::Relaxed) {
            return Failure::new(Reason::ShuttingDown, "the worker is shutting down: ask another worker");
        }
        let message =
            format!("the worker has reached its limit of {} requests: try again soon", self.permits_max);
        Failure::new(Reason::QueueFull, message)
    }

    /// Installs a function, so that the node serves it from now on. An installed revision stays as it is.
    ///
    /// # Errors
    /// [`InstallError`]; nothing is changed then.
    pub async fn install(
        &self,
        function: FunctionConfig,
        model: Arc<PreparedModel>,
    ) -> Result<(), InstallError> {
        let (reply, replied) = oneshot::channel();
        self.directory.post(node::Message::Install { function, model, reply });
        replied.await.unwrap_or(Err(InstallError::NodeGone))
    }

    /// Installs a function that is a program. An installed revision stays as it is.
    ///
    /// # Errors
    /// [`InstallError::NodeGone`].
    pub(crate) async fn install_program(
        &self,
        function: FunctionConfig,
        program: Arc<HostedProgram>,
        processes: u32,
    ) -> Result<(), InstallError> {
        let (reply, replied) = oneshot::channel();
        self.directory.post(node::Message::Host { function, program, processes, reply });
        replied.await.map_err(|_| InstallError::NodeGone)
    }

    /// Stops admitting requests of a function and returns; admitted requests are still answered.
    /// The model is dropped from the GPUs, and its descriptors are closed, after the last of its
    /// functions has given its last answer.
    pub async fn retire(&self, key: RevisionKey) {
        let (reply, replied) = oneshot::channel();
        self.directory.post(node::Message::Retire { key, reply });
        // Without a node there is nothing left to retire.
        replied.await.unwrap_or(());
    }

    /// Passes on the functions' SLO counts, with the counts from other nodes and earlier
    /// placements. The order of the queue may depend on the counts.
    pub(crate) fn set_slo_scores(&self, scores: SloScores) {
        self.directory.post(node::Message::ClusterSloCounts(scores));
    }

    /// Returns the size of a weight group measured on this node's GPUs (T09).
    #[must_use]
    pub fn weight_group_bytes(&self) -> Option<Bytes> {
        let group = self.directory.group.load(Ordering::Relaxed);
        (group > 0).then_some(Bytes(group))
    }

    /// Returns the profiles that the node has measured of its models; an empty list without a node.
    pub(crate) async fn profiles(&self) -> Vec<(Digest, Profile)> {
        let (reply, replied) = oneshot::channel();
        self.directory.post(node::Message::Profiles { reply });
        replied.await.unwrap_or_default()
    }

    /// Sets the tenants' caps on this node. Tenants that `quotas` does not name have no caps.
    pub fn set_quotas(&self, quotas: Arc<TenantQuotas>) {
        self.directory.post(node::Message::Quotas(quotas));
    }

    /// Sets the slices of the node's GPUs, which are in force while the GPUs are shared.
    pub fn set_slices(&self, slices: Arc<NodeSlices>) {
        self.directory.post(node::Message::Slices(slices));
    }

    /// Sets the scheduling policy.
    pub fn set_policy(&self, wanted: DesiredPolicy) {
        self.directory.post(node::Message::Policy(wanted));
    }

    /// Begins with the alphas of an earlier registration.
    pub(crate) fn begin_with(&self, alphas: Alphas) {
        self.directory.post(node::Message::AlphasCommitted(alphas));
    }

    /// Returns a snapshot of the whole node.
    pub async fn snapshot(&self) -> NodeSnapshot {
        self.partial_snapshot(SnapshotScope::Whole).await
    }

    /// Returns a snapshot of the parts that `partial_snapshot` selects.
    pub async fn partial_snapshot(&self, look: SnapshotScope) -> NodeSnapshot {
        let (parts, mut gathered) = mpsc::unbounded_channel();
        self.directory.post(node::Message::Report { look, parts });
        let mut snapshot = NodeSnapshot::default();
        // The channel closes when every actor has sent its part, or died with the sender.
        while let Some(part) = gathered.recv().await {
            snapshot.add(part);
        }
        snapshot.sort();
        snapshot
    }

    /// Returns a counter that grows whenever the input of routing changes: a model was loaded or
    /// evicted, a GPU went down or up, a function was installed or retired.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.directory.changes.subscribe()
    }

    /// Passes a fault on to a GPU's executor. The executor obeys only if faults were allowed
    /// at its start.
    ///
    /// # Errors
    /// [`FaultError`] if the GPU or the function does not exist, or the node is shutting down.
    pub async fn inject_fault(
        &self,
        gpu: GpuIndex,
        fault: Fault,
        function: Option<RevisionKey>,
    ) -> Result<(), FaultError> {
        let (reply, replied) = oneshot::channel();
        self.directory.post(node::Message::Inject { gpu, fault, function, reply });
        replied.await.unwrap_or(Err(FaultError::NodeGone))
    }

    /// Refuses new requests and waits up to `grace` for the admitted ones. Counters stay readable
    /// afterwards.
    pub async fn quiesce(&self, grace: Duration) {
        self.directory.draining.store(true, Ordering::Relaxed);
        // The semaphore is fair: this waiter gets every returned permit, so none is left for new
        // requests.
        let last = self.permits.acquire_many(self.permits_max);
        let drained = tokio::time::timeout(self.clock.sleep_for(grace), last).await.is_ok();
        tracing::info!(drained, "new requests are refused");
        self.permits.close();
    }

    /// Stops every executor and ends the actors. Returns when no executor is left. Requests that
    /// still wait are answered with an error.
    pub async fn stop(&self) {
        let (reply, replied) = oneshot::channel();
        self.directory.post(node::Message::Shutdown { reply });
        replied.await.unwrap_or(());
    }
}

impl std::fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeHandle")
            .field("free_permits", &self.permits.available_permits())
            .finish_non_exhaustive()
    }
}

/// Cancels a request when its caller drops the future before the answer arrives.
struct CancelOnDrop {
    key: RequestKey,
    function: Option<Mailbox<function::Message>>,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(function) = self.function.take() {
            function.post(function::Message::Cancel(self.key));
        }
    }
}
