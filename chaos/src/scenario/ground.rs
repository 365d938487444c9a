//! The grounds on which a scenario can run. Pure.

use super::spec::{CodedScenario, FaultSpec, ScenarioSpec};
use crate::cluster::Ground;

/// Number of controllers in `deploy/compose`.
const COMPOSE_CONTROLLERS: u64 = 3;
/// Number of workers in `deploy/compose`.
const COMPOSE_WORKERS: u32 = 3;

/// Returns the reason why a scenario cannot run on a ground with these options for its processes,
/// and the grounds to use instead.
pub(super) fn refusal(spec: &ScenarioSpec, ground: Ground, words: &[String]) -> Option<String> {
    let (what, others) = match ground {
        Ground::Processes => {
            let unplug = |fault: &FaultSpec| matches!(fault, FaultSpec::Unplug(_));
            let what = spec.faults().find(|&fault| unplug(fault)).map(|_| "has no links to take down");
            (what?.to_owned(), "--ground namespaces")
        }
        Ground::Namespaces => {
            let hostile = (spec.plays == Some(CodedScenario::HostileClients))
                .then_some("has no addresses for attackers");
            (hostile?.to_owned(), "--ground processes")
        }
        Ground::Compose => (compose_cannot(spec, words)?, "--ground processes or namespaces"),
    };
    Some(format!("{} cannot run with --ground {}, which {what}: use {others}", spec.name, ground.word()))
}

/// Returns the reason why a scenario cannot run in the containers of `compose.yaml`, which can only
/// be killed, stopped and restarted.
fn compose_cannot(spec: &ScenarioSpec, words: &[String]) -> Option<String> {
    let shape = &spec.cluster;
    if shape.controllers > COMPOSE_CONTROLLERS || shape.workers > COMPOSE_WORKERS {
        return Some(format!("has {COMPOSE_CONTROLLERS} controllers and {COMPOSE_WORKERS} workers at most"));
    }
    if spec.plays.is_some() {
        return Some("does not support scenarios that are implemented in code".to_owned());
    }
    if shape.isolation.is_some() || !words.is_empty() {
        return Some(
            "starts processes with the arguments in compose.yaml, without preset or isolation".to_owned(),
        );
    }
    let cannot = |fault: &FaultSpec| {
        Some(match fault {
            FaultSpec::Kill(_) | FaultSpec::Stop(_) | FaultSpec::Restart(_) => return None,
            FaultSpec::Starve(_) => "cannot change the memory of its workers",
            FaultSpec::Cut(_) | FaultSpec::Slow(_) | FaultSpec::Unplug(_) => "cannot change its networks",
            FaultSpec::StallDisk(_) | FaultSpec::MoveClock(_) | FaultSpec::Device(_) => {
                "starts no process with the flags for injected faults"
            }
        })
    };
    spec.faults().find_map(cannot).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{all, find};

    fn refused(name: &str, ground: Ground) -> Option<String> {
        refusal(&find(name).unwrap().spec, ground, &[])
    }

    #[test]
    fn a_scenario_that_a_ground_cannot_run_is_refused_with_another_ground() {
        let refusal = refused("unplugged", Ground::Processes).unwrap();
        assert!(
            refusal.contains("unplugged cannot run with --ground processes")
                && refusal.contains("--ground namespaces"),
            "{refusal}"
        );
        for name in ["split-brain", "worker-oom", "torn-store", "gpu-faults", "unplugged"] {
            let refusal = refused(name, Ground::Compose).unwrap();
            assert!(refusal.contains("use --ground processes or namespaces"), "{refusal}");
        }
        let refusal = refused("hostile-clients", Ground::Namespaces).unwrap();
        assert!(refusal.contains("use --ground processes"), "{refusal}");
        let killed = &find("leader-kill").unwrap().spec;
        let words = ["--preset".to_owned(), "fifo".to_owned()];
        assert!(super::refusal(killed, Ground::Compose, &words).unwrap().contains("without preset"));
    }

    #[test]
    fn every_scenario_has_a_ground_and_scenarios_that_only_kill_have_all() {
        assert!(all().iter().all(|it| it.grounds().next().is_some()));
        for name in ["executor-storm", "leader-kill", "frozen-processes", "rolling-restart"] {
            assert_eq!(find(name).unwrap().grounds().collect::<Vec<_>>(), Ground::ALL, "{name}");
        }
    }
}
