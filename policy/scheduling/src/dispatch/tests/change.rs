//! Change of the policy while requests wait.

use std::num::NonZeroU32;

use super::properties::World;
use super::*;

/// Returns every policy that may take over.
fn policies() -> Vec<PolicyConfig> {
    POLICIES.map(|(_, policy)| policy).into_iter().filter(|policy| !policy.binds_early()).collect()
}

fn change_to(policy: PolicyConfig, eviction: Eviction) -> Event {
    let objective = LatencyObjective::from_billionths(900_000_000);
    let scored = |function, m| (FunctionIndex(function), objective, SloCounts { m, n: 10 });
    let functions = if policy.uses_scores() { vec![scored(0, 9), scored(1, 2)] } else { Vec::new() };
    Event::PolicyChanged { policy, eviction, functions }
}

#[test]
fn waiting_requests_leave_in_order_of_arrival_after_a_policy_change() {
    for from in policies() {
        for to in policies() {
            let mut node = node_with(from, &[64]);
            let mut given = Vec::new();
            let mut take = |actions: Vec<Action>| {
                let assigned = |action| match action {
                    Action::Assign { key, .. } => Some(key.0),
                    _ => None,
                };
                given.extend(actions.into_iter().filter_map(assigned));
                given.last().copied()
            };
            for key in 1..=4 {
                take(node.enqueue(key, A));
            }
            take(node.step(change_to(to, Eviction::Lru)));
            for key in 1..=4 {
                node.now = node.now + Duration::from_millis(1);
                let ended = Event::RequestEnded {
                    gpu: gpu(0),
                    key: RequestKey(key),
                    ran: Some(Duration::from_millis(1)),
                };
                take(node.step(ended));
            }
            assert_eq!(given, [1, 2, 3, 4], "{from} to {to}");
            assert_eq!((node.dispatch.queued(), node.dispatch.in_flight()), (0, 0), "{from} to {to}");
        }
    }
}

#[test]
fn a_policy_change_unbinds_requests_and_unpins_their_models() {
    let lalb = PolicyConfig::Lalb { overtakes_max: 25 };
    let mut node = node_with(lalb, &[64, 64]);
    node.enqueue(1, A);
    // A load takes so long that waiting is always better.
    let load = Duration::from_secs(9);
    let run = Duration::from_millis(100);
    node.step(Event::ProfileLoaded(ModelProfile { model: A, kind: 0, load, swap: None, run }));
    assert_eq!(node.enqueue(2, A), [assign(0, 2, A)], "assigned behind the running request");
    assert_eq!(node.enqueue(3, A), [Action::Pin { gpu: gpu(0), model: A }]);
    let changed = node.step(change_to(PolicyConfig::Lb, Eviction::Lru));
    assert_eq!(changed, [Action::Unpin { gpu: gpu(0), model: A }, assign(1, 3, A)]);
}

#[test]
fn a_new_eviction_rule_sends_eviction_ranks_only_if_it_needs_them() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    node.enqueue(2, B);
    let told = |actions: Vec<Action>| {
        actions.into_iter().filter(|it| matches!(it, Action::SetEvictionRank { .. })).count()
    };
    assert_eq!(told(node.step(change_to(PolicyConfig::Fifo, Eviction::Torpor))), 2);
    assert_eq!(told(node.step(change_to(PolicyConfig::Lb, Eviction::Torpor))), 0, "already sent");
    let config = &node.dispatch.config;
    assert_eq!((config.policy, config.eviction), (PolicyConfig::Lb, Eviction::Torpor));
}

#[test]
fn counters_survive_a_policy_change() {
    let mut node = node_with(PolicyConfig::Lalb { overtakes_max: 25 }, &[64]);
    node.enqueue(1, A);
    node.enqueue(2, B);
    node.enqueue(3, A);
    node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(1), ran: Some(Duration::from_millis(1)) });
    let before = node.dispatch.stats();
    assert!(before.overtakings > 0 || before.reserved > 0, "{before:?}");
    node.step(change_to(PolicyConfig::Fifo, Eviction::Lru));
    let after = node.dispatch.stats();
    assert_eq!((after.overtakings, after.reserved), (before.overtakings, before.reserved));
    assert!(node.dispatch.next_wake().is_none_or(|at| at > node.now), "no wake in the past");
}

/// Next step of a random node; numbers are taken modulo the number of candidates.
#[derive(Debug, Clone, Copy)]
enum Step {
    Enqueue { model: u32, level: u64 },
    Withdraw(usize),
    End(usize),
    Down(u32),
    Up(u32),
    Change { policy: usize, evicts: bool },
    OpenSeats(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..3u32, 0..4u64).prop_map(|(model, level)| Step::Enqueue { model, level }),
        1 => any::<usize>().prop_map(Step::Withdraw),
        6 => any::<usize>().prop_map(Step::End),
        1 => (0..3u32).prop_map(Step::Down),
        2 => (0..3u32).prop_map(Step::Up),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(policy, evicts)| Step::Change { policy, evicts }),
        2 => (1..=4u32).prop_map(Step::OpenSeats),
    ]
}

proptest! {
    /// The checks of [`World`]: no request is assigned twice, to a GPU that is down or beyond a
    /// GPU's slots, and pins and unpins alternate.
    #[test]
    fn no_request_is_lost_or_doubled_by_changes_of_policy_and_of_open_seats(
        first in any::<usize>(),
        seats in prop_oneof![Just(1), Just(4u32)],
        steps in prop::collection::vec(step(), 1..150)
    ) {
        let policies = policies();
        let each = NonZeroU32::new(seats).unwrap_or(NonZeroU32::MIN);
        let sizes = [16, 64, 64].map(|mib| GpuConfig {
            seats: each,
            ..GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000))
        });
        let peer = |(a, b, mb): (u32, u32, u64)| PeerLink { a: gpu(a), b: gpu(b), rate: BytesPerSec(mb * 1_000_000) };
        let config = Config {
            peers: [(0, 1, 500), (1, 2, 4000), (0, 2, 8000)].map(peer).to_vec(),
            ..Config::new(sizes.to_vec(), 1000).with_policy(policies[first % policies.len()], 1)
        };
        let mut node = node_of(&config);
        let mut world = World { up: (0..3).collect(), seats_each: seats, open_each: seats, ..World::default() };
        let mut next_key = 0;
        for step in steps {
            node.now = node.now + Duration::from_micros(150);
            let event = match step {
                Step::Enqueue { model, level } => {
                    next_key += 1;
                    let key = RequestKey(next_key);
                    world.waiting.insert(key);
                    let attempts = AttemptRecord::new(3, Idempotence::Yes);
                    let priority = Priority::new(level * 2).unwrap_or_default();
                    let function = FunctionIndex(model);
                    let model = ModelId(model);
                    Event::Enqueue(QueuedRequest { key, function, model, attempts, priority, inputs: InputLocations::NONE })
                }
                Step::Withdraw(number) => {
                    let Some(event) = world.withdraw(number) else { continue };
                    event
                }
                Step::End(number) => {
                    let Some(event) = world.end(number) else { continue };
                    event
                }
                Step::Down(index) => world.lose(index, AttemptProgress::Waiting),
                Step::Up(index) => {
                    let Some(event) = world.revive(index) else { continue };
                    event
                }
                Step::Change { policy, evicts } => {
                    let eviction = if evicts { Eviction::Torpor } else { Eviction::Lru };
                    change_to(policies[policy % policies.len()], eviction)
                }
                Step::OpenSeats(open) => {
                    world.open_each = open.min(seats);
                    Event::SeatsOpened { seats: NonZeroU32::new(open).unwrap_or(NonZeroU32::MIN) }
                }
            };
            // A request that was started on enough GPUs that died is given up.
            let may_fail = matches!(event, Event::Down { .. });
            let actions = node.step(event);
            let fails = actions.iter().any(|it| matches!(it, Action::Fail { .. }));
            prop_assert!(may_fail || !fails, "no request may fail with memory and time for all: {actions:?}");
            world.take(&actions);
            glance::check_indexes(&node.dispatch);
            prop_assert_eq!(node.dispatch.queued(), world.waiting.len());
            prop_assert_eq!(node.dispatch.in_flight(), world.waiting.len() + world.on.len());
        }
        for index in 0..3 {
            if let Some(event) = world.revive(index) {
                world.take(&node.step(event));
            }
        }
        while let Some((key, gpu)) = world.pick(0) {
            world.on.remove(&key);
            world.take(&node.step(Event::RequestEnded { gpu, key, ran: Some(Duration::from_millis(1)) }));
        }
        prop_assert_eq!((node.dispatch.in_flight(), world.waiting.len(), world.pinned.len()), (0, 0, 0));
    }
}
