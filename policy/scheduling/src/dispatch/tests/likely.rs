//! Prewarming of models that a workflow will probably request (D29).

use super::*;

fn likely(node: &mut Node, model: ModelId, after: Option<ModelId>) -> Vec<Action> {
    node.step(Event::PrewarmHint { model, after })
}

fn prewarm(index: u32, model: ModelId) -> Action {
    Action::Prewarm { gpu: gpu(index), model }
}

fn loaded(node: &mut Node, index: u32, model: ModelId) -> Vec<Action> {
    node.step(Event::ModelLoaded { gpu: gpu(index), model, from: None })
}

fn counts(node: &Node) -> (u64, u64, u64) {
    let PrewarmCounts { brought, there, busy } = node.dispatch.stats().prewarms;
    (brought, there, busy)
}

#[test]
fn the_next_model_is_prewarmed_beside_the_running_step_after_its_load() {
    let mut node = node(&[64]);
    node.enqueue(1, A);
    assert_eq!(likely(&mut node, B, Some(A)), [], "A is in transit");
    assert_eq!(loaded(&mut node, 0, A), [prewarm(0, B)]);
    assert_eq!(node.ended(0, 1, 5), []);
    assert_eq!(node.enqueue(2, B), [assign(0, 2, B)]);
    assert_eq!((counts(&node), node.dispatch.stats().hits), ((1, 0, 0), 1));
}

#[test]
fn a_model_is_prewarmed_on_an_idle_gpu_while_the_other_loads() {
    let mut node = node(&[64, 64, 64]);
    node.enqueue(1, A);
    assert_eq!(likely(&mut node, B, Some(A)), [prewarm(1, B)]);
    assert_eq!(likely(&mut node, B, Some(A)), [], "B is already loading");
    // The step before ran outside the GPUs.
    assert_eq!(likely(&mut node, LARGE, None), [prewarm(2, LARGE)]);
    assert_eq!(counts(&node), (2, 1, 0));
}

#[test]
fn an_aborted_load_neither_counts_as_resident_nor_blocks_prewarming() {
    let mut node = node(&[64]);
    node.enqueue(1, A);
    node.enqueue(2, LARGE);
    loaded(&mut node, 0, A);
    assert_eq!(likely(&mut node, B, Some(A)), [], "LARGE is in transit, and a request waits behind A");
    // The client of request 2 left, and the GPU dropped the weights that had arrived.
    node.step(Event::Withdraw { key: RequestKey(2) });
    node.step(Event::ModelsEvicted { gpu: gpu(0), models: vec![LARGE] });
    assert_eq!(
        node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(2), ran: None }),
        [prewarm(0, B)]
    );
    loaded(&mut node, 0, B);
    assert_eq!(likely(&mut node, LARGE, Some(A)), [prewarm(0, LARGE)]);
}

#[test]
fn no_model_is_prewarmed_while_requests_wait_or_need_the_memory() {
    let mut node = node(&[64]);
    node.enqueue(1, LARGE);
    loaded(&mut node, 0, LARGE);
    node.step(Event::Install { model: HUGE, memory: Bytes::mib(24), weights: Bytes::mib(24) });
    assert_eq!(likely(&mut node, HUGE, Some(LARGE)), [], "48 of 64 MiB are in use");
    assert_eq!(likely(&mut node, B, None), [], "no GPU is idle");
    assert_eq!(counts(&node), (0, 0, 0), "both hints wait");
    node.enqueue(2, LARGE);
    node.enqueue(3, LARGE);
    assert_eq!((node.dispatch.queued(), counts(&node)), (1, (0, 0, 2)), "a waiting request drops the hints");
    node.step(Event::Remove { model: A });
    assert_eq!(likely(&mut node, A, None), [], "A is not installed");
    assert_eq!(counts(&node), (0, 0, 2));
}

#[test]
fn expired_or_overtaken_hints_are_dropped() {
    let mut node = node(&[64]);
    node.enqueue(1, A);
    loaded(&mut node, 0, A);
    likely(&mut node, B, None);
    likely(&mut node, LARGE, None);
    node.enqueue(2, LARGE);
    node.now = node.now + LIKELY_FOR;
    assert_eq!(node.step(Event::Tick), []);
    assert_eq!(counts(&node), (0, 1, 1));
    assert_eq!(node.dispatch.likely.len(), 0);
}

#[test]
fn waiting_hints_are_bounded_and_early_binding_follows_none() {
    let mut full = node(&[64]);
    full.enqueue(1, A);
    for model in (10..).map(ModelId).take(LIKELY_MAX + 1) {
        full.step(Event::Install { model, memory: Bytes::mib(1), weights: Bytes::mib(1) });
        likely(&mut full, model, None);
    }
    assert_eq!((full.dispatch.likely.len(), counts(&full)), (LIKELY_MAX, (0, 0, 1)));
    let mut bound = node_with("nonswap".parse().unwrap(), &[64, 64]);
    assert_eq!(likely(&mut bound, A, None), []);
    assert_eq!(counts(&bound), (0, 0, 1));
}
