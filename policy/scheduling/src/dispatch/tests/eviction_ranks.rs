//! Eviction ranks that GPUs get for their models (T23, T24).

use super::*;
use millrace_memory::eviction::EvictionCandidate;
use millrace_memory::eviction::{CopyKind, LoadInterference};

fn two(eviction: Eviction) -> Node {
    let gpu = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    node_of(&Config::new(vec![gpu; 2], 4).with_eviction(eviction))
}

fn candidate(index: u32, model: ModelId, copy: CopyKind, weight: LoadInterference) -> Action {
    Action::SetEvictionRank { gpu: gpu(index), model, candidate: EvictionCandidate { copy, weight } }
}

#[test]
fn another_copy_becomes_the_original_after_the_first_is_evicted() {
    use CopyKind::{Original, Replica};
    let heavy = |index, copy| candidate(index, A, copy, LoadInterference::Heavy);
    let mut node = two(Eviction::Torpor);
    assert_eq!(node.enqueue(1, A), [heavy(0, Original), assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, A), [heavy(1, Replica), assign(1, 2, A)]);
    node.ended(0, 1, 3);
    assert_eq!(node.enqueue(3, A), [assign(0, 3, A)], "a hit changes no rank");
    node.ended(0, 3, 3);
    let evict = |index| Event::ModelsEvicted { gpu: gpu(index), models: vec![A] };
    assert_eq!(node.step(evict(0)), [heavy(1, Original)]);
    assert_eq!(node.enqueue(4, A), [heavy(0, Replica), assign(0, 4, A)]);
    node.ended(0, 4, 3);
    node.ended(1, 2, 3);
    assert_eq!(node.down(1, &[]), [heavy(0, Original)], "the original was lost with its GPU");
    assert_eq!(node.step(evict(0)), [], "no holder is left");
}

#[test]
fn a_models_weight_follows_its_profile() {
    let weighs = |weight| candidate(0, A, CopyKind::Original, weight);
    let mut node = two(Eviction::Torpor);
    node.enqueue(1, A);
    // 8 MiB take 8.4 ms; half the link slows a run of 3 ms more than fivefold.
    assert_eq!(node.ended(0, 1, 3), []);
    let profile = |run_ms| {
        let load = Duration::from_millis(8);
        let run = Duration::from_millis(run_ms);
        Event::ProfileLoaded(ModelProfile { model: A, kind: 0, load, swap: None, run })
    };
    assert_eq!(node.step(profile(40)), [weighs(LoadInterference::Light)]);
    assert_eq!(node.step(profile(50)), [], "the same weight");
    assert_eq!(node.step(profile(5)), [weighs(LoadInterference::Medium)]);
    assert_eq!(node.step(profile(3)), [weighs(LoadInterference::Heavy)]);
    // One run of a second may be an outlier; several runs change the profile.
    let long = |key| {
        node.enqueue(key, A);
        let ran = Some(Duration::from_secs(1));
        node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(key), ran })
    };
    let told: Vec<_> = (2..8).flat_map(long).collect();
    assert_eq!(told.last(), Some(&weighs(LoadInterference::Light)), "{told:?}");
}

#[test]
fn no_eviction_ranks_are_sent_under_lru() {
    let mut node = two(Eviction::Lru);
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, A), [assign(1, 2, A)]);
    assert_eq!(node.step(Event::ModelsEvicted { gpu: gpu(0), models: vec![A] }), []);
}
