//! Tests of the data that a workflow's entry keeps over renewals.

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::StateCommand;
use millrace_workflow::StepIndex;

use super::{WorkflowPlan, Workflows};
use crate::fixtures::{apply, chain, key, state};
use crate::fleet::WorkerFleet;
use crate::leadership::LeaderStatus;
use crate::passed::TrafficMatrix;
use crate::serving::catalog::CatalogInputs;

#[test]
fn step_durations_are_kept_only_for_the_same_steps() {
    let fleet = WorkerFleet::new();
    let outlook = LeaderStatus::of_a_follower();
    let workflows = Workflows::new(TrafficMatrix::default());
    let way = |steps: &[&str]| -> WorkflowPlan {
        let steps: Vec<_> = steps.iter().map(|&step| (step, "f")).collect();
        let mut state = state(&["f"]);
        apply(&mut state, StateCommand::ApplyWorkflow { spec: chain(&steps), expected: None });
        let sight = CatalogInputs { state: &state, fleet: &fleet, outlook: &outlook };
        workflows.entry(&sight, &key("w")).unwrap().way.clone().unwrap()
    };
    let first = way(&["a", "b"]);
    assert!(Arc::ptr_eq(&way(&["a", "b"]).paces, &first.paces));
    // All workflows have generation 1, as if the name was forgotten in between.
    for steps in [&["a", "c"][..], &["a", "c", "d"], &["a"]] {
        let next = way(steps);
        assert!(!Arc::ptr_eq(&next.paces, &first.paces), "{steps:?}");
        let left = Some(Duration::from_secs(9));
        assert!(next.paces.shares(&next.plan).within(&next.plan, StepIndex(0), left).is_some(), "{steps:?}");
    }
}
