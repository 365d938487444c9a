//! Recovery of the models of a lost GPU (T16).

use super::*;
use crate::dispatch::cost::SwapSource;

const C: ModelId = ModelId(4);

fn prefetch(index: u32, model: ModelId) -> Action {
    Action::Prefetch { gpu: gpu(index), model }
}

/// Returns a node with three busy GPUs, and requests for A, B and C on GPU 0 or waiting.
fn busy() -> Node {
    let mut node = node_with(PolicyConfig::Lb, &[64, 64, 64]);
    node.step(Event::Install { model: C, memory: Bytes::mib(20), weights: Bytes::mib(20) });
    for (index, model) in (0..).zip([A, LARGE, LARGE]) {
        assert_eq!(node.enqueue(u64::from(index), model), [assign(index, u64::from(index), model)]);
    }
    for (key, model) in [(3, B), (4, C), (5, A)] {
        assert_eq!(node.enqueue(key, model), []);
    }
    node
}

#[test]
fn models_of_waiting_requests_load_at_once_onto_gpus_with_most_free_memory() {
    let mut node = busy();
    // Beside LARGE each GPU has 16 MiB, too little for C.
    assert_eq!(node.down(0, &[(0, AttemptProgress::Begun)]), [prefetch(1, A), prefetch(2, B)]);
    assert_eq!(node.ended(2, 2, 5), [again(2, 0, A, 2)], "lb goes by age alone");
    assert_eq!(node.ended(1, 1, 5), [assign(1, 3, B)]);
}

#[test]
fn a_model_with_another_holder_or_without_requests_is_not_reloaded() {
    let mut node = node_with(PolicyConfig::Lb, &[64, 64]);
    node.enqueue(1, A);
    node.enqueue(2, A);
    node.enqueue(3, A);
    node.ended(0, 1, 5);
    node.ended(1, 2, 5);
    node.ended(0, 3, 5);
    assert_eq!(node.down(0, &[]), [], "no request waits");
    let mut node = busy();
    for key in [3, 4, 5] {
        node.step(Event::Withdraw { key: RequestKey(key) });
    }
    node.down(1, &[(1, AttemptProgress::Waiting)]);
    assert_eq!(node.down(0, &[(0, AttemptProgress::Waiting)]), [prefetch(2, A)], "GPU 2 holds LARGE");
}

#[test]
fn a_model_evicted_after_recovery_loads_elsewhere_at_the_next_loss() {
    let mut node = busy();
    node.down(0, &[(0, AttemptProgress::Waiting)]);
    node.step(Event::ModelsEvicted { gpu: gpu(1), models: vec![A] });
    assert!(node.dispatch.models.get(node.dispatch.models.slot(A).unwrap()).holders.is_empty());
    assert_eq!(node.down(1, &[(1, AttemptProgress::Waiting)]), [prefetch(2, A)], "beside LARGE and B");
}

#[test]
fn a_recovered_model_counts_as_resident_only_after_its_arrival() {
    let policy = PolicyConfig::Torpor(TorporConfig::default());
    let gpus = vec![GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(1)); 3];
    let peers = [(0, 2), (1, 2)].map(|(a, b)| PeerLink { a: gpu(a), b: gpu(b), rate: BytesPerSec::gb(4) });
    let config = Config { peers: peers.to_vec(), ..Config::new(gpus, 9).with_policy(policy, 1) };
    let swap = Duration::from_nanos(8_388_608);
    // GPUs 0 and 1 are busy, and GPU 2 is down. A waits, and GPU 0 is lost: its model and A load
    // onto GPU 1.
    let brought = || {
        let mut node = node_of(&config);
        node.down(2, &[]);
        node.enqueue(1, LARGE);
        node.enqueue(2, B);
        assert_eq!(node.enqueue(3, A), []);
        assert_eq!(node.down(0, &[(1, AttemptProgress::Waiting)]), [prefetch(1, A), prefetch(1, LARGE)]);
        node
    };
    let up = |index| Event::Up { gpu: gpu(index), incarnation: Incarnation(1) };

    let mut node = brought();
    assert_eq!(node.step(up(2))[..1], [assign(2, 1, LARGE)]);
    assert_eq!(node.ended(2, 1, 5), [assign(2, 3, A)], "from the host: GPU 1 has no complete copy yet");
    let mut node = brought();
    node.step(Event::ModelLoaded { gpu: gpu(1), model: A, from: None });
    assert_eq!(node.step(up(2))[..1], [assign(2, 1, LARGE)]);
    assert_eq!(node.ended(2, 1, 5), [assign_from(1, 2, 3, A)]);

    for arrived in [false, true] {
        let mut node = brought();
        if arrived {
            node.step(Event::ModelLoaded { gpu: gpu(1), model: A, from: None });
        }
        // The next request in the queue is for LARGE, then one for A.
        assert_eq!(node.ended(1, 2, 5), [assign(1, 1, LARGE)]);
        assert_eq!(node.ended(1, 1, 5), [assign(1, 3, A)]);
        let held = node.seat(1).running.unwrap();
        assert_eq!(held.swap, if arrived { Duration::ZERO } else { swap });
        node.now = node.now + Duration::from_millis(6);
        node.ended(1, 3, 5);
        let slot = node.dispatch.models.slot(A).unwrap();
        let learned =
            node.dispatch.fleet.get(gpu(1)).swap_time(&node.dispatch.models, slot, SwapSource::Host);
        assert_eq!(learned, swap, "part of A arrived before the turn");
    }
}
