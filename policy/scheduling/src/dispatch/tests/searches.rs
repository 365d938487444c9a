//! Equivalence of index lookups and full scans, on enough GPUs and models to make a difference: in
//! every state, both lead to the same decision.

use std::num::NonZeroU32;

use super::*;
use millrace_core::attempts::ReturnReason;

const GPUS: u32 = 24;
const MODELS: u32 = 12;
/// Number of models that a GPU holds before one is evicted.
const HELD: usize = 4;

/// Next event; `data` is a GPU and the MiB of inputs on it.
#[derive(Debug, Clone, Copy)]
enum Step {
    Enqueue { model: u32, data: Option<(u32, u32)> },
    End { number: usize, ran_us: u32 },
    GiveBack(usize),
    Withdraw(u64),
    Move { key: u64, data: Option<(u32, u32)> },
    Pass { us: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    // A few models get most requests, so that many GPUs hold them.
    let on = || prop::option::of((0..GPUS, 1..60u32));
    let model = || prop_oneof![0..3u32, 0..MODELS];
    prop_oneof![
        9 => (model(), on()).prop_map(|(model, data)| Step::Enqueue { model, data }),
        6 => (any::<usize>(), 1..40_000u32).prop_map(|(number, ran_us)| Step::End { number, ran_us }),
        1 => any::<usize>().prop_map(Step::GiveBack),
        1 => (0..200u64).prop_map(Step::Withdraw),
        1 => (0..200u64, on()).prop_map(|(key, data)| Step::Move { key, data }),
        3 => (0..9_000u32).prop_map(|us| Step::Pass { us }),
    ]
}

proptest! {
    #[test]
    fn index_lookups_agree_with_full_scans(
        policy in prop::sample::select(vec!["fifo", "lalb", "lalb-o3", "torpor", "unified"]),
        kinds in any::<bool>(),
        seats in prop_oneof![2 => Just(NonZeroU32::MIN), 1 => (2..=16u32).prop_map(|seats| NonZeroU32::new(seats).unwrap())],
        deadlines in any::<bool>(),
        links in prop::collection::vec((0..GPUS, 0..GPUS, 1..40u64), 0..40),
        ways in prop::collection::btree_map((0..GPUS, 0..GPUS), 1..40u64, 0..60),
        read in prop::collection::vec((0..GPUS, 1..60u64), 0..6),
        steps in prop::collection::vec(step(), 1..250),
    ) {
        let (_, policy) = POLICIES.into_iter().find(|(name, _)| *name == policy).expect("a policy of the list");
        let one = GpuConfig { seats, ..GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000)) };
        let mut gpus = vec![one; GPUS as usize];
        if kinds {
            gpus.iter_mut().step_by(2).for_each(|gpu| gpu.kind = 1);
        }
        let peer = |&(a, b, gb): &(u32, u32, u64)| PeerLink { a: gpu(a), b: gpu(b), rate: BytesPerSec::gb(gb) };
        let joined: BTreeMap<_, _> = links.iter().filter(|(a, b, _)| a < b).map(|it| ((it.0, it.1), peer(it))).collect();
        let switches = (0..GPUS / 4).map(|switch| (0..4).map(|at| gpu(4 * switch + at)).collect()).collect();
        let way = |((from, to), gb): ((u32, u32), u64)| PairRate { from: gpu(from), to: gpu(to), rate: BytesPerSec::gb(gb) };
        let ways = ways.into_iter().filter(|((from, to), _)| from != to).map(way).collect();
        let peers = joined.into_values().collect();
        let config = Config { peers, ways, switches, ..Config::new(gpus, 1 << 10) };
        let mut node = node_of(&config.with_policy(policy, 1));
        for model in (0..MODELS).map(ModelId) {
            let memory = Bytes::mib(4 + u64::from(model.0));
            node.step(Event::Install { model, memory, weights: memory });
            let objective = LatencyObjective::from_billionths(900_000_000);
            let objective = objective.map(|it| if deadlines { it.within(Duration::from_millis(40)) } else { it });
            node.step(Event::Objective { function: FunctionIndex(model.0), objective });
        }
        let slots: Vec<_> = (0..MODELS).filter_map(|model| node.dispatch.models.slot(ModelId(model))).collect();
        let mut on: Vec<(RequestKey, GpuIndex)> = Vec::new();
        let mut held = vec![Vec::<ModelId>::new(); GPUS as usize];
        let mut next = 0;
        for step in steps {
            node.now = node.now + Duration::from_micros(10);
            let event = match step {
                Step::Enqueue { model, data } => {
                    next += 1;
                    let key = RequestKey(next);
                    let attempts = AttemptRecord::new(3, Idempotence::Yes);
                    let function = FunctionIndex(model);
                    let model = ModelId(model);
                    let inputs = InputLocations::of(data.map(|(gpu, mib)| (GpuIndex(gpu), Bytes::mib(mib.into()))));
                    Event::Enqueue(QueuedRequest { key, function, model, attempts, priority: Priority::default(), inputs })
                }
                Step::End { number, ran_us } if !on.is_empty() => {
                    let (key, gpu) = on.remove(number % on.len());
                    Event::RequestEnded { gpu, key, ran: Some(Duration::from_micros(ran_us.into())) }
                }
                Step::GiveBack(number) if !on.is_empty() => {
                    let (key, gpu) = on.remove(number % on.len());
                    Event::RequestReturned { gpu, key, why: ReturnReason::Failed(AttemptProgress::Preparing) }
                }
                Step::Withdraw(key) if on.iter().all(|(other, _)| other.0 != key) => {
                    Event::Withdraw { key: RequestKey(key) }
                }
                Step::Move { key, data } => {
                    let inputs = data.map(|(gpu, mib)| (GpuIndex(gpu), Bytes::mib(mib.into())));
                    Event::InputsMoved { key: RequestKey(key), inputs: InputLocations::of(inputs) }
                }
                Step::Pass { us } => {
                    node.now = node.now + Duration::from_micros(us.into());
                    Event::Tick
                }
                _ => continue,
            };
            let mut actions = node.step(event);
            while let Some(action) = actions.pop() {
                let Action::Assign { gpu, key, model, .. } = action else { continue };
                on.push((key, gpu));
                let held = &mut held[gpu.0 as usize];
                held.retain(|&it| it != model);
                held.push(model);
                if held.len() > HELD {
                    let models = vec![held.remove(0)];
                    actions.extend(node.step(Event::ModelsEvicted { gpu, models }));
                }
            }
            let inputs = BTreeMap::new();
            let Dispatcher { fleet, models, .. } = &node.dispatch;
            node.dispatch.policy.check(&DispatchView { now: node.now, fleet, models, inputs: &inputs }, &slots);
            // Three models that many GPUs hold, and one that few hold.
            glance::check_with(&node.dispatch, node.now, &slots[..4], data(&read));
        }
    }
}
