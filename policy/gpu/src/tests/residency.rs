//! Tests of models that stay on the GPU, and of models that are dropped although no room is needed.

use millrace_types::ResidencyOptions;

use super::*;

const AFTER: Duration = Duration::from_nanos(500);

impl Bench {
    fn residency(&mut self, model: ModelId, residency: ResidencyOptions) {
        assert_eq!(self.step(Event::Residency { model, residency }), []);
    }

    /// Returns a bench on which each of the models has run, in this order.
    fn ran(models: &[ModelId]) -> Self {
        let mut bench = bench();
        for (place, &model) in (1..).zip(models) {
            bench.now = bench.now + Duration::from_nanos(10);
            bench.assign(place, model);
            bench.step(Event::ProgramLoaded { model });
            bench.arrive(model, place, place);
            bench.run_done(place, 5);
        }
        bench
    }
}

#[test]
fn pinned_and_kept_copies_are_evicted_last() {
    let pin = ResidencyOptions { pin: true, ..ResidencyOptions::default() };
    let ran = |kept| {
        let mut bench = Bench::ran(&[A, B, C]);
        if kept {
            bench.step(Event::Keep { model: A, kept: true });
        } else {
            bench.residency(A, pin);
        }
        bench
    };
    for kept in [false, true] {
        let mut bench = ran(kept);
        let model = ModelId(9);
        bench.step(Event::Install { model, memory: Bytes::mib(20), weights: Bytes::mib(20) });
        let asked = bench.assign(4, model);
        assert_eq!(asked[..2], [unmap(B, 2), evicted(&[B])], "A was used longest ago");
        let asked = ran(kept).assign(4, LARGE);
        assert!(asked.contains(&unmap(A, 1)), "{asked:?}");
    }
}

#[test]
fn a_copy_unused_for_evict_after_is_dropped_unless_kept() {
    let mut bench = Bench::ran(&[A, B, C]);
    let after = |after| ResidencyOptions { evict_after: Some(after), ..ResidencyOptions::default() };
    bench.residency(A, after(AFTER));
    bench.residency(B, after(AFTER));
    bench.step(Event::Keep { model: B, kept: true });
    let used = bench.now;
    bench.now = bench.gpu.next_wake().unwrap();
    assert_eq!(bench.step(Event::Tick), [unmap(A, 1), evicted(&[A])]);
    assert!(bench.now <= used + AFTER);
    assert_eq!(bench.gpu.totals().evictions, 1);
    bench.step(Event::Keep { model: B, kept: false });
    bench.now = bench.gpu.next_wake().unwrap();
    assert_eq!(bench.step(Event::Tick), [unmap(B, 2), evicted(&[B])]);
    assert_eq!(bench.gpu.next_wake(), None, "C has no limit");
}

#[test]
fn a_copy_in_use_is_not_too_old() {
    let mut bench = Bench::running_a();
    bench.residency(A, ResidencyOptions { evict_after: Some(AFTER), ..ResidencyOptions::default() });
    for _ in 0..3 {
        bench.now = bench.gpu.next_wake().unwrap();
        assert_eq!(bench.step(Event::Tick), []);
    }
    bench.run_done(1, 5);
    bench.now = bench.now + AFTER;
    assert_eq!(bench.step(Event::Tick), [unmap(A, 1), evicted(&[A])]);
    // A reloaded copy has a limit again.
    bench.assign(2, A);
    assert_eq!(bench.gpu.next_wake(), Some(bench.now + AFTER));
}
