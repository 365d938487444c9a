//! A GPU with blocks of 16 MiB, while transfers stay in chunks of 2 MiB.

use super::*;
use millrace_core::ids::{FunctionIndex, ObjectKey};
use millrace_memory::elastic::{self, Config, ConsumerDistance};
use millrace_transfers::fabric::PeerBlocks;

fn large() -> BlockSize {
    BlockSize::new(Bytes::mib(16)).unwrap()
}

/// Returns a GPU of six blocks, of which data may have two, with an executor that is up.
fn large_bench() -> Bench {
    let config = Config { cap: Bytes::mib(32), floor: Bytes::ZERO, ..Config::default() };
    let memory = MemoryMap::new(Bytes::mib(16 * 6 + 15), large());
    let gpu = GpuCore::new(GpuIndex(0), memory).with_data(Some(config));
    let mut bench = Bench { gpu, now: Timestamp(1_000), hides_tokens: false };
    bench.step(Event::Up { incarnation: FIRST });
    bench
}

impl Bench {
    /// Installs a model and assigns a request for the model. Returns the blocks that are mapped and
    /// the number of chunks that are copied.
    fn loads(&mut self, key: u64, model: ModelId, weights: Bytes) -> (Vec<BlockRun>, u32) {
        self.step(Event::Install { model, memory: weights, weights });
        let actions = self.assign(key, model);
        let mapped = actions.iter().find_map(|action| match action {
            Action::Map { blocks, .. } => Some(blocks.clone()),
            _ => None,
        });
        let copied = actions.iter().find_map(|action| match action {
            Action::Transfer { chunks, .. } => Some(chunks.iter().map(|range| range.end - range.start).sum()),
            _ => None,
        });
        (mapped.unwrap_or_default(), copied.unwrap_or_default())
    }

    /// Ends the transfer and the run of the model that was loaded as number `number`.
    fn finishes(&mut self, number: u64, model: ModelId, chunks: u32) {
        self.step(Event::Arrived { model, generation: Generation(number), chunks: 0..chunks });
        self.end_transfer(number, TransferOutcome::Complete);
        self.run_done(number, 100);
    }
}

#[test]
fn a_model_of_one_byte_more_than_a_block_has_two_blocks() {
    let mut bench = large_bench();
    assert_eq!(bench.gpu.memory().total_blocks(), 6, "the rest of 15 MiB is not given out");
    let weights = Bytes::mib(16) + Bytes(1);
    let blocks = vec![BlockRun { start: 0, len: 2 }];
    assert_eq!(bench.loads(1, A, weights), (blocks, 9));
    assert_eq!(bench.gpu.memory().used_blocks(), 2);
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 0..8 });
    assert_eq!(bench.gpu.loaded(A), Bytes::mib(16));
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 8..9 });
    assert_eq!(bench.gpu.loaded(A), weights);
}

#[test]
fn models_of_mixed_sizes_and_data_share_large_blocks() {
    let mut bench = large_bench();
    let one = |start| vec![BlockRun { start, len: 1 }];
    assert_eq!(bench.loads(1, A, Bytes(1)), (one(0), 1));
    bench.finishes(1, A, 1);
    bench.now = Timestamp(2_000);
    let three = vec![BlockRun { start: 1, len: 3 }];
    assert_eq!(bench.loads(2, B, Bytes::mib(33)), (three, 17));
    bench.finishes(2, B, 17);
    bench.now = Timestamp(3_000);
    // Blocks for runs are held and not mapped.
    bench.step(Event::Install { model: C, memory: Bytes::mib(20), weights: Bytes::mib(16) });
    let mapped =
        |action: &Action| *action == Action::Map { model: C, generation: Generation(3), blocks: one(4) };
    assert!(bench.assign(3, C).iter().any(mapped));
    bench.finishes(3, C, 8);
    assert_eq!(bench.gpu.memory().used_blocks(), 6);
    // The object needs two blocks. B's three suffice, so A stays although A was used longer ago.
    let object = ObjectKey(1);
    let consumers = vec![ConsumerDistance::Unqueued];
    let store = elastic::Event::Store { object, function: FunctionIndex(0), size: Bytes::mib(20), consumers };
    let actions = bench.step(Event::Data(store));
    assert!(actions.contains(&evicted(&[B])), "{actions:?}");
    let blocks = bench.gpu.object_blocks(object);
    assert_eq!(blocks, None, "the object is being written");
    bench.step(Event::Data(elastic::Event::Filled { object }));
    let blocks = bench.gpu.object_blocks(object).unwrap();
    assert_eq!(blocks.iter().map(|run| run.len).sum::<u32>(), 2);
    assert_eq!((bench.gpu.memory().data_blocks(), bench.gpu.memory().used_blocks()), (2, 5));
    bench.step(Event::Data(elastic::Event::Discard { object }));
    assert_eq!(bench.gpu.memory().used_blocks(), 3);
}

#[test]
fn a_peer_gets_the_blocks_of_the_weights_and_their_size() {
    let mut bench = large_bench();
    bench.step(Event::Install { model: A, memory: Bytes::mib(60), weights: Bytes::mib(18) });
    bench.assign(1, A);
    bench.finishes(1, A, 9);
    let transfer = TransferId(7);
    let blocks = vec![BlockRun { start: 0, len: 2 }];
    let peer = PeerBlocks { gpu: GpuIndex(0), incarnation: FIRST, blocks, block: large(), skip: Bytes::ZERO };
    assert_eq!(bench.step(Event::Lock { transfer, model: A }), [Action::Locked { transfer, peer }]);
}

#[test]
fn a_model_of_more_than_all_whole_blocks_is_refused() {
    let mut bench = large_bench();
    let weights = Bytes::mib(16 * 6) + Bytes(1);
    bench.step(Event::Install { model: A, memory: weights, weights });
    let actions = bench.assign(1, A);
    let failed = Action::Failed { key: RequestKey(1), reason: Reason::NoGpuMemory, may_have_executed: false };
    assert!(actions.contains(&failed), "{actions:?}");
}
