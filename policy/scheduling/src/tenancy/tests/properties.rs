//! Properties of every policy under random events: no cap that always applies is exceeded, no
//! request is lost, and no request stays parked while its tenant's caps would admit it. A tenant
//! with a GPU share waits at most one window longer than the other tenants' requests.

use millrace_core::attempts::ReturnReason;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::dispatch::POLICIES;

const GPUS: u32 = 3;

#[derive(Debug, Clone, Copy)]
enum Step {
    Enqueue { function: u32, model: u32 },
    Withdraw(usize),
    End(usize),
    GiveBack(usize),
    Down(u32),
    Up(u32),
    Pass(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => (0..4u32, 0..3u32).prop_map(|(function, model)| Step::Enqueue { function, model }),
        1 => any::<usize>().prop_map(Step::Withdraw),
        8 => any::<usize>().prop_map(Step::End),
        1 => any::<usize>().prop_map(Step::GiveBack),
        1 => (0..GPUS).prop_map(Step::Down),
        3 => (0..GPUS).prop_map(Step::Up),
        4 => (0u16..2_000).prop_map(Step::Pass),
    ]
}

fn caps() -> impl Strategy<Value = Quota> {
    (0u32..5, prop::sample::select(vec![0.0, 0.05, 0.3]), prop::sample::select(vec![0.0, 0.1, 0.2, 0.5]))
        .prop_map(|(gpus, time, memory)| quota(gpus, time, memory))
}

/// A request, as the test knows it.
#[derive(Debug, Clone, Copy)]
struct Request {
    function: u32,
    model: u32,
    on: Option<u32>,
}

#[derive(Default)]
struct World {
    requests: BTreeMap<u64, Request>,
    up: BTreeSet<u32>,
    /// By tenant: whether another tenant has an admitted request, and the last time when one had.
    others: [(bool, Option<Timestamp>); 2],
}

const fn mib(model: u32) -> u64 {
    8 << model
}

impl World {
    fn take(&mut self, actions: &[Action]) {
        for action in actions {
            match *action {
                Action::Assign { gpu, key, .. } => {
                    let request = self.requests.get_mut(&key.0).expect("a request of this test");
                    assert!(request.on.replace(gpu.0).is_none(), "{key} was assigned twice");
                    assert!(self.up.contains(&gpu.0));
                }
                Action::Fail { key, .. } => {
                    assert!(self.requests.remove(&key.0).is_some(), "failed after its end");
                }
                _ => {}
            }
        }
    }

    fn pick(&self, number: usize) -> Option<(u64, u32)> {
        let on: Vec<_> = self.requests.iter().filter_map(|(&key, it)| Some((key, it.on?))).collect();
        on.get(number % on.len().max(1)).copied()
    }

    /// Returns the number of GPUs and the MiB that a tenant's requests occupy.
    fn at_work(&self, tenant: u32) -> (usize, u64) {
        let own = self.requests.values().filter(|it| it.function == tenant);
        let copies: BTreeSet<_> = own.filter_map(|it| Some((it.on?, it.model))).collect();
        let gpus: BTreeSet<_> = copies.iter().map(|(gpu, _)| gpu).collect();
        (gpus.len(), copies.iter().map(|&(_, model)| mib(model)).sum())
    }

    fn check(&mut self, node: &Node, caps: &[Quota; 2]) {
        let core = &node.core;
        assert_eq!(core.queued(), self.requests.values().filter(|it| it.on.is_none()).count());
        for (tenant, quota) in (0u32..).zip(caps) {
            let inside = |key: &u64| !core.gate.holds(RequestKey(*key));
            let now_here = self.requests.iter().any(|(key, it)| it.function != tenant && inside(key));
            let (here, last) = &mut self.others[tenant as usize];
            if std::mem::replace(here, now_here) || now_here {
                *last = Some(node.now);
            }
            let alone = last.is_none_or(|last| node.now.since(last) > WINDOW);
            self.check_tenant(core, tenant, quota, alone);
        }
    }

    fn check_tenant(&self, core: &TenantGate, tenant: u32, quota: &Quota, alone: bool) {
        let parked = |key: u64| core.gate.holds(RequestKey(key));
        let (gpus, memory) = self.at_work(tenant);
        let gpus_max = quota.gpus_max.map_or(GPUS, |max| max.get().min(GPUS)) as usize;
        // The share is rounded to blocks of 2 MiB.
        let memory_max = quota.memory_share.map_or(u64::MAX, |share| share.of(32 * u64::from(GPUS)) * 2);
        assert!(gpus <= gpus_max && memory <= memory_max, "{gpus} GPUs, {memory} MiB of {quota:?}");
        let own = |it: &Request| it.function == tenant;
        let Some((_, first)) = self.requests.iter().find(|(key, it)| own(it) && parked(**key)) else {
            return;
        };
        // The tenant's oldest parked request must have a reason to be parked.
        let inside: Vec<_> =
            self.requests.iter().filter(|(key, it)| own(it) && !parked(**key)).map(|(_, it)| it).collect();
        let copies = |model| inside.iter().filter(|it| it.model == model).count().min(GPUS as usize) as u64;
        let taken: u64 = (0..3).map(|model| copies(model) * mib(model)).sum();
        let more = if copies(first.model) < u64::from(GPUS) { mib(first.model) } else { 0 };
        let at_cap = inside.len() >= gpus_max || taken + more > memory_max;
        let yields = quota.gpu_share.is_some() && !alone;
        // A tenant that is alone gets every GPU that is up.
        let full = quota.gpu_share.is_some() && inside.len() >= self.up.len();
        assert!(at_cap || yields || full, "{first:?} of {quota:?} is parked");
        let idle = self.up.iter().any(|gpu| self.requests.values().all(|it| it.on != Some(*gpu)));
        let others_wait_inside =
            self.requests.iter().any(|(key, it)| it.on.is_none() && !parked(*key) && it.function < 2);
        assert!(at_cap || yields || !idle || others_wait_inside, "a GPU idles while {first:?} is parked");
    }
}

proptest! {
    #[test]
    fn caps_hold_and_no_request_is_lost_or_parked_needlessly(
        policy in prop::sample::select(POLICIES.map(|(_, policy)| policy).to_vec()),
        caps in [caps(), caps()],
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut node = Node::new(policy, GPUS);
        node.cap(A, caps[0]);
        node.cap(B, caps[1]);
        let mut world = World { up: (0..GPUS).collect(), ..World::default() };
        let mut next_key = 0;
        for step in steps {
            node.pass_ms(1);
            let event = match step {
                Step::Enqueue { function, model } => {
                    next_key += 1;
                    world.requests.insert(next_key, Request { function, model, on: None });
                    world.take(&node.enqueue(next_key, function, model));
                    world.check(&node, &caps);
                    continue;
                }
                Step::Withdraw(number) => {
                    let waiting: Vec<_> =
                        world.requests.iter().filter(|(_, it)| it.on.is_none()).map(|(&key, _)| key).collect();
                    let Some(&key) = waiting.get(number % waiting.len().max(1)) else { continue };
                    world.requests.remove(&key);
                    dispatch::Event::Withdraw { key: RequestKey(key) }
                }
                Step::End(number) => {
                    let Some((key, gpu)) = world.pick(number) else { continue };
                    world.requests.remove(&key);
                    let ran = Some(Duration::from_micros(1 << (number % 15)));
                    dispatch::Event::RequestEnded { gpu: GpuIndex(gpu), key: RequestKey(key), ran }
                }
                Step::GiveBack(number) => {
                    let Some((key, gpu)) = world.pick(number) else { continue };
                    world.requests.get_mut(&key).unwrap().on = None;
                    let why = ReturnReason::Failed(AttemptProgress::Preparing);
                    dispatch::Event::RequestReturned { gpu: GpuIndex(gpu), key: RequestKey(key), why }
                }
                Step::Down(gpu) => {
                    world.up.remove(&gpu);
                    let mut lost = Vec::new();
                    for (&key, request) in world.requests.iter_mut().filter(|(_, it)| it.on == Some(gpu)) {
                        request.on = None;
                        lost.push((RequestKey(key), AttemptProgress::Begun));
                    }
                    dispatch::Event::Down { gpu: GpuIndex(gpu), lost }
                }
                Step::Up(gpu) => {
                    if !world.up.insert(gpu) {
                        continue;
                    }
                    dispatch::Event::Up { gpu: GpuIndex(gpu), incarnation: Incarnation(1) }
                }
                Step::Pass(ms) => {
                    node.pass_ms(u64::from(ms));
                    dispatch::Event::Tick
                }
            };
            world.take(&node.tell(event));
            world.check(&node, &caps);
        }
        // All requests are answered once every GPU is up and no more events interfere.
        for gpu in 0..GPUS {
            if world.up.insert(gpu) {
                let up = dispatch::Event::Up { gpu: GpuIndex(gpu), incarnation: Incarnation(1) };
                world.take(&node.tell(up));
            }
        }
        while !world.requests.is_empty() {
            let actions = match world.pick(0) {
                Some((key, gpu)) => {
                    world.requests.remove(&key);
                    node.pass_ms(1);
                    node.ended(gpu, key)
                }
                // The tenants used up their GPU shares.
                None => {
                    let Some(at) = node.core.next_wake() else { break };
                    node.now = node.now.max(at);
                    node.tell(dispatch::Event::Tick)
                }
            };
            world.take(&actions);
            world.check(&node, &caps);
        }
        prop_assert_eq!((world.requests.len(), node.core.queued(), node.core.dispatch().in_flight()), (0, 0, 0));
    }
}
