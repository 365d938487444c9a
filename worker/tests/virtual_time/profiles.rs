//! Tests of the trials of profiles in virtual time: the measured times, and the delay of other requests.

use std::time::Duration;

use millrace_types::policy::GpuSharingName;
use millrace_types::profile::{ProfilePoint, TrialSetting};
use millrace_types::{Bytes, Permille, Reason};
use millrace_worker::node::NodeConfig;
use millrace_worker::service::run_trial;

use crate::world::{World, behaviour, gpus, in_virtual_time, request};

/// Run time of both functions on the whole GPU. On a part of the SMs a run takes proportionally longer.
const RUN: Duration = Duration::from_millis(20);

/// Starts a node with a GPU that holds both functions.
async fn node(gpu_sharing: GpuSharingName) -> World {
    let config = NodeConfig { gpu_sharing, ..NodeConfig::new(gpus(1)) };
    let ms = RUN.as_millis() as u64;
    let world = World::start_with(config, &behaviour(&[ms, ms]), 1, |machine| Box::new(machine));
    for number in 0..2 {
        world.install(number, Bytes::mib(4)).await;
    }
    world.pass_ms(100).await;
    for number in 0..2 {
        world.ask(request(number)).await.unwrap().unwrap();
    }
    world
}

async fn measured(world: &World, units: u8, quota: u16) -> ProfilePoint {
    let setting = TrialSetting::new(units, Permille::new(quota).unwrap()).unwrap();
    let (_, point) = run_trial(&world.node, &request(0), setting).await.unwrap();
    assert_eq!(point.setting, setting);
    point
}

fn assert_close(measured: f64, expected: f64, what: &str) {
    assert!((measured / expected - 1.0).abs() <= 0.05, "{what}: {measured}, not {expected}");
}

#[test]
fn a_trial_measures_the_time_of_a_run_on_a_part_of_the_sms() {
    in_virtual_time(async {
        let world = node(GpuSharingName::Slices).await;
        for units in [16, 4, 1] {
            let point = measured(&world, units, 1000).await;
            let expected = RUN.as_secs_f64() * 16.0 / f64::from(units);
            assert_close(point.p50.as_secs_f64(), expected, "the median");
            assert_close(point.throughput(), 1.0 / expected, "the throughput");
            assert_close(point.utilisation(), 1.0, "the utilisation");
        }
    });
}

#[test]
fn the_throughput_of_a_trial_follows_its_share_of_the_time() {
    in_virtual_time(async {
        let world = node(GpuSharingName::Slices).await;
        for quota in [200, 400, 600, 800] {
            let point = measured(&world, 16, quota).await;
            let share = f64::from(quota) / 1000.0;
            assert_close(point.throughput(), share / RUN.as_secs_f64(), "the throughput");
            assert_close(point.utilisation(), share, "the utilisation");
        }
    });
}

#[test]
fn trials_are_neither_counted_nor_billed() {
    in_virtual_time(async {
        let world = node(GpuSharingName::Slices).await;
        let score = async || world.node.snapshot().await.functions[0].score;
        let before = score().await;
        measured(&world, 16, 1000).await;
        assert_eq!(score().await, before);
    });
}

#[test]
fn a_trial_takes_a_tenth_of_the_time_at_most_while_others_compute() {
    in_virtual_time(async {
        let world = node(GpuSharingName::Slices).await;
        let setting = TrialSetting::whole_time(16).unwrap();
        let repeated = request(0);
        let trial = run_trial(&world.node, &repeated, setting);
        // The other function computes without a pause.
        let others = async {
            let end = world.clock.now() + Duration::from_secs(62);
            let mut answers = 0;
            while world.clock.now() < end {
                world.ask(request(1)).await.unwrap().unwrap();
                answers += 1;
            }
            answers
        };
        let (trial, answers) = tokio::join!(trial, others);
        let refused = trial.unwrap_err();
        assert_eq!(refused.reason, Reason::QueueFull, "{refused}");
        assert!(refused.message.contains("profile when fewer requests come"), "{refused}");
        let alone = 62_000 / RUN.as_millis();
        assert!(answers * 100 >= alone * 88, "{answers} of {alone} answers");
    });
}

#[test]
fn a_trial_on_a_gpu_that_is_not_shared_is_refused() {
    in_virtual_time(async {
        let world = node(GpuSharingName::Off).await;
        let refused =
            run_trial(&world.node, &request(0), TrialSetting::whole_time(4).unwrap()).await.unwrap_err();
        assert_eq!(refused.reason, Reason::OperationState);
        assert!(refused.message.contains("policy set --gpu-sharing slices"), "{refused}");
    });
}
