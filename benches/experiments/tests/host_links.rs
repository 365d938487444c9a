//! Copies over neighbours' links (D05) in the simulator: a lone swap on DGX-V100, with the real actors and
//! fabric over modelled links.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use millrace_experiments::hostlinks::{lone, uplink_loads};
use millrace_sim::{SimulationOutcome, run};
use millrace_transfers::paths::HostLinks;

/// The time of 6 GB at 12 GB/s.
const BY_ONE_LINK: Duration = Duration::from_millis(500);

fn swap(host_links: HostLinks) -> SimulationOutcome {
    run(&lone(host_links).unwrap()).unwrap()
}

#[test]
fn a_lone_swap_over_four_links_takes_a_quarter_to_two_fifths_of_the_time() {
    let own = swap(HostLinks::Own);
    let all = swap(HostLinks::All);
    let took = |outcome: &SimulationOutcome| outcome.records[0].latency();
    assert!(own.records[0].answered() && all.records[0].answered());
    assert!(took(&own) >= BY_ONE_LINK && took(&own) < BY_ONE_LINK + Duration::from_millis(5));
    // Four links need at least a quarter of the time. A forwarded batch begins only after the report of the
    // last.
    let all_took = took(&all);
    assert!(all_took >= BY_ONE_LINK / 4 && all_took < BY_ONE_LINK * 2 / 5, "{all_took:?}");
    let loads = uplink_loads(&own).unwrap();
    assert_eq!(loads.iter().filter(|load| **load > 0.0).count(), 1, "{loads:?}");
    let loads = uplink_loads(&all).unwrap();
    let whole: f64 = loads.iter().sum();
    assert!(loads.len() == 4 && loads.iter().all(|load| load / whole > 1.0 / 6.0), "{loads:?}");
}

#[test]
fn a_lone_swap_is_deterministic() {
    for host_links in [HostLinks::Own, HostLinks::All] {
        assert_eq!(swap(host_links).events(), swap(host_links).events());
    }
    assert_ne!(swap(HostLinks::Own).events(), swap(HostLinks::All).events());
}
