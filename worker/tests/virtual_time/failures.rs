//! Tests of the answers of requests when executors die, and of the places of their models
//! afterwards.

use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, Incarnation, Reason};
use millrace_worker::install::FunctionConfig;
use millrace_worker::node::NodeConfig;
use millrace_worker::port::model::RunEnd;
use millrace_worker::request::Attempt;
use millrace_worker::snapshot::GpuHealth;

use crate::world::{START, World, behaviour, function, gpus, in_virtual_time, prepare, request};

#[test]
fn executors_that_die_under_load_cost_latency_only() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[7, 9, 11]));
        for number in 0..3 {
            world.install(number, Bytes::mib(20)).await;
        }
        world.pass_ms(20).await;
        let answers: Vec<_> = (0..60).map(|number| world.ask(request(number % 3))).collect();
        for (gap_ms, gpu) in [(13, 0), (60, 1), (60, 0), (60, 1)] {
            world.pass_ms(gap_ms).await;
            world.machine.kill(GpuIndex(gpu));
        }
        let mut tried_again = 0;
        for answer in answers {
            tried_again += u32::from(answer.await.unwrap().unwrap().attempts > 1);
        }
        assert!(tried_again > 0, "no request was caught by a death: the test shows nothing");
        world.pass_ms(200).await;
        let snapshot = world.node.snapshot().await;
        assert_eq!(snapshot.gpus.iter().map(|gpu| gpu.restarts).sum::<u64>(), 4);
        assert!(
            snapshot.functions.iter().all(|function| function.score.failed == 0 && function.in_flight == 0)
        );
    });
}

#[test]
fn models_with_work_are_elsewhere_before_the_dead_executor_is_back() {
    in_virtual_time(async {
        let mut slow_start = behaviour(&[5, 5]);
        slow_start.start = Duration::from_millis(200);
        let world = World::start(gpus(2), &slow_start);
        let model = world.install(0, Bytes::mib(20)).await;
        world.install(1, Bytes::mib(20)).await;
        world.pass_ms(220).await;
        let warm = world.node.invoke(request(0)).await.unwrap();
        assert_eq!(warm.gpu, Some(GpuIndex(0)));
        let caught = world.ask(request(0));
        world.pass_ms(2).await;
        world.machine.kill(GpuIndex(0));
        let done = caught.await.unwrap().unwrap();
        assert_eq!((done.gpu, done.attempts), (Some(GpuIndex(1)), 2));
        let snapshot = world.node.snapshot().await;
        assert_eq!((snapshot.gpus[0].health, snapshot.gpus[0].models.len()), (GpuHealth::Restarting, 0));
        assert_eq!(snapshot.gpus[0].executor_pid, None);
        assert_eq!(snapshot.gpus[1].models[0].digest, model.digest);
        world.pass_ms(220).await;
        let gpu = world.node.snapshot().await.gpus.remove(0);
        assert_eq!((gpu.health, gpu.restarts, gpu.incarnation), (GpuHealth::Up, 1, Incarnation(3)));
    });
}

/// T16, while no GPU is free to run the requests of the dead executor.
#[test]
fn every_model_with_queued_work_is_on_another_gpu_before_the_dead_executor_is_back() {
    for dispatch in ["fifo", "lb", "lalb", "lalb-o3", "torpor", "random", "unified", "simpleswap"] {
        in_virtual_time(async {
            let mut slow_start = behaviour(&[5, 5, 5, 5, 400]);
            slow_start.start = Duration::from_millis(200);
            let config = NodeConfig { dispatch: dispatch.parse().unwrap(), ..NodeConfig::new(gpus(2)) };
            let world = World::start_with(config, &slow_start, 1, |machine| Box::new(machine));
            let mut models = Vec::new();
            for number in 0..5 {
                models.push(world.install(number, Bytes::mib(10)).await);
            }
            world.pass_ms(220).await;
            // Both GPUs run the long function; all other requests wait, for one GPU or for both.
            let long: Vec<_> = (0..2).map(|_| world.ask(request(4))).collect();
            world.pass_ms(10).await;
            let waiting: Vec<_> = (0..8).map(|number| world.ask(request(number % 4))).collect();
            world.pass_ms(10).await;
            world.machine.kill(GpuIndex(0));
            world.pass_ms(20).await;
            let snapshot = world.node.snapshot().await;
            assert_eq!(snapshot.gpus[0].health, GpuHealth::Restarting, "{dispatch}");
            assert!(!snapshot.gpus[1].running.is_empty(), "{dispatch}: nothing was dispatched meanwhile");
            for model in &models {
                let here = snapshot.gpus[1].models.iter().find(|it| it.digest == model.digest);
                assert_eq!(here.map(|model| model.loaded), Some(Bytes::mib(10)), "{dispatch}");
            }
            for answer in long.into_iter().chain(waiting) {
                answer.await.unwrap().unwrap();
            }
        });
    }
}

#[test]
fn a_request_that_kills_executors_is_quarantined_and_others_are_served() {
    in_virtual_time(async {
        let mut behaviour = behaviour(&[5, 5]);
        behaviour.runs.get_mut("model 0").unwrap().end = RunEnd::Aborts;
        let world = World::start(gpus(2), &behaviour);
        world.install(0, Bytes::mib(2)).await;
        world.install(1, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let pill = world.ask(request(0));
        let others: Vec<_> = (0..30).map(|_| world.ask(request(1))).collect();
        let failure = pill.await.unwrap().unwrap_err();
        assert_eq!((failure.reason, failure.may_have_executed), (Reason::Quarantined, true));
        for other in others {
            other.await.unwrap().unwrap();
        }
        let restarts: u64 = world.node.snapshot().await.gpus.iter().map(|gpu| gpu.restarts).sum();
        assert_eq!(restarts, 2, "the request killed exactly two executors");
    });
}

#[test]
fn on_one_gpu_a_poison_request_kills_two_executors_and_others_are_served() {
    in_virtual_time(async {
        let mut behaviour = behaviour(&[5, 5]);
        behaviour.runs.get_mut("model 0").unwrap().end = RunEnd::Aborts;
        let world = World::start(gpus(1), &behaviour);
        world.install(0, Bytes::mib(2)).await;
        world.install(1, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let pill = world.ask(request(0));
        let others: Vec<_> = (0..5).map(|_| world.ask(request(1))).collect();
        assert_eq!(pill.await.unwrap().unwrap_err().reason, Reason::Quarantined);
        for other in others {
            other.await.unwrap().unwrap();
        }
    });
}

#[test]
fn a_non_idempotent_request_is_repeated_only_if_it_has_not_run() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[20]));
        let config = FunctionConfig { idempotent: false, ..function(0) };
        world.node.install(config, prepare(0, Bytes::mib(2))).await.unwrap();
        world.pass_ms(20).await;
        // On each GPU one request runs and one is next.
        let answers: Vec<_> = (0..4).map(|_| world.ask(request(0))).collect();
        world.pass_ms(5).await;
        world.machine.kill(GpuIndex(0));
        let mut reasons = Vec::new();
        for answer in answers {
            reasons.push(
                answer.await.unwrap().map_err(|failure| (failure.reason, failure.may_have_executed)).err(),
            );
        }
        assert_eq!(reasons, [Some((Reason::ExecutorLost, true)), None, None, None]);
    });
}

#[test]
fn a_request_without_attempts_left_fails_when_its_executor_dies() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[20]));
        world.install(0, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let last = world.ask(Attempt { attempts_left: 1, ..request(0) });
        world.pass_ms(5).await;
        world.machine.kill(GpuIndex(0));
        let failure = last.await.unwrap().unwrap_err();
        assert_eq!((failure.reason, failure.may_have_executed), (Reason::AttemptsExhausted, true));
    });
}

#[test]
fn a_request_is_answered_with_an_error_if_its_copies_always_fail() {
    in_virtual_time(async {
        let mut behaviour = behaviour(&[5]);
        behaviour.copy_fails_every = Some(1);
        let world = World::start(gpus(2), &behaviour);
        world.install(0, Bytes::mib(20)).await;
        let failure = world.node.invoke(request(0)).await.unwrap_err();
        assert_eq!((failure.reason, failure.may_have_executed), (Reason::AttemptsExhausted, false));
        assert!(failure.retryable);
        world.pass_ms(100).await;
        assert!(world.node.snapshot().await.links.iter().all(|link| link.outstanding == 0));
    });
}

#[test]
fn copies_that_fail_now_and_then_cost_no_request() {
    in_virtual_time(async {
        let mut behaviour = behaviour(&[2; 4]);
        behaviour.copy_fails_every = Some(4);
        let world = World::start(gpus(1), &behaviour);
        for number in 0..4 {
            world.install(number, Bytes::mib(40)).await;
        }
        for number in 0..12 {
            world.node.invoke(request(number % 4)).await.unwrap();
        }
    });
}

#[test]
fn requests_wait_for_an_executor_and_are_served_when_it_is_up() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5]));
        world.install(0, Bytes::mib(2)).await;
        let early = world.ask(request(0));
        world.pass(START / 2).await;
        let snapshot = world.node.snapshot().await;
        assert_eq!((snapshot.queued, snapshot.gpus[0].health), (1, GpuHealth::Starting));
        early.await.unwrap().unwrap();
        assert_eq!(world.node.snapshot().await.gpus[0].restarts, 0);
    });
}
