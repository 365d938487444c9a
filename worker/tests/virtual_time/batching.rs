//! Tests of batching, priorities and residency, through the actors.

use std::time::Duration;

use millrace_proto::executor::{Tensor, tensor::Contents};
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_types::{BatchingOptions, Bytes, Priority, Reason, ResidencyOptions, SchedulingOptions};
use millrace_worker::install::FunctionConfig;
use millrace_worker::node::NodeConfig;
use millrace_worker::port::model::RunEnd;
use millrace_worker::request::{Attempt, BatchShare};

use crate::world::{World, behaviour, function, gpus, in_virtual_time, prepare, reason, request};

fn batched(max_size: u32, max_wait: Duration) -> SchedulingOptions {
    SchedulingOptions {
        batching: Some(BatchingOptions { max_size, max_wait }),
        ..SchedulingOptions::default()
    }
}

/// Returns a request with `rows` rows of four numbers.
pub(crate) fn rows(function: usize, rows: i64) -> Attempt {
    let contents = Some(Contents::Inline(vec![0; rows as usize * 16].into()));
    let input = Tensor { name: "x".into(), datatype: "FP32".into(), shape: vec![rows, 4], contents };
    Attempt { inputs: vec![input], ..request(function) }
}

async fn install(world: &World, number: usize, serving: SchedulingOptions) {
    let config = FunctionConfig { serving, ..function(number) };
    world.node.install(config, prepare(number, Bytes::mib(2))).await.unwrap();
}

#[test]
fn waiting_requests_run_as_a_batch_and_each_is_charged_for_its_rows() {
    in_virtual_time(async {
        // The `lb` policy enqueues nothing on a busy GPU, so requests stay in the queue until the GPU is
        // free.
        let config = NodeConfig { dispatch: PolicyConfig::Lb, ..NodeConfig::new(gpus(1)) };
        let world = World::start_with(config, &behaviour(&[40]), 1, |machine| Box::new(machine));
        install(&world, 0, batched(4, Duration::ZERO)).await;
        // This answer shows that the executor is up: requests before that would all wait together.
        world.ask(rows(0, 1)).await.unwrap().unwrap();
        let first = world.ask(rows(0, 1));
        world.pass_ms(1).await;
        let others: Vec<_> = [1, 2, 1, 3].into_iter().map(|count| world.ask(rows(0, count))).collect();
        assert_eq!(first.await.unwrap().unwrap().outputs.share, None, "the first request must run alone");
        let mut shares = Vec::new();
        for other in others {
            shares.push(other.await.unwrap().unwrap().outputs.share);
        }
        let share = |first, rows| Some(BatchShare { first, rows, of: 4 });
        assert_eq!(shares, [share(0, 1), share(1, 2), share(3, 1), None]);
        let snapshot = world.node.snapshot().await;
        assert_eq!((snapshot.batches.batches, snapshot.batches.requests), (1, 3));
        // 40 + 40 + (10 + 20 + 10) + 40 ms.
        assert_eq!(snapshot.functions[0].score.billed_ms, 160);
        assert_eq!((snapshot.functions[0].score.completed, snapshot.queued), (6, 0));
    });
}

#[test]
fn a_batch_that_fails_runs_again_each_request_alone() {
    in_virtual_time(async {
        let mut behaviour = behaviour(&[5]);
        behaviour.runs.get_mut("model 0").unwrap().end = RunEnd::Fails;
        let world = World::start(gpus(1), &behaviour);
        install(&world, 0, batched(4, Duration::from_millis(1))).await;
        let asked: Vec<_> = (0..3).map(|_| world.ask(rows(0, 1))).collect();
        for answer in asked {
            assert_eq!(reason(answer).await, (Reason::ModelFailed, true), "alone, the request is at fault");
        }
        let snapshot = world.node.snapshot().await;
        assert_eq!((snapshot.batches.batches, snapshot.functions[0].score.failed), (0, 3));
    });
}

#[test]
fn inputs_without_common_rows_run_alone() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5]));
        install(&world, 0, batched(4, Duration::ZERO)).await;
        let asked: Vec<_> = (0..3).map(|_| world.ask(request(0))).collect();
        for answer in asked {
            assert_eq!(answer.await.unwrap().unwrap().outputs.share, None);
        }
    });
}

#[test]
fn requests_of_a_higher_priority_run_first_and_a_request_may_lower_its_own() {
    in_virtual_time(async {
        let world = World::start(gpus(1), &behaviour(&[5, 5, 5]));
        for (number, level) in [(0, 4), (1, 8), (2, 1)] {
            let serving =
                SchedulingOptions { priority: Priority::new(level).unwrap(), ..SchedulingOptions::default() };
            install(&world, number, serving).await;
        }
        for number in 0..3 {
            world.ask(request(number)).await.unwrap().unwrap();
        }
        let running = world.ask(request(0));
        world.pass_ms(1).await;
        let ahead = world.ask(request(0));
        world.pass_ms(1).await;
        let last = world.ask(request(1));
        let stepped_back = world.ask(Attempt { priority: 8, ..request(2) });
        let first = world.ask(request(2));
        for before in [running, ahead] {
            before.await.unwrap().unwrap();
        }
        first.await.unwrap().unwrap();
        assert!(!last.is_finished() && !stepped_back.is_finished());
        last.await.unwrap().unwrap();
        stepped_back.await.unwrap().unwrap();
    });
}

#[test]
fn a_model_is_kept_warm_and_dropped_by_its_functions_residency() {
    in_virtual_time(async {
        let world = World::start(gpus(2), &behaviour(&[5, 5]));
        let warm = ResidencyOptions { min_warm: 2, ..ResidencyOptions::default() };
        install(&world, 0, SchedulingOptions { residency: warm, ..SchedulingOptions::default() }).await;
        world.pass_ms(50).await;
        let loaded = |snapshot: &millrace_worker::snapshot::NodeSnapshot| {
            let of = |gpu: &millrace_worker::snapshot::GpuSnapshot| gpu.models.len();
            snapshot.gpus.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(loaded(&world.node.snapshot().await), [1, 1]);
        let hit = world.ask(request(0)).await.unwrap().unwrap();
        assert_eq!(hit.split.swapped, Bytes::ZERO);
        let short =
            ResidencyOptions { evict_after: Some(Duration::from_millis(100)), ..ResidencyOptions::default() };
        install(&world, 1, SchedulingOptions { residency: short, ..SchedulingOptions::default() }).await;
        world.ask(request(1)).await.unwrap().unwrap();
        assert_eq!(loaded(&world.node.snapshot().await).iter().sum::<usize>(), 3);
        world.pass_ms(150).await;
        assert_eq!(loaded(&world.node.snapshot().await), [1, 1], "the unused model was dropped");
    });
}
