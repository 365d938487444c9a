//! GPUs with blocks of another size, alone and beside GPUs with the default blocks.

use super::*;
use millrace_memory::BlockSize;

const SMALL: ModelId = ModelId(20);
const TWO: ModelId = ModelId(21);

fn large() -> BlockSize {
    BlockSize::new(Bytes::mib(16)).unwrap()
}

/// Returns GPUs of these sizes in MiB, with blocks of 16 MiB, and two models: one of a byte, and one
/// of a byte more than a block.
fn large_node(policy: PolicyConfig, memories_mib: &[u64]) -> Node {
    let config = |&mib: &u64| GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000));
    let gpus = memories_mib.iter().map(config).collect();
    install(node_of(&Config::new(gpus, 9).with_policy(policy, 1).with_block(large())))
}

fn install(mut node: Node) -> Node {
    for (model, memory) in [(SMALL, Bytes(1)), (TWO, Bytes::mib(16) + Bytes(1))] {
        node.step(Event::Install { model, memory, weights: memory });
    }
    node
}

#[test]
fn a_model_fits_whole_blocks_only() {
    let mut node = large_node(PolicyConfig::Fifo, &[31]);
    assert_eq!(node.enqueue(1, TWO), [fail(1, Reason::NoGpuMemory, false)], "15 MiB are no block");
    assert_eq!(node.enqueue(2, SMALL), [assign(0, 2, SMALL)]);
    let mut node = large_node(PolicyConfig::Fifo, &[32]);
    assert_eq!(node.enqueue(1, TWO), [assign(0, 1, TWO)]);
}

#[test]
fn resident_models_count_with_whole_blocks() {
    let mut node = large_node(PolicyConfig::Fifo, &[64]);
    node.enqueue(1, TWO);
    node.now = node.now + Duration::from_millis(1);
    node.enqueue(2, SMALL);
    let record = node.dispatch.fleet.get(gpu(0));
    assert_eq!((record.memory(), record.resident_size()), (Bytes::mib(64), Bytes::mib(48)));
    let slot = |model| node.dispatch.models.slot(model).unwrap();
    let victims = |memory| record.victims(memory).map(|(_, model)| model).collect::<Vec<_>>();
    assert_eq!(victims(Bytes::mib(16)), [], "a block is free");
    assert_eq!(victims(Bytes::mib(17)), [slot(TWO)]);
    assert_eq!(victims(Bytes::mib(49)), [slot(TWO), slot(SMALL)]);
}

#[test]
fn bound_functions_hold_whole_blocks_of_their_gpu() {
    let runtime = Bytes::mib(1);
    let binding = BindingLifetime::ForGood;
    let policy = PolicyConfig::Bound(BoundConfig { binding, runtime, cold_start: Duration::ZERO });
    let mut node = large_node(policy, &[64]);
    assert_eq!(node.ask(1, 1, SMALL), [assign(0, 1, SMALL)]);
    assert_eq!(node.ask(2, 2, SMALL), []);
    assert_eq!(node.ask(3, 3, SMALL), [fail(3, Reason::NoGpuMemory, false)], "each holds two blocks");
    let mut node = install(node_of(
        &Config::new(vec![GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(1))], 9).with_policy(policy, 1),
    ));
    (1..=3).for_each(|key| drop(node.ask(key, key as u32, SMALL)));
    assert_eq!(node.dispatch.in_flight(), 3, "with default blocks each holds 4 MiB");
}

#[test]
fn each_gpu_counts_in_its_own_blocks() {
    let small = GpuConfig::new(Bytes::mib(62), BytesPerSec::gb(1));
    let gpus = vec![GpuConfig { block: large(), ..small }, small];
    let policy = PolicyConfig::Bound(BoundConfig {
        binding: BindingLifetime::ForGood,
        runtime: Bytes::ZERO,
        cold_start: Duration::ZERO,
    });
    let mut node = install(node_of(&Config::new(gpus, 9).with_policy(policy, 1)));
    // GPU 0 gives out 48 MiB and GPU 1 all of its 62 MiB.
    assert_eq!(node.ask(1, 1, LARGE), [assign(1, 1, LARGE)]);
    assert_eq!(node.ask(2, 2, TWO), [assign(0, 2, TWO)]);
    assert_eq!(node.ask(3, 3, TWO), [fail(3, Reason::NoGpuMemory, false)]);
    let record = |index| node.dispatch.fleet.get(gpu(index));
    assert_eq!(record(0).resident_size(), Bytes::mib(32));
    assert_eq!(record(1).resident_size(), Bytes::mib(48));
}
