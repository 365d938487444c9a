//! D05 in the twin: a lone swap on DGX-V100, with the real actors and fabric over modelled links.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use millrace_experiments::hostlinks::{lone, uplink_loads};
use millrace_policy::paths::HostLinks;
use millrace_sim::{Outcome, run};

/// 6 GB at 12 GB/s.
const BY_ONE_LINK: Duration = Duration::from_millis(500);

fn swap(host_links: HostLinks) -> Outcome {
    run(&lone(host_links).unwrap()).unwrap()
}

#[test]
fn a_lone_swap_is_about_as_many_times_as_fast_as_it_has_links() {
    let (own, all) = (swap(HostLinks::Own), swap(HostLinks::All));
    let took = |outcome: &Outcome| outcome.records[0].latency();
    assert!(own.records[0].answered() && all.records[0].answered());
    assert!(took(&own) >= BY_ONE_LINK && took(&own) < BY_ONE_LINK + Duration::from_millis(5));
    // All four links at once at best; the end of a forwarded batch has to be heard of before the next.
    let all_took = took(&all);
    assert!(all_took >= BY_ONE_LINK / 4 && all_took < BY_ONE_LINK * 2 / 5, "{all_took:?}");
    let loads = uplink_loads(&own).unwrap();
    assert_eq!(loads.iter().filter(|load| **load > 0.0).count(), 1, "{loads:?}");
    let loads = uplink_loads(&all).unwrap();
    let whole: f64 = loads.iter().sum();
    assert!(loads.len() == 4 && loads.iter().all(|load| load / whole > 1.0 / 6.0), "{loads:?}");
}

#[test]
fn it_is_the_same_run_every_time() {
    for host_links in [HostLinks::Own, HostLinks::All] {
        assert_eq!(swap(host_links).events(), swap(host_links).events());
    }
    assert_ne!(swap(HostLinks::Own).events(), swap(HostLinks::All).events());
}
