//! Tests of the clocks against a model that looks at every millisecond.

use millrace_types::{FunctionName, TenantName};
use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;
const GPU: GpuIndex = GpuIndex(0);

fn key(name: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() }
}

fn at(ms: u64) -> Timestamp {
    Timestamp(ms * MS)
}

fn idle_ms(residence: &IdleResidenceMeter, ms: u64) -> Vec<u128> {
    residence.idle(at(ms)).map(|(_, idle)| idle.as_millis()).collect()
}

#[test]
fn a_function_is_idle_while_ready_with_no_request_on_a_gpu() {
    let mut residence = IdleResidenceMeter::default();
    let f = FunctionIndex(0);
    residence.hosted(at(5), f, &key("f"));
    assert_eq!(idle_ms(&residence, 15), [10]);
    residence.began(at(15), f, GPU, RequestKey(1));
    residence.began(at(16), f, GpuIndex(1), RequestKey(2));
    residence.ended(at(20), GPU, RequestKey(1));
    assert_eq!(idle_ms(&residence, 30), [10], "another request is still on a GPU");
    residence.ended(at(30), GpuIndex(1), RequestKey(2));
    residence.retired(at(34), f);
    assert_eq!(idle_ms(&residence, 90), [14], "a retired revision is not idle");
}

#[test]
fn two_revisions_of_a_function_have_one_clock() {
    let mut residence = IdleResidenceMeter::default();
    residence.hosted(at(0), FunctionIndex(0), &key("f"));
    residence.hosted(at(10), FunctionIndex(1), &key("f"));
    assert_eq!(idle_ms(&residence, 20), [20]);
    residence.began(at(20), FunctionIndex(0), GPU, RequestKey(1));
    assert_eq!(idle_ms(&residence, 30), [20]);
    residence.removed(at(30), FunctionIndex(0));
    residence.ended(at(31), GPU, RequestKey(1));
    assert_eq!(idle_ms(&residence, 40), [29]);
}

#[test]
fn a_function_that_returns_keeps_the_earlier_idle_time() {
    let mut residence = IdleResidenceMeter::default();
    residence.hosted(at(0), FunctionIndex(0), &key("f"));
    residence.removed(at(10), FunctionIndex(0));
    residence.hosted(at(50), FunctionIndex(1), &key("f"));
    assert_eq!(idle_ms(&residence, 55), [15]);
}

#[test]
fn a_lost_gpu_has_no_requests() {
    let mut residence = IdleResidenceMeter::default();
    residence.hosted(at(0), FunctionIndex(0), &key("f"));
    residence.began(at(0), FunctionIndex(0), GPU, RequestKey(1));
    residence.began(at(0), FunctionIndex(0), GPU, RequestKey(2));
    residence.lost(at(10), GPU);
    residence.ended(at(11), GPU, RequestKey(1));
    assert_eq!(idle_ms(&residence, 15), [5]);
}

#[derive(Debug, Clone)]
enum Step {
    Hosted(u32),
    Retired(u32),
    Removed(u32),
    Began(u32, u32, u64),
    Ended(u32, u64),
    Lost(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let revision = 0u32..4;
    let gpu = 0u32..2;
    let key = 0u64..6;
    prop_oneof![
        2 => revision.clone().prop_map(Step::Hosted),
        1 => revision.clone().prop_map(Step::Retired),
        1 => revision.clone().prop_map(Step::Removed),
        6 => (revision, gpu.clone(), key.clone()).prop_map(|(f, gpu, key)| Step::Began(f, gpu, key)),
        6 => (gpu.clone(), key).prop_map(|(gpu, key)| Step::Ended(gpu, key)),
        1 => gpu.prop_map(Step::Lost),
    ]
}

/// The state at a moment, without any clock.
#[derive(Default)]
struct Model {
    /// The revisions that were hosted and not removed, with whether they take requests.
    revisions: BTreeMap<u32, bool>,
    on_gpus: BTreeMap<(u32, u64), u32>,
    idle: BTreeMap<u32, u64>,
    on_gpu_ms: BTreeMap<u32, u64>,
    ready_ms: BTreeMap<u32, u64>,
}

/// Returns the function of a revision: revisions 0 and 2 are of one function, 1 and 3 of another.
const fn function(revision: u32) -> u32 {
    revision % 2
}

impl Model {
    fn take(&mut self, step: &Step) {
        match *step {
            Step::Hosted(revision) => {
                self.revisions.entry(revision).or_insert(true);
            }
            Step::Retired(revision) => {
                self.revisions.entry(revision).and_modify(|takes| *takes = false);
            }
            Step::Removed(revision) => {
                self.revisions.remove(&revision);
            }
            Step::Began(revision, gpu, key) => {
                if self.revisions.contains_key(&revision) && !self.on_gpus.contains_key(&(gpu, key)) {
                    self.on_gpus.insert((gpu, key), function(revision));
                }
            }
            Step::Ended(gpu, key) => {
                self.on_gpus.remove(&(gpu, key));
            }
            Step::Lost(gpu) => self.on_gpus.retain(|&(on, _), _| on != gpu),
        }
    }

    fn wait(&mut self, ms: u64) {
        for of in 0..2 {
            let ready = self.revisions.iter().any(|(&it, &takes)| function(it) == of && takes);
            let running = self.on_gpus.values().any(|&it| it == of);
            *self.idle.entry(of).or_default() += if ready && !running { ms } else { 0 };
            *self.on_gpu_ms.entry(of).or_default() += if running { ms } else { 0 };
            *self.ready_ms.entry(of).or_default() += if ready { ms } else { 0 };
        }
    }
}

proptest! {
    /// A function is idle while it is ready and not on a GPU. Idle time never decreases, and idle
    /// time plus time on GPUs never exceeds the time that passed.
    #[test]
    fn idle_time_equals_the_count_of_idle_milliseconds(
        steps in prop::collection::vec((step(), 0u64..5), 0..80),
    ) {
        let mut residence = IdleResidenceMeter::default();
        let mut model = Model::default();
        let mut now = 0;
        let mut last = BTreeMap::<FunctionKey, Duration>::new();
        for (step, ms) in &steps {
            let time = at(now);
            match *step {
                Step::Hosted(f) => residence.hosted(time, FunctionIndex(f), &key(&format!("f{}", function(f)))),
                Step::Retired(f) => residence.retired(time, FunctionIndex(f)),
                Step::Removed(f) => residence.removed(time, FunctionIndex(f)),
                Step::Began(f, gpu, key) => {
                    // A key on a GPU names a single request.
                    if !model.on_gpus.contains_key(&(gpu, key)) {
                        residence.began(time, FunctionIndex(f), GpuIndex(gpu), RequestKey(key));
                    }
                }
                Step::Ended(gpu, key) => residence.ended(time, GpuIndex(gpu), RequestKey(key)),
                Step::Lost(gpu) => residence.lost(time, GpuIndex(gpu)),
            }
            model.take(step);
            model.wait(*ms);
            now += ms;
            for (function, idle) in residence.idle(at(now)) {
                prop_assert!(last.insert(function.clone(), idle).is_none_or(|before| before <= idle));
            }
        }
        for of in 0..2 {
            let idle = model.idle.get(&of).copied().unwrap_or(0);
            let running = model.on_gpu_ms.get(&of).copied().unwrap_or(0);
            let told = last.get(&key(&format!("f{of}"))).copied().unwrap_or_default();
            prop_assert_eq!(told, Duration::from_millis(idle));
            prop_assert!(idle + running <= now && idle <= model.ready_ms.get(&of).copied().unwrap_or(0));
        }
    }
}
