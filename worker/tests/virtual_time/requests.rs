//! Tests of the answers of requests while all executors live.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::trace::CoreId;
use millrace_scheduling::dispatch::{POLICIES, PolicyConfig};
use millrace_types::tenancy::ResourceShare;
use millrace_types::{Bytes, GpuIndex, Quota, Reason};
use millrace_worker::install::{FunctionConfig, InstallError};
use millrace_worker::node::NodeConfig;
use millrace_worker::port::model::RunEnd;
use millrace_worker::request::{Attempt, AttemptTimes};
use tokio::task::JoinHandle;

use crate::world::{
    World, behaviour, function, gpus, in_virtual_time, prepare, reason, request, revision, within,
};

/// Longest delay of a timer in virtual time: each sleeper wakes in separate microseconds.
const LATE_MAX: Duration = Duration::from_micros(256);

#[test]
fn the_first_request_loads_the_model_and_the_second_finds_it_resident() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5]));
        world.install(0, Bytes::mib(20)).await;
        world.pass_ms(20).await;
        let cold = world.node.invoke(request(0)).await.unwrap();
        let warm = world.node.invoke(request(0)).await.unwrap();
        assert_eq!((cold.split.swapped, warm.split.swapped), (Bytes::mib(20), Bytes::ZERO));
        assert!(cold.split.swap > Duration::from_micros(1_000), "{:?}", cold.split);
        assert_eq!(warm.split.swap, Duration::ZERO);
        assert_eq!((cold.gpu, cold.attempts, cold.outputs.tensors.len()), (Some(GpuIndex(0)), 1, 1));
        for split in [cold.split, warm.split] {
            let parts = split.queue + split.swap + split.run;
            assert!(parts <= split.total && split.total - parts <= LATE_MAX * 2, "{split:?}");
            assert!(
                split.run >= Duration::from_millis(5) && split.run <= Duration::from_millis(5) + LATE_MAX * 2
            );
        }
        let snapshot = world.node.snapshot().await;
        assert_eq!((snapshot.gpus[0].swaps, snapshot.gpus[0].models[0].loaded), (1, Bytes::mib(20)));
        assert_eq!(snapshot.gpus[0].models[0].functions, [revision(0)]);
        assert_eq!(snapshot.links[0].carried, Bytes::mib(20));
        let score = snapshot.functions[0].score;
        assert_eq!((score.completed, score.in_time, score.scored), (2, 2, 2));
        assert_eq!(score.billed_ms, 10, "two runs of 5 ms");
    });
}

#[test]
fn the_wait_behind_a_sequence_counts_towards_timeout_and_objective() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5]));
        world.install(0, Bytes::mib(20)).await;
        world.pass_ms(100).await;
        let behind = |ms| Attempt { behind: Duration::from_millis(ms), ..request(0) };
        // On the node alone, each request meets its objective of 25 ms.
        for ms in [0, 10, 30] {
            let AttemptTimes { queue, total, .. } = world.node.invoke(behind(ms)).await.unwrap().split;
            let waited = Duration::from_millis(ms);
            assert!(
                queue >= waited && total >= waited + Duration::from_millis(5),
                "{ms}: {queue:?}, {total:?}"
            );
        }
        let late = world.ask(within(20, behind(30)));
        assert_eq!(reason(late).await, (Reason::TimedOut, false));
        let score = world.node.snapshot().await.functions[0].score;
        assert_eq!((score.completed, score.in_time, score.expired, score.scored), (3, 2, 1, 4));
    });
}

/// A function is idle except while its requests are on a GPU: while they wait for the model, run,
/// and travel there and back.
#[test]
fn a_function_is_idle_while_its_requests_are_on_no_gpu() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5, 5]));
        world.install(0, Bytes::mib(20)).await;
        world.install(1, Bytes::mib(20)).await;
        world.pass_ms(20).await;
        let before = world.node.snapshot().await.idle;
        let answer = world.node.invoke(request(0)).await.unwrap();
        world.pass_ms(100).await;
        let after = world.node.snapshot().await.idle;
        let grown = |number| {
            let function = &revision(number).function;
            after[function].saturating_sub(before[function])
        };
        let on_gpu = answer.split.total;
        let other = grown(1);
        assert_eq!(other, Duration::from_millis(100) + on_gpu, "the other function was idle all the time");
        assert!(grown(0) + on_gpu >= other && grown(0) + on_gpu <= other + LATE_MAX * 4, "{after:?}");
        world.node.retire(revision(1)).await;
        let last = world.node.snapshot().await.idle[&revision(1).function];
        world.pass_ms(50).await;
        assert_eq!(
            world.node.snapshot().await.idle[&revision(1).function],
            last,
            "a retired function no longer counts as idle"
        );
    });
}

#[test]
fn a_tenants_requests_beyond_its_caps_wait_until_the_caps_are_gone() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[5, 5]));
        world.install(0, Bytes::mib(20)).await;
        world.pass_ms(20).await;
        let tenant = revision(0).function.tenant;
        let quota = Quota { gpus_max: NonZeroU32::new(1), ..Quota::NONE };
        let both = async || {
            let answers = tokio::join!(world.node.invoke(request(0)), world.node.invoke(request(0)));
            (answers.0.unwrap(), answers.1.unwrap())
        };
        let (a, b) = both().await;
        assert_ne!(a.gpu, b.gpu, "without caps each has a GPU");
        world.node.set_quotas(Arc::new([(tenant.clone(), quota)].into()));
        let (a, b) = both().await;
        let queued = a.split.queue.max(b.split.queue);
        assert!(queued >= Duration::from_millis(5), "one waits for the other: {queued:?}");
        // Functions that are installed later are capped too.
        world.install(1, Bytes::mib(20)).await;
        let (a, b) = tokio::join!(world.node.invoke(request(0)), world.node.invoke(request(1)));
        let queued = a.unwrap().split.queue.max(b.unwrap().split.queue);
        assert!(queued >= Duration::from_millis(5), "{queued:?}");
        world.node.set_quotas(Arc::default());
        let (a, b) = both().await;
        assert_ne!(a.gpu, b.gpu);
    });
}

#[test]
fn a_failure_by_a_tenants_caps_names_the_caps() {
    in_virtual_time(async {
        let config = NodeConfig { requests_max: 4, ..NodeConfig::new(gpus(1)) };
        let world = World::start_with(config, &behaviour(&[5]), 1, |machine| Box::new(machine));
        world.install(0, Bytes::mib(20)).await;
        let cap = |quota| world.node.set_quotas(Arc::new([(revision(0).function.tenant, quota)].into()));
        cap(Quota { memory_share: ResourceShare::from_ppm(1_000).ok(), ..Quota::NONE });
        let refused = world.node.invoke(request(0)).await.unwrap_err();
        assert_eq!(refused.reason, Reason::NoGpuMemory);
        assert!(refused.message.contains("millrace get tenants"), "{refused:?}");
        cap(Quota { gpus_max: NonZeroU32::new(1), ..Quota::NONE });
        // One request runs, and half of the four may wait.
        let mut asked: Vec<_> = (0..4).map(|_| world.ask(request(0))).collect();
        let refused = asked.remove(3).await.unwrap().unwrap_err();
        assert_eq!(refused.reason, Reason::QueueFull);
        assert!(refused.message.contains("millrace get tenants"), "{refused:?}");
    });
}

#[test]
fn a_request_for_an_unknown_function_is_refused() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[]));
        let failure = world.node.invoke(request(0)).await.unwrap_err();
        assert_eq!((failure.reason, failure.may_have_executed), (Reason::FunctionNotReady, false));
    });
}

#[test]
fn requests_over_the_limits_of_worker_or_function_are_refused_until_others_end() {
    in_virtual_time(async {
        let config = NodeConfig { requests_max: 4, in_flight_max: 2, ..NodeConfig::new(gpus(1)) };
        let world = World::start_with(config, &behaviour(&[5, 5, 5]), 1, |machine| Box::new(machine));
        for number in 0..3 {
            world.install(number, Bytes::mib(2)).await;
        }
        let taken: Vec<_> = [0, 0, 1, 1].map(|function| world.ask(request(function))).into();
        world.pass_ms(1).await;
        assert_eq!(
            reason(world.ask(request(2))).await,
            (Reason::QueueFull, false),
            "the worker holds four requests"
        );
        for answer in taken {
            answer.await.unwrap().unwrap();
        }
        let mut taken = vec![world.ask(request(0)), world.ask(request(0))];
        world.pass_ms(1).await;
        assert_eq!(
            reason(world.ask(request(0))).await,
            (Reason::QueueFull, false),
            "the function has two requests"
        );
        taken.push(world.ask(request(1)));
        for answer in taken {
            answer.await.unwrap().unwrap();
        }
    });
}

#[test]
fn a_request_expires_at_its_deadline_in_the_queue_and_in_its_run() {
    in_virtual_time(async {
        // The `fifo` policy enqueues one request on a busy GPU.
        let config = NodeConfig { dispatch: PolicyConfig::Fifo, ..NodeConfig::new(gpus(1)) };
        let world = World::start_with(config, &behaviour(&[50]), 1, |machine| Box::new(machine));
        world.install(0, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let start = world.clock.now();
        let running = world.ask(within(20, request(0)));
        let next = world.ask(request(0));
        let queued = world.ask(within(10, request(0)));
        let reason_queued = reason(queued).await;
        let reason_running = world.clock.now();
        assert_eq!(reason_queued, (Reason::TimedOut, false));
        assert!(reason_running.since(start) <= Duration::from_millis(10) + LATE_MAX);
        assert_eq!(world.node.snapshot().await.queued, 0, "it left the queue");
        assert_eq!(reason(running).await, (Reason::TimedOut, true));
        assert!(world.clock.now().since(start) <= Duration::from_millis(20) + LATE_MAX);
        // The run continues and its result is dropped; the next request runs after it.
        let done = next.await.unwrap().unwrap();
        assert!(done.split.queue >= Duration::from_millis(49), "{:?}", done.split);
        let function = world.node.snapshot().await.functions.remove(0);
        let score = function.score;
        assert_eq!((score.expired, score.completed, score.scored, function.in_flight), (2, 1, 3, 0));
    });
}

#[test]
fn requests_of_clients_that_leave_are_removed_from_every_queue() {
    in_virtual_time(async {
        // The `fifo` policy enqueues one request on a busy GPU.
        let config = NodeConfig { dispatch: PolicyConfig::Fifo, ..NodeConfig::new(gpus(1)) };
        let world = World::start_with(config, &behaviour(&[50]), 1, |machine| Box::new(machine));
        world.install(0, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let clients: Vec<_> = (0..5).map(|_| world.ask(request(0))).collect();
        world.pass_ms(5).await;
        assert_eq!(world.node.snapshot().await.queued, 3, "one request runs, one is next");
        clients.iter().for_each(JoinHandle::abort);
        world.pass_ms(1).await;
        let snapshot = world.node.snapshot().await;
        assert_eq!(
            (snapshot.queued, snapshot.functions[0].in_flight, snapshot.functions[0].score.cancelled),
            (0, 0, 5)
        );
        // The run continues to its end; the request behind it never starts.
        world.pass_ms(60).await;
        let snapshot = world.node.snapshot().await;
        assert_eq!(snapshot.gpus[0].running, []);
        assert!(snapshot.gpus[0].busy < Duration::from_millis(51), "{:?}", snapshot.gpus[0].busy);
    });
}

#[test]
fn a_model_that_fails_on_its_input_fails_its_request_alone() {
    in_virtual_time(async {
        let mut behaviour = behaviour(&[5, 5]);
        behaviour.runs.get_mut("model 0").unwrap().end = RunEnd::Fails;
        let world = World::start(gpus(1), &behaviour);
        world.install(0, Bytes::mib(2)).await;
        world.install(1, Bytes::mib(2)).await;
        let bad = world.ask(request(0));
        let good = world.ask(request(1));
        assert_eq!(reason(bad).await, (Reason::ModelFailed, true));
        good.await.unwrap().unwrap();
    });
}

#[test]
fn a_model_larger_than_every_gpu_is_not_installed() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5]));
        let refused = world.node.install(function(0), prepare(0, Bytes::mib(65))).await;
        let expected =
            InstallError::TooLarge { key: revision(0), needed: Bytes::mib(65), largest: Bytes::mib(64) };
        assert_eq!(refused, Err(expected));
        let config = FunctionConfig { gpu_memory: Some(Bytes::mib(100)), ..function(0) };
        let refused = world.node.install(config, prepare(0, Bytes::mib(2))).await;
        assert!(matches!(refused, Err(InstallError::TooLarge { .. })));
        assert_eq!(world.node.snapshot().await.functions, []);
    });
}

#[test]
fn functions_of_one_artifact_share_a_model_until_the_last_is_retired() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[5]));
        let model = prepare(0, Bytes::mib(2));
        for number in 0..2 {
            world.node.install(function(number), Arc::clone(&model)).await.unwrap();
        }
        world.ask(request(0)).await.unwrap().unwrap();
        let warm = world.ask(request(1)).await.unwrap().unwrap();
        assert_eq!(warm.split.swapped, Bytes::ZERO);
        assert_eq!(world.node.snapshot().await.gpus[0].models[0].functions, [revision(0), revision(1)]);
        world.node.retire(revision(0)).await;
        assert_eq!(reason(world.ask(request(0))).await, (Reason::FunctionNotReady, false));
        assert_eq!(world.node.snapshot().await.gpus[0].models.len(), 1);
        let last = world.ask(request(1));
        world.pass_ms(1).await;
        world.node.retire(revision(1)).await;
        assert!(Arc::strong_count(&model) > 1, "its last request still runs");
        last.await.unwrap().unwrap();
        world.pass_ms(1).await;
        let snapshot = world.node.snapshot().await;
        assert_eq!((snapshot.gpus[0].models.len(), snapshot.gpus[0].used), (0, Bytes::ZERO));
        assert_eq!(snapshot.functions, []);
        assert_eq!(Arc::strong_count(&model), 1, "the model's descriptors are closed");
    });
}

#[test]
fn a_function_that_was_retired_can_be_installed_again() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5, 5]));
        world.install(0, Bytes::mib(2)).await;
        world.ask(request(0)).await.unwrap().unwrap();
        world.node.retire(revision(0)).await;
        world.install(0, Bytes::mib(2)).await;
        world.ask(request(0)).await.unwrap().unwrap();
        let snapshot = world.node.snapshot().await;
        assert_eq!(snapshot.functions[0].score.completed, 1, "the new function counts from zero");
        assert_eq!(
            snapshot.past[&revision(0).function].completed,
            1,
            "the counts of the retired function stay"
        );
    });
}

#[test]
fn models_beyond_one_gpus_memory_are_evicted_and_loaded_again() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[1; 4]));
        for number in 0..4 {
            world.install(number, Bytes::mib(30)).await;
        }
        for round in 0..3 {
            for number in 0..4 {
                let done = world.node.invoke(request(number)).await.unwrap();
                assert_eq!(done.split.swapped, Bytes::mib(30), "round {round}");
            }
        }
        let gpu = world.node.snapshot().await.gpus.remove(0);
        assert_eq!((gpu.swaps, gpu.evictions, gpu.models.len(), gpu.used), (12, 10, 2, Bytes::mib(60)));
    });
}

#[test]
fn an_idle_gpu_runs_the_requests_that_wait_behind_a_long_run() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[500, 5]));
        world.install(0, Bytes::mib(2)).await;
        world.install(1, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let long = world.ask(request(0));
        let short: Vec<_> = (0..3).map(|_| world.ask(request(1))).collect();
        for answer in short {
            assert_eq!(
                answer.await.unwrap().unwrap().gpu,
                Some(GpuIndex(1)),
                "no request waits for the long run"
            );
        }
        assert_eq!(long.await.unwrap().unwrap().gpu, Some(GpuIndex(0)));
    });
}

#[test]
fn draining_answers_running_requests_refuses_new_ones_and_stops_executors() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[50]));
        world.install(0, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let running = world.ask(request(0));
        world.pass_ms(5).await;
        let node = world.node.clone();
        let draining = actix_rt::spawn(async move {
            node.quiesce(Duration::from_secs(1)).await;
            node.stop().await;
        });
        world.pass_ms(1).await;
        assert_eq!(reason(world.ask(request(0))).await, (Reason::ShuttingDown, false));
        running.await.unwrap().unwrap();
        draining.await.unwrap();
        assert_eq!(world.node.snapshot().await.gpus, []);
        assert_eq!(reason(world.ask(request(0))).await.0, Reason::ShuttingDown);
        let gone = world.node.install(function(1), prepare(1, Bytes::mib(2))).await;
        assert_eq!(gone, Err(InstallError::NodeGone));
    });
}

#[test]
fn draining_ends_after_the_grace_period() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5_000]));
        world.install(0, Bytes::mib(2)).await;
        world.pass_ms(20).await;
        let waits: Vec<_> = (0..3).map(|_| world.ask(request(0))).collect();
        world.pass_ms(5).await;
        let start = world.clock.now();
        world.node.quiesce(Duration::from_millis(100)).await;
        world.node.stop().await;
        assert!(world.clock.now().since(start) < Duration::from_millis(110));
        for answer in waits {
            assert_eq!(reason(answer).await.0, Reason::ShuttingDown);
        }
    });
}

#[test]
fn changes_that_routing_reads_are_announced() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5]));
        let mut changes = world.node.changes();
        changes.mark_unchanged();
        world.install(0, Bytes::mib(2)).await;
        assert!(changes.has_changed().unwrap(), "a function was installed");
        world.pass_ms(20).await;
        changes.mark_unchanged();
        world.node.invoke(request(0)).await.unwrap();
        assert!(changes.has_changed().unwrap(), "a model was loaded");
        changes.mark_unchanged();
        let again: Attempt = request(0);
        world.node.invoke(again).await.unwrap();
        assert!(!changes.has_changed().unwrap(), "no change");
        world.machine.kill(GpuIndex(0));
        world.pass_ms(1).await;
        assert!(changes.has_changed().unwrap(), "a GPU went down");
    });
}

/// Policies learn the duration of swaps and the load of links from the arrival of weights.
#[test]
fn every_policy_is_notified_when_a_model_has_arrived() {
    for (name, dispatch) in POLICIES.into_iter().filter(|(_, policy)| !policy.binds_early()) {
        in_virtual_time(async {
            let config = NodeConfig { dispatch, ..NodeConfig::new(gpus(1)) };
            let world = World::start_with(config, &behaviour(&[5]), 1, |machine| Box::new(machine));
            world.install(0, Bytes::mib(20)).await;
            world.pass_ms(20).await;
            let told = || world.trace.lock().unwrap().folds()[&CoreId::Dispatch].events;
            let before = told();
            world.node.invoke(request(0)).await.unwrap();
            world.pass_ms(1).await;
            let cold = told() - before;
            world.node.invoke(request(0)).await.unwrap();
            world.pass_ms(1).await;
            let warm = told() - before - cold;
            assert_eq!(
                cold,
                warm + 1,
                "{name}: a request that loads its model has one event more than one that finds it"
            );
        });
    }
}
