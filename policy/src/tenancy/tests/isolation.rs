//! What a tenant's load does to another's latency (L20), on a bare heap of events: the queue, its
//! gate, and GPUs whose runs take as long as they take.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::*;
use crate::dispatch::POLICIES;

const GPUS: u32 = 4;
const RUN_MS: u64 = 10;
const SECONDS: u64 = 40;

/// The attacker's function, and its victim's, which has no caps.
const ATTACKER: u32 = 0;
const VICTIM: u32 = 7;

/// Arrivals at random times, as many a second on average. The same seed gives the same.
fn arrivals(per_second: f64, seed: u64) -> Vec<u64> {
    let mut state = seed;
    let mut draw = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let (mut at, mut times) = (0.0, Vec::new());
    while at < SECONDS as f64 * 1e9 {
        at += -(1.0 - draw()).ln() / per_second * 1e9;
        times.push(at as u64);
    }
    times
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Ends { gpu: u32, key: u64 },
    Arrives { key: u64, function: u32 },
    Wakes,
}

/// The victim's latency at its 99th percentile, in microseconds.
fn p99_us(policy: PolicyConfig, caps: Option<Quota>, attacks_per_second: f64) -> u64 {
    let latencies = latencies_us(policy, caps, attacks_per_second, 30.0);
    latencies[latencies.len() * 99 / 100]
}

/// The victim's latencies in microseconds, the least first.
fn latencies_us(
    policy: PolicyConfig,
    caps: Option<Quota>,
    attacks_per_second: f64,
    requests_per_second: f64,
) -> Vec<u64> {
    let mut node = Node::new(policy, GPUS);
    if let Some(caps) = caps {
        node.cap(A, caps);
    }
    let attacks = arrivals(attacks_per_second, 11).into_iter().map(|at| (at, ATTACKER));
    let requests = arrivals(requests_per_second, 5).into_iter().map(|at| (at, VICTIM));
    let mut both: Vec<_> = attacks.chain(requests).collect();
    both.sort_unstable();
    let (mut events, mut begun) = (BinaryHeap::new(), BTreeMap::new());
    for ((at, function), key) in both.into_iter().zip(1..) {
        events.push(Reverse((at, What::Arrives { key, function })));
        if function == VICTIM {
            begun.insert(key, at);
        }
    }
    // When each GPU is through with what it was given. They give nothing back that was handed ahead.
    let mut free = [0; GPUS as usize];
    let (mut latencies, mut wakes) = (Vec::new(), None);
    while let Some(Reverse((at, what))) = events.pop() {
        node.now = Timestamp(MS + at);
        let actions = match what {
            What::Wakes => node.tell(dispatch::Event::Tick),
            What::Arrives { key, function } => node.enqueue(key, function, u32::from(function == VICTIM)),
            What::Ends { gpu, key } => {
                latencies.extend(begun.remove(&key).map(|begun| (at - begun) / 1_000));
                let ran = Some(Duration::from_millis(RUN_MS));
                node.tell(dispatch::Event::Ended { gpu: GpuIndex(gpu), key: RequestKey(key), ran })
            }
        };
        wakes = wakes.filter(|&wakes| wakes > at);
        let wake = node.core.next_wake().map(|wake| wake.0 - MS).filter(|&wake| wake > at);
        if let Some(wake) = wake.filter(|&wake| wakes.is_none_or(|wakes| wake < wakes)) {
            events.push(Reverse((wake, What::Wakes)));
            wakes = Some(wake);
        }
        for (gpu, key) in given(&actions) {
            let ends = free[gpu as usize].max(at) + RUN_MS * MS;
            free[gpu as usize] = ends;
            events.push(Reverse((ends, What::Ends { gpu, key })));
        }
    }
    latencies.sort_unstable();
    latencies
}

/// The baselines that bind early refuse what has no room beside their runtimes: nobody waits there.
fn late_binding() -> impl Iterator<Item = (&'static str, PolicyConfig)> {
    POLICIES.into_iter().filter(|(_, policy)| !policy.binds_early())
}

/// Before the attack it needs a fifth of a GPU; under it, two, and then ten.
#[test]
fn a_capped_tenant_at_ten_times_its_load_moves_anothers_p99_by_less_than_a_tenth() {
    for (name, policy) in late_binding() {
        for caps in [quota(1, 0.0, 0.0), quota(1, 0.25, 0.5), quota(0, 0.0, 0.04), quota(0, 0.25, 0.0)] {
            let before = p99_us(policy, Some(caps), 20.0);
            for attacks in [200.0, 1_000.0] {
                let under = p99_us(policy, Some(caps), attacks);
                assert!(under * 10 < before * 11, "{name}, {caps:?}: {before} to {under} us at {attacks}");
            }
        }
    }
}

/// No run is taken back: whoever comes after a while finds every GPU at work, and waits for the first
/// that ends, and under LALB, which may have it wait for one GPU alone, for one more.
#[test]
fn under_a_share_of_the_time_the_first_after_a_while_waits_for_two_runs_at_most() {
    for (name, policy) in late_binding() {
        // Longer apart than the window.
        let under = latencies_us(policy, Some(quota(0, 0.25, 0.0)), 1_000.0, 0.05).pop();
        assert!(under.is_some_and(|us| us <= 3 * RUN_MS * 1_000), "{name}: {under:?} us");
    }
}

#[test]
fn without_caps_the_same_load_drowns_everybody() {
    let before = p99_us(PolicyConfig::Fifo, None, 20.0);
    let under = p99_us(PolicyConfig::Fifo, None, 1_000.0);
    assert!(under > 100 * before, "{before} to {under} us");
}
