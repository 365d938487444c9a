//! Learning of the cost model from GPU events, and its prediction errors (L15, L21).

use super::*;
use crate::dispatch::PredictionError;
use crate::dispatch::cost::SwapSource;

/// Returns a node with two GPUs of kind 0 under one switch, and a third GPU of kind 1.
fn two_kinds() -> Node {
    let of = |kind| GpuConfig { kind, ..GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(1)) };
    let gpus = vec![of(0), of(0), of(1)];
    let switches = vec![vec![gpu(0), gpu(1)]];
    node_of(&Config { switches, ..Config::new(gpus, 100).with_policy(PolicyConfig::Lb, 1) })
}

impl Node {
    fn swap_ms(&self, index: u32, source: SwapSource) -> u128 {
        let slot = self.dispatch.models.slot(A).unwrap();
        self.dispatch.fleet.get(gpu(index)).swap_time(&self.dispatch.models, slot, source).as_millis()
    }

    /// Lets a GPU run A for 5 ms in a turn of `turn_ms`.
    fn turn(&mut self, index: u32, key: u64, turn_ms: u64) {
        self.now = self.now + Duration::from_millis(turn_ms);
        self.ended(index, key, 5);
    }
}

#[test]
fn swap_cost_is_turn_time_minus_run_time_per_kind_of_gpu() {
    let mut node = two_kinds();
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.swap_ms(0, SwapSource::Host), 8, "8 MiB at 1 GB/s");
    node.turn(0, 1, 7);
    assert_eq!(node.swap_ms(0, SwapSource::Host), 2, "the run hid the rest");
    assert_eq!(node.swap_ms(1, SwapSource::Host), 2, "the same kind");
    assert_eq!(node.swap_ms(2, SwapSource::Host), 8, "another kind");
    assert_eq!(node.swap_ms(0, SwapSource::SharedHost), 4, "an estimate");
}

#[test]
fn shared_loads_are_learned_separately_and_disturbed_loads_not_at_all() {
    let mut node = two_kinds();
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, A), [assign(1, 2, A)]);
    node.turn(0, 1, 17);
    assert_eq!(node.swap_ms(0, SwapSource::Host), 8, "GPU 1 began to load beside it");
    node.turn(1, 2, 4);
    assert_eq!(node.swap_ms(0, SwapSource::SharedHost), 16);
}

#[test]
fn prediction_errors_are_reported_by_kind() {
    let mut node = two_kinds();
    node.enqueue(1, A);
    node.turn(0, 1, 13);
    assert_eq!(node.dispatch.stats().errors, [], "no prediction before the first run");
    for (key, index) in [(2, 1), (3, 2), (4, 0)] {
        assert_eq!(node.enqueue(key, A), [assign(index, key, A)]);
        node.turn(index, key, 10);
    }
    // The prediction for GPU 1 was a load of 8 ms and a run of 5 ms. For GPU 2's kind no run time
    // was known.
    let error = |turn, thousandths| PredictionError { kind: 0, turn, predictions: 1, thousandths };
    assert_eq!(node.dispatch.stats().errors, [error(TurnKind::Run, 500), error(TurnKind::Load, 300)]);
}

#[test]
fn transfer_time_is_learned_from_arrivals() {
    let mut node = two_kinds();
    node.enqueue(1, A);
    node.now = node.now + Duration::from_millis(6);
    node.step(Event::ModelLoaded { gpu: gpu(0), model: A, from: None });
    node.turn(0, 1, 1);
    let slot = node.dispatch.models.slot(A).unwrap();
    let transfer = node.dispatch.fleet.get(gpu(1)).transfer_time(&node.dispatch.models, slot);
    assert_eq!((transfer, node.swap_ms(1, SwapSource::Host)), (Duration::from_millis(6), 2));
}

#[test]
fn a_peer_copy_that_fell_back_to_the_host_is_no_sample() {
    let rate = BytesPerSec::gb(4);
    let learned = |arrives: Option<Option<GpuIndex>>| {
        let policy = PolicyConfig::Torpor(TorporConfig::default());
        let gpus = vec![GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(1)); 2];
        let peers = vec![PeerLink { a: gpu(0), b: gpu(1), rate }];
        let mut node = node_of(&Config { peers, ..Config::new(gpus, 9).with_policy(policy, 1) });
        assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
        node.step(Event::ModelLoaded { gpu: gpu(0), model: A, from: None });
        assert_eq!(node.enqueue(2, A), [assign_from(0, 1, 2, A)]);
        if let Some(from) = arrives {
            node.step(Event::ModelLoaded { gpu: gpu(1), model: A, from });
        }
        node.turn(1, 2, 15);
        node.swap_ms(1, SwapSource::Peer(rate))
    };
    assert_eq!(learned(Some(Some(gpu(0)))), 9, "the turn minus its run of 5 ms, rounded");
    assert_eq!(learned(Some(None)), 2, "by the rate: some of A came from the host");
    assert_eq!(learned(None), 2, "the source is unknown");
}

#[test]
fn a_model_that_arrives_during_the_run_before_adds_no_swap_time() {
    let mut node = node(&[64]);
    for (key, model) in [(1, A), (2, B)] {
        node.enqueue(key, model);
        node.ended(0, key, 5);
    }
    node.step(Event::ModelsEvicted { gpu: gpu(0), models: vec![B] });
    assert_eq!(node.enqueue(3, A), [assign(0, 3, A)]);
    assert_eq!(
        node.enqueue(4, B),
        [assign(0, 4, B)],
        "behind the running request, and B is loaded meanwhile"
    );
    let backlog = |node: &Node| {
        let fleet = &node.dispatch.fleet;
        fleet.backlog(&node.dispatch.models, node.now, SeatIndex(0)).unwrap()
    };
    let before = backlog(&node);
    let swap = node.seat(0).ahead[0].swap;
    assert!(swap > Duration::ZERO);
    node.step(Event::ModelLoaded { gpu: gpu(0), model: B, from: None });
    assert_eq!(backlog(&node), before - swap);
}
