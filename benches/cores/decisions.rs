//! Costs of decisions. Each bench repeats a steady state, which measures the decision and not the
//! growth of the state.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use millrace_core::Core;
use millrace_core::attempts::{AttemptRecord, Idempotence};
use millrace_core::ids::{BatchId, FunctionIndex, Generation, RequestKey, RunId, SeatIndex, TransferId};
use millrace_gpu::GpuCore;
use millrace_memory::{BlockSize, CHUNK, MemoryMap};
use millrace_nodes::placement;
use millrace_nodes::router::{self, ModelResidency, WorkerCandidate};
use millrace_scheduling::dispatch::{self, Dispatcher};
use millrace_transfers::fabric::{self, LinkScheduler, TransferCargo, WeightsCargo};
use millrace_types::topology::{self, LinkId, LinkKind, Topology, TopologyLink};
use millrace_types::{
    Bytes, BytesPerSec, Digest, FunctionKey, FunctionName, GpuIndex, Incarnation, ModelId, NodeName,
    NodeState, Priority, TenantName, Timestamp,
};

const GPUS: u32 = 8;
const INCARNATION: Incarnation = Incarnation(1);

/// Lets a core handle an event and returns its actions, in a reused vector.
fn step<'a, C: Core>(
    core: &mut C,
    now: u64,
    event: C::Event,
    actions: &'a mut Vec<C::Action>,
) -> &'a [C::Action] {
    actions.clear();
    core.on_event(Timestamp(now), event, actions);
    actions
}

/// Returns a node of eight GPUs. Each GPU runs one request and has the next request enqueued;
/// `queued` more requests wait.
fn busy_node(queued: u64) -> (Dispatcher, u64) {
    let gpu = dispatch::GpuConfig::new(Bytes::gib(16), BytesPerSec::gb(12));
    let config = dispatch::Config::new(vec![gpu; GPUS as usize], 100_000);
    let mut node = Dispatcher::new(&config);
    let mut actions = Vec::new();
    for model in (0..64).map(ModelId) {
        let event = dispatch::Event::Install { model, memory: Bytes::mib(100), weights: Bytes::mib(100) };
        step(&mut node, 0, event, &mut actions);
    }
    for gpu in (0..GPUS).map(GpuIndex) {
        step(&mut node, 0, dispatch::Event::Up { gpu, incarnation: INCARNATION }, &mut actions);
    }
    let requests = u64::from(GPUS) * 2 + queued;
    for key in 0..requests {
        step(&mut node, key, enqueue(key), &mut actions);
    }
    (node, requests)
}

fn enqueue(key: u64) -> dispatch::Event {
    let attempts = AttemptRecord::new(3, Idempotence::Yes);
    let model = (key % 64) as u32;
    let function = FunctionIndex(model);
    let model = ModelId(model);
    dispatch::Event::Enqueue(dispatch::QueuedRequest {
        key: RequestKey(key),
        function,
        model,
        attempts,
        priority: Priority::default(),
        inputs: dispatch::InputLocations::NONE,
    })
}

fn dispatch_one(c: &mut Criterion) {
    for queued in [0, 1_000] {
        let (mut node, mut key) = busy_node(queued);
        let mut actions = Vec::new();
        // Requests on each GPU, according to the node's own actions.
        let mut on: Vec<Vec<u64>> =
            (0..u64::from(GPUS)).map(|gpu| vec![gpu, gpu + u64::from(GPUS)]).collect();
        let mut turn = 0;
        c.bench_function(&format!("dispatch/one request in and one out, 8 GPUs, {queued} queued"), |b| {
            b.iter(|| {
                turn = (turn + 1) % GPUS as usize;
                let ended = on[turn].remove(0);
                let gpu = GpuIndex(turn as u32);
                let ran = Some(Duration::from_millis(5));
                let event = dispatch::Event::RequestEnded { gpu, key: RequestKey(ended), ran };
                note(&mut on, step(&mut node, key * 1000, event, &mut actions));
                note(&mut on, step(&mut node, key * 1000, enqueue(key), &mut actions));
                key += 1;
            });
        });
    }
}

fn note(on: &mut [Vec<u64>], actions: &[dispatch::Action]) {
    for action in actions {
        if let dispatch::Action::Assign { gpu, key, .. } = action {
            on[gpu.0 as usize].push(key.0);
        }
    }
}

fn memory(c: &mut Criterion) {
    // 16 GiB full of models of 20 to 120 MiB; each turn loads the model that was evicted longest
    // ago.
    let blocks = |model: u32| 10 + model * 37 % 51;
    let mut map = MemoryMap::new(Bytes::gib(16), BlockSize::DEFAULT);
    let mut model = 0;
    let mut now = 0;
    let mut bring = || {
        now += 1;
        model = (model + 1) % 1000;
        map.map(Timestamp(now), ModelId(model), blocks(model), blocks(model), &[])
            .map(|evicted| evicted.len())
    };
    for _ in 0..2000 {
        black_box(bring()).expect("everything fits an empty GPU");
    }
    c.bench_function("memory/make room and map, 16 GiB of about 230 models", |b| b.iter(&mut bring));
}

fn topology() -> Topology {
    let link = |kind| TopologyLink { kind, rate: BytesPerSec::gb(12) };
    let gpu = |index: u32| topology::TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "bench".to_owned(),
        memory: Bytes::gib(16),
        host_path: vec![LinkId(index), LinkId(GPUS + index / 2)],
    };
    let links =
        (0..GPUS).map(|_| link(LinkKind::Pcie)).chain((0..GPUS / 2).map(|_| link(LinkKind::PcieUplink)));
    Topology { name: "bench".to_owned(), gpus: (0..GPUS).map(gpu).collect(), links: links.collect() }
}

fn start(transfer: u64, gpu: u32) -> fabric::Event {
    let bytes = Bytes(CHUNK.0 * 1_000_000);
    let cargo =
        TransferCargo::Weights(WeightsCargo { model: ModelId(gpu), generation: Generation(1), bytes });
    let chunks = std::iter::once(0..1_000_000).collect();
    fabric::Event::Start {
        transfer: TransferId(transfer),
        gpu: GpuIndex(gpu),
        cargo,
        chunks,
        from: None,
        objective: None,
    }
}

fn fabric(c: &mut Criterion) {
    c.bench_function("fabric/100 batches end and the next are granted, 8 GPUs on 4 uplinks", |b| {
        let mut actions = Vec::new();
        b.iter_batched_ref(
            || {
                let mut fabric = LinkScheduler::new(&topology());
                let mut actions = Vec::new();
                let mut out = Vec::new();
                for gpu in 0..GPUS {
                    granted(step(&mut fabric, 0, start(gpu.into(), gpu), &mut actions), &mut out);
                }
                (fabric, out, 0)
            },
            |(fabric, out, now)| {
                for _ in 0..100 {
                    let (transfer, batch) = out.remove(0);
                    *now += 900_000;
                    let event = fabric::Event::Done { transfer, batch };
                    granted(step(fabric, *now, event, &mut actions), out);
                }
            },
            BatchSize::SmallInput,
        );
    });
}

fn granted(actions: &[fabric::Action], out: &mut Vec<(TransferId, BatchId)>) {
    for action in actions {
        if let fabric::Action::Grant { grant, .. } = action {
            out.push((grant.transfer, grant.batch));
        }
    }
}

fn gpu_request(c: &mut Criterion) {
    let mut gpu = GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes::gib(16), BlockSize::DEFAULT));
    let mut actions = Vec::new();
    let model = ModelId(1);
    let weights = Bytes::mib(2);
    step(&mut gpu, 0, millrace_gpu::Event::Install { model, memory: weights, weights }, &mut actions);
    step(&mut gpu, 0, millrace_gpu::Event::Up { incarnation: INCARNATION }, &mut actions);
    let assign = |key| millrace_gpu::Event::Assign {
        seat: SeatIndex(0),
        key: RequestKey(key),
        model,
        incarnation: INCARNATION,
        from: None,
        deadline: None,
        right: millrace_gpu::ComputeRight::Free,
    };
    step(&mut gpu, 0, assign(0), &mut actions);
    step(
        &mut gpu,
        0,
        millrace_gpu::Event::Arrived { model, generation: Generation(1), chunks: 0..1 },
        &mut actions,
    );
    let done = millrace_gpu::Event::TransferEnded {
        transfer: TransferId(1),
        outcome: fabric::TransferOutcome::Complete,
        from: None,
    };
    step(&mut gpu, 0, done, &mut actions);
    let started = Timestamp(0);
    let done = run_done(RunId(1), started, started);
    step(&mut gpu, 0, done, &mut actions);
    let mut key = 0;
    let mut serve = || {
        key += 1;
        step(&mut gpu, key * 1000, assign(key), &mut actions);
        let started = Timestamp(key * 1000);
        let finished = Timestamp(key * 1000 + 500);
        step(&mut gpu, key * 1000 + 500, run_done(RunId(key + 1), started, finished), &mut actions);
        actions.len()
    };
    assert_eq!(serve(), 2, "answered and ended");
    c.bench_function("gpu/a resident request, from assignment to answer", |b| b.iter(&mut serve));
}

/// Returns the end of a run that waited for nothing.
fn run_done(run: RunId, started: Timestamp, finished: Timestamp) -> millrace_gpu::Event {
    let zero = Duration::ZERO;
    millrace_gpu::Event::RunDone { run, started, finished, waited: zero, held: zero, sm: zero, token: None }
}

fn router(c: &mut Criterion) {
    let candidate = |worker: u32| WorkerCandidate {
        worker,
        gpus_up: 8,
        gpus_idle: worker % 3,
        gpus_coming: 0,
        queued: worker * 7 % 11,
        unseen: worker % 5,
        run: Duration::from_millis(7),
        assigned: Duration::from_millis(u64::from(worker % 9)),
        waiting: Duration::from_millis(u64::from(worker * 7 % 11)),
        held: match worker % 4 {
            0 => ModelResidency::OnIdleGpu,
            1 => ModelResidency::OnBusyGpu { free_in: Duration::from_millis(3) },
            _ => ModelResidency::InHost,
        },
        load: Duration::from_millis(20),
        has_room: worker.is_multiple_of(2),
        missing: Bytes::ZERO,
    };
    for workers in [4, 100] {
        let candidates: Vec<_> = (0..workers).map(candidate).collect();
        c.bench_function(&format!("router/choose among {workers} workers"), |b| {
            b.iter(|| router::choose(black_box(&candidates).iter().copied()));
        });
    }
}

/// Returns a cluster of 100 nodes and 1,000 functions of 100 MiB to 2 GiB with 2 replicas each,
/// with these placements.
fn cluster(placements: Vec<placement::FunctionPlacement>) -> placement::ClusterSnapshot {
    let digest = |number: u32| Digest::of(&number.to_be_bytes());
    let size = |number: u32| Bytes::mib(100 + u64::from(number * 37 % 1900));
    let function = |number: u32| placement::DesiredReplicas {
        key: FunctionKey {
            tenant: TenantName::new(&format!("t{}", number % 20)).expect("a tenant's name"),
            name: FunctionName::new(&format!("f{number}")).expect("a function's name"),
        },
        enabled: true,
        replicas: 2,
        models: vec![placement::PlacedModel { digest: digest(number), host: size(number) }],
        gpu: size(number),
        load: placement::GpuLoad(u64::from(number % 200)),
        ran: true,
        keeps_state: false,
    };
    let node = |number: u32| placement::PlacementNode {
        name: NodeName::new(&format!("n{number}")).expect("a node's name"),
        state: NodeState::Schedulable,
        host: Bytes::gib(64),
        gpu: Bytes::gib(16),
        gpus: GPUS,
        busy: placement::GpuLoad::default(),
    };
    placement::ClusterSnapshot {
        functions: (0..1000).map(function).collect(),
        nodes: (0..100).map(node).collect(),
        placements,
        flows: Vec::new(),
    }
}

fn placements(c: &mut Criterion) {
    let limits = placement::PlanLimits { steps_max: 4096 };
    let empty = cluster(Vec::new());
    let placed = placement::plan(&empty, &limits).steps.into_iter().map(|step| match step {
        placement::PlacementChange::Place { function, node } => {
            placement::FunctionPlacement { function, node, phase: placement::PlacementPhase::Ready }
        }
        placement::PlacementChange::Unplace { .. } => unreachable!("nothing is placed yet"),
    });
    let flows = (0..1000).filter(|number| number % 5 > 0).map(|number| placement::DataFlow {
        from: empty.functions[number - 1].key.clone(),
        to: empty.functions[number].key.clone(),
        bytes: Bytes::mib(1 + number as u64 % 7),
        is_critical: number % 2 == 0,
    });
    let grouped = placement::ClusterSnapshot { flows: flows.collect(), ..empty.clone() };
    let settled = cluster(placed.collect());
    assert_eq!(settled.placements.len(), 2000);
    assert_eq!(placement::plan(&settled, &limits), placement::PlacementPlan::default());
    c.bench_function("placement/plan 2 copies of 1,000 functions on 100 empty nodes", |b| {
        b.iter(|| placement::plan(black_box(&empty), &limits));
    });
    c.bench_function("placement/the same in 200 workflows of 5 functions", |b| {
        b.iter(|| placement::plan(black_box(&grouped), &limits));
    });
    c.bench_function("placement/see that 2,000 copies on 100 nodes are right", |b| {
        b.iter(|| placement::plan(black_box(&settled), &limits));
    });
}

criterion_group!(benches, dispatch_one, memory, fabric, gpu_request, router, placements);
criterion_main!(benches);
