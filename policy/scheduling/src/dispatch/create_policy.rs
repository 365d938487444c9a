//! Creates the policy that the configuration names.

use super::config::{Config, PolicyConfig};
use super::fleet::IdleOrder;
use super::policy::DispatchPolicy;
use super::priority::Prioritised;
use super::{arrival, early_binding, lalb, torpor, unified};

/// Creates the configured policy. Also returns the policy's order of the idle GPUs.
pub(super) fn create_policy(config: &Config, ranks: usize) -> (Box<dyn DispatchPolicy>, IdleOrder) {
    let order = match config.policy {
        PolicyConfig::Fifo | PolicyConfig::Bound(_) => IdleOrder::Emptiest,
        PolicyConfig::Lb => IdleOrder::Longest,
        PolicyConfig::Lalb { .. } => IdleOrder::MostUsed,
        PolicyConfig::Torpor(_) => IdleOrder::Calmest,
        PolicyConfig::Unified(_) => IdleOrder::Coldest,
    };
    if let PolicyConfig::Bound(bound) = config.policy {
        return (Box::new(early_binding::EarlyBinding::new(bound, &config.gpus)), order);
    }
    let choice = config.policy;
    let gpus = config.gpus.len();
    let seed = config.seed;
    let of_level = move || -> Box<dyn DispatchPolicy> {
        match choice {
            PolicyConfig::Fifo | PolicyConfig::Bound(_) => Box::new(arrival::Fifo::new(ranks)),
            PolicyConfig::Lb => Box::new(arrival::Lb::new(ranks)),
            PolicyConfig::Lalb { overtakes_max } => Box::new(lalb::Lalb::new(ranks, gpus, overtakes_max)),
            PolicyConfig::Torpor(config) => Box::new(torpor::Torpor::new(config, ranks, seed)),
            PolicyConfig::Unified(config) => Box::new(unified::Unified::new(config, ranks)),
        }
    };
    (Box::new(Prioritised::new(Box::new(of_level))), order)
}
