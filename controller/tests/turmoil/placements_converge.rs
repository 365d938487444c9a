//! Invariant: placements converge. After all repairs, every function has the desired number of copies
//! on live nodes. Every running worker is registered, serves exactly its placements, and has no
//! checkpoint left to send.

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::{FunctionRecord, NodeStatus, State};
use millrace_types::NodeName;

use crate::desired_state::placed;
use crate::group::HOST_MEMORY;
use crate::history::{History, Verdict, WorkerEnd};

pub(crate) fn check(history: &History) -> Verdict {
    converged(&history.ends, &history.workers)
}

pub(crate) fn converged(ends: &BTreeMap<u64, State>, workers: &[WorkerEnd]) -> Verdict {
    for state in ends.values() {
        placements(state)?;
        registrations(state, workers)?;
    }
    Ok(())
}

/// Returns the live nodes with a GPU.
fn places(state: &State) -> BTreeSet<&NodeName> {
    let nodes = state.nodes().filter(|node| node.status == NodeStatus::Live && !node.gpus.is_empty());
    nodes.map(|node| &node.name).collect()
}

/// Whether a node has enough memory for a function.
fn fits(state: &State, function: &FunctionRecord) -> bool {
    let artifact = state.artifact(&function.latest().digest);
    function.enabled && artifact.is_some_and(|artifact| artifact.model.weights <= HOST_MEMORY)
}

fn placements(state: &State) -> Verdict {
    let places = places(state);
    for function in state.functions() {
        let replicas = function.latest().spec.replicas as usize;
        let wanted = if fits(state, function) { replicas.min(places.len()) } else { 0 };
        let copies: BTreeSet<_> = state.placements_of(&function.key).map(|it| it.node.clone()).collect();
        if copies.len() != wanted || !copies.iter().all(|node| places.contains(node)) {
            return Err(format!(
                "{} should have {wanted} copies on {places:?}, and is on {copies:?}",
                function.key
            )
            .into());
        }
    }
    Ok(())
}

fn registrations(state: &State, workers: &[WorkerEnd]) -> Verdict {
    let names: BTreeSet<&NodeName> = workers.iter().map(|worker| &worker.node).collect();
    if places(state) != names {
        return Err(format!("{names:?} are there, and {:?} are live in the state", places(state)).into());
    }
    for name in names {
        let epoch = state.node(name).map(|node| node.epoch);
        // Another process may claim the name, and be refused.
        let Some(worker) = workers.iter().find(|it| it.node == *name && it.epoch == epoch) else {
            return Err(format!("no process of {name} is known under epoch {epoch:?}: {workers:?}").into());
        };
        let placed = placed(state, name);
        if worker.serves != placed {
            return Err(format!("{name} serves {:?}, and {placed:?} are placed there", worker.serves).into());
        }
        if !worker.settled {
            return Err(format!("{name} has checkpoints left to send").into());
        }
    }
    Ok(())
}

#[test]
fn after_all_repairs_every_function_is_placed_and_served() {
    crate::runs::hold("placements converge");
}

mod planted {
    use millrace_cluster_state::{ControllerId, ModelSummary, State, StateCommand};
    use millrace_types::{Bytes, Digest, Epoch, FunctionSpec, NodeDelta};

    use super::converged;
    use crate::history::WorkerEnd;
    use crate::planted::{commands, init, name, registration_with_gpu};

    const SERVED: &str = "f";

    /// Returns a state with two nodes and a function of two copies, placed on the given nodes.
    fn state(copies: &[&str]) -> State {
        let digest = Digest::of(b"m");
        let weights = Bytes(1);
        let inputs = Vec::new();
        let outputs = Vec::new();
        let model = ModelSummary { weights, parameters: 1, launches: 1, inputs, outputs };
        let mut spec = FunctionSpec::new(millrace_proto::convert::function_key("", SERVED).unwrap());
        spec.replicas = 2;
        let key = spec.key.clone();
        let mut all = vec![
            init(),
            StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder: ControllerId(1) },
            registration_with_gpu("n1"),
            registration_with_gpu("n2"),
            StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() },
        ];
        all.extend(copies.iter().map(|node| StateCommand::Place {
            function: key.clone(),
            node: name(node),
            reason: millrace_cluster_state::PlacementReason::MissingReplica,
        }));
        let mut state = State::default();
        if let openraft::EntryPayload::Normal(proposals) = commands(1, 0, all).payload {
            for proposal in proposals {
                state.apply(0, &proposal).unwrap();
            }
        }
        state
    }

    fn worker(node: &str, epoch: u64, serves: bool, settled: bool) -> WorkerEnd {
        let serves = if serves { [(SERVED.to_owned(), 1)].into() } else { [].into() };
        WorkerEnd {
            node: name(node),
            epoch: Some(Epoch(epoch)),
            settled,
            everything: NodeDelta::default(),
            serves,
        }
    }

    #[test]
    fn a_missing_or_unserved_copy_is_detected() {
        let check = |copies: &[&str], second| {
            let ends = [(1, state(copies))].into();
            converged(&ends, &[worker("n1", 1, true, true), second]).is_ok()
        };
        let both = ["n1", "n2"];
        assert!(check(&both, worker("n2", 2, true, true)));
        assert!(!check(&["n1"], worker("n2", 2, false, true)), "one copy is missing");
        assert!(!check(&both, worker("n2", 2, false, true)), "one copy is not served");
        assert!(!check(&both, worker("n2", 1, true, true)), "the epoch has ended");
        assert!(!check(&both, worker("n2", 2, true, false)), "a checkpoint is left to send");
    }
}
