//! The check that the cluster is healthy again: every function is ready on its nodes, every
//! controller has the same state, and every gateway serves.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_client::messages;

use crate::load::POKED;
use crate::report::PromiseCheck;
use crate::timeline::seconds;

/// Factor by which a run may exceed a stated time before the check fails. This machine is shared,
/// and the binary may be a debug build. The report contains the measured time.
pub const ALLOWANCE: u32 = 5;
pub const NAME: &str = "the cluster is healthy again";

/// Judges the time until a cluster was healthy again.
#[must_use]
pub fn check(found: &SettledCluster, within: Duration) -> PromiseCheck {
    let &SettledCluster { controllers, functions, workers, took } = found;
    let limit = within * ALLOWANCE;
    let detail = format!(
        "{}; workers up: {workers}; every function is ready; settled in {}, stated {}, fails beyond {}",
        agreement(controllers, functions),
        seconds(took),
        seconds(within),
        seconds(limit)
    );
    let late = (took > limit).then(|| format!("the cluster was healthy after {}", seconds(took)));
    PromiseCheck::of(NAME, detail, late.into_iter().collect())
}

/// A healthy cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettledCluster {
    /// Number of controllers, which all agree.
    pub controllers: usize,
    /// Number of functions on which the controllers agree.
    pub functions: usize,
    /// Number of workers that are up.
    pub workers: usize,
    /// Time until the cluster was healthy.
    pub took: Duration,
}

/// Returns the reason why an enabled function is not ready.
pub(crate) fn not_ready(function: &messages::Function) -> Option<String> {
    let ready = |it: &&messages::Condition| it.r#type == "Ready";
    let condition = function.conditions.iter().find(ready)?;
    let name = || function.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    (function.enabled && condition.status() != messages::ConditionStatus::True)
        .then(|| format!("{}: {} ({})", name(), condition.reason, condition.message))
}

/// Returns the difference between the number of placements and the number that the functions ask
/// for.
pub(crate) fn misplaced(functions: &[messages::Function], nodes: &[messages::Node]) -> Option<String> {
    let replicas = |it: &messages::Function| it.spec.as_ref().map_or(0, |spec| spec.replicas.max(1));
    let wanted: u32 = functions.iter().filter(|it| it.enabled).map(replicas).sum();
    let placed: u32 = nodes.iter().map(|node| node.placements).sum();
    (placed != wanted).then(|| format!("{placed} placements instead of {wanted}"))
}

/// The part of a function on which controllers have to agree.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FunctionFingerprint {
    generation: u64,
    resource_version: u64,
    enabled: bool,
    /// The model file of the latest revision.
    digest: String,
}

impl FunctionFingerprint {
    fn of(function: &messages::Function) -> Self {
        let latest = function.revisions.iter().find(|it| it.number == function.generation);
        let artifact = latest.and_then(|it| it.artifact.as_ref());
        Self {
            generation: function.generation,
            resource_version: function.resource_version,
            enabled: function.enabled,
            digest: artifact.map(|it| it.digest.clone()).unwrap_or_default(),
        }
    }
}

/// Returns every function except the one that [`Targets::poke`](crate::load::Targets::poke) writes,
/// because such a write may take effect late.
pub(crate) fn known(functions: &[messages::Function]) -> BTreeMap<String, FunctionFingerprint> {
    let name = |it: &messages::Function| it.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let judged = functions.iter().filter(|it| name(it) != POKED);
    judged.map(|it| (name(it), FunctionFingerprint::of(it))).collect()
}

fn agreement(controllers: usize, functions: usize) -> String {
    match (controllers, functions) {
        (1, 1) => "1 controller has its 1 function".to_owned(),
        (1, functions) => format!("1 controller has all {functions} functions"),
        (controllers, 1) => format!("{controllers} controllers agree on 1 function"),
        (controllers, functions) => format!("{controllers} controllers agree on {functions} functions"),
    }
}

/// Returns the first function that differs between a controller's state and the common state.
pub(crate) fn difference(
    own: &BTreeMap<String, FunctionFingerprint>,
    all: &BTreeMap<String, FunctionFingerprint>,
) -> String {
    let keys = own.keys().chain(all.keys()).find(|&key| own.get(key) != all.get(key));
    keys.map(|key| format!("{key} is {:?} here and {:?} for all", own.get(key), all.get(key)))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CheckVerdict;

    #[test]
    fn agreement_is_described_for_one_and_for_many_controllers() {
        assert_eq!(agreement(1, 1), "1 controller has its 1 function");
        assert_eq!(agreement(1, 2), "1 controller has all 2 functions");
        assert_eq!(agreement(3, 1), "3 controllers agree on 1 function");
        assert_eq!(agreement(3, 12), "3 controllers agree on 12 functions");
    }

    #[test]
    fn a_cluster_that_settles_late_fails_beyond_the_allowance() {
        let settled = |seconds| {
            let took = Duration::from_secs(seconds);
            check(&SettledCluster { controllers: 3, functions: 2, workers: 2, took }, Duration::from_secs(2))
                .verdict
        };
        assert_eq!(settled(10), CheckVerdict::Pass);
        assert_eq!(settled(11), CheckVerdict::Fail);
    }
}
