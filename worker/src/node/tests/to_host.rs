//! Tests of copies from GPUs to host memory, which cross links under grants as other transfers do
//! (D11 to D16).

mod objectives;

use millrace_memory::elastic::MigrationPolicy;
use millrace_transfers::fabric::GuaranteeCounts;
use millrace_transfers::paths::{HostDirection, HostLinks};
use millrace_transfers::rates::TransferSharing;
use millrace_types::{Failure, Slo};
use tokio::task::JoinHandle;

use super::*;
use crate::node::DataConfig;
use crate::object_handle::{HandleLocation, HostBytes, ObjectHandle, ObjectRange, TransferReader};
use crate::objects::size_of_memory;
use crate::request::AttemptOutcome;
use crate::snapshot::NodeSnapshot;

/// Rate of each link in each direction.
const RATE: BytesPerSec = BytesPerSec::gb(10);
const RUN: Duration = Duration::from_millis(5);
/// Weights of each model.
const WEIGHTS: Bytes = Bytes::mib(4);
/// Name, in MiB, of the function with a model that fills most of a GPU.
const FILLS: u64 = 1;
/// Upper bound of the delays of messages: in virtual time each actor has separate microseconds.
const LITTLE: Duration = Duration::from_micros(700);

/// Returns the duration of a batch of five chunks.
fn batch() -> Duration {
    RATE.time_for(Bytes::mib(10))
}

type Answer = Result<AttemptOutcome, Failure>;

/// A node with GPUs behind one shared link, or each behind its own. Function `fN` has an output of
/// N MiB.
struct World {
    node: NodeHandle,
    machine: ModelledMachine,
    clock: Arc<dyn Clock>,
}

struct Plan {
    gpus: u32,
    memory: Bytes,
    /// Output of each function, in MiB, and its deadline in milliseconds.
    functions: Vec<(u64, Option<u64>)>,
    copy_fails_every: Option<u64>,
    sharing: TransferSharing,
    /// Links for transfers to the host. If set, each GPU has its own link and an NVLink to the
    /// first GPU.
    host_links: Option<HostLinks>,
}

impl Plan {
    /// Returns a plan for one GPU of 64 MiB, with room for 16 MiB of objects.
    fn of(functions: &[u64]) -> Self {
        Self {
            gpus: 1,
            memory: Bytes::mib(64),
            functions: functions.iter().map(|&mib| (mib, None)).collect(),
            copy_fails_every: None,
            sharing: TransferSharing::Fair,
            host_links: None,
        }
    }

    async fn start(self) -> World {
        let gpu = |index| TopologyGpu {
            index: GpuIndex(index),
            gpu_type: "modelled".to_owned(),
            memory: self.memory,
            host_path: vec![LinkId(self.host_links.map_or(0, |_| index))],
        };
        let topology = Topology {
            name: "test".to_owned(),
            gpus: (0..self.gpus).map(gpu).collect(),
            links: vec![TopologyLink { kind: LinkKind::Pcie, rate: RATE }],
        };
        let topology = if self.host_links.is_some() { joined(topology) } else { topology };
        let run = |&(mib, _): &(u64, Option<u64>)| {
            (format!("f{mib}"), RunModel { keeps: Bytes::mib(mib), ..RunModel::new(RUN) })
        };
        let behaviour = ExecutorBehaviour {
            start: Duration::from_millis(8),
            process_start: Duration::ZERO,
            copy_rate: BytesPerSec(u64::MAX),
            copy_fails_every: self.copy_fails_every,
            ties: 0,
            runs: self.functions.iter().map(run).collect(),
        };
        let clock = clock();
        let machine = ModelledMachine::new(Arc::clone(&clock), vec![behaviour; self.gpus as usize]);
        let machine = machine.with_links(&topology);
        let context = NodeContext::new(1, Box::new(machine.clone())).with_clock(Arc::clone(&clock));
        let data = DataConfig { migration: MigrationPolicy::Lru, ..DataConfig::default() };
        let host_links = self.host_links.unwrap_or_default();
        let config = NodeConfig { data, sharing: self.sharing, host_links, ..NodeConfig::new(topology) };
        let node = start_here(config, context);
        for (mib, ms) in self.functions {
            let slo = ms.map(|ms| Slo { deadline: Duration::from_millis(ms), percentile: 0.98 });
            let name = format!("f{mib}");
            let model = PreparedModel {
                digest: Digest::of(name.as_bytes()),
                name,
                weights_bytes: WEIGHTS,
                ..Arc::into_inner(prepared()).unwrap()
            };
            let gpu_memory = (mib == FILLS).then(|| Bytes(self.memory.get() - Bytes::mib(32).get()));
            let function = FunctionConfig { key: key(mib), slo, gpu_memory, ..function() };
            node.install(function, Arc::new(model)).await.unwrap();
        }
        let world = World { node, machine, clock };
        world.pass(20 * MOMENT).await;
        world
    }
}

/// Returns the topology with a link for each GPU, and NVLinks between the first GPU and the others.
fn joined(topology: Topology) -> Topology {
    let gpus = topology.gpus.len() as u32;
    let nvlink = |gpu| TopologyLink {
        kind: LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(gpu) },
        rate: BytesPerSec::gb(40),
    };
    let links = vec![topology.links[0].clone(); gpus as usize].into_iter().chain((1..gpus).map(nvlink));
    Topology { links: links.collect(), ..topology }
}

fn key(mib: u64) -> RevisionKey {
    let name = FunctionName::new(&format!("f{mib}")).unwrap();
    RevisionKey { function: FunctionKey { tenant: TenantName::default(), name }, revision: Revision::FIRST }
}

impl World {
    async fn pass(&self, span: Duration) {
        tokio::time::sleep(self.clock.sleep_for(span)).await;
    }

    /// Waits until the node's snapshot satisfies the condition.
    async fn until(&self, wanted: impl Fn(&NodeSnapshot) -> bool) {
        for _ in 0..1_000 {
            if wanted(&self.snapshot().await) {
                return;
            }
            self.pass(Duration::from_micros(20)).await;
        }
        panic!("not within 20 ms: {:?}", self.snapshot().await);
    }

    /// Waits until one batch of several crosses to the host and another is queued.
    async fn leaves(&self) {
        // The weights are a single batch, so two outstanding batches are of an object.
        self.until(|now| now.links[0].outstanding == 2).await;
    }

    /// Measures the duration of an event.
    async fn timed<T>(&self, event: impl Future<Output = T>) -> (T, Duration) {
        let began = self.clock.now();
        let came = event.await;
        (came, self.clock.now().since(began))
    }

    fn ask(&self, mib: u64) -> JoinHandle<Answer> {
        let node = self.node.clone();
        let invocation = Attempt { revision: key(mib), ..request(MINUTE) };
        actix_rt::spawn(async move { node.invoke(invocation).await })
    }

    /// Runs a function and returns its output.
    async fn make(&self, mib: u64) -> Arc<ObjectHandle> {
        let mut made = self.ask(mib).await.unwrap().unwrap();
        made.outputs.objects.remove(0)
    }

    async fn snapshot(&self) -> NodeSnapshot {
        self.node.snapshot().await
    }

    async fn carried_to_host(&self) -> Bytes {
        self.snapshot().await.links[0].carried_to_host
    }

    /// Asserts that no transfer is under way and that no object is left.
    async fn is_at_rest(&self) {
        self.pass(MOMENT).await;
        let now = self.snapshot().await;
        assert_eq!((now.links[0].outstanding, now.gpus[0].data.used), (0, Bytes::ZERO));
    }
}

/// Copies a whole object to the host. The task that waits for the copy holds the object.
fn fetch(object: Arc<ObjectHandle>) -> JoinHandle<HostBytes> {
    fetch_for(object, TransferReader::None)
}

fn fetch_for(object: Arc<ObjectHandle>, reader: TransferReader) -> JoinHandle<HostBytes> {
    actix_rt::spawn(async move {
        let bytes = object.bytes;
        ObjectRange { object, offset: 0, bytes }.on_host(reader).await
    })
}

fn on_host(object: &ObjectHandle) -> bool {
    matches!(object.place(), HandleLocation::Host(_))
}

#[test]
fn an_output_without_room_is_answered_after_its_whole_copy() {
    in_virtual_time(async {
        let world = Plan::of(&[40]).start().await;
        drop(world.make(40).await);
        let (made, took) = world.timed(world.make(40)).await;
        let whole = RATE.time_for(Bytes::mib(40));
        assert!(took >= RUN + whole && took < RUN + whole + LITTLE, "{took:?}");
        let HandleLocation::Host(fd) = made.place() else { panic!("{made:?}") };
        assert_eq!(size_of_memory(&fd).unwrap() as u64, Bytes::mib(40).get());
        let now = world.snapshot().await;
        let link = &now.links[0];
        assert_eq!((link.carried, link.carried_to_host), (WEIGHTS, Bytes::mib(80)));
        let measured = link.measured_to_host.unwrap().0 as f64 / RATE.0 as f64;
        assert!((0.99..1.01).contains(&measured), "{measured}");
        assert_eq!(
            now.transfers.ended.from_gpu,
            GuaranteeCounts { unpromised: 2, ..GuaranteeCounts::default() }
        );
        assert_eq!(now.transfers.waits[&(LinkId(0), HostDirection::FromGpu)].transfers, 2);
        drop(made);
        world.is_at_rest().await;
    });
}

/// D13: grants per batch let a small object overtake the rest of a large one.
#[test]
fn a_reader_of_an_object_waits_for_at_most_the_batch_in_transit() {
    in_virtual_time(async {
        let world = Plan::of(&[8, 40]).start().await;
        let small = world.make(8).await;
        let large = world.ask(40);
        world.leaves().await;
        let (found, took) = world.timed(fetch(small)).await;
        assert!(found.unwrap().is_ok());
        let own = RATE.time_for(Bytes::mib(8));
        assert!(took > own && took < batch() + own + LITTLE, "{took:?}");
        assert!(!large.is_finished());
        assert!(on_host(&large.await.unwrap().unwrap().outputs.objects[0]));
    });
}

#[test]
fn transfers_to_the_host_do_not_slow_transfers_from_the_host() {
    in_virtual_time(async {
        let world = Plan { gpus: 2, ..Plan::of(&[8, 40]) }.start().await;
        let large = world.ask(40);
        world.leaves().await;
        let beside = world.ask(8).await.unwrap().unwrap().split.swap;
        assert!(large.await.unwrap().is_ok());
        let alone = Plan::of(&[8]).start().await.ask(8).await.unwrap().unwrap().split.swap;
        assert!(beside.abs_diff(alone) < LITTLE, "{beside:?} beside, {alone:?} alone");
    });
}

#[test]
fn migrated_objects_leave_under_grants_until_their_last_handle_is_dropped() {
    in_virtual_time(async {
        for dropped in [false, true] {
            // The GPU has room for 128 MiB of objects.
            let world = Plan { memory: Bytes::mib(512), ..Plan::of(&[60]) }.start().await;
            let first = world.make(60).await;
            let second = world.make(60).await;
            let third = world.ask(60);
            world.leaves().await;
            assert_eq!(world.snapshot().await.gpus[0].data.migrated, 1);
            let first = Some(first).filter(|_| !dropped);
            let third = third.await.unwrap().unwrap().outputs.objects.remove(0);
            assert!(matches!(third.place(), HandleLocation::Gpu(_)), "{third:?}");
            let carried = world.carried_to_host().await;
            if let Some(first) = first {
                assert!(on_host(&first));
                assert_eq!(carried, Bytes::mib(60));
            } else {
                assert!(carried <= Bytes::mib(20), "{carried}");
            }
            assert!(matches!(second.place(), HandleLocation::Gpu(_)));
            drop((second, third));
            world.is_at_rest().await;
        }
    });
}

/// D05 in the opposite direction.
#[test]
fn transfers_to_the_host_also_use_idle_links_of_neighbours() {
    let leaves = |links: HostLinks| {
        in_virtual_time(async move {
            let host_links = Some(links);
            let world = Plan { gpus: 3, memory: Bytes::gib(1), host_links, ..Plan::of(&[200]) };
            let world = world.start().await;
            let object = world.make(200).await;
            let own = object.gpu;
            assert_eq!(own, GpuIndex(0));
            let (found, took) = world.timed(fetch(object)).await;
            assert!(found.unwrap().is_ok());
            let carried: Vec<_> = world.snapshot().await.links.iter().map(|it| it.carried_to_host).collect();
            world.is_at_rest().await;
            (took, carried)
        })
    };
    let whole = Bytes::mib(200);
    let (alone, carried) = leaves(HostLinks::Own);
    assert!(alone >= RATE.time_for(whole), "{alone:?}");
    assert_eq!(carried, [whole, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO]);
    let (took, carried) = leaves(HostLinks::All);
    assert!(took >= RATE.time_for(whole) / 3 && took < alone / 2, "{took:?} instead of {alone:?}");
    let [own, second, third, by_second, by_third] = carried[..] else { panic!("{carried:?}") };
    assert_eq!(
        (own + second + third, by_second, by_third),
        (whole, second, third),
        "each byte crosses one link"
    );
    assert!(second > Bytes::mib(20) && third > Bytes::mib(20), "{carried:?}");
}

#[test]
fn a_copy_that_no_reader_waits_for_stops() {
    // The copy stops whether or not other readers keep the object: both readers of the copy gave
    // up.
    for stays in [false, true] {
        in_virtual_time(async move {
            let world = Plan { memory: Bytes::mib(512), ..Plan::of(&[60]) }.start().await;
            let object = world.make(60).await;
            let fetched = [fetch(Arc::clone(&object)), fetch(Arc::clone(&object))];
            let object = Some(object).filter(|_| stays);
            world.leaves().await;
            for fetched in fetched {
                fetched.abort();
                assert!(fetched.await.is_err());
            }
            world.pass(4 * batch()).await;
            assert!(world.carried_to_host().await <= Bytes::mib(40), "{stays}");
            drop(object);
            world.is_at_rest().await;
        });
    }
}

#[test]
fn an_object_in_transit_is_lost_with_its_executor_and_its_reader_is_notified() {
    in_virtual_time(async {
        let world = Plan { memory: Bytes::mib(512), ..Plan::of(&[60, 200]) }.start().await;
        let object = world.make(60).await;
        let fetched = fetch(Arc::clone(&object));
        world.until(|now| now.links[0].carried_to_host >= Bytes::mib(20)).await;
        world.machine.kill(GpuIndex(0));
        assert!(fetched.await.unwrap().is_err());
        assert!(object.is_lost());
        world.pass(20 * MOMENT).await;
        // The executor dies while an answer is copied.
        let refused = world.ask(200);
        world.until(|now| now.links[0].carried_to_host >= Bytes::mib(60)).await;
        assert!(!refused.is_finished());
        world.machine.kill(GpuIndex(0));
        assert!(refused.await.unwrap().unwrap().outputs.objects[0].is_lost());
        world.pass(20 * MOMENT).await;
        world.is_at_rest().await;
        // The links are free again.
        let object = world.make(60).await;
        let (found, took) = world.timed(fetch(object)).await;
        assert!(found.unwrap().is_ok());
        assert!(took < RATE.time_for(Bytes::mib(60)) + LITTLE, "{took:?}");
        world.is_at_rest().await;
    });
}

#[test]
fn batches_that_fail_are_copied_again() {
    in_virtual_time(async {
        // The copy of the weights counts too: every third copy fails.
        let world = Plan { copy_fails_every: Some(3), memory: Bytes::mib(512), ..Plan::of(&[60]) };
        let world = world.start().await;
        fetch(world.make(60).await).await.unwrap().unwrap();
        assert_eq!(world.carried_to_host().await, Bytes::mib(60));
        world.is_at_rest().await;
    });
}

/// D14, D15: the deadline of an answer is the deadline of its output's copy.
#[test]
fn an_answer_with_a_deadline_overtakes_an_answer_without() {
    for (sharing, tight_first) in [(TransferSharing::FaasTube, true), (TransferSharing::Fair, false)] {
        in_virtual_time(async {
            let functions = vec![(60, None), (59, Some(25))];
            let world = Plan { gpus: 2, functions, sharing, ..Plan::of(&[]) }.start().await;
            let loose = world.ask(60);
            world.pass(MOMENT).await;
            let tight = world.ask(59);
            world.leaves().await;
            assert!(on_host(&tight.await.unwrap().unwrap().outputs.objects[0]));
            assert_eq!(!loose.is_finished(), tight_first, "{sharing:?}");
            loose.await.unwrap().unwrap();
            let admitted = u64::from(tight_first);
            let counts = GuaranteeCounts { admitted, unpromised: 2 - admitted, ..GuaranteeCounts::default() };
            assert_eq!(world.snapshot().await.transfers.ended.from_gpu, counts);
        });
    }
}
