//! The rate of a transfer from each GPU to each other while nothing else moves, for estimates
//! before any transfer begins. The rates are computed once, by the rules that choose the routes of
//! running transfers.

use millrace_types::topology::Topology;
use millrace_types::{BytesPerSec, GpuIndex};

use super::config::Config;
use super::error::Error;
use super::planner::PathPlanner;
use millrace_core::ids::FlowId;

/// The NVLinks that lead from one GPU to another, directly or over other GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairRate {
    /// The source GPU.
    pub from: GpuIndex,
    /// The destination GPU.
    pub to: GpuIndex,
    /// The rate of all routes of a lone transfer together.
    pub rate: BytesPerSec,
}

/// Returns a way for each ordered pair of GPUs that routes lead between, in the order of source,
/// then destination.
///
/// # Errors
/// The errors of [`PathPlanner::new`].
pub fn pair_rates(topology: &Topology, config: Config) -> Result<Vec<PairRate>, Error> {
    let mut paths = PathPlanner::new(topology, config)?;
    let gpus = || (0..topology.gpus.len() as u32).map(GpuIndex);
    let flow = FlowId(0);
    let mut rates = Vec::new();
    for (from, to) in gpus().flat_map(|from| gpus().map(move |to| (from, to))).filter(|(from, to)| from != to)
    {
        paths.begin(flow, from, to)?;
        let routes = paths.routes(flow).into_iter().flatten();
        let rate = routes.fold(0u64, |rate, route| rate.saturating_add(route.rate.0));
        paths.end(flow);
        if rate > 0 {
            rates.push(PairRate { from, to, rate: BytesPerSec(rate) });
        }
    }
    Ok(rates)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::fixtures::{dgx_v100, machine};
    use crate::paths::Selection;

    fn found(topology: &Topology, config: Config) -> Vec<(u32, u32, u64)> {
        let rates = pair_rates(topology, config).unwrap();
        rates.into_iter().map(|it| (it.from.0, it.to.0, it.rate.0 / 1_000_000_000)).collect()
    }

    #[test]
    fn a_way_has_the_rate_of_all_routes_of_a_lone_transfer() {
        let links = machine(4, &[(0, 1, 10), (0, 2, 24), (1, 2, 48)]);
        let all = [(0, 1, 34), (0, 2, 34), (1, 0, 34), (1, 2, 58), (2, 0, 34), (2, 1, 58)];
        assert_eq!(found(&links, Config::default()), all, "no NVLink leads to GPU 3");
        let one_link = Config { hops_max: NonZeroU32::new(1), ..Config::default() };
        let direct = [(0, 1, 10), (0, 2, 24), (1, 0, 10), (1, 2, 48), (2, 0, 24), (2, 1, 48)];
        assert_eq!(found(&links, one_link), direct);
        assert_eq!(found(&links, Config { selection: Selection::Direct, ..Config::default() }), direct);
    }

    #[test]
    fn ways_lead_between_pairs_without_an_nvlink() {
        let topology = dgx_v100();
        assert_eq!(found(&topology, Config::default()).len(), 56);
        let one_link = Config { hops_max: NonZeroU32::new(1), ..Config::default() };
        assert_eq!(found(&topology, one_link).len(), 32);
    }
}
