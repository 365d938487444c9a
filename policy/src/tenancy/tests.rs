use std::num::NonZeroU32;
use std::time::Duration;

use millrace_types::tenancy::{Quota, Share};
use millrace_types::{Bytes, BytesPerSec, Incarnation, Priority};

use super::*;
use crate::attempts::{Attempts, Idempotent, Progress};
use crate::dispatch::{GpuConfig, PolicyConfig, Return};
use crate::ids::TenantIndex;

mod isolation;
mod properties;

const MS: u64 = 1_000_000;
/// Two tenants with caps, each with the function of its number; functions above are of others.
const A: TenantIndex = TenantIndex(0);
const B: TenantIndex = TenantIndex(1);

struct Node {
    core: Tenancy,
    now: Timestamp,
}

fn quota(gpus_max: u32, gpu_share: f64, memory_share: f64) -> Quota {
    let share = |share: f64| Share::from_ppm((share * 1e6) as u32).ok();
    Quota {
        gpus_max: NonZeroU32::new(gpus_max),
        gpu_share: share(gpu_share),
        memory_share: share(memory_share),
    }
}

impl Node {
    /// So many GPUs of 64 MiB. Model 0 takes 8 MiB, 1 takes 16 MiB, 2 takes 32 MiB.
    fn new(policy: PolicyConfig, gpus: u32) -> Self {
        Self::of(policy, &vec![64; gpus as usize])
    }

    fn of(policy: PolicyConfig, memories_mib: &[u64]) -> Self {
        let gpu = |&mib: &u64| GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000));
        let gpus: Vec<_> = memories_mib.iter().map(gpu).collect();
        let config = Config::new(gpus, 1 << 14).with_policy(policy, 1);
        let mut node = Self { core: Tenancy::new(&config), now: Timestamp(MS) };
        for (model, mib) in [(0, 8), (1, 16), (2, 32)] {
            let (model, memory) = (ModelId(model), Bytes::mib(mib));
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
        let (key, attempts) = (RequestKey(key), Attempts::new(3, Idempotent::Yes));
        let (function, model) = (FunctionIndex(function), ModelId(model));
        let priority = Priority::default();
        self.tell(dispatch::Event::Enqueue(dispatch::Request {
            key,
            function,
            model,
            attempts,
            priority,
            inputs: dispatch::Inputs::NONE,
        }))
    }

    fn ended(&mut self, gpu: u32, key: u64) -> Vec<Action> {
        let ran = Some(Duration::from_millis(1));
        self.tell(dispatch::Event::Ended { gpu: GpuIndex(gpu), key: RequestKey(key), ran })
    }

    fn pass_ms(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
    }
}

/// Who was given to which GPU.
fn given(actions: &[Action]) -> Vec<(u32, u64)> {
    let assign = |action: &Action| match *action {
        Action::Assign { gpu, key, .. } => Some((gpu.0, key.0)),
        _ => None,
    };
    actions.iter().filter_map(assign).collect()
}

#[test]
fn what_is_beyond_the_gpus_cap_waits_outside_and_others_pass_it_by() {
    let mut node = Node::new(PolicyConfig::Lb, 4);
    node.cap(A, quota(2, 0.0, 0.0));
    assert_eq!(given(&node.enqueue(1, 0, 0)), [(0, 1)]);
    assert_eq!(given(&node.enqueue(2, 0, 0)), [(1, 2)]);
    assert_eq!(given(&node.enqueue(3, 0, 0)), []);
    assert_eq!(given(&node.enqueue(4, 7, 0)), [(2, 4)], "of somebody else");
    assert_eq!((node.core.queued(), node.core.gate.parked()), (1, 1));
    assert_eq!(given(&node.ended(1, 2)), [(3, 3)]);
    assert!(node.core.holds(RequestKey(3)) && node.core.gate.parked() == 0);
}

#[test]
fn what_waits_outside_comes_in_with_its_data_where_it_is_by_then() {
    let mut node = Node::new(PolicyConfig::Lb, 1);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    let known = |node: &Node| node.core.dispatch().inputs_of(RequestKey(2));
    let inputs = dispatch::Inputs::of([(GpuIndex(0), Bytes::mib(1))]);
    assert_eq!(node.tell(dispatch::Event::Moved { key: RequestKey(2), inputs }), []);
    assert_eq!(known(&node), dispatch::Inputs::NONE);
    node.ended(0, 1);
    assert_eq!(known(&node), inputs);
    assert_eq!(node.tell(dispatch::Event::Moved { key: RequestKey(2), inputs: dispatch::Inputs::NONE }), []);
    assert_eq!(known(&node), dispatch::Inputs::NONE);
}

#[test]
fn what_waits_outside_for_others_too_comes_in_with_the_data_of_those_that_are_left() {
    let mut node = Node::new(PolicyConfig::Lb, 1);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    let on_gpu = |mib| dispatch::Inputs::of([(GpuIndex(0), Bytes::mib(mib))]);
    for (rows, mib) in [(2, 5), (1, 4)] {
        let stands_for = dispatch::Event::Rows { key: RequestKey(2), rows, inputs: on_gpu(mib) };
        assert_eq!(node.tell(stands_for), []);
    }
    node.ended(0, 1);
    assert_eq!(node.core.dispatch().inputs_of(RequestKey(2)), on_gpu(4));
}

/// What that waits for may be on a GPU, and make room.
#[test]
fn no_hint_is_followed_while_a_request_waits_outside() {
    let mut node = Node::new(PolicyConfig::Fifo, 1);
    node.cap(A, quota(1, 0.0, 0.0));
    let likely =
        |model, after| dispatch::Event::Likely { model: ModelId(model), after: Some(ModelId(after)) };
    let busy = |node: &Node| node.core.dispatch().stats().prewarms.busy;
    let prewarm = Action::Prewarm { gpu: GpuIndex(0), model: ModelId(1) };
    node.enqueue(1, 0, 0);
    // One that was waiting for the GPU to have time for it, and one that comes then.
    assert_eq!(node.tell(likely(1, 0)), []);
    assert_eq!(node.enqueue(2, 0, 0), []);
    let loaded = dispatch::Event::Loaded { gpu: GpuIndex(0), model: ModelId(0), from: None };
    assert_eq!((node.tell(loaded), busy(&node)), (vec![], 1));
    assert_eq!((node.tell(likely(1, 0)), busy(&node)), (vec![], 2));
    assert_eq!(node.tell(dispatch::Event::Withdraw { key: RequestKey(2) }), []);
    assert_eq!(node.tell(likely(1, 0)), [prewarm]);
}

#[test]
fn one_that_nobody_waits_for_any_more_leaves_from_outside_too() {
    let mut node = Node::new(PolicyConfig::Fifo, 2);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    assert_eq!(node.tell(dispatch::Event::Withdraw { key: RequestKey(2) }), []);
    assert_eq!((node.core.queued(), node.core.holds(RequestKey(2))), (0, false));
    assert_eq!(given(&node.ended(0, 1)), []);
}

#[test]
fn models_at_work_keep_to_the_share_of_the_memory() {
    // 128 MiB in all: of 48, model 2 takes 32 and model 1 takes 16.
    let mut node = Node::new(PolicyConfig::Lb, 2);
    node.cap(A, quota(0, 0.0, 0.375));
    assert_eq!(given(&node.enqueue(1, 0, 2)), [(0, 1)]);
    assert_eq!(given(&node.enqueue(2, 0, 2)), [], "another copy would be too much");
    assert_eq!(given(&node.enqueue(3, 0, 1)), [], "the oldest comes first");
    assert_eq!(given(&node.ended(0, 1)), [(1, 2), (0, 3)]);
}

#[test]
fn what_can_never_fit_the_share_of_the_memory_fails() {
    let mut node = Node::new(PolicyConfig::Fifo, 1);
    node.cap(A, quota(0, 0.0, 0.25));
    let fails =
        |key| [Action::Fail { key: RequestKey(key), reason: Reason::NoGpuMemory, may_have_executed: false }];
    assert_eq!(node.enqueue(1, 0, 2), fails(1));
    let over = |function, model| node.core.over_memory_share(FunctionIndex(function), ModelId(model));
    assert_eq!((over(0, 2), over(0, 1), over(7, 2)), (true, false, false));
    assert_eq!(given(&node.enqueue(2, 0, 1)), [(0, 2)]);
    assert_eq!(given(&node.enqueue(3, 0, 1)), []);
    assert_eq!(node.cap(A, quota(0, 0.0, 0.125)), fails(3), "a cap that was lowered");
}

#[test]
fn a_tenant_over_its_share_of_the_time_yields_only_to_those_who_wait() {
    let mut node = Node::new(PolicyConfig::Lb, 1);
    node.cap(A, quota(0, 0.2, 0.0));
    for key in 1..=5 {
        node.enqueue(key, 0, 0);
    }
    // Nobody else is there: it has all of the time.
    for key in 1..=3 {
        node.pass_ms(1_000);
        assert_eq!(given(&node.ended(0, key)), [(0, key + 1)]);
    }
    // Three seconds of the last ten are more than a fifth.
    assert_eq!(given(&node.enqueue(10, 7, 0)), []);
    assert_eq!(given(&node.enqueue(11, 7, 0)), []);
    node.pass_ms(1_000);
    assert_eq!(given(&node.ended(0, 4)), [(0, 10)]);
    node.pass_ms(100);
    assert_eq!(given(&node.ended(0, 10)), [(0, 11)], "5 is older, and its tenant over its share");
    node.pass_ms(100);
    assert_eq!(given(&node.ended(0, 11)), [], "others needed it lately, and may come again");
    node.now = node.core.next_wake().unwrap();
    assert_eq!(given(&node.tell(dispatch::Event::Tick)), []);
    node.pass_ms(10_000);
    assert_eq!(given(&node.tell(dispatch::Event::Tick)), [(0, 5)], "nobody else was here for a while");
}

#[test]
fn beyond_its_share_a_tenant_has_the_gpus_that_others_did_not_use_at_once() {
    let mut node = Node::new(PolicyConfig::Lb, 4);
    node.cap(A, quota(0, 0.25, 0.0));
    assert_eq!(given(&node.enqueue(1, 7, 0)).len() + given(&node.enqueue(2, 7, 0)).len(), 2);
    assert_eq!((node.ended(0, 1), node.ended(1, 2)), (vec![], vec![]));
    let let_in: Vec<_> = (3..=6).map(|key| given(&node.enqueue(key, 0, 0)).len()).collect();
    assert_eq!(let_in, [1, 1, 0, 0], "two of four GPUs are left for the others");
    node.pass_ms(10_500);
    assert_eq!(given(&node.tell(dispatch::Event::Tick)).len(), 2, "they did not come back");
}

#[test]
fn those_over_their_shares_do_not_yield_to_each_other() {
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
fn a_gpu_that_is_of_no_use_to_those_who_wait_is_given_to_one_over_its_share() {
    // Model 2 takes 32 MiB: the second GPU is too small for it.
    let mut node = Node::of(PolicyConfig::Lb, &[64, 16]);
    node.cap(A, quota(0, 0.01, 0.0));
    assert_eq!(given(&node.enqueue(1, 7, 2)), [(0, 1)]);
    assert_eq!(given(&node.enqueue(2, 0, 0)), [(1, 2)]);
    assert_eq!(given(&node.enqueue(3, 7, 2)), []);
    assert_eq!(given(&node.enqueue(4, 0, 0)), []);
    node.pass_ms(5_000);
    assert_eq!(given(&node.ended(1, 2)), [(1, 4)], "3 waits inside, for the other GPU");
    assert_eq!(given(&node.ended(0, 1)), [(0, 3)]);
}

#[test]
fn caps_that_are_taken_away_let_everything_in() {
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
fn a_lost_gpu_gives_its_place_back_and_takes_its_request_elsewhere() {
    let mut node = Node::new(PolicyConfig::Fifo, 2);
    node.cap(A, quota(1, 0.0, 0.0));
    node.enqueue(1, 0, 0);
    node.enqueue(2, 0, 0);
    let lost = vec![(RequestKey(1), Progress::Preparing)];
    assert_eq!(given(&node.tell(dispatch::Event::Down { gpu: GpuIndex(0), lost })), [(1, 1)]);
    let returned = dispatch::Event::Returned { gpu: GpuIndex(1), key: RequestKey(1), why: Return::Recalled };
    assert_eq!(given(&node.tell(returned)), [(1, 1)]);
    assert_eq!(given(&node.ended(1, 1)), [(1, 2)]);
}

/// So many GPUs that are not up, a queue of four, and so two places outside.
fn short_queue(gpus: usize) -> Node {
    let gpu = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let config = Config::new(vec![gpu; gpus], 4).with_policy(PolicyConfig::Lb, 1);
    let mut node = Node { core: Tenancy::new(&config), now: Timestamp(MS) };
    let (model, memory) = (ModelId(0), Bytes::mib(8));
    node.tell(dispatch::Event::Install { model, memory, weights: memory });
    node
}

fn full(key: u64) -> [Action; 1] {
    [Action::Fail { key: RequestKey(key), reason: Reason::QueueFull, may_have_executed: false }]
}

#[test]
fn a_tenant_that_fills_the_place_outside_takes_none_of_anothers() {
    let mut node = short_queue(2);
    for gpu in 0..2 {
        node.tell(dispatch::Event::Up { gpu: GpuIndex(gpu), incarnation: Incarnation(1) });
    }
    node.cap(A, quota(1, 0.0, 0.0));
    node.cap(B, quota(1, 0.0, 0.0));
    assert_eq!(given(&node.enqueue(1, 0, 0)), [(0, 1)]);
    assert_eq!((node.enqueue(2, 0, 0), node.enqueue(3, 0, 0)), (vec![], vec![]));
    assert_eq!(node.enqueue(4, 0, 0), full(4), "all of the place is A's");
    assert_eq!(given(&node.enqueue(5, 1, 0)), [(1, 5)], "B may use the idle GPU");
    assert_eq!(node.enqueue(6, 1, 0), full(3), "and has a place of its own");
    assert_eq!(node.enqueue(7, 1, 0), full(7));
    assert_eq!(node.enqueue(8, 0, 0), full(8));
    assert_eq!((given(&node.ended(0, 1)), given(&node.ended(1, 5))), (vec![(0, 2)], vec![(1, 6)]));
}

#[test]
fn nothing_is_let_in_while_the_queue_is_full() {
    let mut node = short_queue(1);
    node.cap(A, quota(1, 0.0, 0.0));
    for key in 1..=4 {
        assert_eq!(node.enqueue(key, 7, 0), []);
    }
    assert_eq!(node.enqueue(5, 0, 0), [], "it waits outside");
    assert_eq!((node.core.queued(), node.core.gate.parked()), (5, 1));
    assert_eq!(node.tell(dispatch::Event::Withdraw { key: RequestKey(4) }), []);
    assert_eq!((node.core.queued(), node.core.gate.parked()), (4, 0));
}

#[test]
fn the_place_outside_is_bounded_apart_from_the_queue() {
    let mut node = short_queue(1);
    node.cap(A, quota(1, 0.0, 0.0));
    // One inside, two outside.
    let failed =
        |actions: Vec<Action>| matches!(actions[..], [Action::Fail { reason: Reason::QueueFull, .. }]);
    let full: Vec<_> = (1..=5).map(|key| failed(node.enqueue(key, 0, 0))).collect();
    assert_eq!(full, [false, false, false, true, true]);
    let others: Vec<_> = (6..=9).map(|key| failed(node.enqueue(key, 7, 0))).collect();
    assert_eq!(others, [false, false, false, true], "the queue has one of the tenant's and three of theirs");
}
