//! Effect of a tenant's load on another tenant's latency (L20), on a plain heap of events: the
//! queue, its gate, and GPUs with fixed run times.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::*;
use crate::dispatch::POLICIES;

const GPUS: u32 = 4;
const RUN_MS: u64 = 10;
const SECONDS: u64 = 40;

/// Function of the attacking tenant.
const ATTACKER: u32 = 0;
/// Function of the victim, which has no caps.
const VICTIM: u32 = 7;

/// Returns random arrival times with a mean rate of `per_second`. The same seed gives the same
/// times.
fn arrivals(per_second: f64, seed: u64) -> Vec<u64> {
    let mut state = seed;
    let mut draw = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut at = 0.0;
    let mut times = Vec::new();
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

/// Returns the victim's latency at the 99th percentile, in microseconds.
fn p99_us(policy: PolicyConfig, caps: Option<Quota>, attacks_per_second: f64) -> u64 {
    let latencies = latencies_us(policy, caps, attacks_per_second, 30.0);
    latencies[latencies.len() * 99 / 100]
}

/// Returns the victim's latencies in microseconds, ascending.
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
    let mut events = BinaryHeap::new();
    let mut begun = BTreeMap::new();
    for ((at, function), key) in both.into_iter().zip(1..) {
        events.push(Reverse((at, What::Arrives { key, function })));
        if function == VICTIM {
            begun.insert(key, at);
        }
    }
    // End of each GPU's assigned runs. These GPUs ignore recalls.
    let mut free = [0; GPUS as usize];
    let mut latencies = Vec::new();
    let mut wakes = None;
    while let Some(Reverse((at, what))) = events.pop() {
        node.now = Timestamp(MS + at);
        let actions = match what {
            What::Wakes => node.tell(dispatch::Event::Tick),
            What::Arrives { key, function } => node.enqueue(key, function, u32::from(function == VICTIM)),
            What::Ends { gpu, key } => {
                latencies.extend(begun.remove(&key).map(|begun| (at - begun) / 1_000));
                let ran = Some(Duration::from_millis(RUN_MS));
                node.tell(dispatch::Event::RequestEnded { gpu: GpuIndex(gpu), key: RequestKey(key), ran })
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

/// Returns the policies that bind late. Early binding refuses requests without memory, so no
/// requests wait.
fn late_binding() -> impl Iterator<Item = (&'static str, PolicyConfig)> {
    POLICIES.into_iter().filter(|(_, policy)| !policy.binds_early())
}

/// Before the attack the tenant needs a fifth of a GPU; under attack it needs two, and then ten.
#[test]
fn a_capped_tenant_at_ten_times_its_load_moves_the_p99_of_another_by_less_than_a_tenth() {
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

/// No run is preempted: a tenant that comes after a while finds every GPU busy and waits for the
/// first run that ends. Under LALB, the request may wait for one GPU alone and thus for one more
/// run.
#[test]
fn the_first_request_after_an_idle_window_waits_for_two_runs_at_most() {
    for (name, policy) in late_binding() {
        // The mean gap between requests exceeds the window.
        let under = latencies_us(policy, Some(quota(0, 0.25, 0.0)), 1_000.0, 0.05).pop();
        assert!(under.is_some_and(|us| us <= 3 * RUN_MS * 1_000), "{name}: {under:?} us");
    }
}

#[test]
fn without_caps_the_same_load_raises_the_p99_a_hundredfold() {
    let before = p99_us(PolicyConfig::Fifo, None, 20.0);
    let under = p99_us(PolicyConfig::Fifo, None, 1_000.0);
    assert!(under > 100 * before, "{before} to {under} us");
}
