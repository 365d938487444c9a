//! Tests of changes of the policy while requests wait, through the actors.

use std::time::Duration;

use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_transfers::rates::TransferSharing;
use millrace_types::policy::{
    AlphaReading, Batches, DispatchName, EvictionName, HostLinksName, PresetName, TransferSharingName,
};
use millrace_types::{BatchingOptions, Bytes, PolicySpec, Priority, SchedulingOptions};
use millrace_worker::install::FunctionConfig;
use millrace_worker::node::NodeConfig;
use millrace_worker::policy::{DesiredPolicy, EffectivePolicy};

use crate::world::{World, behaviour, function, gpus, in_virtual_time, prepare, request};

fn wanted(generation: u64, dispatch: DispatchName) -> DesiredPolicy {
    let alpha = (dispatch == DispatchName::Torpor).then_some(AlphaReading::Artifact);
    let eviction = Some(EvictionName::Torpor);
    DesiredPolicy {
        generation,
        spec: PolicySpec { dispatch: Some(dispatch), eviction, alpha, ..PolicySpec::NONE },
    }
}

async fn in_force(world: &World) -> EffectivePolicy {
    world.node.snapshot().await.policy.unwrap()
}

#[test]
fn waiting_requests_are_answered_once_over_changes_of_the_policy() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[5, 5, 5, 5]));
        for model in 0..4 {
            // The four models together do not fit one GPU.
            world.install(model, Bytes::mib(20)).await;
        }
        world.pass_ms(20).await;
        let mut asked = Vec::new();
        for (generation, &dispatch) in (1..).zip(DispatchName::ALL) {
            asked.extend((0..8).map(|n| world.ask(request(n % 4))));
            world.pass_ms(3).await;
            world.node.set_policy(wanted(generation, dispatch));
            world.pass_ms(1).await;
            assert_eq!(in_force(&world).await.generation, generation);
        }
        assert!(world.node.snapshot().await.queued > 20, "most of them wait");
        let count = asked.len() as u64;
        for answer in asked {
            answer.await.unwrap().unwrap();
        }
        let snapshot = world.node.snapshot().await;
        let completed: u64 = snapshot.functions.iter().map(|function| function.score.completed).sum();
        assert_eq!((completed, snapshot.queued), (count, 0));
    });
}

#[test]
fn a_policy_that_uses_scores_gets_them_once_it_is_in_force() {
    in_virtual_time(async {
        // The first policy uses no scores.
        let config =
            NodeConfig { dispatch: PolicyConfig::Fifo, eviction: Eviction::Lru, ..NodeConfig::new(gpus(1)) };
        let world = World::start_with(config, &behaviour(&[40, 5]), 1, |machine| Box::new(machine));
        for model in 0..2 {
            world.install(model, Bytes::mib(20)).await;
        }
        world.pass_ms(20).await;
        for _ in 0..3 {
            // Each run misses the objective of 25 ms.
            world.node.invoke(request(0)).await.unwrap();
        }
        world.node.set_policy(wanted(1, DispatchName::Torpor));
        world.pass_ms(1).await;
        let now = in_force(&world).await;
        assert_eq!(now.policy.dispatch.alpha(), Some(AlphaReading::Artifact));
        assert_eq!(now.policy.eviction, Eviction::Torpor);
        assert!(world.node.snapshot().await.dispatch.alphas.contains_key(&Priority::default()));
        // The request of the function behind its objective runs before an earlier request.
        let running = world.ask(request(1));
        world.pass_ms(1).await;
        let kept = world.ask(request(1));
        let behind = world.ask(request(0));
        for answer in [running, behind, kept] {
            answer.await.unwrap().unwrap();
        }
        world.node.set_policy(DesiredPolicy { generation: 2, spec: PolicySpec::NONE });
        world.pass_ms(1).await;
        let back = EffectivePolicy { generation: 2, policy: SchedulingPolicy::preset(PresetName::Fifo) };
        assert_eq!(in_force(&world).await, back, "the policy at the start");
    });
}

#[test]
fn requests_run_alone_while_batching_is_off() {
    in_virtual_time(async {
        let config = NodeConfig { dispatch: PolicyConfig::Lb, ..NodeConfig::new(gpus(1)) };
        let world = World::start_with(config, &behaviour(&[10]), 1, |machine| Box::new(machine));
        let batching = Some(BatchingOptions { max_size: 8, max_wait: Duration::from_millis(2) });
        let serving = SchedulingOptions { batching, ..SchedulingOptions::default() };
        let config = FunctionConfig { serving, ..function(0) };
        world.node.install(config, prepare(0, Bytes::mib(2))).await.unwrap();
        let off = PolicySpec { batching: Some(Batches::Off), ..PolicySpec::NONE };
        world.pass_ms(20).await;
        let rows = |rows: i64| crate::batching::rows(0, rows);
        for (spec, runs) in [(off, 0), (PolicySpec::NONE, 1), (off, 1)] {
            world.node.set_policy(DesiredPolicy { generation: 1, spec });
            world.pass_ms(1).await;
            let asked: Vec<_> = (0..4).map(|_| world.ask(rows(1))).collect();
            for answer in asked {
                answer.await.unwrap().unwrap();
            }
            assert_eq!(world.node.snapshot().await.batches.batches, runs, "{spec}");
        }
    });
}

#[test]
fn transfers_continue_when_an_operator_changes_the_transfer_sharing() {
    in_virtual_time(async {
        let world =
            World::start_with(NodeConfig::new(gpus(2)), &behaviour(&[5, 5]), 1, |machine| Box::new(machine));
        for model in 0..2 {
            world.install(model, Bytes::mib(40)).await;
        }
        world.pass_ms(20).await;
        let asked: Vec<_> = (0..2).map(|model| world.ask(request(model))).collect();
        world.pass_ms(1).await;
        for (generation, sharing) in (1..).zip([TransferSharingName::Faastube, TransferSharingName::Fifo]) {
            let host_links = Some(HostLinksName::All);
            let spec = PolicySpec { transfer_sharing: Some(sharing), host_links, ..PolicySpec::NONE };
            world.node.set_policy(DesiredPolicy { generation, spec });
            world.pass_ms(1).await;
        }
        assert_eq!(in_force(&world).await.policy.sharing, TransferSharing::Fifo);
        for answer in asked {
            answer.await.unwrap().unwrap();
        }
    });
}
