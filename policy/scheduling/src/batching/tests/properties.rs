//! Under any order of requests, ends, failures and losses, each request is on one GPU at most and
//! ends once.

use millrace_core::attempts::ReturnReason;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use millrace_types::tenancy::{Quota, ResourceShare};

use super::*;
use millrace_core::ids::TenantIndex;

#[derive(Debug, Clone, Copy)]
enum Step {
    Ask { function: u32, rows: u32 },
    Withdraw(usize),
    End(usize),
    Split(usize),
    GiveBack(usize, u8),
    Down(u32),
    Up(u32),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => (0..2u32, 1..4u32).prop_map(|(function, rows)| Step::Ask { function, rows }),
        2 => any::<usize>().prop_map(Step::Withdraw),
        6 => any::<usize>().prop_map(Step::End),
        1 => any::<usize>().prop_map(Step::Split),
        2 => (any::<usize>(), 0..3u8).prop_map(|(which, why)| Step::GiveBack(which, why)),
        1 => (0..2u32).prop_map(Step::Down),
        2 => (0..2u32).prop_map(Step::Up),
        2 => (0..10u64).prop_map(Step::Pass),
        1 => (0..3000u64).prop_map(Step::Pass),
    ]
}

/// Requests that await an answer, and the batches on each GPU.
#[derive(Default)]
struct World {
    open: BTreeSet<RequestKey>,
    on: BTreeMap<RequestKey, (GpuIndex, Vec<RequestKey>)>,
    up: BTreeSet<u32>,
}

impl World {
    fn take(
        &mut self,
        batcher: &Batcher,
        max_size: u32,
        rows: &BTreeMap<RequestKey, u32>,
        actions: &[Action],
    ) {
        for &action in actions {
            match action {
                Action::Assign { gpu, key, .. } => {
                    assert!(self.up.contains(&gpu.0), "{gpu} is down");
                    let members = batcher.members(key);
                    assert!(!members.is_empty() && members.iter().all(|member| self.open.contains(member)));
                    let total: u32 = members.iter().map(|member| rows[member]).sum();
                    assert!(members.len() == 1 || total <= max_size, "{total} rows");
                    for (other, (_, there)) in &self.on {
                        assert!(members.iter().all(|member| !there.contains(member)), "also in {other}");
                    }
                    self.on.insert(key, (gpu, members));
                }
                Action::Fail { key, .. } => assert!(self.open.remove(&key), "{key} failed after its end"),
                Action::Cancel { gpu, key } | Action::Recall { gpu, key } => {
                    assert_eq!(self.on.get(&key).map(|on| on.0), Some(gpu));
                }
                _ => {}
            }
        }
    }

    fn pick(&mut self, number: usize) -> Option<(RequestKey, GpuIndex, Vec<RequestKey>)> {
        let key = *self.on.keys().nth(number % self.on.len().max(1))?;
        let (gpu, members) = self.on.remove(&key)?;
        Some((key, gpu, members))
    }
}

proptest! {
    #[test]
    fn each_request_is_on_one_gpu_at_most_and_ends_once(
        policy in prop::sample::select(POLICIES.map(|(_, policy)| policy).to_vec()),
        max_size in 2..6u32,
        max_wait in prop::sample::select(vec![0, 1, 2, 2000u64]),
        capped in prop::option::of(100_000..900_000u32),
        steps in prop::collection::vec(step(), 1..150)
    ) {
        let mut bench = bench_with(policy, 2, max_size, max_wait);
        if let Some(ppm) = capped {
            let tenant = TenantIndex(0);
            let quota = Quota { gpu_share: ResourceShare::from_ppm(ppm).ok(), ..Quota::NONE };
            bench.tell(tenancy::Event::Quota { tenant, quota });
            bench.tell(tenancy::Event::Owner { function: FunctionIndex(0), tenant: Some(tenant) });
        }
        let mut world = World { up: (0..2).collect(), ..World::default() };
        let mut rows = BTreeMap::new();
        let mut next_key = 0;
        for step in steps {
            bench.now = bench.now + Duration::from_micros(100);
            let actions = match step {
                Step::Ask { function, rows: of } => {
                    next_key += 1;
                    world.open.insert(RequestKey(next_key));
                    rows.insert(RequestKey(next_key), of);
                    let item = BatchItem { rows: of, class: 1, inline: 1, descriptors: 0 };
                    bench.ask_for(next_key, function, item)
                }
                Step::Withdraw(number) => {
                    let Some(&key) = world.open.iter().nth(number % world.open.len().max(1)) else { continue };
                    world.open.remove(&key);
                    for (_, members) in world.on.values_mut() {
                        members.retain(|&member| member != key);
                    }
                    bench.withdraw(key.0)
                }
                Step::End(number) => {
                    let Some((key, gpu, members)) = world.pick(number) else { continue };
                    members.iter().for_each(|member| assert!(world.open.remove(member)));
                    let ran = Some(Duration::from_micros(1 << (number % 15)));
                    bench.tell(dispatch::Event::RequestEnded { gpu, key, ran })
                }
                Step::Split(number) => {
                    let Some((key, gpu, members)) = world.pick(number) else { continue };
                    if members.len() < 2 {
                        world.on.insert(key, (gpu, members));
                        continue;
                    }
                    bench.tell(Event::Split { key });
                    bench.tell(dispatch::Event::RequestEnded { gpu, key, ran: None })
                }
                Step::GiveBack(number, why) => {
                    let Some((key, gpu, _)) = world.pick(number) else { continue };
                    let why = match why {
                        0 => ReturnReason::Recalled,
                        1 => ReturnReason::Failed(AttemptProgress::Preparing),
                        _ => ReturnReason::Died(AttemptProgress::Begun),
                    };
                    bench.tell(dispatch::Event::RequestReturned { gpu, key, why })
                }
                Step::Down(index) => {
                    world.up.remove(&index);
                    let lost: Vec<_> =
                        world.on.iter().filter(|(_, on)| on.0.0 == index).map(|(&key, _)| key).collect();
                    lost.iter().for_each(|key| drop(world.on.remove(key)));
                    let lost = lost.into_iter().map(|key| (key, AttemptProgress::Begun)).collect();
                    bench.tell(dispatch::Event::Down { gpu: GpuIndex(index), lost })
                }
                Step::Up(index) if world.up.insert(index) => bench.up(index),
                Step::Up(_) => continue,
                Step::Pass(ms) => {
                    bench.now = bench.now + Duration::from_millis(ms);
                    bench.tell(dispatch::Event::Tick)
                }
            };
            world.take(&bench.batcher, max_size, &rows, &actions);
            bench.check();
            for &key in &world.open {
                prop_assert!(bench.batcher.holds(key), "{} is lost", key);
            }
            let on: usize = world.on.values().map(|(_, members)| members.len()).sum();
            prop_assert_eq!(bench.batcher.queued() + on, world.open.len());
        }
        for index in 0..2 {
            if world.up.insert(index) {
                let actions = bench.up(index);
                world.take(&bench.batcher, max_size, &rows, &actions);
            }
        }
        loop {
            let actions = match (world.pick(0), bench.batcher.next_wake()) {
                (Some((key, gpu, members)), _) => {
                    members.iter().for_each(|member| assert!(world.open.remove(member)));
                    bench.tell(dispatch::Event::RequestEnded { gpu, key, ran: Some(Duration::from_millis(1)) })
                }
                (None, Some(at)) if !world.open.is_empty() => {
                    bench.now = bench.now.max(at);
                    bench.tell(dispatch::Event::Tick)
                }
                (None, _) => break,
            };
            world.take(&bench.batcher, max_size, &rows, &actions);
        }
        prop_assert!(world.open.is_empty(), "{:?} never ran", world.open);
        let left = (bench.batcher.batches.len(), bench.batcher.batch_of.len(), bench.batcher.held.len());
        prop_assert_eq!(left, (0, 0, 0));
        prop_assert_eq!(bench.batcher.dispatch().in_flight(), 0);
        prop_assert!(bench.batcher.functions.values().all(|it| it.at_work == 0 && it.open.is_empty() && it.waiting.is_empty()));
    }
}
