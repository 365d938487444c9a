//! Tests of a Gpu actor alone. Its peers are mailboxes: the tests read the actor's messages there, and send
//! messages in the peers' place.

use std::sync::{Arc, Weak};
use std::time::Duration;

use millrace_core::ids::ObjectKey;
use millrace_core::ids::{FunctionIndex, RequestKey, RunId, SeatIndex, TransferId};
use millrace_core::trace::CoreId;
use millrace_gpu::{Event, GpuCore};
use millrace_memory::elastic::{self};
use millrace_memory::{BlockSize, MemoryMap};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::{ObjectPart, Run, Tensor, tensor::Contents};
use millrace_transfers::fabric::{TransferCargo, TransferOutcome};
use millrace_types::topology::{self, LinkId};
use millrace_types::{
    Bytes, Digest, FunctionKey, FunctionName, GpuIndex, Incarnation, ModelId, Priority, RequestId, Revision,
    RevisionKey, TenantName, Timestamp,
};
use tokio::sync::mpsc;
use tracing::Span;

use super::*;
use crate::actor_runtime::{self, AddressSlot};
use crate::handle::ActorDirectory;
use crate::install::PreparedModel;
use crate::messages::gpu::{CopiedBatch, ObjectReport};
use crate::messages::request_update::RequestUpdate;
use crate::messages::work::RequestWork;
use crate::messages::{executor, node};
use crate::node_config::DataConfig;
use crate::object_handle::{HandleLocation, ObjectHandle, ObjectRequest, Reply, TransferReader};
use crate::objects::{INLINE_BYTES_MAX, memory};
use crate::port::Descriptor;
use crate::request::RunOutputs;
use crate::request::{Attempt, OnGpus};
use crate::traced_core::TracedCore;

const HERE: GpuIndex = GpuIndex(1);
const OTHER: GpuIndex = GpuIndex(0);
const INCARNATION: Incarnation = Incarnation(2);
const NOW: Timestamp = Timestamp(1_000);
const OBJECT_BYTES: u64 = 100_000;

/// A peer of the actor, with the messages that the actor sent to the peer.
struct Peer<M: Send + 'static> {
    slot: AddressSlot<M>,
    told: mpsc::UnboundedReceiver<M>,
    /// A message that the actor never sends to this peer.
    mark: fn() -> M,
    is_mark: fn(&M) -> bool,
}

impl<M: Send + 'static> Peer<M> {
    fn new(mark: fn() -> M, is_mark: fn(&M) -> bool) -> Self {
        let (mailbox, told) = actor_runtime::spawn_forwarder();
        let slot = AddressSlot::empty();
        slot.publish(mailbox);
        Self { slot, told, mark, is_mark }
    }

    fn mailbox(&self) -> actor_runtime::Mailbox<M> {
        self.slot.mailbox().unwrap()
    }

    /// Returns the messages that arrived since the last call.
    async fn told(&mut self) -> Vec<M> {
        self.slot.post((self.mark)());
        let mut told = Vec::new();
        loop {
            let message = self.told.recv().await.unwrap();
            if (self.is_mark)(&message) {
                return told;
            }
            told.push(message);
        }
    }
}

/// GPU 1 of two GPUs with an NVLink between them, with two models and an executor.
struct Bench {
    gpu: GpuActor,
    node: Peer<node::Message>,
    executor: Peer<executor::Message>,
    function: Peer<RequestUpdate>,
    /// The actor's own address, as its peers know it.
    own: Peer<Message>,
    /// The actor's own address, for the handles of objects.
    own_objects: Peer<ObjectRequest>,
    other: Peer<ObjectRequest>,
}

impl Bench {
    fn new() -> Self {
        let node = Peer::new(
            || node::Message::ExecutorStopped(GpuIndex(u32::MAX)),
            |it| matches!(it, node::Message::ExecutorStopped(_)),
        );
        let executor = Peer::new(|| executor::Message::Stop, |it| matches!(it, executor::Message::Stop));
        let function = Peer::new(
            || RequestUpdate::Dispatched(RequestKey(u64::MAX)),
            |it| matches!(it, RequestUpdate::Dispatched(_)),
        );
        let own = Peer::new(|| Message::ActorReplaced, |it| matches!(it, Message::ActorReplaced));
        let objects = || {
            Peer::new(
                || ObjectRequest::Discard(ObjectKey(u64::MAX)),
                |it| matches!(it, ObjectRequest::Discard(ObjectKey(u64::MAX))),
            )
        };
        let own_objects = objects();
        let other = objects();
        let memory = Bytes::mib(64);
        let hardware = topology::TopologyGpu {
            index: HERE,
            gpu_type: "modelled".to_owned(),
            memory,
            host_path: vec![LinkId(0)],
        };
        let core = GpuCore::new(HERE, MemoryMap::new(memory, BlockSize::DEFAULT))
            .with_data(DataConfig::default().store_config(memory));
        let peers = GpuPeers {
            node: node.slot.clone(),
            executor: executor.slot.clone(),
            own: own.slot.clone(),
            own_objects: own_objects.slot.clone(),
            directory: ActorDirectory::new(),
            joined: vec![OTHER],
        };
        let gpu = GpuActor::new(hardware, TracedCore::new(core, CoreId::Gpu(HERE), None), peers);
        let mut bench = Self { gpu, node, executor, function, own, own_objects, other };
        bench.tell(Message::Up { incarnation: INCARNATION, pid: 1, sms: None });
        for model in [0, 1].map(ModelId) {
            let memory = Bytes::mib(4);
            bench.tell(Message::Install { model, memory, prepared: prepared(memory) });
        }
        bench
    }

    fn tell(&mut self, message: Message) {
        self.gpu.handle(NOW, message);
    }

    /// Assigns a request that reads these objects and may keep its output on the GPU.
    fn assign(&mut self, key: u64, model: u32, objects: Vec<Arc<ObjectHandle>>) {
        let input = |object: &Arc<ObjectHandle>| {
            let part = ObjectPart { object: object.key.0, offset: 0, bytes: object.bytes };
            let shape = vec![i64::try_from(object.bytes).unwrap()];
            let contents = Some(Contents::Object(part));
            Tensor { name: "x".to_owned(), datatype: "UINT8".to_owned(), shape, contents }
        };
        let invocation = Attempt {
            request_id: RequestId::new("request").unwrap(),
            attempts_left: 3,
            revision: RevisionKey {
                function: FunctionKey {
                    tenant: TenantName::default(),
                    name: FunctionName::new("f").unwrap(),
                },
                revision: Revision::FIRST,
            },
            timeout: Duration::from_secs(60),
            priority: 0,
            objective: None,
            next: Vec::new(),
            inputs: objects.iter().map(input).collect(),
            descriptors: Vec::new(),
            on_gpus: OnGpus { objects, keep: vec!["y".to_owned()] },
            outputs: Vec::new(),
            cold: Duration::ZERO,
            behind: Duration::ZERO,
            counted: false,
            trial: None,
        };
        let key = RequestKey(key);
        let work = Arc::new(RequestWork {
            key,
            function: FunctionIndex(0),
            model: ModelId(model),
            priority: Priority::default(),
            accepted: NOW,
            invocation,
            home: self.function.mailbox(),
            span: Span::none(),
        });
        let works = vec![work];
        self.tell(Message::Assign {
            seat: SeatIndex(0),
            key,
            works,
            incarnation: INCARNATION,
            attempt: 1,
            from: None,
            deadline: None,
            right: millrace_gpu::ComputeRight::Free,
        });
    }

    /// Returns an object of the other GPU, in this place.
    fn object(&self, place: HandleLocation) -> Arc<ObjectHandle> {
        let kept = ObjectHandle::new(OTHER, ObjectKey(7), OBJECT_BYTES, self.other.mailbox());
        kept.moves_to(place);
        Arc::new(kept)
    }

    /// Ends a run whose output the executor keeps.
    fn run_done(&mut self, run: RunId) {
        let contents = Some(Contents::KeptBytes(OBJECT_BYTES));
        let output = Tensor { name: "y".to_owned(), contents, ..Tensor::default() };
        let outputs = RunOutputs { tensors: vec![output], ..RunOutputs::default() };
        let event = Event::RunDone {
            run,
            started: NOW,
            finished: NOW,
            waited: Duration::ZERO,
            held: Duration::ZERO,
            sm: Duration::ZERO,
            token: None,
        };
        self.tell(Message::RunDone { run, times: Vec::new(), event, outputs });
    }

    /// Delivers the messages that arrived at the actor's own addresses.
    async fn hear(&mut self) {
        for message in self.own.told().await {
            self.tell(message);
        }
        for request in self.own_objects.told().await {
            self.tell(request.into());
        }
    }

    /// Returns the commands that the actor sent to the executor since the last call.
    async fn commands(&mut self) -> Vec<Command> {
        let command = |message| match message {
            executor::Message::Send { command, .. } => Some(command),
            _ => None,
        };
        self.executor.told().await.into_iter().filter_map(command).collect()
    }

    /// Returns the runs that the actor sent to the executor since the last call, with their programs.
    async fn runs(&mut self) -> Vec<(RunId, u64)> {
        let run = |command| match command {
            Command::Run(Run { run, program, .. }) => Some((RunId(run), program)),
            _ => None,
        };
        self.commands().await.into_iter().filter_map(run).collect()
    }
}

fn prepared(weights: Bytes) -> Arc<PreparedModel> {
    let memfd = || -> Descriptor { Arc::new(memory("model").unwrap().into()) };
    Arc::new(PreparedModel {
        digest: Digest::of(b"model"),
        name: "model".to_owned(),
        graph: memfd(),
        graph_bytes: Bytes::ZERO,
        weights: memfd(),
        weights_bytes: weights,
        group_bytes: Bytes::mib(2),
        launches: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
    })
}

fn in_actors<F: Future>(test: F) -> F::Output {
    actix::System::new().block_on(test)
}

#[test]
fn the_source_of_a_cancelled_copy_stays_until_the_copy_has_ended() {
    in_actors(async {
        let mut bench = Bench::new();
        let source = bench.object(HandleLocation::Gpu(Incarnation(1)));
        let held: Weak<ObjectHandle> = Arc::downgrade(&source);
        bench.assign(1, 0, vec![source]);
        let transfer = |message: &node::Message| match message {
            node::Message::Transfer { transfer, cargo: TransferCargo::Object(_), .. } => Some(*transfer),
            _ => None,
        };
        let told = bench.node.told().await;
        let [transfer]: [TransferId; 1] =
            told.iter().filter_map(transfer).collect::<Vec<_>>().try_into().unwrap();

        bench.tell(Message::Cancel(RequestKey(1)));
        let cancels =
            |message: &node::Message| matches!(message, node::Message::CancelTransfer(it) if *it == transfer);
        let told = bench.node.told().await;
        assert!(told.iter().any(|message| matches!(message, node::Message::RunEnded { .. })));
        assert_eq!(told.iter().filter(|message| cancels(message)).count(), 1);
        assert_eq!(held.strong_count(), 1, "the copy still reads the source's blocks");

        bench.tell(Message::ObjectTransferEnded {
            transfer,
            outcome: TransferOutcome::Cancelled,
            routes: Vec::new(),
        });
        assert_eq!(held.strong_count(), 0);
        assert_eq!(bench.gpu.data_report().used, Bytes::ZERO);
    });
}

#[test]
fn a_run_that_waits_for_an_input_is_dropped_with_its_failed_program() {
    in_actors(async {
        let mut bench = Bench::new();
        let source = bench.object(HandleLocation::Coming);
        bench.assign(1, 0, vec![Arc::clone(&source)]);
        bench.assign(2, 1, Vec::new());
        assert_eq!(bench.runs().await, [], "the first waits for its input, the second behind it");

        bench.tell(Message::Event(Event::ProgramFailed { model: ModelId(0) }));
        let runs = bench.runs().await;
        assert_eq!(runs.iter().map(|(_, program)| *program).collect::<Vec<_>>(), [1]);

        // An input of the request's first run does not count for the request's second run.
        bench.assign(1, 0, vec![source]);
        let fetches = bench.other.told().await.into_iter().filter_map(|message| match message {
            ObjectRequest::Fetch { reply, .. } => Some(reply),
            _ => None,
        });
        let [first, second] = fetches.collect::<Vec<_>>().try_into().unwrap();
        let fd: Descriptor = Arc::new(memory("object").unwrap().into());
        rustix::fs::ftruncate(&fd, OBJECT_BYTES).unwrap();
        first.send(Ok((Arc::clone(&fd), 0)));
        bench.hear().await;
        assert_eq!(bench.runs().await, []);
        assert!(bench.gpu.entries[&RequestKey(1)].fetches.is_empty());
        second.send(Ok((fd, 0)));
        bench.hear().await;
        let runs = bench.runs().await;
        assert_eq!(runs.iter().map(|(_, program)| *program).collect::<Vec<_>>(), [0]);
        assert_eq!(bench.gpu.entries[&RequestKey(1)].fetches.len(), 1);
    });
}

/// A cancelled request leaves no outputs in an executor, which keeps the outputs of a bounded number of
/// runs.
#[test]
fn outputs_of_cancelled_requests_are_dropped() {
    in_actors(async {
        let mut bench = Bench::new();
        for key in 1..4 {
            bench.assign(key, 0, Vec::new());
            let [(run, _)] = bench.runs().await[..] else { panic!("expected one run") };
            // The executor had begun the run before the cancellation, so the run ends with outputs.
            bench.tell(Message::Cancel(RequestKey(key)));
            bench.run_done(run);
            let told = bench.commands().await;
            let [Command::Cancel(_), Command::DropOutputs(dropped)] = &told[..] else { panic!("{told:?}") };
            assert_eq!(dropped.run, run.0);
            let data = &bench.gpu.data;
            assert!(data.records.is_empty() && data.storing.is_empty() && bench.gpu.entries.is_empty());
        }
        bench.assign(4, 0, Vec::new());
        let [(run, _)] = bench.runs().await[..] else { panic!("expected one run") };
        bench.run_done(run);
        let told = bench.commands().await;
        assert!(matches!(told[..], [Command::PlaceObject(_)]), "an answer waits for these outputs: {told:?}");
    });
}

/// Runs a request and returns its output, which stays on the GPU.
async fn keep(bench: &mut Bench, key: u64) -> Arc<ObjectHandle> {
    bench.assign(key, 0, Vec::new());
    let [(run, _)] = bench.runs().await[..] else { panic!("expected one run") };
    bench.run_done(run);
    let told = bench.commands().await;
    let [Command::PlaceObject(place)] = &told[..] else { panic!("{told:?}") };
    bench.tell(Message::Data(ObjectReport::Placed(ObjectKey(place.object))));
    let told = bench.function.told().await.into_iter();
    let mut kept = told.filter_map(|message| match message {
        RequestUpdate::Completed { outputs, .. } => Some(outputs.objects),
        _ => None,
    });
    let kept = kept.next().unwrap().remove(0);
    bench.commands().await;
    bench.node.told().await;
    kept
}

/// Returns a message that fetches the first `bytes` bytes of an object, and a receiver that hears whether
/// they arrived.
fn fetch(object: ObjectKey, bytes: u64) -> (Message, mpsc::UnboundedReceiver<bool>) {
    let (sender, found) = mpsc::unbounded_channel();
    let reply = Reply::new(move |found| sender.send(found.is_ok()).unwrap_or_default());
    let part = ObjectPart { object: object.0, offset: 0, bytes };
    (ObjectRequest::Fetch { part, reader: TransferReader::None, reply }.into(), found)
}

impl Bench {
    /// Returns the transfers to the host that the actor asked for since the last call, with their copies.
    async fn leaving(&mut self) -> Vec<(TransferId, u64)> {
        let leaving = |message| match message {
            node::Message::Transfer { transfer, cargo: TransferCargo::ToHost(leaving), .. } => {
                Some((transfer, leaving.copy))
            }
            _ => None,
        };
        self.node.told().await.into_iter().filter_map(leaving).collect()
    }
}

#[test]
fn a_fetch_to_the_host_needs_grants_unless_it_is_small() {
    in_actors(async {
        let mut bench = Bench::new();
        let object = keep(&mut bench, 1).await;
        for outcome in [TransferOutcome::Complete, TransferOutcome::Failed] {
            let (message, mut found) = fetch(object.key, OBJECT_BYTES);
            bench.tell(message);
            let [(transfer, copy)] = bench.leaving().await[..] else { panic!("expected one transfer") };
            let told = bench.commands().await;
            assert!(matches!(&told[..], [Command::CopyOut(it)] if it.copy == copy && it.granted), "{told:?}");
            // For a copy under grants the executor's own report is ignored.
            bench.tell(Message::Data(ObjectReport::NotCopiedOut(copy)));
            assert!(found.try_recv().is_err());
            bench.tell(Message::HostTransferEnded { transfer, outcome });
            assert_eq!(found.try_recv(), Ok(outcome == TransferOutcome::Complete));
            let told = bench.commands().await;
            assert!(matches!(&told[..], [Command::EndCopyOut(it)] if it.copy == copy), "{told:?}");
        }
        let (message, mut found) = fetch(object.key, INLINE_BYTES_MAX as u64);
        bench.tell(message);
        assert_eq!(bench.leaving().await, []);
        let told = bench.commands().await;
        let [Command::CopyOut(little)] = &told[..] else { panic!("{told:?}") };
        assert!(!little.granted);
        bench.tell(Message::Data(ObjectReport::CopiedOut(little.copy)));
        assert_eq!(found.try_recv(), Ok(true));
        assert!(bench.gpu.data.outgoing.is_empty());
    });
}

#[test]
fn a_fetch_to_the_host_is_cancelled_once_no_other_handle_of_the_object_exists() {
    in_actors(async {
        let mut bench = Bench::new();
        let object = keep(&mut bench, 1).await;
        let (message, mut found) = fetch(object.key, OBJECT_BYTES);
        bench.tell(message);
        let [(transfer, _)] = bench.leaving().await[..] else { panic!("expected one transfer") };
        let crossed = || {
            Message::Copied(CopiedBatch {
                transfer,
                link: LinkId(0),
                via: None,
                started: NOW,
                finished: NOW,
                bytes: Bytes(1),
            })
        };
        let cancelled =
            |message: &node::Message| matches!(message, node::Message::CancelTransfer(it) if *it == transfer);
        bench.tell(crossed());
        assert!(!bench.node.told().await.iter().any(cancelled));
        drop(object);
        bench.tell(crossed());
        assert!(bench.node.told().await.iter().any(cancelled));
        assert!(bench.gpu.data_report().used > Bytes::ZERO, "the copy still reads the object");
        bench.tell(Message::HostTransferEnded { transfer, outcome: TransferOutcome::Cancelled });
        assert_eq!(found.try_recv(), Ok(false));
        bench.hear().await;
        assert_eq!(bench.gpu.data_report().used, Bytes::ZERO);
        let told = bench.commands().await;
        assert!(matches!(told[..], [.., Command::EndCopyOut(_), Command::FreeObject(_)]), "{told:?}");
    });
}

/// The deadline of a transfer may become known only after the transfer began (D14).
#[test]
fn a_migration_without_a_reader_is_hastened_once_a_run_waits_for_its_memory() {
    in_actors(async {
        let mut bench = Bench::new();
        let object = keep(&mut bench, 1).await;
        let model = ModelId(2);
        let memory = Bytes::mib(64);
        bench.tell(Message::Install { model, memory, prepared: prepared(Bytes::mib(4)) });
        // The limit stands for models in use that leave no room for the object, while no run waits for
        // memory.
        bench.tell(Message::Event(Event::Data(elastic::Event::Limit { limit: Bytes::ZERO })));
        let for_nobody = |message| match message {
            node::Message::Transfer {
                transfer,
                cargo: TransferCargo::ToHost(_),
                reader: TransferReader::None,
                ..
            } => Some(transfer),
            _ => None,
        };
        let leaving: Vec<_> = bench.node.told().await.into_iter().filter_map(for_nobody).collect();
        let [transfer] = leaving[..] else { panic!("expected one transfer: {leaving:?}") };
        let hastened = |message| match message {
            node::Message::Hasten { transfer, reader } => Some((transfer, reader)),
            _ => None,
        };
        // Request 2 needs all of the GPU's memory. Request 3 waits behind request 2, so request 3 is not
        // the reader.
        bench.assign(2, model.0, Vec::new());
        bench.assign(3, 1, Vec::new());
        let hastened: Vec<_> = bench.node.told().await.into_iter().filter_map(hastened).collect();
        assert_eq!(hastened, [(transfer, RequestKey(2))], "hastened exactly once");
        drop(object);
    });
}
