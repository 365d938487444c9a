//! Minimum warm copies.

use super::*;

fn keep(index: u32, model: ModelId, kept: bool) -> Action {
    Action::SetWarmCopy { gpu: gpu(index), model, kept }
}

fn prefetch(index: u32, model: ModelId) -> Action {
    Action::Prefetch { gpu: gpu(index), model }
}

fn evicted(index: u32, model: ModelId) -> Event {
    Event::ModelsEvicted { gpu: gpu(index), models: vec![model] }
}

#[test]
fn a_model_is_loaded_onto_the_required_number_of_idle_gpus() {
    let mut node = node(&[64, 64, 64]);
    let kept = node.step(Event::WarmCopiesRequired { model: A, copies: 2 });
    assert_eq!(kept, [prefetch(0, A), keep(0, A, true), prefetch(1, A), keep(1, A, true)]);
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)], "a hit");
    assert_eq!(node.step(Event::WarmCopiesRequired { model: A, copies: 1 }), [keep(1, A, false)]);
    assert_eq!(node.step(Event::Remove { model: A }), [keep(0, A, false)]);
    assert_eq!(node.ended(0, 1, 5), []);
    assert_eq!(node.dispatch.next_wake(), None);
}

#[test]
fn existing_copies_become_warm_and_missing_ones_load_on_idle_gpus() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    assert_eq!(node.enqueue(2, B), [assign(1, 2, B)]);
    assert_eq!(
        node.step(Event::WarmCopiesRequired { model: A, copies: 2 }),
        [keep(0, A, true)],
        "GPU 1 is busy"
    );
    assert_eq!(node.ended(1, 2, 5), [prefetch(1, A), keep(1, A, true)]);
    // More copies than GPUs.
    assert_eq!(node.step(Event::WarmCopiesRequired { model: A, copies: 9 }), []);
}

#[test]
fn warm_copies_do_not_evict_each_other() {
    let mut node = node(&[64]);
    assert_eq!(
        node.step(Event::WarmCopiesRequired { model: LARGE, copies: 1 }),
        [prefetch(0, LARGE), keep(0, LARGE, true)]
    );
    node.step(Event::Install { model: HUGE, memory: Bytes::mib(24), weights: Bytes::mib(24) });
    assert_eq!(
        node.step(Event::WarmCopiesRequired { model: HUGE, copies: 1 }),
        [],
        "warm copies hold 48 of 64 MiB"
    );
    assert_eq!(
        node.step(Event::WarmCopiesRequired { model: A, copies: 1 }),
        [prefetch(0, A), keep(0, A, true)]
    );
}

#[test]
fn an_evicted_warm_copy_is_retried_later_and_a_lost_one_at_once() {
    let mut node = node(&[64, 64]);
    assert_eq!(
        node.step(Event::WarmCopiesRequired { model: A, copies: 1 }),
        [prefetch(0, A), keep(0, A, true)]
    );
    assert_eq!(node.step(evicted(0, A)), [keep(0, A, false)]);
    let at = node.now + WARM_RETRY;
    assert_eq!(node.dispatch.next_wake(), Some(at));
    assert_eq!(node.step(Event::Tick), []);
    node.now = at;
    assert_eq!(node.step(Event::Tick), [prefetch(0, A), keep(0, A, true)]);
    assert_eq!(node.down(0, &[]), [keep(0, A, false), prefetch(1, A), keep(1, A, true)]);
    assert_eq!(node.down(1, &[]), [keep(1, A, false)]);
    let up = node.step(Event::Up { gpu: gpu(1), incarnation: Incarnation(2) });
    assert_eq!(up, [prefetch(1, A), keep(1, A, true)]);
}
