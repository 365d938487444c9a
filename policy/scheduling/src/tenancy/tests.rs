use millrace_core::attempts::ReturnReason;
use std::num::NonZeroU32;
use std::time::Duration;

use millrace_types::tenancy::{Quota, ResourceShare};
use millrace_types::{Bytes, BytesPerSec, Incarnation, Priority};

use super::*;
use crate::dispatch::{GpuConfig, PolicyConfig};
use millrace_core::attempts::{AttemptProgress, AttemptRecord, Idempotence};
use millrace_core::ids::TenantIndex;

mod isolation;
mod properties;

const MS: u64 = 1_000_000;
/// Tenants with caps, each with the function of the same number; functions with higher numbers
/// belong to other tenants.
const A: TenantIndex = TenantIndex(0);
const B: TenantIndex = TenantIndex(1);

struct Node {
    core: TenantGate,
    now: Timestamp,
}

fn quota(gpus_max: u32, gpu_share: f64, memory_share: f64) -> Quota {
    let share = |share: f64| ResourceShare::from_ppm((share * 1e6) as u32).ok();
    Quota {
        gpus_max: NonZeroU32::new(gpus_max),
        gpu_share: share(gpu_share),
        memory_share: share(memory_share),
    }
}

impl Node {
    /// Creates a node of 64 MiB GPUs. Model 0 has 8 MiB, model 1 has 16 MiB, and model 2 has 32
    /// MiB.
    fn new(policy: PolicyConfig, gpus: u32) -> Self {
        Self::of(policy, &vec![64; gpus as usize])
    }

    fn of(policy: PolicyConfig, memories_mib: &[u64]) -> Self {
        let gpu = |&mib: &u64| GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000));
        let gpus: Vec<_> = memories_mib.iter().map(gpu).collect();
        Self::with_config(&Config::new(gpus, 1 << 14).with_policy(policy, 1))
    }

    fn with_config(config: &Config) -> Self {
        let mut node = Self { core: TenantGate::new(config), now: Timestamp(MS) };
        for (model, mib) in [(0, 8), (1, 16), (2, 32)] {
            let model = ModelId(model);
            let memory = Bytes::mib(mib);
            node.tell(dispatch::Event::Install { model, memory, weights: memory });
        }
        for gpu in 0..config.gpus.len() as u32 {
            node.tell(dispatch::Event::Up { gpu: GpuIndex(gpu), incarnation: Incarnation(1) });
        }
        node
    }

    fn tell(&mut self, event: impl Into<Event>) -> Vec<Action> {
        let mut actions = Vec::new();
        self.core.on_event(self.now, event.into(), &mut actions);
        actions
    }

    fn cap(&mut self, tenant: TenantIndex, quota: Quota) -> Vec<Action> {
        self.tell(Event::Owner { function: FunctionIndex(tenant.0), tenant: Some(tenant) });
        self.tell(Event::Quota { tenant, quota })
    }

    fn enqueue(&mut self, key: u64, function: u32, model: u32) -> Vec<Action> {
        let key = RequestKey(key);
        let attempts = AttemptRecord::new(3, Idempotence::Yes);
        let function = FunctionIndex(function);
        let model = ModelId(model);
        let priority = Priority::default();
        self.tell(dispatch::Event::Enqueue(dispatch::QueuedRequest {
            key,
            function,
            model,
            attempts,
            priority,
            inputs: dispatch::InputLocations::NONE,
        }))
    }

    fn ended(&mut self, gpu: u32, key: u64) -> Vec<Action> {
        let ran = Some(Duration::from_millis(1));
        self.tell(dispatch::Event::RequestEnded { gpu: GpuIndex(gpu), key: RequestKey(key), ran })
    }

    fn pass_ms(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
    }
}

/// Returns the assigned requests with their GPUs.
fn given(actions: &[Action]) -> Vec<(u32, u64)> {
    let assign = |action: &Action| match *action {
        Action::Assign { gpu, key, .. } => Some((gpu.0, key.0)),
        _ => None,
    };
    actions.iter().filter_map(assign).collect()
}

#[test]
fn requests_beyond_gpus_max_are_parked_and_others_pass_them() {
    let mut node = Node::new(PolicyConfig::Lb, 4);
    node.cap(A, quota(2, 0.0, 0.0));
    assert_eq!(given(&node.enqueue(1, 0, 0)), [(0, 1)]);
    assert_eq!(given(&node.enqueue(2, 0, 0)), [(1, 2)]);
    assert_eq!(given(&node.enqueue(3, 0, 0)), []);
    assert_eq!(given(&node.enqueue(4, 7, 0)), [(2, 4)], "a request of another tenant");
    assert_eq!((node.core.queued(), node.core.gate.parked()), (1, 1));
    assert_eq!(given(&node.ended(1, 2)), [(3, 3)]);
    assert!(node.core.holds(RequestKey(3)) && node.core.gate.parked() == 0);
}

#[test]
fn a_parked_request_enters_with_the_present_location_of_its_inputs() {
    let mut node = Node::new(PolicyConfig::Lb, 1);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    let known = |node: &Node| node.core.dispatch().inputs_of(RequestKey(2));
    let inputs = dispatch::InputLocations::of([(GpuIndex(0), Bytes::mib(1))]);
    assert_eq!(node.tell(dispatch::Event::InputsMoved { key: RequestKey(2), inputs }), []);
    assert_eq!(known(&node), dispatch::InputLocations::NONE);
    node.ended(0, 1);
    assert_eq!(known(&node), inputs);
    assert_eq!(
        node.tell(dispatch::Event::InputsMoved {
            key: RequestKey(2),
            inputs: dispatch::InputLocations::NONE
        }),
        []
    );
    assert_eq!(known(&node), dispatch::InputLocations::NONE);
}

#[test]
fn a_parked_batch_enters_with_the_inputs_of_its_remaining_requests() {
    let mut node = Node::new(PolicyConfig::Lb, 1);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    let on_gpu = |mib| dispatch::InputLocations::of([(GpuIndex(0), Bytes::mib(mib))]);
    for (rows, mib) in [(2, 5), (1, 4)] {
        let stands_for = dispatch::Event::BatchChanged { key: RequestKey(2), rows, inputs: on_gpu(mib) };
        assert_eq!(node.tell(stands_for), []);
    }
    node.ended(0, 1);
    assert_eq!(node.core.dispatch().inputs_of(RequestKey(2)), on_gpu(4));
}

/// The model of the parked request may be on a GPU, and a prewarming load could evict it.
#[test]
fn no_model_is_prewarmed_while_a_request_is_parked() {
    let mut node = Node::new(PolicyConfig::Fifo, 1);
    node.cap(A, quota(1, 0.0, 0.0));
    let likely =
        |model, after| dispatch::Event::PrewarmHint { model: ModelId(model), after: Some(ModelId(after)) };
    let busy = |node: &Node| node.core.dispatch().stats().prewarms.busy;
    let prewarm = Action::Prewarm { gpu: GpuIndex(0), model: ModelId(1) };
    node.enqueue(1, 0, 0);
    // The first hint waits for the GPU to have time; the second one comes after the parked request.
    assert_eq!(node.tell(likely(1, 0)), []);
    assert_eq!(node.enqueue(2, 0, 0), []);
    let loaded = dispatch::Event::ModelLoaded { gpu: GpuIndex(0), model: ModelId(0), from: None };
    assert_eq!((node.tell(loaded), busy(&node)), (vec![], 1));
    assert_eq!((node.tell(likely(1, 0)), busy(&node)), (vec![], 2));
    assert_eq!(node.tell(dispatch::Event::Withdraw { key: RequestKey(2) }), []);
    assert_eq!(node.tell(likely(1, 0)), [prewarm]);
}

#[test]
fn a_withdrawn_request_is_no_longer_parked() {
    let mut node = Node::new(PolicyConfig::Fifo, 2);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    assert_eq!(node.tell(dispatch::Event::Withdraw { key: RequestKey(2) }), []);
    assert_eq!((node.core.queued(), node.core.holds(RequestKey(2))), (0, false));
    assert_eq!(given(&node.ended(0, 1)), []);
}

#[test]
fn models_of_admitted_requests_stay_within_the_memory_share() {
    // The share is 48 of 128 MiB: model 2 takes 32, and model 1 takes 16.
    let mut node = Node::new(PolicyConfig::Lb, 2);
    node.cap(A, quota(0, 0.0, 0.375));
    assert_eq!(given(&node.enqueue(1, 0, 2)), [(0, 1)]);
    assert_eq!(given(&node.enqueue(2, 0, 2)), [], "another copy would exceed the share");
    assert_eq!(given(&node.enqueue(3, 0, 1)), [], "the oldest request goes first");
    assert_eq!(given(&node.ended(0, 1)), [(1, 2), (0, 3)]);
}

#[test]
fn a_request_that_exceeds_the_memory_share_fails() {
    let mut node = Node::new(PolicyConfig::Fifo, 1);
    node.cap(A, quota(0, 0.0, 0.25));
    let fails =
        |key| [Action::Fail { key: RequestKey(key), reason: Reason::NoGpuMemory, may_have_executed: false }];
    assert_eq!(node.enqueue(1, 0, 2), fails(1));
    let over = |function, model| node.core.over_memory_share(FunctionIndex(function), ModelId(model));
    assert_eq!((over(0, 2), over(0, 1), over(7, 2)), (true, false, false));
    assert_eq!(given(&node.enqueue(2, 0, 1)), [(0, 2)]);
    assert_eq!(given(&node.enqueue(3, 0, 1)), []);
    assert_eq!(node.cap(A, quota(0, 0.0, 0.125)), fails(3), "the cap was lowered");
}

#[test]
fn a_tenant_over_its_gpu_share_yields_only_to_tenants_with_requests() {
    let mut node = Node::new(PolicyConfig::Lb, 1);
    node.cap(A, quota(0, 0.2, 0.0));
    for key in 1..=5 {
        node.enqueue(key, 0, 0);
    }
    // No other tenant has requests, so this one gets all of the time.
    for key in 1..=3 {
        node.pass_ms(1_000);
        assert_eq!(given(&node.ended(0, key)), [(0, key + 1)]);
    }
    // Three of the last ten seconds are more than a fifth.
    assert_eq!(given(&node.enqueue(10, 7, 0)), []);
    assert_eq!(given(&node.enqueue(11, 7, 0)), []);
    node.pass_ms(1_000);
    assert_eq!(given(&node.ended(0, 4)), [(0, 10)]);
    node.pass_ms(100);
    assert_eq!(given(&node.ended(0, 10)), [(0, 11)], "request 5 is older, but its tenant is over its share");
    node.pass_ms(100);
    assert_eq!(given(&node.ended(0, 11)), [], "others used the GPU recently, and may come again");
    node.now = node.core.next_wake().unwrap();
    assert_eq!(given(&node.tell(dispatch::Event::Tick)), []);
    node.pass_ms(10_000);
    assert_eq!(
        given(&node.tell(dispatch::Event::Tick)),
        [(0, 5)],
        "no other request came for a whole window"
    );
}

#[test]
fn beyond_its_share_a_tenant_gets_the_gpus_that_others_did_not_use_at_once() {
    let mut node = Node::new(PolicyConfig::Lb, 4);
    node.cap(A, quota(0, 0.25, 0.0));
    assert_eq!(given(&node.enqueue(1, 7, 0)).len() + given(&node.enqueue(2, 7, 0)).len(), 2);
    assert_eq!((node.ended(0, 1), node.ended(1, 2)), (vec![], vec![]));
    let let_in: Vec<_> = (3..=6).map(|key| given(&node.enqueue(key, 0, 0)).len()).collect();
    assert_eq!(let_in, [1, 1, 0, 0], "two of four GPUs are left for the other tenants");
    node.pass_ms(10_500);
    assert_eq!(given(&node.tell(dispatch::Event::Tick)).len(), 2, "the other tenants did not return");
}

#[test]
fn tenants_over_their_shares_do_not_yield_to_each_other() {
    let mut node = Node::new(PolicyConfig::Lb, 1);
    node.cap(A, quota(0, 0.1, 0.0));
    node.cap(B, quota(0, 0.1, 0.0));
    node.enqueue(1, 0, 0);
    node.pass_ms(2_000);
    node.ended(0, 1);
    node.enqueue(2, 1, 0);
    node.pass_ms(2_000);
    node.ended(0, 2);
    assert_eq!(given(&node.enqueue(3, 0, 0)), [(0, 3)]);
    assert_eq!((given(&node.enqueue(4, 1, 0)), given(&node.enqueue(5, 0, 0))), (vec![], vec![]));
    node.pass_ms(10);
    assert_eq!(given(&node.ended(0, 3)), [(0, 4)], "by age");
}

#[test]
fn a_gpu_that_waiting_requests_cannot_use_goes_to_a_tenant_over_its_share() {
    // Model 2 needs 32 MiB, so the second GPU is too small for it.
    let mut node = Node::of(PolicyConfig::Lb, &[64, 16]);
    node.cap(A, quota(0, 0.01, 0.0));
    assert_eq!(given(&node.enqueue(1, 7, 2)), [(0, 1)]);
    assert_eq!(given(&node.enqueue(2, 0, 0)), [(1, 2)]);
    assert_eq!(given(&node.enqueue(3, 7, 2)), []);
    assert_eq!(given(&node.enqueue(4, 0, 0)), []);
    node.pass_ms(5_000);
    assert_eq!(given(&node.ended(1, 2)), [(1, 4)], "request 3 is queued for the other GPU");
    assert_eq!(given(&node.ended(0, 1)), [(0, 3)]);
}

#[test]
fn removing_the_caps_admits_all_parked_requests() {
    let mut node = Node::new(PolicyConfig::Lb, 4);
    node.cap(A, quota(1, 0.0, 0.0));
    for key in 1..=4 {
        node.enqueue(key, 0, 0);
    }
    let released = node.tell(Event::Quota { tenant: A, quota: Quota::NONE });
    assert_eq!(given(&released), [(1, 2), (2, 3), (3, 4)]);
    node.tell(Event::Owner { function: FunctionIndex(0), tenant: None });
    for (gpu, key) in [(0, 1), (1, 2), (2, 3), (3, 4)] {
        node.ended(gpu, key);
    }
    assert_eq!(given(&node.enqueue(5, 0, 0)).len(), 1);
}

#[test]
fn a_request_of_a_lost_gpu_stays_admitted_and_moves_to_another_gpu() {
    let mut node = Node::new(PolicyConfig::Fifo, 2);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    let lost = vec![(RequestKey(1), AttemptProgress::Preparing)];
    assert_eq!(given(&node.tell(dispatch::Event::Down { gpu: GpuIndex(0), lost })), [(1, 1)]);
    let returned = dispatch::Event::RequestReturned {
        gpu: GpuIndex(1),
        key: RequestKey(1),
        why: ReturnReason::Recalled,
    };
    assert_eq!(given(&node.tell(returned)), [(1, 1)]);
    assert_eq!(given(&node.ended(1, 1)), [(1, 2)]);
}

/// Creates a node of GPUs that are down, with a queue bound of four and thus two parked requests.
fn short_queue(gpus: usize) -> Node {
    let gpu = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let config = Config::new(vec![gpu; gpus], 4).with_policy(PolicyConfig::Lb, 1);
    let mut node = Node { core: TenantGate::new(&config), now: Timestamp(MS) };
    let model = ModelId(0);
    let memory = Bytes::mib(8);
    node.tell(dispatch::Event::Install { model, memory, weights: memory });
    node
}

fn full(key: u64) -> [Action; 1] {
    [Action::Fail { key: RequestKey(key), reason: Reason::QueueFull, may_have_executed: false }]
}

#[test]
fn a_tenant_that_fills_the_parked_bound_takes_no_capacity_of_another() {
    let mut node = short_queue(2);
    for gpu in 0..2 {
        node.tell(dispatch::Event::Up { gpu: GpuIndex(gpu), incarnation: Incarnation(1) });
    }
    node.cap(A, quota(1, 0.0, 0.0));
    node.cap(B, quota(1, 0.0, 0.0));
    assert_eq!(given(&node.enqueue(1, 0, 0)), [(0, 1)]);
    assert_eq!((node.enqueue(2, 0, 0), node.enqueue(3, 0, 0)), (vec![], vec![]));
    assert_eq!(node.enqueue(4, 0, 0), full(4), "A uses the whole bound");
    assert_eq!(given(&node.enqueue(5, 1, 0)), [(1, 5)], "B may use the idle GPU");
    assert_eq!(node.enqueue(6, 1, 0), full(3), "B may park a request too");
    assert_eq!(node.enqueue(7, 1, 0), full(7));
    assert_eq!(node.enqueue(8, 0, 0), full(8));
    assert_eq!((given(&node.ended(0, 1)), given(&node.ended(1, 5))), (vec![(0, 2)], vec![(1, 6)]));
}

#[test]
fn no_request_is_admitted_while_the_queue_is_full() {
    let mut node = short_queue(1);
    node.cap(A, quota(1, 0.0, 0.0));
    for key in 1..=4 {
        assert_eq!(node.enqueue(key, 7, 0), []);
    }
    assert_eq!(node.enqueue(5, 0, 0), [], "request 5 is parked");
    assert_eq!((node.core.queued(), node.core.gate.parked()), (5, 1));
    assert_eq!(node.tell(dispatch::Event::Withdraw { key: RequestKey(4) }), []);
    assert_eq!((node.core.queued(), node.core.gate.parked()), (4, 0));
}

#[test]
fn parked_requests_are_bounded_separately_from_the_queue() {
    let mut node = short_queue(1);
    node.cap(A, quota(1, 0.0, 0.0));
    // One request is admitted, and two are parked.
    let failed =
        |actions: Vec<Action>| matches!(actions[..], [Action::Fail { reason: Reason::QueueFull, .. }]);
    let full: Vec<_> = (1..=5).map(|key| failed(node.enqueue(key, 0, 0))).collect();
    assert_eq!(full, [false, false, false, true, true]);
    let others: Vec<_> = (6..=9).map(|key| failed(node.enqueue(key, 7, 0))).collect();
    assert_eq!(
        others,
        [false, false, false, true],
        "the queue has one request of the tenant and three others"
    );
}

#[test]
fn only_open_seats_count_as_idle() {
    let seats = NonZeroU32::new(4).unwrap();
    let one = GpuConfig { seats, ..GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000)) };
    let config = Config::new(vec![one; 2], 16).with_open_seats(NonZeroU32::MIN);
    let mut node = Node::with_config(&config);
    let idle = |node: &Node| node.core.gpus.iter().map(OnGpu::has_idle_seat).collect::<Vec<_>>();
    assert_eq!(idle(&node), [true, true]);
    let assigned = [1, 2].map(|key| node.enqueue(key, 0, 0).len());
    assert_eq!((assigned, idle(&node)), ([1, 1], vec![false, false]));
    node.tell(dispatch::Event::SeatsOpened { seats });
    assert_eq!(idle(&node), [true, true]);
    for key in 3..=8 {
        node.enqueue(key, 0, 0);
    }
    assert_eq!(idle(&node), [false, false]);
    // Requests run on closed seats of GPU 1, and its only open seat is idle.
    node.tell(dispatch::Event::SeatsOpened { seats: NonZeroU32::MIN });
    let on_seat = |node: &Node, seat| node.core.gpus[1].seats[&SeatIndex(seat)][0];
    let key = on_seat(&node, 4);
    node.tell(dispatch::Event::RequestEnded { gpu: GpuIndex(1), key, ran: None });
    assert_eq!(idle(&node), [false, true]);
    let key = on_seat(&node, 5);
    node.tell(dispatch::Event::RequestEnded { gpu: GpuIndex(1), key, ran: None });
    node.enqueue(9, 0, 0);
    assert_eq!(idle(&node), [false, false], "a closed seat without a request is not idle");
}
