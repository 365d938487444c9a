//! Tests of prewarming the models that a workflow is likely to use next (D29), through the actors.

use std::time::Duration;

use millrace_scheduling::dispatch::PrewarmCounts;
use millrace_types::{Bytes, GpuIndex};
use millrace_worker::node::NodeConfig;
use millrace_worker::request::Attempt;
use millrace_workflow::hints::Prewarm;

use crate::world::{World, behaviour, gpus, in_virtual_time, request, revision};

/// Starts a node with one GPU and two models of 20 MiB, each of which takes 2 ms to copy. The first
/// runs for 30 ms.
async fn two_steps(prewarm: Prewarm) -> World {
    let config = NodeConfig { prewarm, ..NodeConfig::new(gpus(1)) };
    let world = World::start_with(config, &behaviour(&[30, 5]), 1, |machine| Box::new(machine));
    world.install(0, Bytes::mib(20)).await;
    world.install(1, Bytes::mib(20)).await;
    world.pass_ms(20).await;
    world
}

/// Returns a request for the first step of a workflow. The second step runs function 1.
fn first() -> Attempt {
    Attempt { next: vec![revision(1)], ..request(0) }
}

async fn on_gpu(world: &World, function: usize) -> bool {
    let models = world.node.snapshot().await.gpus.remove(0).models;
    models.iter().any(|model| model.functions.contains(&revision(function)))
}

#[test]
fn the_second_steps_model_is_loaded_while_the_first_step_runs() {
    in_virtual_time(async {
        let world = two_steps(Prewarm::On).await;
        let step = world.ask(first());
        world.pass_ms(10).await;
        assert!(on_gpu(&world, 1).await, "loaded while the first step runs");
        step.await.unwrap().unwrap();
        let second = world.node.invoke(request(1)).await.unwrap();
        assert_eq!((second.split.swap, second.split.swapped), (Duration::ZERO, Bytes::ZERO));
        let snapshot = world.node.snapshot().await;
        assert_eq!(snapshot.dispatch.prewarms, PrewarmCounts { brought: 1, there: 0, busy: 0 });
        assert_eq!(snapshot.gpus[0].swaps, 2, "each model was loaded once");
    });
}

#[test]
fn with_prewarming_off_the_second_steps_model_is_loaded_with_the_second_step() {
    in_virtual_time(async {
        let world = two_steps(Prewarm::Off).await;
        let step = world.ask(first());
        world.pass_ms(10).await;
        assert!(!on_gpu(&world, 1).await);
        step.await.unwrap().unwrap();
        let second = world.node.invoke(request(1)).await.unwrap();
        assert_eq!(second.split.swapped, Bytes::mib(20));
        assert_eq!(world.node.snapshot().await.dispatch.prewarms, PrewarmCounts::default());
    });
}

#[test]
fn a_hint_of_a_function_that_is_not_served_here_is_ignored() {
    in_virtual_time(async {
        let world = two_steps(Prewarm::On).await;
        let step = Attempt { next: vec![revision(7)], ..request(0) };
        assert_eq!(world.node.invoke(step).await.unwrap().gpu, Some(GpuIndex(0)));
        assert_eq!(world.node.snapshot().await.dispatch.prewarms, PrewarmCounts::default());
    });
}

#[test]
fn a_hint_does_not_evict_a_model_that_a_request_waits_for() {
    in_virtual_time(async {
        let config = NodeConfig::new(gpus(1));
        let world = World::start_with(config, &behaviour(&[30, 5, 5]), 1, |machine| Box::new(machine));
        // The GPU has room for two of the models.
        for number in 0..3 {
            world.install(number, Bytes::mib(28)).await;
        }
        world.pass_ms(20).await;
        world.node.invoke(request(2)).await.unwrap();
        let step = world.ask(first());
        let waits = world.ask(request(2));
        world.pass_ms(10).await;
        assert!(on_gpu(&world, 2).await && !on_gpu(&world, 1).await);
        step.await.unwrap().unwrap();
        assert_eq!(waits.await.unwrap().unwrap().split.swapped, Bytes::ZERO);
    });
}
