//! Tests of executors that die, and of copies and runs that fail.

use super::*;

#[test]
fn a_dead_executor_loses_everything_and_reports_the_progress_of_each_request() {
    let mut bench = Bench::running_a();
    bench.assign(2, B);
    assert_eq!(
        bench.step(Event::Down),
        [down(&[(1, AttemptProgress::Begun), (2, AttemptProgress::Preparing)])]
    );
    assert_eq!((bench.gpu.memory().used_blocks(), bench.gpu.requests(), bench.gpu.transfers()), (0, 0, 0));
    assert_eq!(bench.run_done(1, 500), [], "the report of the dead executor");
    bench.step(Event::Up { incarnation: Incarnation(2) });
    assert_eq!(bench.assign(3, A), [], "meant for the dead executor");
    let again = bench.step(Event::Assign {
        seat: SeatIndex(0),
        key: RequestKey(3),
        model: A,
        incarnation: Incarnation(2),
        from: None,
        deadline: None,
        right: ComputeRight::Free,
    });
    assert_eq!(again, [load(A), map(A, 3, 0), run(3, 3, A, 3), transfer(3, A, 3, 0..10)]);
    assert_eq!((bench.gpu.health(), bench.gpu.totals().restarts), (ExecutorHealth::Up, 1));
}

#[test]
fn a_request_may_have_run_while_its_weights_are_copied_and_a_queued_request_is_waiting() {
    let mut bench = bench();
    bench.assign(1, A);
    assert_eq!(bench.step(Event::Down), [down(&[(1, AttemptProgress::Starting)])]);
    let mut bench = Bench::running_a();
    bench.assign(2, A);
    assert_eq!(
        bench.step(Event::Down),
        [down(&[(1, AttemptProgress::Begun), (2, AttemptProgress::Waiting)])]
    );
    let mut bench = Bench::running_a();
    bench.assign(2, LARGE);
    assert_eq!(
        bench.step(Event::Down),
        [down(&[(1, AttemptProgress::Begun), (2, AttemptProgress::Waiting)])]
    );
}

#[test]
fn a_run_without_weights_is_sent_again_at_most_sends_max_times() {
    let mut bench = Bench::running_a();
    assert_eq!(bench.run_failed(1, RunFailure::NotThere), [run(2, 1, A, 1)]);
    assert_eq!(bench.run_failed(2, RunFailure::NotThere), [run(3, 1, A, 1)]);
    let back = [returned(1, ReturnReason::Failed(AttemptProgress::Begun))];
    assert_eq!(bench.run_failed(3, RunFailure::NotThere), back);
}

#[test]
fn a_run_that_a_failed_copy_ended_is_sent_again_after_the_copy() {
    let mut bench = bench();
    bench.assign(1, A);
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 0..5 });
    assert_eq!(bench.run_failed(1, RunFailure::NotThere), [], "the executor still knows of the failure");
    let arrived = Event::Arrived { model: A, generation: Generation(1), chunks: 5..10 };
    assert_eq!(bench.step(arrived), [run(2, 1, A, 1)]);
}

#[test]
fn a_request_that_is_sent_again_runs_behind_the_request_already_sent() {
    let mut bench = Bench::running_a();
    bench.assign(2, A);
    assert_eq!(bench.run_failed(1, RunFailure::NotThere), [run(3, 1, A, 1)]);
    assert_eq!(bench.gpu.running().collect::<Vec<_>>(), [RequestKey(2)]);
}

#[test]
fn a_model_failure_fails_the_request() {
    let mut bench = Bench::running_a();
    let failed = Action::Failed { key: RequestKey(1), reason: Reason::ModelFailed, may_have_executed: true };
    assert_eq!(bench.run_failed(1, RunFailure::Model), [failed, ended(1, None)]);
}

#[test]
fn a_request_with_weights_that_cannot_be_copied_is_handed_back() {
    let mut bench = bench();
    bench.assign(1, A);
    assert_eq!(bench.end_transfer(1, TransferOutcome::Failed), [cancel_run(1)]);
    let back = bench.step(Event::RunCancelled { run: RunId(1) });
    let failed = returned(1, ReturnReason::Failed(AttemptProgress::Preparing));
    assert_eq!(back, [unmap(A, 1), evicted(&[A]), failed]);
    let again = [map(A, 2, 0), run(2, 2, A, 2), transfer(2, A, 2, 0..10)];
    assert_eq!(bench.assign(2, A), again, "another try");
}

#[test]
fn a_failed_mapping_is_made_again() {
    let mut bench = bench();
    bench.assign(1, A);
    let failed = Event::MapFailed { model: A, generation: Generation(1) };
    assert_eq!(bench.step(failed.clone()), [cancel_transfer(1)]);
    assert_eq!(bench.gpu.memory().used_blocks(), 0);
    let again = [map(A, 2, 0), run(2, 1, A, 2), transfer(2, A, 2, 0..10)];
    assert_eq!(bench.run_failed(1, RunFailure::NotThere), again);
    assert_eq!(bench.step(failed), [], "the report of the earlier mapping");
}

#[test]
fn a_run_that_fails_before_the_reports_of_its_copies_may_have_run() {
    let mut bench = bench();
    bench.assign(1, A);
    let actions = bench.run_failed(1, RunFailure::OutOfMemory);
    assert!(actions.contains(&returned(1, ReturnReason::Failed(AttemptProgress::Starting))), "{actions:?}");
}

#[test]
fn requests_for_a_program_that_cannot_be_loaded_are_handed_back() {
    let mut bench = Bench::running_a();
    bench.assign(2, B);
    let actions = bench.step(Event::ProgramFailed { model: B });
    assert_eq!(
        actions,
        [cancel_transfer(2), evicted(&[B]), returned(2, ReturnReason::Failed(AttemptProgress::Preparing))]
    );
    assert_eq!(bench.run_failed(2, RunFailure::NotThere), [], "the report is too late");
}

#[test]
fn a_failed_device_is_unhealthy_until_another_executor_is_up() {
    let mut bench = Bench::running_a();
    assert_eq!(bench.step(Event::DeviceFailed), [down(&[(1, AttemptProgress::Begun)]), Action::Replace]);
    assert_eq!(bench.gpu.health(), ExecutorHealth::Unhealthy);
    assert_eq!(bench.step(Event::Down), []);
    assert_eq!(bench.gpu.health(), ExecutorHealth::Unhealthy);
    bench.step(Event::Up { incarnation: Incarnation(2) });
    assert_eq!(bench.gpu.health(), ExecutorHealth::Up);
}

#[test]
fn a_gpu_with_a_lost_context_restarts_and_is_not_unhealthy() {
    let mut bench = Bench::running_a();
    assert_eq!(bench.step(Event::ContextLost), [down(&[(1, AttemptProgress::Begun)]), Action::Replace]);
    assert_eq!(bench.gpu.health(), ExecutorHealth::Restarting);
    assert_eq!(bench.step(Event::ContextLost), [], "reported twice");
    assert_eq!(bench.step(Event::Down), []);
    bench.step(Event::Up { incarnation: Incarnation(2) });
    assert_eq!(bench.gpu.health(), ExecutorHealth::Up);
}

#[test]
fn an_executor_with_a_hung_cancelled_run_is_replaced() {
    let mut bench = Bench::running_a();
    bench.cancel(1);
    let hung = bench.gpu.next_wake().unwrap();
    assert_eq!(hung, bench.now + HANG_AFTER);
    bench.now = hung;
    assert_eq!(bench.step(Event::Tick), [down(&[]), Action::Replace]);
    assert_eq!(bench.gpu.next_wake(), None);
}
