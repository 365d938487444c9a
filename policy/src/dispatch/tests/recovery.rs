//! Where models go whose GPU is lost (T16).

use super::*;

const C: ModelId = ModelId(4);

fn prefetch(index: u32, model: ModelId) -> Action {
    Action::Prefetch { gpu: gpu(index), model }
}

/// Three GPUs at work, and requests of A, B and C on GPU 0 or waiting.
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
fn models_that_requests_wait_for_go_to_the_others_with_most_room_at_once() {
    let mut node = busy();
    // Beside LARGE there are 16 MiB on each: too little for C.
    assert_eq!(node.down(0, &[(0, Progress::Begun)]), [prefetch(1, A), prefetch(2, B)]);
    assert_eq!(node.ended(2, 2, 5), [again(2, 0, A, 2)], "lb goes by age alone");
    assert_eq!(node.ended(1, 1, 5), [assign(1, 3, B)]);
}

#[test]
fn a_model_that_another_gpu_holds_or_that_nobody_waits_for_stays_where_it_is() {
    let mut node = node_with(PolicyConfig::Lb, &[64, 64]);
    node.enqueue(1, A);
    node.enqueue(2, A);
    node.enqueue(3, A);
    node.ended(0, 1, 5);
    node.ended(1, 2, 5);
    node.ended(0, 3, 5);
    assert_eq!(node.down(0, &[]), [], "nobody waits");
    let mut node = busy();
    for key in [3, 4, 5] {
        node.step(Event::Withdraw { key: RequestKey(key) });
    }
    node.down(1, &[(1, Progress::Waiting)]);
    assert_eq!(node.down(0, &[(0, Progress::Waiting)]), [prefetch(2, A)], "2 has LARGE");
}

#[test]
fn a_model_that_a_gpu_could_not_bring_goes_to_another_when_the_next_is_lost() {
    let mut node = busy();
    node.down(0, &[(0, Progress::Waiting)]);
    node.step(Event::Evicted { gpu: gpu(1), models: vec![A] });
    assert_eq!(node.dispatch.models.get(node.dispatch.models.slot(A).unwrap()).holders, BTreeSet::new());
    assert_eq!(node.down(1, &[(1, Progress::Waiting)]), [prefetch(2, A)], "beside LARGE and B");
}
